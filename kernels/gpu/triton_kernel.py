"""What a file with a Triton kernel says of it: one `KERNEL` serves the backend, the ahead-of-time
compiler, the tests, the benchmark and the tables of docs/kernels.md. No Triton is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.launch import Call
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.kernel import Kernel
from mtmd.kernels.ops import OPS


@dataclass(frozen=True)
class Placed(Type):
    """The type of a tensor that is a part of a larger one. aligned: it begins at a multiple of 16
    bytes; storage: bytes of all that lies there.
    """

    aligned: bool = True
    storage: int = 0

    @property
    def is_contiguous(self) -> bool:
        return fresh(self).is_contiguous


def fresh(kind: Type) -> Type:
    """Of a tensor with memory of its own."""
    return Type(kind.shape, kind.dtype, kind.strides)


def not_dense(named: Mapping[str, Type | None]) -> str | None:
    """The first of some operands that is not in bf16, fp16 or fp32, or not contiguous; None if
    there is none.
    """
    for name, type_ in named.items():
        if type_ is None:
            continue
        if type_.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{name} is {name_of(type_.dtype)}; the kernel takes bf16, fp16 or fp32"
        if not type_.is_contiguous:
            return f"{name} has strides {list(type_.strides)}; the kernel needs it contiguous"
    return None


@dataclass(frozen=True)
class Program:
    """What is compiled for a node: a `@triton.jit` function, how it is called, and the type of what
    each of its pointers points at, by the name of the argument (of absent ones, of whatever the
    launcher passes in their place).

    tile: the constants that are the sizes of a program's work, for docs/kernels.md. title: what a
    report calls it, where the kernel's name does not say enough. head: the head size, if any.
    """

    function: Any
    call: Call
    operands: Mapping[str, Type]
    tile: Sequence[str] = ()
    title: str | None = None
    head: int | None = None


class Case(Protocol):
    """A problem for a kernel. `str()` of it is its name in tests and tables."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def options(self) -> dict[str, Any]:
        """The op's attributes."""

    def inputs(
        self, device: str | torch.device = "cpu", seed: int = 0
    ) -> tuple[Tensor | None, ...]:
        """The op's inputs, the same for the same seed. What the kernel may not read is NaN."""


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

    program: what a run on these types launches, for compiling it ahead of time; from the same
        `Call` as the launcher's, so that what is compiled is what runs.
    programs: all that it launches, in order, where that is more.
    cases: small problems, each run in Triton's interpreter (a block and a bit of everything: sizes
        of 1, primes, just over a block, every layout that `rejects` lets through).
    uses: problems of real sizes by what they are, compiled for docs/kernels.md and timed by
        benchmarks/gpu.py.
    launches: how many kernels one run launches.
    error, limits: how far a result is from the op's reference, as `relative_error` is called, and
        the most that is right, by the type of the inputs.
    """

    program: Callable[..., Program] = field(kw_only=True)
    cases: Sequence[Case] = field(kw_only=True)
    limits: Mapping[torch.dtype, float] = field(kw_only=True)
    uses: Mapping[str, Case] = field(kw_only=True)
    programs: Callable[..., Sequence[Program]] | None = None
    launches: Callable[..., int] = lambda *types, **attrs: 1  # noqa: ARG005
    error: Callable[[str, Tensor, Sequence[Tensor | None], Mapping[str, Any]], float] = (
        relative_error
    )

    def launched(self, *types: Type | None, **attrs: Any) -> list[Program]:
        """What a run on these types launches: nothing where there is nothing to compute."""
        found = (
            [self.program(*types, **attrs)]
            if self.programs is None
            else self.programs(*types, **attrs)
        )
        return [program for program in found if program.call.programs]

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
        if (found := Type.of(result)) != node.type:
            return f"{name}: result {found}, expected {node.type}"
        error, allowed = self.error(op, result, inputs, case.options), self.limits[case.dtype]
        if error <= allowed:  # not so of NaN
            return None
        return f"{name}: error {error:.3g}, expected at most {allowed:.3g}"


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
