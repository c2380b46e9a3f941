"""Definition of a kernel: a faster way to run one op on one kind of device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mtmd.kernels.graph import Node, Type


def _nothing(*types: Type | None, **attrs: Any) -> None:  # noqa: ARG001
    return None


def _no_bytes(*types: Type | None, **attrs: Any) -> int:  # noqa: ARG001
    return 0


@dataclass(frozen=True)
class Kernel:
    """One entry of a table `KERNELS` (`kernels/cpu/table.py`, `kernels/gpu/table.py`).

    Every function is called as the op's reference is: with the node's inputs in order, None or
    nothing for one that is absent, and its attributes by name; `run` on tensors, the others on the
    `Type`s of those tensors.

    run: the op's result, a new tensor.
    in_place: the op's overwriting form: the result lies where the first input was. A kernel without
        it makes a new tensor there, too.
    rejects: None to take these types, else why not, naming the numbers. It must hold for every
        shape that a run can bring: what it lets through, `run` computes.
    how: in which of several ways this machine would run such a node, for the report; None of a
        kernel that has one way.
    workspace: bytes held at the peak beyond the inputs and the result. It is asked for every plan,
        so it counts and runs nothing.
    """

    run: Callable[..., Tensor]
    rejects: Callable[..., str | None] = _nothing
    workspace: Callable[..., int] = _no_bytes
    in_place: Callable[..., Tensor] | None = None
    how: Callable[..., str | None] = _nothing


def types_of(node: Node) -> tuple[Type | None, ...]:
    """The types of a node's inputs, None for one that is absent."""
    return tuple(None if i is None else i.type for i in node.inputs)
