"""Lowering of a plan to programs: which nodes run as machine code, and where their values lie.

Steps are taken in their order. Those that a rule here takes become instructions of a program; each
run of them is one, and between programs the other steps are called as ever. Values keep the types
of their nodes. Every value has memory of its own in the run's arena: nothing is written twice in a
run (`program` says why). Views cost nothing, only other strides.

A plan of many rows, as of a prompt, is wide: its products and its attention are those of `tiled`,
its values are large, so that memory is used again as soon as nobody reads what is in it, and no
instruction is done twice; and it is cut into several programs, between which a run can be ended.

Some nodes vanish into others:

- `gather_pages` into the attention that reads it: pages are read where they lie
- an `add` into the product before it
- of a wide plan, the products of which an activation has one and multiplies by the other
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mtmd.kernels.cpu import tiled_attention
from mtmd.kernels.cpu.native import attention, kv_rows, linear_runs, products, recurrent, rows
from mtmd.kernels.cpu.native import experts as experts_
from mtmd.kernels.cpu.native.compile import compile_kernel, compiler, not_compiling
from mtmd.kernels.cpu.native.decode import rows_of
from mtmd.kernels.cpu.native.pool import shared_pool
from mtmd.kernels.cpu.native.program import Instruction, Pointer, Program, scratch_bytes
from mtmd.kernels.cpu.tiled import expert_rows, few_rows, many_rows, words
from mtmd.kernels.cpu.tiled.activation import emit_activation
from mtmd.kernels.cpu.tiled.codes import FORMS
from mtmd.kernels.cpu.tiled.cpu import host_form
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops import OPS
from mtmd.kernels.ops.moe import Routing
from mtmd.kernels.plan.arena import ARENA, Arena, StepUse, packed
from mtmd.kernels.plan.steps import LONG_S, SLOWEST, STORES, NativeFacts, Step
from mtmd.kernels.quantization.kv_rows import cached_parts, value_offset

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
ALLOWED = {*DTYPES, torch.int64, torch.int32, torch.uint8, torch.bool}
# Tokens whose attention is summed up in the same order however many of them there are, so that an
# answer is the same to the last bit with tokens proposed and without.
ALIKE = 8
TOGETHER = 16  # heads that one unit of attention computes, of a group that is alone
MAX_ROWS = 16  # of a product of a plan that is not wide
SHARE = 1 << 22  # products that a thread needs to have to take a part of one of many rows
WIDE_FLOPS = LONG_S * SLOWEST  # of a wide program, unless one node has more: 10 ms on two cores
GATED = ("gelu_mul", "silu_mul")
TORCHS = 0.1  # of the products of many rows that may be torch's, between programs
WORTH = 4096  # values of a chunk, at least, of a kernel that does little with each: about 1 us

Location: TypeAlias = "int | Pointer"
"""An address that is known, or one in a run's memory."""


