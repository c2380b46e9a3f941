"""Describes what a file with a Triton kernel says of it: one `KERNEL` serves the backend, the
ahead-of-time compiler, the tests, the benchmark and the tables of docs/kernels.md. No Triton is
imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache, wraps
from inspect import Parameter, signature
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mtmd.base.errors import PlacementError
from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.launch import Call, run_call
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.kernel import Kernel
from mtmd.kernels.ops import OPS


@dataclass(frozen=True)
class Located(Type):
    """The type of a tensor that is a part of a larger one. aligned: it begins at a multiple of 16
    bytes; storage: bytes of all that lies there.
    """

    aligned: bool = True
    storage: int = 0

    @property
    def is_contiguous(self) -> bool:
        return fresh(self).is_contiguous


def fresh(kind: Type) -> Type:
    """Return the fresh of a tensor with memory of its own."""
    return Type(kind.shape, kind.dtype, kind.strides)


def not_dense(named: Mapping[str, Type | None]) -> str | None:
    """The first of some operands that is not in bf16, fp16 or fp32, or not contiguous; None if
    there is none.
    """
    for name, type_ in named.items():
        if type_ is None:
            continue
        if type_.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{name} is {name_of(type_.dtype)}; the kernel supports bf16, fp16 or fp32"
        if not type_.is_contiguous:
            return f"{name} has strides {list(type_.strides)}; the kernel needs it contiguous"
    return None


@dataclass(frozen=True)
class Program:
    """Describes what is compiled for a node: a `@triton.jit` function, how it is called, and the
    type of what each of its pointers points at, by the name of the argument (of absent ones, of
    whatever the launcher passes in their place).

    tile: the constants that are the sizes of a program's work, for docs/kernels.md. title: what a
    report calls it, where the kernel's name does not say enough. head: the head size, if any.
    """

    function: Any
    call: Call
    operands: Mapping[str, Type]
    tile: Sequence[str] = ()
    title: str | None = None
    head: int | None = None


@dataclass(frozen=True)
class Launch:
    """One launch of a run: a `@triton.jit` function and how it is called.

    pointers: for each argument that is a pointer, the name of what it points at: an operand, "out"
        or a buffer or a constant of the `Plan`; by default, what the argument is called. In place
        of an operand that is absent the first one is passed, which is not read.
    tile, title, head: as a `Program` has them.
    """

    function: Any
    call: Call
    pointers: Mapping[str, str] | None = None
    tile: Sequence[str] = ()
    title: str | None = None
    head: int | None = None

    def locations(self) -> Mapping[str, str]:
        if self.pointers is not None:
            return self.pointers
        others = {*self.call.scalars, *self.call.constants, "s", "C"}
        return {name: name for name in self.function.arg_names if name not in others}


def same(names: str) -> dict[str, str]:
    """Return pointers that are called as what they point at."""
    return {name: name for name in names.split()}


@dataclass(frozen=True)
class Constant:
    """A tensor that is the same in every run: its type, and what makes it on a device, once."""

    type: Type
    on: Callable[[torch.device], Tensor]


@dataclass(frozen=True)
class Plan:
    """Describes what a run on operands of given types makes and launches.

    out: the result's type; None where the result is the first operand, overwritten.
    buffers: memory beyond operands and result, by name; constants: what lies on the device for all
        runs.
    """

    out: Type | None
    launches: Sequence[Launch]
    buffers: Mapping[str, Type] = field(default_factory=dict)
    constants: Mapping[str, Constant] = field(default_factory=dict)

    def started(self) -> list[Launch]:
        return [launch for launch in self.launches if launch.call.programs]


class Problem(NamedTuple):
    """The inputs and the attributes of one run of an op."""

    inputs: tuple[Tensor | None, ...]
    options: dict[str, Any]


def given(*inputs: Tensor | None, **options: Any) -> Problem:
    return Problem(inputs, options)


@dataclass(frozen=True)
class Case:
    """A problem for a kernel. `make` draws its inputs, for these sizes, from a generator of random
    numbers; what the kernel may not read is NaN. `str()` of it is its name in tests and tables.
    """

    make: Callable[..., Problem]
    sizes: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        parameters = signature(self.make).parameters
        words = [
            _words(name, value)
            for name, value in self.sizes
            if parameters[name].default is Parameter.empty or parameters[name].default != value
        ]
        return " ".join(words)

    def __getitem__(self, size: str) -> Any:
        return dict(self.sizes)[size]

    @property
    def dtype(self) -> torch.dtype:
        result: torch.dtype = self["dtype"]
        return result

    @property
    def options(self) -> dict[str, Any]:
        """The op's attributes."""
        return dict(_options(self))

    def inputs(
        self, device: str | torch.device = "cpu", seed: int = 0
    ) -> tuple[Tensor | None, ...]:
        """Return the op's inputs, the same for the same seed."""
        return tuple(t if t is None else _moved(t, device) for t in self.drawn(seed).inputs)

    def but(self, **changes: Any) -> Case:
        """Return the same with other sizes."""
        return Case(self.make, tuple((dict(self.sizes) | changes).items()))

    def drawn(self, seed: int = 0) -> Problem:
        return self.make(torch.Generator().manual_seed(seed), **dict(self.sizes))


