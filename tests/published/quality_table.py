"""The figures about published models in README.md and docs/fidelity.md, from what `make published`
measured.

    python tests/published/quality_table.py            writes them
    python tests/published/quality_table.py --check    exits with 1 where a file has others
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from published_models import MODELS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / ".venv-published" / "models" / "results.json"
BEGIN = "<!-- published: made by tests/published/quality_table.py -->"
END = "<!-- end of published -->"
Results = dict[str, dict[str, Any]]


def machine() -> str:
    """The CPU, its cores, and the versions that were compared."""
    name = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    versions = [f"{package} {version(package)}" for package in ("torch", "transformers")]
    return f"{name}, {os.cpu_count()} cores; {', '.join(versions)}"


def sentence(results: Results) -> Iterator[str]:
    """For the README."""
    equal = sum(result["equal"] for result in results.values())
    prompts = sum(result["prompts"] for result in results.values())
    models = "; ".join(
        f"{MODELS[name].title} {max(result['quality'][key] for key in ('read', 'written')):.4f} "
        f"({result['quality']['transformers_bf16']:.4f})"
        for name, result in results.items()
    )
    yield (
        f"Published checkpoints (`make published`): {equal} of {prompts} greedy answers in fp32 are "
        "transformers' token for token. Divergence (KL, nats) of the default precision from fp32 "
        f"over English text, and of transformers' bf16: {models}. "
        "[More](docs/fidelity.md#published-checkpoints)."
    )


def table(results: Results) -> Iterator[str]:
    """For docs/fidelity.md."""
    yield "| model | answers equal | positions | KL, prompt read | KL, answer written | KL, transformers in bf16 | perplexity: fp32, prompt read, answer written, transformers in bf16 |"
    yield "|---|---|---|---|---|---|---|"
    for name, result in results.items():
        quality = result["quality"]
        divergences = (quality[key] for key in ("read", "written", "transformers_bf16"))
        perplexities = (
            quality[f"perplexity_{key}"] for key in ("fp32", "read", "written", "transformers_bf16")
        )
        cells = (
            MODELS[name].title,
            f"{result['equal']} of {result['prompts']}",
            str(quality["positions"]),
            *(f"{value:.5f}" for value in divergences),
            ", ".join(f"{value:.2f}" for value in perplexities),
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    types = {result["quality"]["dtype"].removeprefix("torch.") for result in results.values()}
    yield f"The default number type is {', '.join(sorted(types))} on {machine()}."


FILES = {ROOT / "README.md": sentence, ROOT / "docs" / "fidelity.md": table}


def main(arguments: list[str]) -> int:
    """0, or 1 where `--check` finds other figures in a file."""
    results = json.loads(RESULTS.read_text())
    results = {name: results[name] for name in MODELS}
    other = 0
    for path, lines in FILES.items():
        text = path.read_text()
        before, _, rest = text.partition(BEGIN)
        made = "\n".join([before + BEGIN, *lines(results), END + rest.partition(END)[2]])
        if "--check" in arguments:
            other |= made != text
        else:
            path.write_text(made)
    return int(other)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
