"""Steps that work row by row, run over a block of rows at a time: what is wide between two
products, as in the middle of an MLP, is never there as a whole.

A chain is a run of steps from the product that makes rows wide to the one that makes them narrow
again. Each of its blocks is a plan of its own over the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from mtmd.kernels.graph import Node, Shape, Type
from mtmd.kernels.ops import OPS
from mtmd.kernels.plan.steps import Step

LARGE = 16 << 20  # bytes of a value from which on it is not made whole
BLOCK = 4 << 20  # bytes of its part in a block, about
STEP = 64  # rows; a block has a multiple of them
MINIMUM = 512  # rows of a block: of fewer, products lay their weight out too often
WIDER = 2  # times the width of the narrowest value, of what counts as wide
# Each row of the result is made of the same row of the inputs, and of weights. The second operand
# of some may be a value with rows, too.
NORMS = frozenset(("gaussian_topk", "l2_norm", "layer_norm", "rms_norm"))
ELEMENTS = frozenset(
    ("cast", "clamp", "gelu", "relu", "scale", "sigmoid", "silu", "softcap", "softplus")
)
ROW_WISE = NORMS | ELEMENTS | {"matmul", "reshape"}
OF_TWO = frozenset(("add", "gelu_mul", "mul", "silu_mul"))


@dataclass(frozen=True)
class Chain:
    """Steps `first` to before `stop` of a plan, whose only result is that of the last one."""

    first: int
    stop: int
    steps: tuple[Step, ...]
    rows: int  # of all
    block: int  # rows of all blocks but the last

    @property
    def result(self) -> Node:
        return self.steps[-1].node

    @cached_property
    def inputs(self) -> tuple[Node, ...]:
        """Values of the plan that it reads by rows."""
        made = {s.node for s in self.steps}
        read = (i for s in self.steps for i in s.inputs if i is not None and not i.is_leaf)
        return tuple(dict.fromkeys(i for i in read if i not in made))

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The rows of each block."""
        starts = range(0, self.rows, self.block)
        return [(start, min(start + self.block, self.rows)) for start in starts]

    @cached_property
    def row_shapes(self) -> tuple[Shape, ...]:
        """Return the shape of a row of each of the inputs."""
        return tuple(_tail(node.shape, self.rows) for node in self.inputs)

    def graph(self, rows: int) -> Node:
        """The result of a block of so many rows [rows, ...]; inputs are filled from a sequence of
        tensors in the order of `inputs`.
        """
        made: dict[Node, Node] = {}
        for index, (node, shape) in enumerate(zip(self.inputs, self.row_shapes, strict=True)):
            kind = Type.contiguous((rows, *shape), node.dtype)
            attrs = {"fill": lambda batch, at=index: batch[at], "state": True}
            made[node] = Node("input", (), kind, attrs, node.name)
        for step in self.steps:
            node, given = step.node, [i and made.get(i, i) for i in step.inputs]
            attrs = dict(node.attrs)
            if node.op == "reshape":
                attrs["shape"] = rows, *_tail(node.shape, self.rows)
            made[node] = OPS[node.op](*given, name=node.name, **attrs)
        return made[self.result]


def chains(steps: Sequence[Step], outputs: Sequence[Node]) -> tuple[Chain, ...]:
    """Return the chains of a plan that are worth it, in order."""
    if all(step.node.type.bytes < LARGE for step in steps):
        return ()
    result = []
    for first, stop, rows in _runs(steps):
        for begin, end, maximum in _wide(steps, outputs, first, stop):
            chain = _chain(steps, outputs, begin, end, rows, maximum)
            if chain is not None:
                result.append(chain)
    return tuple(result)


def _runs(steps: Sequence[Step]) -> Iterator[tuple[int, int, int]]:
    """Steps next to each other that share their rows: first, end, rows."""
    first = rows = 0
    for index, step in enumerate(steps):
        if not _joins(step, rows):
            if rows:
                yield first, index, rows
            first, rows = index, prod(step.node.shape[:-1])
            if not _joins(step, rows):
                rows = 0
    if rows:
        yield first, len(steps), rows


def _joins(step: Step, rows: int) -> bool:
    """Return whether it works row by row on values of so many rows."""
    node = step.node
    if not rows or not step.backend.native or node.op not in ROW_WISE | OF_TWO:
        return False
    first, *others = step.inputs
    if first is None or not (_has(first, rows) and _has(node, rows)):
        return False
    inside = len(_tail(first.shape, rows))
    return all(
        other is None
        or (other.op == "weight" and (node.op not in OF_TWO or len(other.shape) <= inside))
        or (node.op in OF_TWO and other.shape == first.shape and _has(other, rows))
        for other in others
    )


def _has(node: Node, rows: int) -> bool:
    return not node.is_leaf and node.type.is_contiguous and bool(_tail(node.shape, rows))


def _tail(shape: Shape, rows: int) -> Shape:
    """The shape of a row; empty where there are no such rows."""
    for count in range(1, len(shape)):
        if prod(shape[:count]) == rows:
            return shape[count:]
    return ()


def _wide(
    steps: Sequence[Step], outputs: Sequence[Node], first: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """Return the parts of a run in which there are wide values: first, end, bytes of the widest."""
    minimum = min(step.node.type.bytes for step in steps[first:stop])
    begin = end = maximum = 0
    for index in range(first, stop):
        node = steps[index].node
        if node.type.bytes < max(LARGE, WIDER * minimum) or node in outputs:
            continue
        if maximum and index >= end:
            yield begin, end, maximum
            maximum = 0
        begin = begin if maximum else index
        readers = [i for i in range(index, stop) if node in steps[i].inputs]
        end = max(end, index + 1, *(i + 1 for i in readers))
        maximum = max(maximum, node.type.bytes)
    if maximum:
        yield begin, end, maximum


def _chain(
    steps: Sequence[Step], outputs: Sequence[Node], first: int, stop: int, rows: int, maximum: int
) -> Chain | None:
    """Return a chain of steps whose last one makes the only result that others read, a narrow one,
    on one backend.
    """
    made = {step.node for step in steps[first:stop]}
    saved = set(outputs) | {i for step in steps[stop:] for i in step.inputs if i is not None}
    result = steps[stop - 1].node
    if (
        result.type.bytes * WIDER > maximum
        or made & saved != {result}
        or len({s.backend for s in steps[first:stop]}) > 1
    ):
        return None
    block = max(MINIMUM, -(-rows // (-(-maximum // BLOCK) * STEP)) * STEP)
    return Chain(first, stop, tuple(steps[first:stop]), rows, block) if block < rows else None
