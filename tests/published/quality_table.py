"""The table of published models in docs/fidelity.md, from the results of `make published`.

python tests/published/quality_table.py            writes it
python tests/published/quality_table.py --check    exits with 1 if the page has another
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


def table(results: Results) -> Iterator[str]:
    """The lines of the table, and the number type and machine of the results."""
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


PAGE = ROOT / "docs" / "fidelity.md"


def main(arguments: list[str]) -> int:
    """0, or 1 if `--check` finds other figures in the page."""
    results = json.loads(RESULTS.read_text())
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    lines = table({name: results[name] for name in MODELS})
    made = "\n".join([before + BEGIN, *lines, END + rest.partition(END)[2]])
    if "--check" in arguments:
        return int(made != text)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
