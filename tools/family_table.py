"""The tables of families and of their tasks in docs/models.md, and the list of their names in
README.md, made from the checkpoints that the tests build. The last column of the first is the share
of a decode step's nodes that run as machine code on a CPU: the minimum over the variants of a row.

python tools/family_table.py            writes both
python tools/family_table.py --check    exits with 1 if a file has other text
"""

from __future__ import annotations

import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINE = 150  # of README.md
# Models of a row that no variant builds, and what of its vision family says that they are these.
ALSO = {
    "GLM-4.1V, GLM-4.5V, GLM-4.6V, GLM-OCR": {"GLM-OCR": {"ocr": True}},
    "InternVL 2.5, 3, 3.5, Qianfan-OCR": {"Qianfan-OCR": {"marker": "<image>"}},
}
# A name on the hub for each line of the table of tasks, to try it by.
HUB = {
    "BLIP": "Salesforce/blip-image-captioning-large",
    "BLIP-2": "Salesforce/blip2-opt-2.7b",
    "InstructBLIP": "Salesforce/instructblip-vicuna-7b",
    "Moondream 2": "vikhyatk/moondream2",
    "Florence-2": "florence-community/Florence-2-large",
    "TrOCR": "microsoft/trocr-base-printed",
    "GLM-OCR": "zai-org/GLM-OCR",
    "DeepSeek-OCR-2; DeepSeek-OCR, as its authors": "deepseek-ai/DeepSeek-OCR",
    "GOT-OCR 2": "stepfun-ai/GOT-OCR-2.0-hf",
    "dots.ocr, dots.mocr": "rednote-hilab/dots.ocr",
    "PaddleOCR-VL": "PaddlePaddle/PaddleOCR-VL",
    "HunyuanOCR": "tencent/HunyuanOCR",
}
BEGIN, END = "<!-- {}: made by tools/family_table.py -->", "<!-- end of {} -->"
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("families", "support")]

from mtmd.checkpoint.checkpoint import Checkpoint  # noqa: E402
from mtmd.checkpoint.open import open_checkpoint  # noqa: E402
from mtmd.clip.family import FAMILIES as VISION  # noqa: E402
from mtmd.clip.tasks import tasks_of  # noqa: E402
from mtmd.kernels.plan.scheduler import Plan  # noqa: E402
from mtmd.llm.batch import BatchShape  # noqa: E402
from mtmd.llm.family import FAMILIES as TEXT  # noqa: E402
from mtmd.model import Model  # noqa: E402
from mtmd.options.load import LoadOptions  # noqa: E402

DECODING = BatchShape(3, requested=3, sequences=3)
"""Whose plan the last column of the first table is about."""


def rows() -> Iterator[str]:
    """One line for each row of the tests' table, from a checkpoint of each of its variants."""
    from table import ROWS

    yield "| models | vision | text | what is special | variants tested | decodes as machine code |"
    yield "|---|---|---|---|---|---|"
    for row in ROWS.values():
        opened, shares = zip(*map(_open, row.variants.values()), strict=True)
        vision = sorted({file_of(c.vision) for c in opened if c.vision})
        text = sorted({file_of(c.text) for c in opened})
        yield (
            f"| {row.name} | {', '.join(vision) or '–'} | {', '.join(text)} | {row.notes} | "
            f"{len(row.variants)} | {min(shares):.0%} |"
        )
    yield ""
    yield gguf_line()


def gguf_line() -> str:
    return f"As GGUF: decoders of {_names(TEXT)}; projectors of {_names(VISION)}."


def tasks() -> Iterator[str]:
    """One line for all variants of a row that have the same tasks."""
    from table import ROWS

    yield "| model | tasks | such as |"
    yield "|---|---|---|"
    for row in ROWS.values():
        variants: dict[tuple[str, ...], list[str]] = {}
        for variant, build in row.variants.items():
            has = tuple(tasks_of(_open(build)[0].vision))
            variants.setdefault(has, []).append(variant)
        for name, changes in ALSO.get(row.name, {}).items():
            family = _open(next(iter(row.variants.values())))[0].vision
            variants[tuple(tasks_of(replace(family, **changes)))] = [name]  # type: ignore[type-var]
        for has, alike in variants.items():
            if has:
                of = row.name if len(variants) == 1 else "; ".join(alike)
                hub = f"`{HUB[of]}`" if of in HUB else ""
                yield f"| {of} | {', '.join(f'`{task}`' for task in has)} | {hub} |"


def documented(region: str) -> list[list[str]]:
    """Return the cells of a table of docs/models.md as it is, a list for each line."""
    begin, end = BEGIN.format(region), END.format(region)
    text = MODELS.read_text().partition(begin)[2].partition(end)[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def names() -> Iterator[str]:
    """The names of all rows, one sentence."""
    from table import ROWS

    sentence = "; ".join(row.name for row in ROWS.values())
    yield from textwrap.wrap(f"{sentence}.", LINE, break_on_hyphens=False)


MODELS, README = ROOT / "docs" / "models.md", ROOT / "README.md"
REGIONS = [(MODELS, "families", rows), (MODELS, "tasks", tasks), (README, "families", names)]


def main(arguments: list[str]) -> int:
    """0, or 1 if `--check` finds other text in a file."""
    other = False
    for path, region, lines in REGIONS:
        text, begin, end = path.read_text(), BEGIN.format(region), END.format(region)
        before, _, rest = text.partition(begin)
        made = before + "\n".join([begin, *lines(), end]) + rest.partition(end)[2]
        other |= made != text
        if arguments != ["--check"]:
            path.write_text(made)
    return int(other and arguments == ["--check"])


@cache
def _open(build: object) -> tuple[Checkpoint, float]:
    """The variant, and the share of its decoder that is machine code."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(build(Path(folder)).folder)  # type: ignore[operator]
        return checkpoint, _share(checkpoint)


def _share(checkpoint: Checkpoint) -> float:
    options = LoadOptions(device="cpu", context=128, parallel=3, dtype="bf16")
    return share_of(Model(checkpoint, options).runner.plan(DECODING))


def share_of(plan: Plan) -> float:
    """Return the share of a plan's nodes that run as machine code."""
    return plan.native.nodes / plan.nodes if plan.native else 0.0


def file_of(family: object) -> str:
    """Return the module of a family, as the tables name it."""
    return f"`{type(family).__module__.partition('.families.')[2].partition('.')[0]}`"


def _names(entries: tuple[object, ...]) -> str:
    names = {name.partition("/")[0] for entry in entries for name in entry.gguf}  # type: ignore[attr-defined]
    return ", ".join(sorted(f"`{name}`" for name in names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
