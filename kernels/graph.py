"""A graph is its output nodes: building a node computes its type and nothing else.

Shapes are torch order, outermost first; strides are in elements. There is no graph object:
`toposort(*outputs)` lists the nodes a result needs, inputs first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, Protocol

import numpy as np
import torch

from mtmd.kernels.dtype import name_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Type:
    """Type of an op's result, as the op promises it."""

    shape: Shape
    dtype: torch.dtype
    strides: Shape

    @staticmethod
    def of(tensor: torch.Tensor) -> Type:
        """A dimension of size 1 gets the stride it has in a contiguous tensor: its own says
        nothing, and differs between devices.
        """
        return Type.strided(tuple(tensor.shape), tensor.dtype, tensor.stride())

    @staticmethod
    def strided(shape: Shape, dtype: torch.dtype, strides: Iterable[int]) -> Type:
        """The type `of` a tensor with this shape and these strides."""
        strides, step = list(strides), 1
        for i in reversed(range(len(shape))):
            strides[i] = step if shape[i] == 1 else strides[i]
            step = strides[i] * max(shape[i], 1)
        return Type(shape, dtype, tuple(strides))

    @staticmethod
    def contiguous(shape: Iterable[int], dtype: torch.dtype) -> Type:
        return _contiguous(tuple(shape), dtype)

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        return self.strides == _contiguous(self.shape, self.dtype).strides

    def meta(self) -> torch.Tensor:
        """A tensor of this type without storage, to run shape rules on."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")

    def __str__(self) -> str:
        return f"{name_of(self.dtype)} {list(self.shape)}"


@lru_cache(maxsize=4096)
def _contiguous(shape: Shape, dtype: torch.dtype) -> Type:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return Type(shape, dtype, tuple(reversed(strides)))


class WeightSource(Protocol):
    """Source of weights: their types without reading them, and their values, under canonical
    names.
    """

    def type_of(self, name: str, dtype: torch.dtype) -> Type: ...
    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor: ...

    def quant(self, name: str) -> str | None:
        """The block type of a parameter that is used as it is stored: then it has bytes as its
        type, and rows of blocks as its shape.
        """

    def order(self, name: str) -> str | None:
        """The name of the parameter, int64 [K], that says in which order the blocks of a matrix
        have its columns; None where it is their own.
        """


@dataclass(frozen=True, eq=False, repr=False)
class Node:
    """One value of the graph. `inputs` holds None where an op's optional input is absent.

    `alias` tells that the result shares the memory of input 0 (a view, or a cache written in
    place).
    """

    op: str
    inputs: tuple[Node | None, ...]
    type: Type
    attrs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    alias: bool = False

    @property
    def shape(self) -> Shape:
        return self.type.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.type.dtype

    @property
    def operands(self) -> Iterator[Node]:
        """The inputs that are there."""
        return (i for i in self.inputs if i is not None)

    @property
    def is_leaf(self) -> bool:
        return self.op in ("input", "weight")

    @property
    def is_in_state(self) -> bool:
        """Return whether it lies in the memory of a state, which outlives the run."""
        node = self
        while node.alias and node.inputs[0] is not None:
            node = node.inputs[0]
        return bool(node.attrs.get("state"))

    def __str__(self) -> str:
        return f"{self.name or '(unnamed)'} = {self.op} -> {self.type}"

    def __repr__(self) -> str:
        """Itself alone: with its inputs, each with theirs, a graph would take for ever to print."""
        return f"<{self}>"


def graph_input(
    name: str,
    shape: Iterable[int],
    dtype: torch.dtype,
    fill: Callable[[Any], torch.Tensor | np.ndarray],
    **facts: Any,
) -> Node:
    """A value supplied per run: `fill(batch)` makes it, written next to the code that uses it.
    `facts`: what is known of it in all runs, for rules that rewrite graphs and for predictions.
    """
    return Node("input", (), Type.contiguous(shape, dtype), {"fill": fill, **facts}, name)


def filled(node: Node, batch: Any) -> torch.Tensor:
    """The value of an input in one run."""
    value: torch.Tensor | np.ndarray = node.attrs["fill"](batch)
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def constant(name: str, locations: torch.Tensor) -> Node:
    """int64 [N] that every run reads the same: `values` of the node."""
    attrs = {"fill": lambda _: locations, "values": tuple(locations.tolist())}
    return Node("input", (), Type.contiguous(locations.shape, torch.int64), attrs, name)


def weight(name: str, source: WeightSource, dtype: torch.dtype) -> Node:
    """A parameter under its canonical name, wanted in `dtype`. It is read when a plan makes it
    resident.
    """
    return Node("weight", (), source.type_of(name, dtype), {"source": source}, name)


def toposort(*outputs: Node) -> list[Node]:
    """Every node the outputs need, each once, inputs before users, in the order in which they were
    first asked for.
    """
    order: dict[Node, None] = {}
    stack = list(reversed(outputs))
    while stack:
        for i in stack[-1].inputs:
            if i is not None and i not in order:
                if i.inputs:
                    stack.append(i)
                    break
                order[i] = None
        else:
            order[stack.pop()] = None
    return list(order)
