"""What the script does, in the order of its worth: a table of parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from gpu_kernels import (
    ahead,
    attention,
    cases,
    ceilings,
    demo,
    fidelity,
    golden,
    matmul,
    models,
    paged,
    pictures,
    reference,
    sanitizer,
)
from gpu_kernels.rows import Setting, Task


class Part(NamedTuple):
    """`seconds`: it is ended after so many. `shows`: what for, in a dry run's plan. `op`: the op
    of the kernels that it times, None where it has those of several, or of none.
    compiles: it needs Triton's compiler, also in a dry run. alongside: it takes no times, and runs
    at once with those before and after it that take none. processes: as many as there are cores
    for share out its rows. row_seconds: a row that takes longer is given up. first: one of those
    that a budget is shared out among.
    """

    name: str
    seconds: int
    shows: str
    tasks: Callable[[Setting], Iterator[Task]]
    op: str | None = None
    compiles: bool = False
    alongside: bool = False
    processes: bool = False
    row_seconds: int = 60
    first: bool = False


GEMMA, QWEN = "gemma-3-4b", "qwen3-8b"


def _decoding(shape: str, weights: str, seconds: int, first: bool = False) -> Part:
    minimum = models.MIN_SHARE[weights]
    shows = (
        f"at least {minimum:.0%} of copying with 1 sequence; no cliff from 16 to 64; the estimate"
    )
    tasks = functools.partial(models.decoding, shape, weights)
    return Part(f"decode-{shape}-{weights}", seconds, shows, tasks, first=first)


PARTS = (
    Part("ceilings", 20, "what the rest is judged by", ceilings.tasks, row_seconds=15, first=True),
    Part(
        "cases",
        110,
        "every kernel is compiled and right, in all its cases",
        cases.tasks,
        alongside=True,
        processes=True,
        row_seconds=30,
        first=True,
    ),
    Part(
        "demo",
        70,
        "answers are the CPU's; every op as its reference",
        demo.tasks,
        alongside=True,
        first=True,
    ),
    Part(
        "golden",
        70,
        "tokens are those of transformers on a CPU",
        golden.tasks,
        alongside=True,
        row_seconds=40,
        first=True,
    ),
    _decoding(GEMMA, "BF16", 50, first=True),
    Part(
        "attention-72",
        25,
        "at least 400 TFLOP/s at head 72, and torch's best",
        functools.partial(attention.tasks, first=True),
        "attention",
        row_seconds=30,
        first=True,
    ),
    _decoding(GEMMA, "Q4_K", 45, first=True),
    _decoding(GEMMA, "Q8_0", 45, first=True),
    Part(
        "encode",
        60,
        "at least 1.5 x transformers SDPA; the first picture as the tenth; the estimate",
        functools.partial(models.encoding, GEMMA, "Q4_0"),
        first=True,
    ),
    Part("compile", 90, "all other programs, by all cores at once", ahead.tasks, compiles=True),
    Part(
        "attention",
        60,
        "at least torch's best at heads of 64 to 128",
        attention.tasks,
        "attention",
        row_seconds=30,
    ),
    Part("sanitizer", 120, "no error of memory, no race", sanitizer.tasks, row_seconds=120),
    _decoding(QWEN, "BF16", 70),
    Part("paged_attention", 45, "no cliff after 16 sequences", paged.tasks, "paged_attention"),
    _decoding(QWEN, "Q4_K", 60),
    _decoding(GEMMA, "Q4_0", 45),
    Part(
        "tests",
        150,
        "families as transformers, the demo as its references",
        fidelity.tasks,
        row_seconds=150,
    ),
    Part("matmul", 45, "quantized products against torch's", matmul.tasks, "matmul"),
    Part("others", 45, "every other kernel against its reference", reference.tasks),
    Part("pictures", 30, "pictures on their way to the encoder", pictures.tasks, "pictures"),
)


def chosen(names: list[str]) -> list[tuple[Part, str | None]]:
    """The parts of these names, and for the name of an op all that is of it: with the op, to which
    a part of several is limited. Raises KeyError for one that is neither.
    """
    from mtmd.kernels.gpu.table import KERNELS

    if not names:
        return [(part, None) for part in PARTS]
    result: list[tuple[Part, str | None]] = []
    for name in names:
        if name in KERNELS or name == "pictures":
            timed = [p for p in PARTS if p.op == name] or [p for p in PARTS if p.name == "others"]
            result += [(part, name) for part in PARTS if part.name == "cases"]
            result += [(part, name) for part in timed]
        else:
            result.append(({part.name: part for part in PARTS}[name], None))
    return result


def known() -> list[str]:
    """Names of parts, and of ops that are in one of several."""
    from mtmd.kernels.gpu.table import KERNELS

    names = [part.name for part in PARTS]
    return [*names, *(op for op in KERNELS if op not in names)]
