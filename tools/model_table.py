"""The tables of models in README.md and docs/models.md: sizes, and the memory that is predicted for
them, from their published shapes; nothing is fetched.

python tools/model_table.py            writes them
python tools/model_table.py --check    exits with 1 where a file has another
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
    """A model by its shape in mtmd/bench/shapes.json, and where it is on the hub. `short`: in the
    README's table, too.
    """

    shape: str
    name: str
    gguf: str = ""
    short: bool = False


MODELS = (
    Known(
        "smolvlm-256m",
        "HuggingFaceTB/SmolVLM-256M-Instruct",
        "ggml-org/SmolVLM-256M-Instruct-GGUF:Q8_0",
        True,
    ),
    Known(
        "smolvlm-500m",
        "HuggingFaceTB/SmolVLM-500M-Instruct",
        "ggml-org/SmolVLM-500M-Instruct-GGUF:Q8_0",
    ),
    Known("lfm2-vl-450m", "LiquidAI/LFM2-VL-450M", "LiquidAI/LFM2-VL-450M-GGUF:Q8_0", True),
    Known("lfm2-vl-1.6b", "LiquidAI/LFM2-VL-1.6B", "LiquidAI/LFM2-VL-1.6B-GGUF:Q8_0"),
    Known("qwen3-vl-2b", "Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-VL-2B-Instruct-GGUF:Q4_K_M", True),
    Known("qwen3-vl-4b", "Qwen/Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-4B-Instruct-GGUF:Q4_K_M"),
    Known("qwen3-vl-8b", "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-VL-8B-Instruct-GGUF:Q4_K_M"),
    Known(
        "qwen2.5-vl-3b",
        "Qwen/Qwen2.5-VL-3B-Instruct",
        "ggml-org/Qwen2.5-VL-3B-Instruct-GGUF:Q4_K_M",
    ),
    Known(
        "qwen2.5-vl-7b",
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "ggml-org/Qwen2.5-VL-7B-Instruct-GGUF:Q4_K_M",
        True,
    ),
    Known("internvl3-2b", "OpenGVLab/InternVL3-2B-hf", "ggml-org/InternVL3-2B-Instruct-GGUF:Q8_0"),
    Known("gemma-3-4b", "google/gemma-3-4b-it", "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M", True),
    Known("gemma-3-12b", "google/gemma-3-12b-it", "ggml-org/gemma-3-12b-it-GGUF:Q4_K_M"),
    Known("llava-1.5-7b", "llava-hf/llava-1.5-7b-hf"),
    Known("glm-4.1v-9b", "zai-org/GLM-4.1V-9B-Thinking"),
    Known("pixtral-12b", "mistral-community/pixtral-12b", "ggml-org/pixtral-12b-GGUF:Q4_K_M", True),
)


@lru_cache
def memory(shape: str, weights: str) -> tuple[int, int]:
    """Bytes of the file, and at most in memory with one answer of `CONTEXT` tokens."""
    stored = random_checkpoint(shape, weights).weight_bytes
    report = predict(
        CARD, random_weights=shape, weights=weights, context=CONTEXT, parallel=1, compile=False
    )
    return stored, report.needed_bytes


def rows(short: bool) -> Iterator[str]:
    yield "| `-m` | BF16: file | memory | Q4_K_M: file | memory |" + (
        "" if short else " as GGUF |"
    )
    yield "|---|---|---|---|---|" + ("" if short else "---|")
    for known in MODELS:
        if short and not known.short:
            continue
        cells = [_gb(size) for kind in ("BF16", "Q4_K_M") for size in memory(known.shape, kind)]
        line = f"| `{known.name}` | {' | '.join(cells)} |"
        yield line if short else f"{line} {f'`{known.gguf}`' if known.gguf else '–'} |"


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


FILES = {ROOT / "README.md": True, ROOT / "docs" / "models.md": False}


def main(arguments: list[str]) -> int:
    """0, or 1 where `--check` finds another table in a file."""
    other = 0
    for path, short in FILES.items():
        text = path.read_text()
        before, _, rest = text.partition(BEGIN)
        made = "\n".join([before + BEGIN, *rows(short), END + rest.partition(END)[2]])
        if "--check" in arguments:
            other |= made != text
        else:
            path.write_text(made)
    return int(other)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