def bits(number: float) -> int:
    """A float32 as an argument."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


@dataclass
class Lowered:
    """Result of lowering a plan: programs and steps in order; what a run has to bring."""

    parts: list[Program | int] = field(default_factory=list)  # int: the number of a step
    arena: int = 0
    scratch: int = 0  # of each thread
    leaves: dict[Node, int] = field(default_factory=dict)  # inputs: their roots
    made: dict[Node, int] = field(default_factory=dict)  # by steps: their roots
    results: dict[int, Type] = field(default_factory=dict)  # of outputs, by root
    locations: dict[Node, Location] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)  # the last part that reads a root
    weights: dict[Node, Tensor] = field(default_factory=dict)
    roots: int = 1
    native: int = 0
    refused: dict[Node, str] = field(default_factory=dict)
    wide: bool = False
    flops: dict[int, float] = field(default_factory=dict)  # of parts
    saved: list[Any] = field(default_factory=list)  # whose addresses are in the programs


Operands = Sequence[Node | None]
Rejects = Callable[["Lowering", Node, Operands], str | None]
Emits = Callable[["Lowering", Node, Operands], None]


@dataclass(frozen=True)
class Rule:
    rejects: Rejects
    emit: Emits


@dataclass(frozen=True)
class StepFacts:
    """A step as this file sees it."""

    node: Node
    inputs: tuple[Node | None, ...]
    here: bool  # on this backend


def worth(steps: Sequence[Step]) -> str | None:
    """Why a plan is better run as it is; None where it works behind a cache."""
    if not any(s.node.op in STORES for s in steps):
        return "no step of decoding"
    wide = [s for s in steps if s.node.op == "matmul" and rows_of_product(s.inputs) > MAX_ROWS]
    others = [s for s in wide if _rejects_many(s.node, s.inputs) is not None]
    all_, torchs = (sum(OPS["matmul"].flops(s.node) for s in some) for some in (wide, others))
    if torchs > TORCHS * all_:
        reason = _rejects_many(others[0].node, others[0].inputs)
        return f"{rows_of_product(others[0].inputs)} rows, more than {MAX_ROWS}: {reason}"
    return None


def rows_of_product(inputs: Sequence[Node | None]) -> int:
    """Rows of its first operand."""
    x = inputs[0]
    return 0 if x is None else x.type.count // x.shape[-1]


def foresee(
    steps: Sequence[Step], outputs: Sequence[Node]
) -> tuple[NativeFacts, int | None] | None:
    """Return how much of a plan runs as programs, and the bytes that a run takes beside weights and
    caches, None where that is not known: where other steps run between. None where it runs as it
    is. Nothing is compiled or allocated to find it.
    """
    if worth(steps) is not None or {s.backend.space for s in steps} != {"cpu"}:
        return None

    facts = [StepFacts(s.node, s.inputs, s.backend.native) for s in steps]
    with not_compiling():
        lowered = Lowering(facts, outputs, lambda node: node.type.meta()).run()
    return facts_of(lowered)


def facts_of(lowered: Lowered) -> tuple[NativeFacts, int | None]:
    """Return what `foresee` does, of a plan that is lowered."""
    programs = [part for part in lowered.parts if isinstance(part, Program)]
    reasons = Counter((node.op, reason) for node, reason in lowered.refused.items())
    threads = shared_pool().threads
    text = NativeFacts(
        lowered.native,
        len(programs),
        sum(len(p.instructions) for p in programs),
        threads,
        tuple((op, reason, count) for (op, reason), count in reasons.items()),
    )
    if len(programs) < len(lowered.parts):
        return text, None
    inputs = sum(n.type.bytes for n in lowered.leaves if not n.attrs.get("state"))
    frames = sum(p.frame_bytes for p in programs) + scratch_bytes(lowered.scratch, threads)
    return text, inputs + lowered.arena + sum(t.bytes for t in lowered.results.values()) + frames


class Lowering:
    """The work of `lower`. `weight` gives a parameter's tensor."""

    def __init__(
        self, steps: Sequence[StepFacts], outputs: Sequence[Node], weight: Callable[[Node], Tensor]
    ):
        self.steps, self.outputs, self.weight = steps, outputs, weight
        self.result = Lowered()
        self.users: dict[Node, list[Node]] = {}
        self.inputs = {s.node: s.inputs for s in steps}
        for step in steps:
            for node in step.inputs:
                if node is not None:
                    self.users.setdefault(node, []).append(step.node)
        self.taken: set[Node] = set()
        self.vanished: set[Node] = set()
        self.joined: set[Node] = set()  # activations that are part of their products
        self.parts: list[list[Instruction] | int] = []
        self.instructions: list[Instruction] = []
        self.arena = Arena()
        self.scratch, self.flops = 0, 0.0
        self.wide = self.result.wide = any(
            s.node.op == "matmul" and rows_of_product(s.inputs) > MAX_ROWS for s in steps
        )
        self.rules = {**RULES, **WIDE} if self.wide else RULES
        self._prepared: dict[tuple[Location, int, int, str], Location] = {}

    def run(self) -> Lowered:
        self._choose()
        result = self.result
        for number, step in enumerate(self.steps):
            node = step.node
            if node in self.vanished:
                result.native += 1
            elif node in self.taken:
                result.native += 1
                if node.type.count:
                    self._cut(node)
                    self.rules[node.op].emit(self, node, step.inputs)
                else:  # nothing to compute, and no kernel divides by its size
                    result.locations[node] = self.room(0)
            else:
                self._end_program()
                for i in step.inputs:
                    if i is not None:
                        self.location(i)
                result.flops[len(self.parts)] = OPS[node.op].flops(node)
                self.parts.append(number)
                result.made[node] = result.roots
                result.locations[node] = Pointer(result.roots)
                result.roots += 1
        self._end_program()
        result.arena, result.scratch = self.arena.bytes, self.scratch
        if self.wide:
            self._pack()
        for part in self.parts:
            if isinstance(part, list):
                program = Program(part, self.scratch, again=not self.wide)
                program.set_roots(result.roots)
                result.parts.append(program)
            else:
                result.parts.append(part)
        return result

    def _end_program(self) -> None:
        if self.instructions:
            self.result.flops[len(self.parts)] = self.flops
            self.parts.append(self.instructions)
            self.instructions, self.flops = [], 0.0

    def _pack(self) -> None:
        """Let values that are not needed at the same time lie in the same memory."""
        result = self.result
        uses = {
            number: StepUse(
                # As they are noted: who asks for a location reads it once more
                tuple(
                    p
                    for i in step.inputs
                    if i is not None and isinstance(p := result.locations[i], Pointer)
                ),
                result.made[step.node],
            )
            for number, step in enumerate(self.steps)
            if number in self.parts
        }
        saved = [p for o in self.outputs if isinstance(p := result.locations[o], Pointer)]
        packing = packed(self.arena, self.parts, uses, saved)
        self.parts = [
            [packing.instruction(i) for i in part] if isinstance(part, list) else part
            for part in self.parts
        ]
        for node, location in result.locations.items():
            if isinstance(location, Pointer):
                result.locations[node] = packing.location(location)
        result.arena = packing.bytes

    def _cut(self, node: Node) -> None:
        """End a wide program before it gets too long."""
        if self.wide:
            joined = self.inputs[node] if node in self.joined else ()
            flops = sum(OPS[n.op].flops(n) for n in (node, *joined) if n is not None)
            if self.flops and self.flops + flops > WIDE_FLOPS:
                self._end_program()
            self.flops += flops

    def _choose(self) -> None:
        """Choose the steps that are taken. An attention and what it gathers go together."""
        for step in self.steps:
            reason = self._reason(step)
            if reason is None:
                self.taken.add(step.node)
            else:
                self.result.refused[step.node] = reason
            if self.wide and reason is None and step.node.op in GATED:
                self._join(step.node)
        for step in self.steps:  # what is gathered for somebody else has to be there
            node = step.node
            if node.op == "gather_pages" and node in self.taken:
                readers = self.users.get(node, [])
                if node not in self.outputs and all(
                    u.op == "attention" and u in self.taken for u in readers
                ):
                    self.vanished.add(node)
                else:
                    self._refuse(node, "read by something other than native attention")
        for step in self.steps:
            gathered = step.inputs[1:3]
            if (
                step.node.op == "attention"
                and step.node in self.taken
                and not all(i in self.vanished for i in gathered)
                and (not self.wide or any(i in self.vanished for i in gathered))
            ):
                self._refuse(step.node, "its keys are read by something else too")
                for keys in gathered:
                    if keys is not None and keys in self.vanished:
                        self._refuse(keys, "its attention does not run here")

    def _join(self, node: Node) -> None:
        """Make the two products of a gated layer one, with its activation."""
        if not _is_flat(node, self.inputs[node]):
            return
        parts = [
            part
            for part in dict.fromkeys(self.inputs[node])
            if part is not None
            and part.op == "matmul"
            and part in self.taken
            and self.only_user(part) is node
            and _is_by_panels(part, self.inputs[part])
        ]
        if len(parts) < 2:
            return
        (x, w, bias), (same, other, more) = ((*self.inputs[part], None)[:3] for part in parts)
        assert w is not None and other is not None
        alike = w.type == other.type and len({part.attrs.get("quant") for part in parts}) == 1
        if x is same and alike and bias is None and more is None:
            self.joined.add(node)
            self.vanished |= set(parts)

    def _refuse(self, node: Node, reason: str) -> None:
        self.taken.discard(node)
        self.vanished.discard(node)
        self.result.refused[node] = reason

    def _reason(self, step: StepFacts) -> str | None:
        node = step.node
        if not step.here:
            return "runs on another backend"
        rule = self.rules.get(node.op)
        if rule is None:
            return f"there is no native {node.op}"
        for n in (node, *step.inputs):
            if n is not None and n.type.dtype not in ALLOWED:
                return f"{n.type} is neither fp32 nor bf16"
        return rule.rejects(self, node, step.inputs)

    # What rules use ---------------------------------------------------------------------------

    def location(self, node: Node) -> Location:
        """Return where a value lies that is there already."""
        if node not in self.result.locations:
            assert node.is_leaf, node
            if node.op == "weight":
                tensor = self.weight(node)
                assert tensor.is_contiguous()
                self.result.weights[node] = tensor
                self.result.locations[node] = tensor.data_ptr()
            else:
                self.result.leaves[node] = self.result.roots
                self.result.locations[node] = Pointer(self.result.roots)
                self.result.roots += 1
        location = self.result.locations[node]
        if isinstance(location, Pointer):
            self.result.last[location.root] = len(self.parts)
        return location

    def make(self, node: Node) -> Location:
        """Memory for a node's value."""
        assert node.type.is_contiguous, node
        if node in self.outputs:
            root = self.result.roots
            self.result.roots += 1
            self.result.results[root] = node.type
            location = Pointer(root)
        else:
            location = self.room(node.type.bytes)
        self.result.locations[node] = location
        return location

    def room(self, size: int) -> Pointer:
        """Memory of the run."""
        return self.arena.room(size)

    def constant(self, tensor: Tensor) -> int:
        self.result.saved.append(tensor)
        return tensor.data_ptr()

    def add(
        self,
        address: int,
        args: Sequence[Location],
        units: int,
        chunk: int = 1,
        name: str = "",
        again: bool = True,
    ) -> None:
        if units:
            self.instructions.append(Instruction(address, tuple(args), units, chunk, again, name))

    def only_user(self, node: Node) -> Node | None:
        users = self.users.get(node, [])
        return users[0] if len(users) == 1 and node not in self.outputs else None

    def addend(self, node: Node) -> tuple[Node | None, Node | None]:
        """The `add` that alone reads a product, and what it adds; that is done with the product."""
        user = self.only_user(node)
        if user is None or user.op != "add" or user not in self.taken:
            return None, None
        a, b = self.inputs[user][:2]
        other = b if a is node else a
        if other is None or other is node or not (other.type == node.type == user.type):
            return None, None
        if other not in self.result.locations and not other.is_leaf:
            return None, None
        self.vanished.add(user)
        return user, other

    def prepared(self, x: Node, count: int, width: int, how: products.Preparation) -> Location:
        """x as products with quantized weights read it, made once for all that read it alike."""
        return self.prepared_at(self.location(x), count, width, how, x.name)

    def prepared_at(
        self, location: Location, count: int, width: int, how: products.Preparation, name: str
    ) -> Location:
        key = location, count, width, how.name
        if key not in self._prepared:
            self._prepared[key] = to = self.room(count * how.bytes(width))
            self.add(how.address, [location, width, to, width], count, 1, f"{name} prepared")
        return self._prepared[key]

    def tiled(
        self, x: Node, count: int, width: int, how: few_rows.Kernel | words.Prepared
    ) -> Location:
        """Prepare operands as `prepared` does, for products that read all rows together."""
        location = self.location(x)
        key = location, count, width, how.name
        if key not in self._prepared:
            self._prepared[key] = to = self.room(how.bytes(count, width))
            args = [location, width, to, width, count]
            self.add(how.prepare, args, how.units(count, width), 8, f"{x.name} prepared")
        return self._prepared[key]


def at(location: Location, offset: int) -> Location:
    """A place, some bytes on."""
    if isinstance(location, Pointer):
        return Pointer(location.root, location.offset + offset)
    return location + offset


def name_of(node: Node) -> str:
    return DTYPES[node.dtype]


# Rules ----------------------------------------------------------------------------------------


def _dense_rows(type_: Type) -> bool:
    return not type_.shape or type_.strides[-1] == 1 or type_.shape[-1] == 1


def _broadcast(b: Type, shape: Sequence[int]) -> list[int]:
    """b's strides in a's shape."""
    extra = len(shape) - len(b.shape)
    return [0] * extra + [0 if n == 1 else s for n, s in zip(b.shape, b.strides, strict=True)]


def _each_layout(node: Node, inputs: Operands) -> tuple[list[int], list[list[int]]] | None:
    """Sizes (three) and strides of a, b and the result."""
    a = inputs[0]
    assert a is not None
    binary = node.op in rows.BINARY
    b = inputs[1] if binary else a
    assert b is not None
    out = Type.contiguous(a.shape, node.dtype)  # of a reshape: its elements are in a's order
    sizes, strides = rows.leading(a.shape, a.type.strides, _broadcast(b.type, a.shape), out.strides)
    if not sizes:
        sizes, strides = [1], [[1], [1], [1]]
    if strides[0][-1] != 1 or strides[1][-1] not in (0, 1):
        # the last dimension of a single value, or apart in memory: rows of one value each
        if strides[0][-1] != 1 and sizes[-1] > 64:
            return None
        sizes, strides = [*sizes, 1], [[*s, 1] for s in strides]
    if len(sizes) > 3:
        return None
    fill = 3 - len(sizes)
    return [1] * fill + sizes, [[0] * fill + s for s in strides]


