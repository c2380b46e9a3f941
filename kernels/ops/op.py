"""Definition of an op: one Python function on torch tensors, which is its meaning, its reference
and its fallback.

Calling an op on nodes builds a node; `op.reference` computes. What type the result has, the
reference says by being run on meta tensors, cached per types and attributes. Meta tensors make
torch load its compiler, which takes longer than a cold answer may: so an op can have a shape rule
for the usual case, and a test holds each rule to its reference.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from mtmd.base.errors import PlacementError
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.quantization.blocks import BLOCKS
from mtmd.kernels.quantization.kv_rows import CACHE_TYPES, PAIRS, cached_bytes

CALLS_SAVED = 16384  # of ops on types, whose results are known: under a kB each, some 50 a plan
OPS: dict[str, Op] = {}
ShapeRule = Callable[..., Type | None]


class Op:
    """A named operation. `flops(node)` counts multiply and add as two; `bytes(node)` is the least
    traffic it can need: each operand read once and the result written, unless the op says
    otherwise.

    `in_place`, where an op has one, is the same function overwriting its first input; the planner
    uses it when nothing else still reads that input. `shape`, on types in place of tensors, refuses
    operands that do not fit together and gives the result's type, or None where only the reference
    can tell. `writes_first`: the result is the first input, written to. `workspace(node)` counts
    the bytes the reference holds beyond its result, where that cannot be seen by running it on meta
    tensors: it reads its inputs. `waits`: the reference asks a device for numbers, to decide by.
    """

    def __init__(
        self,
        reference: Callable[..., torch.Tensor],
        shape: ShapeRule | None,
        flops: Callable[[Node], int] | None,
        traffic: Callable[[Node], int] | None,
        in_place: Callable[..., torch.Tensor] | None,
        view: bool,
        writes_first: bool,
        workspace: Callable[[Node], int] | None,
        waits: bool = False,
    ):
        self.name, self.reference, self.in_place, self.is_view = (
            reference.__name__,
            reference,
            in_place,
            view,
        )
        self.writes_first, self.workspace = writes_first, workspace
        self.waits = waits
        self.shape, self._flops, self._traffic = shape, flops, traffic
        self._signature = inspect.signature(reference)
        parameters = self._signature.parameters.values()
        operands = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self._required = [i for i, p in enumerate(operands) if p.annotation == "Tensor"]
        self._counts = range(sum(p.default is p.empty for p in operands), len(operands) + 1)
        attrs = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        self._attrs = {p.name for p in attrs}
        self._required_attrs = {p.name for p in attrs if p.default is p.empty}
        if self.name in OPS:
            raise ValueError(f"op {self.name} registered twice")
        OPS[self.name] = self
        functools.update_wrapper(self, reference)

    def __call__(self, *inputs: Node | None, name: str = "", **attrs: Any) -> Node:
        types = tuple(None if i is None else i.type for i in inputs)
        try:
            result, alias = _infer(self.name, types, tuple(attrs.items()))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            given = ", ".join(str(t) if t else "nothing" for t in types)
            why = " ".join(str(error).split())  # torch's messages have line breaks
            raise PlacementError(
                f"{self.name} {name or '(unnamed)'} cannot take ({given}) with {attrs}: {why}"
            ) from error
        return Node(self.name, inputs, result, attrs, name, alias)

    def check_call(
        self, types: tuple[Type | None, ...], attrs: tuple[tuple[str, Any], ...]
    ) -> None:
        """Raises TypeError for an operand that is missing and for an attribute that is missing or
        none of the op's.
        """
        names = {name for name, _ in attrs}
        if len(types) in self._counts and self._required_attrs <= names <= self._attrs:
            given = len(types)
            if all(types[i] is not None for i in self._required if i < given):
                return
        for name, value in self._signature.bind(*types, **dict(attrs)).arguments.items():
            if value is None and self._signature.parameters[name].annotation == "Tensor":
                raise TypeError(f"operand {name} is missing")

    @property
    def operands(self) -> tuple[str, ...]:
        """Return the names of the operands, in order."""
        parameters = self._signature.parameters.values()
        return tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)

    def flops(self, node: Node) -> int:
        return self._flops(node) if self._flops else 0

    @property
    def reads_a_part(self) -> bool:
        """Return whether it says itself what it moves: operands are not read whole."""
        return self._traffic is not None

    def bytes(self, node: Node) -> int:
        if self._traffic:
            return self._traffic(node)
        if node.alias:
            return 0
        return node.type.bytes + sum(i.type.bytes for i in node.operands)


@functools.lru_cache(maxsize=CALLS_SAVED)
def _infer(
    op: str, types: tuple[Type | None, ...], attrs: tuple[tuple[str, Any], ...]
) -> tuple[Type, bool]:
    OPS[op].check_call(types, attrs)
    rule = OPS[op].shape
    result = rule(*types, **dict(attrs)) if rule else None
    return (
        (result, OPS[op].writes_first or OPS[op].is_view)
        if result
        else infer_by_running(op, types, attrs)
    )


def infer_by_running(
    op: str, types: tuple[Type | None, ...], attrs: tuple[tuple[str, Any], ...]
) -> tuple[Type, bool]:
    """The type that the reference's result has, and whether it lies in the first input's memory."""
    with torch.inference_mode(False), torch.no_grad():
        values = [None if t is None else t.meta() for t in types]
        result = OPS[op].reference(*values, **dict(attrs))
    shares = [
        v is not None and v.untyped_storage()._cdata == result.untyped_storage()._cdata
        for v in values
    ]
    need(not any(shares[1:]), f"{op} returns an input other than its first")
    return Type.of(result), any(shares)


def op(
    *,
    shape: ShapeRule | None = None,
    flops: Callable[[Node], int] | None = None,
    traffic: Callable[[Node], int] | None = None,
    in_place: Callable[..., torch.Tensor] | None = None,
    view: bool = False,
    writes_first: bool = False,
    workspace: Callable[[Node], int] | None = None,
    waits: bool = False,
) -> Callable[[Callable[..., torch.Tensor]], Op]:
    """Register a function as an op. `view`: it only looks at its input differently, and runs
    wherever that lies; with a shape rule it never copies.
    """
    return lambda reference: Op(
        reference, shape, flops, traffic, in_place, view, writes_first, workspace, waits
    )


def same_as_first(first: Type, *others: Type | None, **attrs: Any) -> Type | None:  # noqa: ARG001
    """The shape rule of ops on each element of their first input. Of columns of a wider value, as
    queries and keys of one product are, the result is contiguous as well: torch would load its
    compiler to find that out.
    """
    need_floats(first, *others)
    if first.is_contiguous:
        return first
    steps = [step for step, size in zip(first.strides, first.shape, strict=True) if size > 1]
    descend = all(a > b for a, b in pairwise((*steps, 0)))
    return Type.contiguous(first.shape, first.dtype) if descend else None


def need_floats(*types: Type | None) -> None:
    need(
        all(t is None or t.dtype.is_floating_point for t in types),
        "expected numbers with a fraction",
    )


def need_positions(at: Type) -> None:
    need(
        len(at.shape) == 1 and at.dtype == torch.int64,
        f"{at} for places, expected i64 of one dimension",
    )


def values_in(table: Type, quant: str) -> int:
    """Return how many values a row of a block-quantized table holds: u8, of the GGUF block type
    that the attribute `quant` names. Refuses what cannot be rows of blocks of that type.
    """
    need(quant in BLOCKS, f"quant {quant!r}; expected one of {', '.join(BLOCKS)}")
    need(
        table.dtype == torch.uint8 and len(table.shape) >= 2 and table.is_contiguous,
        f"{table} for rows of {quant} blocks",
    )
    block = BLOCKS[quant]
    size = table.shape[-1]
    need(
        size > 0 and size % block.bytes == 0,
        f"rows of {size} bytes; {quant} has blocks of {block.bytes}",
    )
    return size // block.bytes * block.values


def need_cache(cache: Type, groups: int, head: int, quant: str | None) -> None:
    """Refuse what is no cache [P, S, G, K] of so many groups and of heads of that size: of u8, with
    the bytes of a head in place of K, where `quant` names the type of its rows. P is 2 for keys and
    values, 1 where keys are the values, too, or where a key and its value share a row.
    """
    row = head
    if quant is not None:
        need(quant in CACHE_TYPES, f"quant {quant!r}; expected one of {', '.join(CACHE_TYPES)}")
        row = cached_bytes(quant, head)
        need(cache.dtype == torch.uint8, f"cache {cache} for rows of {quant}")
    else:
        need_floats(cache)
    halves = (1,) if quant in PAIRS else (1, 2)
    need(
        len(cache.shape) == 4 and cache.shape[0] in halves and cache.shape[2:] == (groups, row),
        f"cache {cache} of {groups} heads of {head} values in {quant or 'floats'}, expected "
        f"[{' or '.join(map(str, halves))}, S, {groups}, {row}]",
    )


def need(ok: bool, message: str) -> None:
    """Refuse a graph that cannot be meant."""
    if not ok:
        raise ValueError(message)