@lru_cache(maxsize=4096)
def _options(case: Case) -> dict[str, Any]:
    with _Unfilled():
        return case.drawn().options


P = ParamSpec("P")


def case(make: Callable[Concatenate[torch.Generator, P], Problem]) -> Callable[P, Case]:
    """Make a function that draws a problem from sizes a function of the sizes: their `Case`."""

    @wraps(make)
    def sized(*args: P.args, **kwargs: P.kwargs) -> Case:
        bound = signature(make).bind(None, *args, **kwargs)
        bound.apply_defaults()
        return Case(make, tuple(bound.arguments.items())[1:])

    return sized


def _words(name: str, value: Any) -> str:
    if isinstance(value, torch.dtype):
        return name_of(value) if name == "dtype" else f"{name} {name_of(value)}"
    if isinstance(value, tuple):
        return f"{name} {'x'.join(map(str, value))}".replace(" ", "")
    return name if value is True else f"{name} {value}"


def _moved(tensor: Tensor, device: str | torch.device) -> Tensor:
    """Return the tensor on a device, in memory as it lies here, with all that lies between."""
    if torch.device(device).type == "cpu":
        return tensor
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    memory = tensor.as_strided((size,), (1,), 0).to(device)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def relative_error(
    op: str, result: Tensor, inputs: Sequence[Tensor | None], options: Mapping[str, Any]
) -> float:
    """Mean square error against the op's reference in fp32, relative to the result's own (0 of
    an empty result).
    """
    wide = [t.float() if t is not None and t.is_floating_point() else t for t in inputs]
    expected = OPS[op].reference(*wide, **options)
    power = float(expected.square().sum())
    return float((result.float() - expected).square().sum()) / (power or 1)


@dataclass(frozen=True)
class TritonKernel(Kernel):
    """A kernel of `kernels/gpu/table.py`.

    operands: makes a record of the types of the op's inputs and of its attributes.
    plan: what a run on such a record makes and launches.
    cases: small problems, each run in Triton's interpreter (a block and a bit of everything: sizes
        of 1, primes, just over a block, every layout that `rejects` lets through).
    uses: problems of real sizes by what they are, compiled for docs/kernels.md and timed by
        benchmarks/gpu.py.
    error, limits: how far a result is from the op's reference, as `relative_error` is called, and
        the most that is right, by the type of the inputs.
    """

    operands: Callable[..., Any] = field(kw_only=True)
    plan: Callable[[Any], Plan] = field(kw_only=True)
    cases: Sequence[Case] = field(kw_only=True)
    limits: Mapping[torch.dtype, float] = field(kw_only=True)
    uses: Mapping[str, Case] = field(kw_only=True)
    error: Callable[[str, Tensor, Sequence[Tensor | None], Mapping[str, Any]], float] = (
        relative_error
    )

    def launched(self, *types: Type | None, **attrs: Any) -> list[Program]:
        """Return what a run on these types launches, for compiling it ahead of time: nothing where
        there is nothing to compute.
        """
        record = self.operands(*types, **attrs)
        plan = self.plan(record)
        named = _named(record)
        first = next(iter(named.values()))
        constants = {name: constant.type for name, constant in plan.constants.items()}
        kinds = {**constants, **plan.buffers, **named, "out": plan.out or first}
        return [
            Program(
                launch.function,
                launch.call,
                {name: kinds[location] or first for name, location in launch.locations().items()},
                launch.tile,
                launch.title,
                launch.head,
            )
            for launch in plan.started()
        ]

    def launches(self, *types: Type | None, **attrs: Any) -> int:
        """Return how many kernels one run launches."""
        return len(self.plan(self.operands(*types, **attrs)).started())

    def main(self, *types: Type | None, **attrs: Any) -> Program:
        """Return the first program with a tile, which does the most of a run's work."""
        return next(p for p in self.launched(*types, **attrs) if p.tile)

    def failure(
        self, op: str, case: Case, device: str | torch.device = "cpu", label: str | None = None
    ) -> str | None:
        """None where a case is taken and its result, computed on a device, is right; else what is
        wrong. `label`: what the case is called.
        """
        inputs = case.inputs(device)
        node, name = _node(op, case, inputs), f"{op} {label or case}"
        if reason := self.rejects(*(i and i.type for i in node.inputs), **node.attrs):
            return f"{name}: not taken: {reason}"
        result = self.run(*inputs, **case.options)
        if (match := Type.of(result)) != node.type:
            return f"{name}: result {match}, expected {node.type}"
        error, allowed = self.error(op, result, inputs, case.options), self.limits[case.dtype]
        if error <= allowed:  # not so of NaN
            return None
        return f"{name}: error {error:.3g}, expected at most {allowed:.3g}"


