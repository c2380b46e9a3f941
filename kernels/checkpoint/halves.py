"""Keeps weights of 16 bits as they are stored where a CPU computes in fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mtmd.kernels.checkpoint.canonical import CanonicalWeights
from mtmd.kernels.graph import Type, WeightSource


class _Requested:
    """Weights that note of which parameters a graph takes blocks: it asks for their type."""

    def __init__(self, base: WeightSource):
        self.base, self.names = base, set[str]()

    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        return self.base.type_of(name, dtype)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.base.read(name, dtype)

    def quant(self, name: str) -> str | None:
        self.names.add(name)
        return self.base.quant(name)

    def order(self, name: str) -> str | None:
        return self.base.order(name)


def in_halves(source: WeightSource, graph: Callable[[WeightSource], object]) -> WeightSource:
    """Return `source` with its plain numbers of 16 bits as blocks, where `graph`, called with it,
    makes ops that take them so: half of the memory, and the same values. Files alone have such.
    """
    if not isinstance(source, CanonicalWeights):
        return source
    requests = _Requested(source)
    graph(requests)
    return source.with_halves(requests.names)