def _rejects_each(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    if not node.type.is_contiguous:
        return "its result has gaps"
    return None if _each_layout(node, inputs) else "strides of more than three dimensions"


def _emit_each(low: Lowering, node: Node, inputs: Operands) -> None:
    kind = {"cast": "copy", "reshape": "copy"}.get(node.op, node.op)
    layout = _each_layout(node, inputs)
    a, b = inputs[0], inputs[1] if node.op in rows.BINARY else None
    assert layout is not None and a is not None
    extra: list[Location] = [0, 0]
    attrs = node.attrs
    if kind == "scale":
        extra = [bits(attrs["factor"]), bits(attrs.get("offset", 0.0))]
    elif kind == "softcap":
        extra = [bits(attrs["cap"]), 0]
    elif kind == "clamp":
        extra = [low.location(i) for i in inputs[1:3] if i is not None]
    _each(low, kind, a, b, low.make(node), node, layout, extra)


def _each(
    low: Lowering,
    kind: str,
    a: Node,
    b: Node | None,
    to: Location,
    node: Node,
    layout: tuple[list[int], list[list[int]]],
    extra: Sequence[Location] = (0, 0),
    again: bool = True,
) -> None:
    (outer, inner, columns), (sa, sb, so) = layout
    address = compile_kernel(
        rows.emit_each,
        kind,
        name_of(a),
        name_of(b or a),
        name_of(node),
        sb[2],
        node.attrs.get("approximate", ""),
    )
    blocks = -(-columns // rows.BLOCK)
    args = [low.location(a), *sa[:2], low.location(b or a), *sb[:2], to, *so[:2], inner, columns]
    each = min(columns, rows.BLOCK)
    chunk = max(WORTH // each, 1)
    low.add(address, [*args, *extra], outer * inner * blocks, chunk, node.name, again)


def _rejects_norm(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    x, w = (*inputs, None)[:2]
    assert x is not None
    if node.op != "layer_norm" and w is not None and w.dtype != torch.float32:
        return f"a weight in {w.type}"
    if not _dense_rows(x.type) or not node.type.is_contiguous:
        return "rows with gaps"
    return None if rows.two_level(x.shape[:-1], x.type.strides[:-1]) else "rows in three dimensions"


def _emit_norm(low: Lowering, node: Node, inputs: Operands) -> None:
    x, w = (*inputs, None)[:2]
    assert x is not None
    outer, inner, ((xo, xi), (oo, oi)) = _rows(x, node)
    kind, size = node.op.removesuffix("_norm"), x.shape[-1]
    address = compile_kernel(rows.emit_norm, kind, name_of(x), name_of(node), w is not None)
    args: list[Location] = [low.location(x), xo, xi, low.make(node), oo, oi, inner, size]
    args += [bits(node.attrs["eps"]), low.location(w) if w is not None else 0]
    low.add(address, args, outer * inner, max(WORTH // 2 // size, 1), node.name)


def _emit_layer_norm(low: Lowering, node: Node, inputs: Operands) -> None:
    x, w, b = (*inputs, None)[:3]
    assert x is not None and w is not None
    outer, inner, ((xo, xi), (oo, oi)) = _rows(x, node)
    size = x.shape[-1]
    address = compile_kernel(rows.emit_layer_norm, name_of(x), name_of(node), b is not None)
    args: list[Location] = [low.location(x), xo, xi, low.make(node), oo, oi, inner, size]
    args += [bits(node.attrs["eps"]), low.location(w), low.location(b) if b is not None else 0]
    low.add(address, args, outer * inner, max(WORTH // 2 // size, 1), node.name)


def _rejects_magnitude(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    y, x = inputs
    assert y is not None and x is not None
    if not (_dense_rows(y.type) and _dense_rows(x.type) and node.type.is_contiguous):
        return "rows with gaps"
    return None if _magnitude_rows(y, x, node) else "rows in three dimensions"


def _magnitude_rows(y: Node, x: Node, node: Node) -> tuple[int, int, list[tuple[int, int]]] | None:
    """Rows of y, of x where it has one for several of y's, and of the result."""
    own = _broadcast(x.type, y.shape)[:-1]
    out = Type.contiguous(node.shape, node.dtype).strides[:-1]
    return rows.two_level(y.shape[:-1], y.type.strides[:-1], own, out)


def _emit_magnitude(low: Lowering, node: Node, inputs: Operands) -> None:
    y, x = inputs
    assert y is not None and x is not None
    layout = _magnitude_rows(y, x, node)
    assert layout is not None
    outer, inner, ((yo, yi), (xo, xi), (oo, oi)) = layout
    size = y.shape[-1]
    address = compile_kernel(rows.emit_match_magnitude, name_of(y), name_of(node))
    args: list[Location] = [low.location(y), yo, yi, low.location(x), xo, xi, low.make(node)]
    args += [oo, oi, inner, size, bits(node.attrs["floor"])]
    low.add(address, args, outer * inner, max(WORTH // 2 // size, 1), node.name)


def _emit_topk(low: Lowering, node: Node, inputs: Operands) -> None:
    (x,) = inputs
    assert x is not None
    outer, inner, ((xo, xi), (oo, oi)) = _rows(x, node)
    size = x.shape[-1]
    address = compile_kernel(rows.emit_gaussian_topk, name_of(x), name_of(node))
    args: list[Location] = [low.location(x), xo, xi, low.make(node), oo, oi, inner, size]
    args.append(bits(node.attrs["deviations"]))
    low.add(address, args, outer * inner, max(WORTH // 2 // size, 1), node.name)


def _rejects_mixed(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    if not all(i is not None and _dense_rows(i.type) for i in inputs):
        return "rows with gaps"
    return None if inputs[1] is not None and inputs[1].shape[1] <= MAX_ROWS else "many streams"


def _emit_mixed(low: Lowering, node: Node, inputs: Operands) -> None:
    x = inputs[1]
    assert x is not None
    tokens, streams, size = node.shape
    address = compile_kernel(rows.emit_add_mixed, name_of(x), x.shape[1])
    args: list[Location] = []
    for one in inputs:
        assert one is not None
        args += [low.location(one), *one.type.strides[:2]]
    args += [low.make(node), streams, size]
    low.add(address, args, tokens * streams, max(WORTH // 2 // size, 1), node.name)


def _rows(x: Node, node: Node, last: int = 1) -> tuple[int, int, list[tuple[int, int]]]:
    """Rows of x and of a contiguous result of its shape."""
    out = Type.contiguous(node.shape, node.dtype)
    result = rows.two_level(x.shape[:-last], x.type.strides[:-last], out.strides[:-last])
    assert result is not None
    return result


def _rejects_rope(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    x, table = inputs
    assert x is not None and table is not None
    if node.attrs.get("parts", 1) != 1:
        return "heads in several parts"
    if not _dense_rows(x.type) or not table.type.is_contiguous or table.dtype != torch.float32:
        return "rows with gaps"
    return None if prod(x.shape[:-3]) == 1 else "a batch of several"


def _emit_rope(low: Lowering, node: Node, inputs: Operands) -> None:
    x, table = inputs
    assert x is not None and table is not None
    tokens, heads, size = x.shape[-3:]
    out = Type.contiguous(node.shape, node.dtype)
    address = compile_kernel(
        rows.emit_rope, name_of(x), name_of(node), node.attrs.get("pairs", "half")
    )
    args: list[Location] = [low.location(x), *x.type.strides[-3:-1], low.make(node)]
    args += [*out.strides[-3:-1], heads, size, table.shape[2], low.location(table)]
    low.add(address, args, tokens * heads, max(WORTH // 2 // size, 1), node.name)


def _rejects_table(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    divisors = (*inputs, None)[1]
    if divisors is not None and divisors.op != "weight":
        return "frequencies that are computed"
    return None


def _emit_table(low: Lowering, node: Node, inputs: Operands) -> None:
    positions, divisors = (*inputs, None)[:2]
    assert positions is not None
    rotary = node.attrs["rotary"]
    frequencies = torch.tensor(rotary.frequencies, dtype=torch.float32)
    if divisors is not None:
        result = low.weight(divisors)  # without values where memory is counted
        frequencies = frequencies if result.is_meta else frequencies / result
    tokens, count = positions.shape[1], len(rotary.frequencies)
    axes = torch.tensor(list(rotary.axes) or [0] * count, dtype=torch.int64) * tokens
    args = [low.location(positions), tokens, low.make(node), count]
    args += [low.constant(frequencies), low.constant(axes), bits(rotary.scale)]
    low.add(compile_kernel(rows.emit_rope_table), args, tokens, 4, node.name)


def _rejects_embed(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    quant = node.attrs.get("quant")
    return None if quant is None or quant in products.KINDS else f"a table of {quant}"


def _emit_embed(low: Lowering, node: Node, inputs: Operands) -> None:
    tokens, table = inputs
    assert tokens is not None and table is not None
    scale = torch.tensor(node.attrs.get("scale", 1.0), dtype=node.dtype).item()
    quant = node.attrs.get("quant")
    if quant is None:
        _take(low, node, table, tokens, scale)
        return
    size = node.shape[1]
    address = rows_of(quant, name_of(node), scale != 1.0)
    args: list[Location] = [
        low.location(table),
        products.row_bytes(quant, size),
        low.location(tokens),
    ]
    args += [low.make(node), size, size, bits(scale)]
    low.add(address, args, tokens.shape[0], 1, node.name)


def _rejects_take(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    x = inputs[0]
    assert x is not None
    whole = len(rows.leading(x.shape[:-2], x.type.strides[:-2])[0]) <= 1
    return None if whole and _dense_rows(x.type) else "rows with gaps"


def _emit_take(low: Lowering, node: Node, inputs: Operands) -> None:
    x, locations = inputs
    assert x is not None and locations is not None
    _take(low, node, x, locations, 1.0)


def _take(low: Lowering, node: Node, x: Node, locations: Node, scale: float) -> None:
    size = x.shape[-1]
    if size == 1 and scale == 1.0:
        _take_each(low, node, x, locations)
        return
    address = compile_kernel(rows.emit_take, name_of(x), name_of(node), scale != 1.0)
    args: list[Location] = [
        low.location(x),
        x.type.strides[-2],
        low.location(locations),
        low.make(node),
    ]
    _, batches = rows.leading(x.shape[:-2], x.type.strides[:-2])
    args += [size, size, bits(scale), locations.shape[0], *(batches[0] or [0])]
    units = prod(x.shape[:-2]) * locations.shape[0]
    low.add(address, args, units, max(WORTH // size, 1), node.name)


def _take_each(low: Lowering, node: Node, x: Node, locations: Node) -> None:
    """Rows of a single value: columns of what is seen as a matrix."""
    count = locations.shape[0]
    _, batches = rows.leading(x.shape[:-2], x.type.strides[:-2])
    args: list[Location] = [low.location(x), x.type.strides[-2], low.location(locations)]
    args += [low.make(node), count, *(batches[0] or [0])]
    units = prod(x.shape[:-2]) * -(-count // rows.BLOCK)
    address = compile_kernel(rows.emit_take_each, name_of(x), name_of(node))
    low.add(address, args, units, max(WORTH // min(count, rows.BLOCK), 1), node.name)


def _rejects_put(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    x, values, _ = inputs
    assert x is not None and values is not None
    return None if x.type.is_contiguous and _dense_rows(values.type) else "rows with gaps"


def _emit_put(low: Lowering, node: Node, inputs: Operands) -> None:
    x, values, locations = inputs
    assert x is not None and values is not None and locations is not None
    layout = _each_layout(node, (x,))
    assert layout is not None
    to = low.make(node)
    _each(low, "copy", x, None, to, node, layout, again=False)  # what is put must stay
    address = compile_kernel(rows.emit_put, name_of(values), name_of(node), node.op == "add_rows")
    args: list[Location] = [to, x.shape[1], low.location(locations), low.location(values)]
    args += [values.type.strides[0], x.shape[1]]
    low.add(address, args, locations.shape[0], locations.shape[0], node.name, again=False)


def _rejects_concat(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    for part in inputs:
        assert part is not None
        if len(rows.leading(part.shape, part.type.strides, node.type.strides)[0]) > 3:
            return "strides of more than three dimensions"
        if not _dense_rows(part.type):
            return "rows with gaps"
    return None


def _emit_concat(low: Lowering, node: Node, inputs: Operands) -> None:
    to, axis = low.make(node), node.attrs["axis"]
    for part in inputs:
        assert part is not None
        sizes, strides = rows.leading(part.shape, part.type.strides, node.type.strides)
        fill = 3 - len(sizes)
        sizes = [1] * fill + sizes
        own, out = ([0] * fill + s for s in strides)
        _each(low, "copy", part, None, to, node, (sizes, [own, own, out]))
        to = at(to, part.shape[axis] * node.type.strides[axis] * node.dtype.itemsize)


def _rejects_store(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    cache, k, v, _ = inputs
    assert cache is not None and k is not None and v is not None
    if k.dtype != v.dtype:
        return "keys and values of two types"
    return None if _dense_rows(k.type) and _dense_rows(v.type) else "rows with gaps"


def _emit_store(low: Lowering, node: Node, inputs: Operands) -> None:
    cache, k, v, slots = inputs
    assert cache is not None and k is not None and v is not None and slots is not None
    tokens, groups, size = k.shape
    low.result.locations[node] = to = low.location(cache)
    args: list[Location] = [
        low.location(k),
        *k.type.strides[:2],
        low.location(v),
        *v.type.strides[:2],
    ]
    quant = node.attrs.get("quant")
    of_value = (quant and value_offset(quant, size)) or cache.type.strides[0]
    args += [low.location(slots), to, of_value, groups]
    if quant is None:
        args.append(size)
        address = compile_kernel(rows.emit_store, name_of(k), name_of(cache), cache.shape[0])
    else:
        address = compile_kernel(
            kv_rows.emit_quantized_store,
            name_of(k),
            quant,
            size,
            cached_parts(cache.shape[0], quant),
        )
    low.add(address, args, tokens * groups, max(WORTH // size, 1), node.name, again=False)


def _rejects_gather(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    cache = inputs[0]
    assert cache is not None
    if node.attrs["size"] != attention.PAGE:
        return f"pages of {node.attrs['size']} tokens"
    return None if cache.type.is_contiguous else "a cache with gaps"


def _emit_nothing(low: Lowering, node: Node, inputs: Operands) -> None:
    """Emit nothing: the node is part of its reader."""


def _rejects_attention(low: Lowering, node: Node, inputs: Operands) -> str | None:
    q, k, v, mask, bounds = (*inputs, None, None)[:5]
    assert q is not None and k is not None and v is not None
    if node.attrs.get("causal") or node.attrs.get("window") is not None:
        return "causal or a window besides bounds"
    if mask is not None and (
        mask.dtype != torch.float32
        or len(mask.shape) != 2
        or not mask.type.is_contiguous
        or node.attrs.get("mask_capped")
    ):
        return f"a mask {mask.type}, expected fp32 of tokens by keys, behind a cap"
    if bounds is None or len(bounds.shape) != 2:
        return "no bounds"
    if not (k.op == v.op == "gather_pages"):
        return "its keys are no pages of a cache"
    if low.inputs[k][1] is not low.inputs[v][1] or k.type.strides != v.type.strides:
        return "keys and values of different pages"
    if q.shape[0] != 1 or not _dense_rows(q.type):
        return "a batch of several"
    per_group = q.shape[2] // k.shape[2]
    if max(q.shape[3], v.shape[3]) > attention.MAX_HEAD:
        return f"heads of {q.shape[3]}"
    return f"{per_group} heads in a group" if per_group > 32 and k.shape[2] > 1 else None


def _at_once(per_group: int, groups: int) -> int:
    """Return of how many heads of a group a unit of attention computes. A group that is alone is
    cut into equal parts, each a unit of its own.
    """
    if groups > 1 or per_group <= TOGETHER:
        return per_group
    return next(n for n in range(TOGETHER, 0, -1) if per_group % n == 0)


def _emit_attention(low: Lowering, node: Node, inputs: Operands) -> None:
    q, k, v, mask, bounds = (*inputs, None, None)[:5]
    assert q is not None and k is not None and v is not None and bounds is not None
    (_, tokens, count, size), groups, value = q.shape, k.shape[2], v.shape[3]
    keys, pages = low.inputs[k]
    values, _ = low.inputs[v]
    assert keys is not None and values is not None and pages is not None
    softcap, to, quant = node.attrs.get("softcap"), low.make(node), k.attrs.get("quant")
    heads = _at_once(count // groups, groups)
    of_keys, of_values = keys.type.strides[2], values.type.strides[2]
    if heads * groups < count:  # all of them read the only group
        groups, of_keys, of_values = count // heads, 0, 0
    maximum = _splits(groups if tokens <= ALIKE else tokens * groups)
    splits = max(1, min(maximum, -(-pages.shape[0] // attention.FEW)))
    address = compile_kernel(
        attention.emit_attention,
        (name_of(q), quant or name_of(keys), name_of(node)),
        size,
        value,
        heads,
        softcap is not None,
        16 if compiler().cpu.has("avx512f") else 4,
        mask is not None,
    )
    width = attention.ROOM + attention.padded(value)
    parts = low.room(4 * tokens * count * splits * width) if splits > 1 else Pointer(ARENA)
    of_value = (quant and value_offset(quant, size)) or keys.type.strides[0] * keys.dtype.itemsize
    halves = [
        at(low.location(c), part.attrs["which"] * of_value) for c, part in ((keys, k), (values, v))
    ]
    token, head = node.type.strides[1:3]
    args: list[Location] = [low.location(q), *q.type.strides[1:3], *halves, keys.type.strides[1]]
    args += [of_keys, of_values, low.location(pages), low.location(bounds)]
    args += [groups, splits, to, token, head, parts]
    args += [bits(node.attrs["scale"]), bits(softcap or 0.0), maximum]
    args += [] if mask is None else [low.location(mask), mask.shape[1]]
    low.add(address, args, tokens * groups * splits, 1, node.name)
    if splits > 1:
        address = compile_kernel(attention.emit_combine, name_of(node), value)
        args = [parts, splits, to, token, head, count]
        chunk = max(WORTH // (splits * width), 1)
        low.add(address, args, tokens * count, chunk, node.name)


def _splits(units: int) -> int:
    """Into how many runs of pages each token's keys are cut at most: so many that there are parts
    enough for every thread.
    """
    return max(1, -(-16 // units))


def _rejects_view(low: Lowering, node: Node, inputs: Operands) -> str | None:
    if node.alias:
        return None
    return _rejects_each(low, node, inputs)


def _emit_view(low: Lowering, node: Node, inputs: Operands) -> None:
    x = inputs[0]
    assert x is not None
    if not node.alias:
        _emit_each(low, node, inputs)
        return
    offset = 0
    if node.op == "rows":
        offset = node.attrs["start"] * x.type.strides[0]
    elif node.op == "columns":
        offset = node.attrs["start"] * x.type.strides[-1]
    elif node.op == "kv_half":
        offset = node.attrs["which"] * x.type.strides[0]
    low.result.locations[node] = at(low.location(x), offset * node.dtype.itemsize)


def _kind(node: Node, w: Node) -> str:
    """The type of a product's weight, as products call it."""
    quant = node.attrs.get("quant")
    return {"f32": "F32", "bf16": "BF16"}[name_of(w)] if quant is None else str(quant)


def _rejects_matmul(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    x, w = inputs[:2]
    assert x is not None and w is not None
    m = x.type.count // x.shape[-1]
    if m > MAX_ROWS:
        return f"{m} rows, more than {MAX_ROWS}"
    if w.op != "weight":
        return "its weight is computed"
    if (kind := _kind(node, w)) not in products.KINDS:
        return f"a weight of {kind}"
    if products.too_narrow(kind, x.shape[-1]):
        return f"rows of {x.shape[-1]} values in {kind}"
    return None if x.type.is_contiguous else "rows with gaps"


def _emit_matmul(low: Lowering, node: Node, inputs: Operands) -> None:
    x, w, bias = (*inputs, None)[:3]
    assert x is not None and w is not None
    user, addend = low.addend(node)
    m, n, width = x.type.count // x.shape[-1], w.shape[0], x.shape[-1]
    kind, biased = _kind(node, w), None if bias is None else name_of(bias)
    grain, here, stride = products.grain(kind, width), low.location(x), width
    if few_rows.takes(kind, m, n, width, name_of(x)):
        tiles = few_rows.product(kind, name_of(node), biased, addend is not None)
        address, grain = tiles.address, few_rows.grain(kind, width, n)
        here, stride = low.tiled(x, m, width, tiles), 0
        low.scratch = max(low.scratch, few_rows.scratch_bytes(m))
    else:
        kernel = products.product(
            kind, products.rows_for(m), name_of(x), name_of(node), biased, addend is not None
        )
        address = kernel.address
        low.scratch = max(low.scratch, kernel.scratch(width))
        if kernel.prepare is not None:
            here, stride = low.prepared(x, m, width, kernel.prepare), kernel.prepare.bytes(width)
    args: list[Location] = [here, stride, low.location(w), products.row_bytes(kind, width)]
    args += [low.make(user or node), n, width, m, low.location(bias) if bias is not None else 0]
    args += [low.location(addend) if addend is not None else 0, n, n]
    low.add(address, args, n, grain, node.name)


def _rejects_lora(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    if (m := rows_of_product(inputs[1:])) > MAX_ROWS:
        return f"{m} rows, more than {MAX_ROWS}"
    return _rejects_adapter(inputs)


def _rejects_adapter(inputs: Operands) -> str | None:
    y, x, a, b, scale = inputs
    assert y is not None and x is not None and a is not None and b is not None
    m = rows_of_product(inputs[1:])
    if a.op != "weight" or b.op != "weight":
        return "its weights are computed"
    if scale is None or scale.type.count != m:
        return "one scale for several rows"
    whole = all(i.type.is_contiguous for i in (y, x, scale))
    return None if whole else "rows with gaps"


def _emit_lora(low: Lowering, node: Node, inputs: Operands) -> None:
    """Two products, the sums of the first scaled row by row between them, in fp32."""
    y, x, a, b, scale = inputs
    assert y is not None and x is not None and a is not None and b is not None
    assert scale is not None
    m, (rank, width), kind = x.type.count // x.shape[-1], a.shape, _kind(node, a)
    narrow, scaled = low.room(4 * m * rank), low.room(m * rank * x.dtype.itemsize)
    rows_ = products.rows_for(m)
    kernel = products.product(kind, rows_, name_of(x), "f32")
    args: list[Location] = [low.location(x), width, low.location(a)]
    args += [products.row_bytes(kind, width), narrow, rank, width, m, 0, 0, 0, rank]
    low.add(kernel.address, args, rank, products.grain(kind, width), f"{node.name} a")
    _scale_rows(low, node, narrow, "f32", scale, scaled, name_of(x), m, rank)
    kernel = products.product(kind, rows_, name_of(x), name_of(node), None, True)
    args = [scaled, rank, low.location(b), products.row_bytes(kind, rank), low.make(node)]
    n = b.shape[0]
    args += [n, rank, m, 0, low.location(y), n, n]
    low.add(kernel.address, args, n, products.grain(kind, rank), node.name)


def _scale_rows(
    low: Lowering,
    node: Node,
    values: Location,
    dtype: str,
    scale: Node,
    to: Location,
    scaled: str,
    m: int,
    rank: int,
) -> None:
    """m rows of `rank` values, each times its number of `scale`."""
    address = compile_kernel(rows.emit_each, "mul", dtype, name_of(scale), scaled, 0, "")
    args = [values, 0, rank, low.location(scale), 0, 1, to, 0, rank, m, rank, 0, 0]
    units = m * -(-rank // rows.BLOCK)
    low.add(address, args, units, max(WORTH // min(rank, rows.BLOCK), 1), f"{node.name} scale")


def _rejects_conv(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    x, w, state = inputs[:3]
    assert x is not None and w is not None and state is not None
    if state.dtype != x.dtype:
        return f"a state in {name_of(state)}"
    if not (_dense_rows(x.type) and w.type.is_contiguous and state.type.is_contiguous):
        return "rows with gaps"
    return None if w.shape[1] <= 8 else f"{w.shape[1]} taps"


def _emit_conv(low: Lowering, node: Node, inputs: Operands) -> None:
    x, w, state, starts, slots, bias = (*inputs, None)[:6]
    assert x is not None and w is not None and state is not None
    assert starts is not None and slots is not None
    address = compile_kernel(
        recurrent.emit_conv,
        name_of(x),
        name_of(w),
        w.shape[1],
        name_of(bias) if bias is not None else None,
        node.attrs["activation"] == "silu",
    )
    args: list[Location] = [
        low.location(x),
        x.type.strides[0],
        *map(low.location, (w, state, starts, slots)),
    ]
    args += [low.location(bias) if bias is not None else 0, low.make(node)]
    args += [x.shape[0], slots.shape[0], x.shape[1]]
    blocks = -(-x.shape[1] // recurrent.LANES)
    chunk = max(WORTH // 64 // x.shape[0], 1)
    low.add(address, args, blocks, chunk, node.name, again=False)  # its state is written after it


def _rejects_linear(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    q, k, v, decay, beta, state = inputs[:6]
    assert q is not None and k is not None and v is not None
    assert decay is not None and beta is not None and state is not None
    dense = all(_dense_rows(n.type) for n in (q, k, v))
    whole = all(n.type.is_contiguous for n in (decay, beta, state))
    return None if dense and whole else "rows with gaps"


def _emit_linear(low: Lowering, node: Node, inputs: Operands) -> None:
    q, k, v, decay, beta, state, starts, slots = inputs
    assert q is not None and k is not None and v is not None and slots is not None
    (tokens, heads, value), (_, groups, size) = v.shape, q.shape
    emit = recurrent.emit_linear
    if tokens > MAX_ROWS:
        emit = linear_runs.emit_linear_runs
        low.scratch = max(low.scratch, linear_runs.scratch_bytes(size, value))
    delta = node.attrs.get("delta", True)
    address = compile_kernel(emit, name_of(q), name_of(k), name_of(v), delta)
    args: list[Location] = []
    for part in (q, k, v):
        args += [low.location(part), *part.type.strides[:2]]
    args += [low.location(n) for n in (decay, beta, state, starts, slots) if n is not None]
    args += [low.make(node), tokens, groups, heads, size, value, bits(node.attrs["scale"])]
    low.add(address, args, slots.shape[0] * heads, 1, node.name, again=False)  # as above


def _rejects_state(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    state, rows_, _ = inputs
    assert state is not None and rows_ is not None
    return None if state.type.is_contiguous and rows_.type.is_contiguous else "rows with gaps"


def _emit_state(low: Lowering, node: Node, inputs: Operands) -> None:
    state, rows_, slots = inputs
    assert state is not None and rows_ is not None and slots is not None
    low.result.locations[node] = to = low.location(state)
    size = prod(state.shape[1:])
    address = compile_kernel(recurrent.emit_state_store, name_of(rows_), name_of(state))
    args = [to, low.location(rows_), low.location(slots), size, WORTH]
    low.add(address, args, slots.shape[0] * -(-size // WORTH), 1, node.name, again=False)


def _rejects_moe(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    x = inputs[0]
    assert x is not None
    if x.shape[0] > MAX_ROWS:
        return f"{x.shape[0]} rows, more than {MAX_ROWS}"
    return _rejects_experts(node, inputs)


def _rejects_experts(node: Node, inputs: Operands) -> str | None:
    x, router = inputs[:2]
    assert x is not None and router is not None
    if not (x.type.is_contiguous and _dense_rows(router.type)):
        return "rows with gaps"
    for part, table, values in _tables(inputs):
        if table.op != "weight":
            return "its weights are computed"
        if (kind := _part_kind(node, part, table)) not in products.KINDS:
            return f"a weight of {kind}"
        if products.too_narrow(kind, values):
            return f"rows of {values} values in {kind}"
    return None


def _tables(inputs: Operands) -> list[tuple[str, Node, int]]:
    """The weights of experts by name, with the values of their rows."""
    x, _, gate, up, down = inputs[:5]
    assert x is not None and gate is not None and up is not None and down is not None
    width, ffn = x.shape[1], gate.shape[1]
    return [("gate", gate, width), ("up", up, width), ("down", down, ffn)]


def _part_kind(node: Node, part: str, table: Node) -> str:
    return str(node.attrs.get(f"{part}_quant") or _kind(node, table))


def _route(low: Lowering, node: Node, inputs: Operands) -> tuple[Location, Location]:
    """Weights and numbers of the experts of each token."""
    x, router, _, _, _, shares, bias = (*inputs, None, None)[:7]
    assert x is not None and router is not None
    tokens, experts = router.shape
    routing: Routing = node.attrs["routing"]
    pairs = tokens * routing.top_k
    weights, chosen = low.room(4 * pairs), low.room(8 * pairs)
    reads = _reads(inputs)
    given = [one is not None for one in (shares, bias, reads)]
    address = compile_kernel(experts_.emit_route, name_of(router), routing, *given)
    args: list[Location] = [low.location(router), router.type.strides[0], experts, weights, chosen]
    args += [low.location(one) if one is not None else 0 for one in (shares, bias)]
    for each in (experts, experts, experts + routing.groups, routing.groups):
        args.append(low.room(4 * tokens * each))
    args += [low.location(reads)] if reads is not None else []
    low.add(address, args, tokens, 1, f"{node.name} route", again=False)  # it notes what it took
    return weights, chosen


def _expert_rows(
    low: Lowering, node: Node, x: Node, weights: Location
) -> tuple[Location, int, int]:
    """Rows that experts read, how many there are and how many pairs share one: x's, or with
    `on_input` those of each pair, times their weights.
    """
    (tokens, width), routing = x.shape, node.attrs["routing"]
    maximum, size = routing.top_k, x.dtype.itemsize
    pairs = tokens * maximum
    if not routing.on_input:
        return low.location(x), tokens, maximum
    address = compile_kernel(rows.emit_each, "mul", name_of(x), "f32", name_of(x), 0, "")
    read = low.room(pairs * width * size)
    args: list[Location] = [low.location(x), width, 0, weights, maximum, 1, read]
    args += [maximum * width, width]
    units = pairs * -(-width // rows.BLOCK)
    chunk = max(WORTH // min(width, rows.BLOCK), 1)
    low.add(address, [*args, maximum, width, 0, 0], units, chunk, f"{node.name} scale")
    return read, pairs, 1


def _expert_activation(
    low: Lowering, node: Node, x: Node, gate: Location, up: Location, count: int, ffn: int
) -> Location:
    """Rows of what the first two products of experts make."""
    gated = low.room(count * ffn * x.dtype.itemsize)
    kind, _, approximate = node.attrs.get("act", "silu").partition("_")
    address = compile_kernel(rows.emit_each, f"{kind}_mul", *[name_of(x)] * 3, 1, approximate)
    row = [0, ffn]
    args = [gate, *row, up, *row, gated, *row, count, ffn, 0, 0]
    low.add(address, args, count * -(-ffn // rows.BLOCK), WORTH // rows.BLOCK, f"{node.name} act")
    return gated


def _first_tables(gate: Node, up: Node) -> list[tuple[str, Node]]:
    """The tables of an expert's first products: gate and up may be one."""
    return [("gate", gate)] if gate is up else [("gate", gate), ("up", up)]


def _emit_moe(low: Lowering, node: Node, inputs: Operands) -> None:
    x, _, gate, up, down = inputs[:5]
    assert x is not None and gate is not None and up is not None and down is not None
    (tokens, width), ffn, size = x.shape, gate.shape[1], x.dtype.itemsize
    routing: Routing = node.attrs["routing"]
    maximum = routing.top_k
    pairs = tokens * maximum
    weights, chosen = _route(low, node, inputs)
    read, of, read_by = _expert_rows(low, node, x, weights)
    first = _first_tables(gate, up)
    halves = [low.room(pairs * ffn * size) for _ in first]
    for (part, table), to in zip(first, halves, strict=True):
        _chosen(low, node, part, x, read, of, read_by, table, width, chosen, to)
    gated = _expert_activation(low, node, x, halves[0], halves[-1], pairs, ffn)
    mixed = low.room(pairs * width * size)
    _chosen(low, node, "down", x, gated, pairs, 1, down, ffn, chosen, mixed)
    _mix(low, node, x, mixed, weights)


def _mix(
    low: Lowering,
    node: Node,
    x: Node,
    mixed: Location,
    weights: Location,
    locations: Location | None = None,
) -> None:
    """The sum over each token's experts of what they made of it, which lies at `locations`."""
    routing, reads, (tokens, width) = node.attrs["routing"], _reads(low.inputs[node]), x.shape
    form = not routing.on_input, locations is not None, reads is not None
    address = compile_kernel(experts_.emit_mix, name_of(x), name_of(node), *form)
    args: list[Location] = [mixed, weights, routing.top_k, low.make(node), width, locations or 0]
    args += [low.location(reads)] if reads is not None else []
    low.add(address, args, tokens * -(-width // 256), 4, node.name)


def _reads(inputs: Operands) -> Node | None:
    """Return which tokens experts read, None if all."""
    return (*inputs, None, None, None)[7]


def _chosen(
    low: Lowering,
    node: Node,
    part: str,
    x: Node,
    here: Location,
    count: int,
    each: int,
    table: Node,
    width: int,
    chosen: Location,
    to: Location,
    spacing: int | None = None,
) -> None:
    """One of the three products: `count` rows of x, `spacing` numbers from each to the next or one
    behind the other, each for `each` experts.
    """
    kind, n = _part_kind(node, part, table), table.shape[1]
    kernel = products.product(kind, 1, name_of(x), name_of(x))
    low.scratch = max(low.scratch, kernel.scratch(width))
    stride = width
    step = (width if spacing is None else spacing) * x.dtype.itemsize
    if kernel.prepare is not None:
        here = low.prepared_at(here, count, width, kernel.prepare, f"{node.name}.{part}")
        step = stride = kernel.prepare.bytes(width)
    row = products.row_bytes(kind, width)
    args: list[Location] = [here, stride, low.location(table), row, to, n, width, 1, 0, 0, 0, n]
    args += [kernel.address, n, chosen, n * row, step, each, n * x.dtype.itemsize]
    address = compile_kernel(experts_.emit_chosen)
    grain = products.grain(kind, width)
    low.add(address, args, count * each * n, grain, f"{node.name}.{part}")


def _rejects_heads(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    x, w = inputs
    assert x is not None and w is not None
    if x.shape[0] > MAX_ROWS:
        return f"{x.shape[0]} rows, more than {MAX_ROWS}"
    if x.shape[1] != w.shape[0]:
        return "one row for all heads"
    return _rejects_any_heads(node, inputs)


def _rejects_any_heads(node: Node, inputs: Operands) -> str | None:
    x, w = inputs
    assert x is not None and w is not None
    if w.op != "weight":
        return "its weight is computed"
    if node.attrs.get("turned"):
        return "rows and columns of its weight exchanged"
    if products.too_narrow(kind := _kind(node, w), x.shape[2]):
        return f"rows of {x.shape[2]} values in {kind}"
    return None if _head_stride(x) is not None else "heads with gaps of two sizes"


def _head_stride(x: Node) -> int | None:
    """Return how many numbers lie from one head to the next, of the same token or another; None
    where that differs.
    """
    (tokens, heads, _), (token, head, one) = x.shape, x.type.strides
    alike = heads > 1 and (tokens == 1 or token == heads * head)
    return head if alike and one == 1 else token if heads == one == 1 else None


def _emit_heads(low: Lowering, node: Node, inputs: Operands) -> None:
    """The products of experts, each head being one that all its rows choose."""
    x, w = inputs
    assert x is not None and w is not None
    tokens, heads, width = x.shape
    chosen = low.constant(torch.arange(heads).repeat(tokens))
    here, to = low.location(x), low.make(node)
    _chosen(low, node, "w", x, here, tokens * heads, 1, w, width, chosen, to, _head_stride(x))


# Rules of wide plans --------------------------------------------------------------------------


def _rejects_many(node: Node, inputs: Operands) -> str | None:
    """Why a product of many rows is torch's."""
    x, w = inputs[:2]
    assert x is not None and w is not None
    if w.op != "weight":
        return "its weight is computed"
    if not x.type.is_contiguous:
        return "rows with gaps"
    return _rejects_panels(_kind(node, w), x)


def _rejects_panels(kind: str, x: Node) -> str | None:
    """Why products of many rows of x with a weight of this type are torch's."""
    if kind in FORMS:
        return None if x.dtype in DTYPES else f"x is {x.type}"
    if x.dtype != torch.bfloat16 or kind != "BF16":
        return f"a weight in {kind} and x {x.type}, which torch multiplies"
    form = host_form("bf16")
    return None if form and form[0] == "tiles" else "the CPU has no AMX, or none for us"


def _rejects_wide_matmul(low: Lowering, node: Node, inputs: Operands) -> str | None:
    if rows_of_product(inputs) <= MAX_ROWS:
        return _rejects_matmul(low, node, inputs)
    return _rejects_many(node, inputs)


def _emit_wide_matmul(low: Lowering, node: Node, inputs: Operands) -> None:
    x, w, bias = (*inputs, None)[:3]
    assert x is not None and w is not None
    if not _is_by_panels(node, inputs):
        _emit_matmul(low, node, inputs)
        return
    m, n, width, kind = rows_of_product(inputs), w.shape[0], x.shape[-1], _kind(node, w)
    user, addend = low.addend(node)
    biased = None if bias is None else name_of(bias)
    int8 = node.attrs.get("int8", False)
    made = many_rows.call(
        kind, m, width, n, name_of(x), biased, addend is not None, share=SHARE, int8=int8
    )
    args: list[Location] = [*_operand(low, x, m, width, made), m, width, low.location(w)]
    args += [products.row_bytes(kind, width), n, low.location(bias) if bias is not None else 0]
    args += [low.make(user or node), n, *made.sizes]
    args += [low.location(addend)] if addend is not None else []
    low.scratch = max(low.scratch, made.scratch)
    low.add(made.address, args, made.units, 1, node.name)


def _operand(
    low: Lowering, x: Node, m: int, width: int, made: many_rows.Call
) -> tuple[Location, int]:
    """x as a product of many rows reads it, and the stride of its rows."""
    if made.prepared is None:
        return low.location(x), width
    return low.tiled(x, m, width, made.prepared), 0


def _is_by_panels(node: Node, inputs: Operands) -> bool:
    x, w = inputs[:2]
    assert x is not None and w is not None
    m, kind = rows_of_product(inputs), _kind(node, w)
    return m > MAX_ROWS and not few_rows.pays(kind, m, w.shape[0], x.shape[-1], name_of(x))


def _emit_gated(low: Lowering, node: Node, inputs: Operands) -> None:
    """An activation with the two products that it has."""
    gate, up = inputs[:2]
    assert gate is not None and up is not None
    (x, w), (_, other) = low.inputs[gate][:2], low.inputs[up][:2]
    assert x is not None and w is not None and other is not None
    m, n, width, kind = node.type.count // w.shape[0], w.shape[0], x.shape[-1], _kind(gate, w)
    how = node.attrs.get("approximate", "silu")
    int8 = gate.attrs.get("int8", False)
    made = many_rows.call(
        kind, m, width, 2 * n, name_of(x), None, gated=how, share=SHARE, int8=int8
    )
    args: list[Location] = [*_operand(low, x, m, width, made), m, width, low.location(w)]
    args += [products.row_bytes(kind, width), 2 * n, 0, low.make(node), n, *made.sizes]
    args.append(low.location(other))
    low.scratch = max(low.scratch, made.scratch)
    low.add(made.address, args, made.units, 1, node.name)


def _rejects_wide_lora(low: Lowering, node: Node, inputs: Operands) -> str | None:
    x, a = inputs[1:3]
    assert x is not None and a is not None
    if rows_of_product(inputs[1:]) <= MAX_ROWS:
        return _rejects_lora(low, node, inputs)
    return _rejects_panels(_kind(node, a), x) or _rejects_adapter(inputs)


def _emit_wide_lora(low: Lowering, node: Node, inputs: Operands) -> None:
    """Two products of many rows, the sums of the first rounded and scaled row by row between them,
    those of the second added to y.
    """
    y, x, a, b, scale = inputs
    assert y is not None and x is not None and a is not None and b is not None
    assert scale is not None
    m, (rank, width), n = rows_of_product(inputs[1:]), a.shape, b.shape[0]
    if m <= MAX_ROWS:
        _emit_lora(low, node, inputs)
        return
    kind, dtype, size = _kind(node, a), name_of(x), x.dtype.itemsize
    narrow, scaled = low.room(m * rank * size), low.room(m * rank * size)
    made = many_rows.call(kind, m, width, rank, dtype, None, share=SHARE, as_stored=True)
    args: list[Location] = [low.location(x), width, m, width, low.location(a)]
    args += [products.row_bytes(kind, width), rank, 0, narrow, rank, *made.sizes]
    low.scratch = max(low.scratch, made.scratch)
    low.add(made.address, args, made.units, 1, f"{node.name} a")
    _scale_rows(low, node, narrow, dtype, scale, scaled, dtype, m, rank)
    made = many_rows.call(kind, m, rank, n, dtype, None, True, share=SHARE, as_stored=True)
    args = [scaled, rank, m, rank, low.location(b), products.row_bytes(kind, rank), n, 0]
    args += [low.make(node), n, *made.sizes, low.location(y)]
    low.scratch = max(low.scratch, made.scratch)
    low.add(made.address, args, made.units, 1, node.name)


def _rejects_wide_moe(low: Lowering, node: Node, inputs: Operands) -> str | None:  # noqa: ARG001
    x = inputs[0]
    assert x is not None
    if x.shape[0] > MAX_ROWS:
        for part, table, _ in _tables(inputs):
            if reason := _rejects_panels(_part_kind(node, part, table), x):
                return reason
    return _rejects_experts(node, inputs)


def _emit_wide_moe(low: Lowering, node: Node, inputs: Operands) -> None:
    """Experts of many tokens: the rows of each together, in the order of the experts."""
    x, router, gate, up, down = inputs[:5]
    assert x is not None and router is not None
    assert gate is not None and up is not None and down is not None
    (tokens, width), ffn, experts, size = x.shape, gate.shape[1], router.shape[1], x.dtype.itemsize
    if tokens <= MAX_ROWS:
        _emit_moe(low, node, inputs)
        return
    routing: Routing = node.attrs["routing"]
    pairs, block = tokens * routing.top_k, experts_.BLOCK
    weights, chosen = _route(low, node, inputs)
    read, _, each = _expert_rows(low, node, x, weights)
    blocks = (pairs + (block - 1) * min(experts, pairs)) // block  # at most
    count = blocks * block
    counts, begins, locations, order = (low.room(8 * n) for n in (experts, experts, pairs, count))
    args: list[Location] = [chosen, pairs, experts, counts, begins, locations, order]
    low.add(compile_kernel(experts_.emit_sort), args, 1, 1, f"{node.name} sort")
    laid: dict[object, Location] = {}

    def multiplied(
        part: str, table: Node, x_rows: Location, values: int, outer: int, taken: bool
    ) -> Location:
        made = expert_rows.forms(_part_kind(node, part, table), values, outer, name_of(x), tokens)
        low.scratch = max(low.scratch, made.scratch)
        key = taken, made.layout
        if key not in laid:
            laid[key] = low.room(blocks * made.block_bytes)
            address = compile_kernel(experts_.emit_lay_rows, name_of(x), taken, made.prepared)
            args = [x_rows, values * size, each, order, counts, begins, laid[key], *made.laying()]
            low.add(address, args, experts, 1, f"{node.name}.{part} prepared")
        stored = made.block_bytes if taken else block * made.row_bytes
        to = low.room(count * outer * size)
        args = [counts, begins]
        args += made.multiplying(
            low.location(table), to, laid[key], laid[key] if taken else x_rows, stored
        )
        units, address = experts * made.units, compile_kernel(experts_.emit_grouped)
        low.add(address, args, units, 1, f"{node.name}.{part}")
        return to

    halves = [multiplied(p, t, read, width, ffn, True) for p, t in _first_tables(gate, up)]
    gated = _expert_activation(low, node, x, halves[0], halves[-1], count, ffn)
    mixed = multiplied("down", down, gated, ffn, width, False)
    _mix(low, node, x, mixed, weights, locations)


def _rejects_wide_heads(low: Lowering, node: Node, inputs: Operands) -> str | None:
    x, w = inputs
    assert x is not None and w is not None
    if x.shape[0] <= MAX_ROWS:
        return _rejects_heads(low, node, inputs)
    return _rejects_panels(_kind(node, w), x) or _rejects_any_heads(node, inputs)


def _emit_wide_heads(low: Lowering, node: Node, inputs: Operands) -> None:
    """A product of many rows for each head, whose rows lie between those of others."""
    x, w = inputs
    assert x is not None and w is not None
    if x.shape[0] <= MAX_ROWS:
        _emit_heads(low, node, inputs)
        return
    (tokens, _, width), (heads, n, _), kind = x.shape, w.shape, _kind(node, w)
    made = many_rows.call(kind, tokens, width, n, name_of(x), None, share=SHARE, as_stored=True)
    row, (token, head, _), size = products.row_bytes(kind, width), x.type.strides, x.dtype.itemsize
    args: list[Location] = [made.address, made.units, head * size * (x.shape[1] > 1), n * row]
    args += [n * size, low.location(x), token, tokens, width, low.location(w), row, n, 0]
    args += [low.make(node), heads * n, *made.sizes]
    low.scratch = max(low.scratch, made.scratch)
    address = compile_kernel(experts_.emit_heads, 10 + len(made.sizes))
    low.add(address, args, heads * made.units, 1, node.name)


def _rejects_wide_attention(
    low: Lowering,  # noqa: ARG001
    node: Node,
    inputs: Operands,
) -> str | None:
    q, k, v, mask, bounds = (*inputs, None, None)[:5]
    assert q is not None and k is not None and v is not None
    attrs = node.attrs
    if reason := tiled_attention.unfit(q.type, k.type, v.type, mask.type if mask else None):
        return reason
    if mask is not None and (not mask.type.is_contiguous or len(mask.shape) != 2):
        return f"a mask {mask.type}, expected one of tokens by keys"
    if attrs.get("causal") or attrs.get("window") is not None or attrs.get("mask_capped"):
        return "causal, a window or a capped mask besides bounds"
    if bounds is None or not bounds.type.is_contiguous:
        return "no bounds"
    dense = all(_dense_rows(i.type) for i in (q, k, v))
    return None if q.shape[0] == 1 and dense else "a batch of several"


def _emit_wide_attention(low: Lowering, node: Node, inputs: Operands) -> None:
    q, k, v, mask, bounds = (*inputs, None, None)[:5]
    assert q is not None and k is not None and v is not None and bounds is not None
    (_, tokens, heads, _), (keys, groups) = q.shape, k.shape[1:3]
    softcap, scale = node.attrs.get("softcap"), node.attrs["scale"]
    form = tiled_attention.form_of(q.type, v.type, mask.type if mask else None, softcap, scale)
    pages: Location = 0
    to = low.make(node)
    args: list[Location] = [low.location(q), *q.type.strides[:3]]
    for part in (k, v):
        if part in low.vanished:
            cache, table = low.inputs[part]
            assert cache is not None and table is not None
            form, pages = replace(form, paged=True), low.location(table)
            half = part.attrs["which"] * cache.type.strides[0] * cache.dtype.itemsize
            args += [at(low.location(cache), half), 0, *cache.type.strides[1:3]]
        else:
            args += [low.location(part), *part.type.strides[:3]]
    args += [to, *node.type.strides[:3]]
    args += [0] * 4 if mask is None else [low.location(mask), 0, 0, mask.type.strides[0]]
    args += [low.location(bounds), 0, pages]
    made = tiled_attention.call(form, 1, tokens, keys, heads, groups, scale, softcap)
    low.scratch = max(low.scratch, made.scratch)
    low.add(made.address, [*args, *made.sizes], made.units, 1, node.name)


def _rejects_wide_gather(low: Lowering, node: Node, inputs: Operands) -> str | None:
    cache = inputs[0]
    assert cache is not None
    if node.attrs.get("quant") or cache.dtype != node.dtype:
        return f"a cache {cache.type}, which is made numbers of first"
    return _rejects_gather(low, node, inputs)


def _rejects_activation(low: Lowering, node: Node, inputs: Operands) -> str | None:
    return None if _is_flat(node, inputs) else _rejects_each(low, node, inputs)


def _emit_wide_activation(low: Lowering, node: Node, inputs: Operands) -> None:
    if node in low.joined:
        _emit_gated(low, node, inputs)
        return
    if not _is_flat(node, inputs):
        _emit_each(low, node, inputs)
        return
    kind = node.attrs.get("approximate", "silu")
    address = compile_kernel(emit_activation, kind, name_of(node), len(inputs) > 1)
    x, gate = (*inputs, None)[:2]
    assert x is not None
    args = [low.location(x), 0 if gate is None else low.location(gate), low.make(node)]
    low.add(address, args, node.type.count, WORTH, node.name)


def _is_flat(node: Node, inputs: Operands) -> bool:
    """Return whether it is an activation of values that lie one after another, all of one type."""
    return (
        all(
            i is not None
            and i.type.is_contiguous
            and i.type.count == node.type.count
            and i.dtype == node.dtype
            for i in inputs
        )
        and host_form(name_of(node)) is not None
    )


_EACH = Rule(_rejects_each, _emit_each)
_NORM = Rule(_rejects_norm, _emit_norm)
_VIEW = Rule(_rejects_view, _emit_view)
_PUT = Rule(_rejects_put, _emit_put)
RULES: Mapping[str, Rule] = {
    **dict.fromkeys((*rows.UNARY[1:], *rows.BINARY, "cast"), _EACH),
    "rms_norm": _NORM,
    "l2_norm": _NORM,
    "layer_norm": Rule(_rejects_norm, _emit_layer_norm),
    "match_magnitude": Rule(_rejects_magnitude, _emit_magnitude),
    "gaussian_topk": Rule(_rejects_norm, _emit_topk),
    "add_mixed": Rule(_rejects_mixed, _emit_mixed),
    "rope": Rule(_rejects_rope, _emit_rope),
    "rope_table": Rule(_rejects_table, _emit_table),
    "embed": Rule(_rejects_embed, _emit_embed),
    "take_rows": Rule(_rejects_take, _emit_take),
    "place_rows": _PUT,
    "add_rows": _PUT,
    "concat": Rule(_rejects_concat, _emit_concat),
    "kv_store": Rule(_rejects_store, _emit_store),
    "gather_pages": Rule(_rejects_gather, _emit_nothing),
    "attention": Rule(_rejects_attention, _emit_attention),
    "reshape": _VIEW,
    "rows": _VIEW,
    "columns": _VIEW,
    "kv_half": _VIEW,
    "matmul": Rule(_rejects_matmul, _emit_matmul),
    "head_matmul": Rule(_rejects_heads, _emit_heads),
    "lora": Rule(_rejects_lora, _emit_lora),
    "short_conv": Rule(_rejects_conv, _emit_conv),
    "linear_attention": Rule(_rejects_linear, _emit_linear),
    "state_store": Rule(_rejects_state, _emit_state),
    "moe": Rule(_rejects_moe, _emit_moe),
}
_ACTIVATION = Rule(_rejects_activation, _emit_wide_activation)
WIDE: Mapping[str, Rule] = {
    "matmul": Rule(_rejects_wide_matmul, _emit_wide_matmul),
    "attention": Rule(_rejects_wide_attention, _emit_wide_attention),
    "gather_pages": Rule(_rejects_wide_gather, _emit_nothing),
    "moe": Rule(_rejects_wide_moe, _emit_wide_moe),
    "head_matmul": Rule(_rejects_wide_heads, _emit_wide_heads),
    "lora": Rule(_rejects_wide_lora, _emit_wide_lora),
    **dict.fromkeys(("silu_mul", "gelu_mul", "silu", "gelu"), _ACTIVATION),
}
