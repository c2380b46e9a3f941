"""The table of models in docs/models.md: sizes and predicted memory, computed from their published
shapes. Nothing is downloaded.

python tools/model_table.py            writes them
python tools/model_table.py --check    exits with 1 if the page has another
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mtmd import predict
from mtmd.bench.shapes import random_checkpoint

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- models: made by tools/model_table.py -->", "<!-- end of models -->"
CARD = "mi300x"  # large enough for all; a CPU takes about the same
CONTEXT = 4096


@dataclass(frozen=True)
class Known:
    """A model: its shape in mtmd/bench/shapes.json, and its name on the hub."""

    shape: str
    name: str


MODELS = (
    Known("smolvlm-256m", "HuggingFaceTB/SmolVLM-256M-Instruct"),
    Known("smolvlm-500m", "HuggingFaceTB/SmolVLM-500M-Instruct"),
    Known("lfm2-vl-450m", "LiquidAI/LFM2-VL-450M"),
    Known("lfm2-vl-1.6b", "LiquidAI/LFM2-VL-1.6B"),
    Known("qwen3-vl-2b", "Qwen/Qwen3-VL-2B-Instruct"),
    Known("qwen3-vl-4b", "Qwen/Qwen3-VL-4B-Instruct"),
    Known("qwen3-vl-8b", "Qwen/Qwen3-VL-8B-Instruct"),
    Known("qwen2.5-vl-3b", "Qwen/Qwen2.5-VL-3B-Instruct"),
    Known("qwen2.5-vl-7b", "Qwen/Qwen2.5-VL-7B-Instruct"),
    Known("internvl3-2b", "OpenGVLab/InternVL3-2B-hf"),
    Known("gemma-3-4b", "google/gemma-3-4b-it"),
    Known("gemma-3-12b", "google/gemma-3-12b-it"),
    Known("llava-1.5-7b", "llava-hf/llava-1.5-7b-hf"),
    Known("llava-onevision-0.5b", "llava-hf/llava-onevision-qwen2-0.5b-ov-hf"),
    Known("llava-onevision-7b", "llava-hf/llava-onevision-qwen2-7b-ov-hf"),
    Known("glm-4.1v-9b", "zai-org/GLM-4.1V-9B-Thinking"),
    Known("pixtral-12b", "mistral-community/pixtral-12b"),
)


@lru_cache
def memory(shape: str, weights: str) -> tuple[int, int]:
    """Bytes of the file, and at most in memory with one answer of `CONTEXT` tokens."""
    stored = random_checkpoint(shape, weights).weight_bytes
    report = predict(
        CARD, random_weights=shape, weights=weights, context=CONTEXT, parallel=1, compile=False
    )
    return stored, report.needed_bytes


def rows(models: Iterable[Known]) -> Iterator[str]:
    yield "| model | BF16: file | memory | Q4_K_M: file | memory |"
    yield "|---|---|---|---|---|"
    for known in models:
        cells = [as_gb(size) for kind in ("BF16", "Q4_K_M") for size in memory(known.shape, kind)]
        yield f"| `{known.name}` | {' | '.join(cells)} |"


def as_gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


PAGE = ROOT / "docs" / "models.md"


def main(arguments: list[str]) -> int:
    """0, or 1 if `--check` finds another table in the page."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    made = "\n".join([before + BEGIN, *rows(MODELS), END + rest.partition(END)[2]])
    if "--check" in arguments:
        return int(made != text)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
