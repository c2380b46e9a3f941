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
    compiles: it needs Triton's compiler, also in a dry run.
    """

    name: str
    seconds: int
    shows: str
    tasks: Callable[[Setting], Iterator[Task]]
    op: str | None = None
    compiles: bool = False


GEMMA, QWEN = "gemma-3-4b", "qwen3-8b"


def _decoding(shape: str, weights: str, seconds: int) -> Part:
    minimum = models.MIN_SHARE[weights]
    shows = (
        f"at least {minimum:.0%} of copying with 1 sequence; no cliff from 16 to 64; the estimate"
    )
    tasks = functools.partial(models.decoding, shape, weights)
    return Part(f"decode-{shape}-{weights}", seconds, shows, tasks)


PARTS = (
    Part("ceilings", 25, "what the rest is judged by", ceilings.tasks),
    Part("compile", 90, "every program, by all cores at once", ahead.tasks, compiles=True),
    Part("cases", 75, "all cases right on the device", cases.tasks),
    Part("demo", 45, "answers are the CPU's; every op as its reference", demo.tasks),
    Part(
        "attention",
        70,
        "at least 400 TFLOP/s at head 72, and torch's best at 64 to 128",
        attention.tasks,
        "attention",
    ),
    _decoding(GEMMA, "BF16", 90),
    Part(
        "encode",
        90,
        "at least 1.5 x transformers SDPA; the first picture as the tenth; the estimate",
        functools.partial(models.encoding, GEMMA, "Q4_0"),
    ),
    _decoding(QWEN, "BF16", 100),
    _decoding(GEMMA, "Q4_0", 75),
    _decoding(GEMMA, "Q4_K", 75),
    Part("sanitizer", 120, "no error of memory, no race", sanitizer.tasks),
    Part("paged_attention", 45, "no cliff after 16 sequences", paged.tasks, "paged_attention"),
    _decoding(QWEN, "Q4_K", 80),
    _decoding(QWEN, "Q4_0", 80),
    Part("tests", 150, "families as transformers, the demo as its references", fidelity.tasks),
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
