"""A rank's part of a weight, read out of the whole one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtmd.kernels.graph import Node, Type, WeightSource
from mtmd.kernels.ops.collective import Ranges
from mtmd.kernels.quantization.blocks import BLOCKS


@dataclass(frozen=True)
class Slice:
    """A weight source of one parameter: `ranges` of values along an axis, which along quantized
    rows are those of whole blocks.
    """

    source: WeightSource
    axis: int
    ranges: Ranges
    block: str | None

    @property
    def _stored(self) -> Ranges:
        if self.block is None:
            return self.ranges
        block = BLOCKS[self.block]
        return tuple(
            (start // block.values * block.bytes, stop // block.values * block.bytes)
            for start, stop in self.ranges
        )

    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        whole = self.source.type_of(name, dtype)
        size = sum(stop - start for start, stop in self._stored)
        shape = (*whole.shape[: self.axis], size, *whole.shape[self.axis + 1 :])
        return Type.contiguous(shape, whole.dtype)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        whole = self.source.read(name, dtype)
        parts = [whole.narrow(self.axis, start, stop - start) for start, stop in self._stored]
        return torch.cat(parts, self.axis)  # a copy: what the whole one lies in can be let go

    def quant(self, name: str) -> str | None:
        return self.source.quant(name)

    def order(self, name: str) -> str | None:
        return self.source.order(name)


class Slices:
    """Each once, so that plans share what they read."""

    def __init__(self) -> None:
        self._made: dict[tuple[WeightSource, str, int, Ranges, str | None], Slice] = {}

    def cut(self, node: Node, axis: int, ranges: Ranges, block: str | None) -> Node:
        source = node.attrs["source"]
        key = source, node.name, axis, ranges, block
        part = self._made.setdefault(key, Slice(source, axis, ranges, block))
        return Node("weight", (), part.type_of(node.name, node.dtype), {"source": part}, node.name)
