"""The README's table of families, made from what the tests build and open. What decodes as
machine code are the nodes of a step of decoding on a CPU that run so, of all, the least of a row.

python tools/family_table.py            writes it
python tools/family_table.py --check    exits with 1 where the README has another
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- families: made by tools/family_table.py -->", "<!-- end of families -->"
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("families", "support")]

from mtmd.checkpoint.checkpoint import Checkpoint  # noqa: E402
from mtmd.checkpoint.open import open_checkpoint  # noqa: E402
from mtmd.clip.family import FAMILIES as VISION  # noqa: E402
from mtmd.llm.batch import BatchShape  # noqa: E402
from mtmd.llm.family import FAMILIES as TEXT  # noqa: E402
from mtmd.model import Model  # noqa: E402
from mtmd.options.load import LoadOptions  # noqa: E402


def rows() -> Iterator[str]:
    """One line for each row of the tests' table, from a checkpoint of each of its variants."""
    from table import ROWS

    yield "| models | vision | text | what is special | variants tested | decodes as machine code |"
    yield "|---|---|---|---|---|---|"
    for row in ROWS.values():
        opened, shares = zip(*map(_open, row.variants.values()), strict=True)
        vision = sorted({_file(c.vision) for c in opened if c.vision})
        text = sorted({_file(c.text) for c in opened})
        yield (
            f"| {row.name} | {', '.join(vision) or '–'} | {', '.join(text)} | {row.notes} | "
            f"{len(row.variants)} | {min(shares):.0%} |"
        )
    yield ""
    yield f"As GGUF: decoders of {_names(TEXT)}; projectors of {_names(VISION)}."


def table() -> str:
    return "\n".join([BEGIN, *rows(), END])


def main(arguments: list[str]) -> int:
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"{before}{table()}{after}"
    if arguments == ["--check"]:
        return int(made != text)
    README.write_text(made)
    return 0


def _open(build: object) -> tuple[Checkpoint, float]:
    """The variant, and the share of its decoder that is machine code."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(build(Path(folder)).folder)  # type: ignore[operator]
        return checkpoint, _share(checkpoint)


def _share(checkpoint: Checkpoint) -> float:
    options = LoadOptions(device="cpu", context=128, parallel=3, dtype="bf16")
    plan = Model(checkpoint, options).runner.plan(BatchShape(3, requested=3, sequences=3))
    return plan.native.nodes / plan.nodes if plan.native else 0.0


def _file(family: object) -> str:
    return f"`{type(family).__module__.partition('.families.')[2].partition('.')[0]}`"


def _names(entries: tuple[object, ...]) -> str:
    return ", ".join(sorted(f"`{name}`" for entry in entries for name in entry.gguf))  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