R = TypeVar("R")


def _named(record: Any) -> dict[str, Any]:
    """Return the types of a record by name, which are its fields that have places of their own."""
    return {f.name: getattr(record, f.name) for f in fields(record) if not f.kw_only}


def declared(
    operands: Callable[..., R],
    plan: Callable[[R], Plan],
    rejects: Callable[[R], str | None],
    *,
    what: str,
    overwrites: bool = False,
    copies: bool = False,
    aligned: Callable[[R], Mapping[str, int]] | None = None,
    **facts: Any,
) -> TritonKernel:
    """Make a kernel of a record of its operands, a plan and what it rejects.

    operands: makes the record, a frozen dataclass: types of the op's inputs, then attributes as
        fields that are given by keyword.
    what: what a refusal calls the kernel.
    overwrites: the result can lie where the first input is. copies: elsewhere it begins as a copy
        of the first input.
    aligned: the multiples of bytes that operands have to begin at.
    facts: the other fields of `TritonKernel`.
    """

    def refuses(*types: Type | None, **attrs: Any) -> str | None:
        return rejects(operands(*types, **attrs))

    def workspace(*types: Type | None, **attrs: Any) -> int:
        made = plan(operands(*types, **attrs))
        return sum(kind.bytes for kind in made.buffers.values()) if made.started() else 0

    def execute(tensors: Sequence[Tensor | None], attrs: dict[str, Any], in_place: bool) -> Tensor:
        record = operands(*(t if t is None else Type.of(t) for t in tensors), **attrs)
        locations = dict(zip(_named(record), tensors, strict=False))
        reason = rejects(record) or (aligned and _unaligned(locations, aligned(record)))
        if reason:
            raise PlacementError(f"{what} on the GPU: {reason}")
        made, first = plan(record), tensors[0]
        assert first is not None
        if in_place or made.out is None:
            out = first
        else:
            out = first.clone() if copies else _empty(made.out, first.device)
        started = made.started()
        if started:
            locations |= {name: c.on(first.device) for name, c in made.constants.items()}
            locations |= {name: _empty(kind, first.device) for name, kind in made.buffers.items()}
            locations["out"] = out
        for launch in started:
            result = {
                name: locations.get(location) for name, location in launch.locations().items()
            }
            pointers = {name: first if t is None else t for name, t in result.items()}
            run_call(launch.function, launch.call, pointers)
        return out

    def run(*tensors: Tensor | None, **attrs: Any) -> Tensor:
        return execute(tensors, attrs, False)

    def in_place(*tensors: Tensor | None, **attrs: Any) -> Tensor:
        return execute(tensors, attrs, True)

    return TritonKernel(
        run=run,
        in_place=in_place if overwrites else None,
        rejects=refuses,
        workspace=workspace,
        operands=operands,
        plan=plan,
        **facts,
    )


def _empty(kind: Type, device: torch.device) -> Tensor:
    memory = torch.empty(kind.count, dtype=kind.dtype, device=device)
    return memory.as_strided(kind.shape, kind.strides)


def _unaligned(tensors: Mapping[str, Tensor | None], sizes: Mapping[str, int]) -> str | None:
    """Why an operand's address will not do, if it will not."""
    for name, size in sizes.items():
        tensor = tensors[name]
        if tensor is not None and tensor.data_ptr() % size:
            return (
                f"{name} begins at {tensor.data_ptr():#x}; the kernel needs it aligned to {size} "
                "bytes"
            )
    return None


@lru_cache(maxsize=4096)
def node_of(op: str, case: Case) -> Node:
    """The node that a case is a run of. No number is drawn for it: of a cache of many tokens that
    would take longer than to compile the kernel.
    """
    with _Unfilled():
        return _node(op, case, case.inputs())


class _Unfilled(TorchFunctionMode):
    """Meanwhile large tensors have their types, and as values whatever lies in their memory: nobody
    draws numbers, copies or converts them. Places and counts are what they are.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        chosen = {k: v for k, v in (kwargs or {}).items() if k != "generator"}
        if func in (torch.randn, torch.rand):
            return torch.empty(*args, **chosen)
        if func is torch.full and isinstance(args[1], float):
            return torch.empty(args[0], **chosen)
        if func is torch.randint and chosen.get("dtype") is torch.uint8:
            return torch.empty(args[2], **chosen)
        if func is Tensor.__setitem__ and not _counts(args[0]):
            return None
        if func is Tensor.to and isinstance(args[1], torch.dtype) and not _counts(args[0]):
            return torch.empty_like(args[0], dtype=args[1])
        return func(*args, **(kwargs or {}))


def _counts(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.dtype is not torch.uint8


def _node(op: str, case: Case, inputs: Sequence[Tensor | None]) -> Node:
    leaves = [t if t is None else Node("input", (), Type.of(t)) for t in inputs]
    return OPS[op](*leaves, name=str(case), **case.options)
