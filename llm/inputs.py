"""The graph inputs of a decoder: each says, beside its use, how it is filled from a `Batch`."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from mtmd.kernels.graph import Node, Type, graph_input
from mtmd.llm.sequence import Batch


@dataclass(frozen=True)
class TextInputs:
    """The inputs of one shape: T tokens, M of them given as embeddings, R rows of logits, S cache slots."""
    tokens: int
    images: int
    wanted: int
    slots: int
    width: int
    dtype: torch.dtype
    _made: dict[str, Node] = field(default_factory=dict, compare=False)

    def _input(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Batch], torch.Tensor]) -> Node:
        """One node per name, however many layers ask for it."""
        if name not in self._made:
            self._made[name] = graph_input(name, shape, dtype, fill)
        return self._made[name]

    def token_ids(self) -> Node:
        return self._input("inp.tokens", (self.tokens,), torch.int64, lambda b: b.tokens)

    def image_rows(self) -> Node:
        return self._input("inp.images", (self.images, self.width), self.dtype, Batch.image_rows)

    def image_at(self) -> Node:
        return self._input("inp.image_at", (self.images,), torch.int64, Batch.image_places)

    def wanted_rows(self) -> Node:
        return self._input("inp.wanted", (self.wanted,), torch.int64, lambda b: b.wanted)

    def positions(self) -> Node:
        return self._input("inp.positions", (self.tokens,), torch.int64, lambda b: b.positions)

    def cache_slots(self) -> Node:
        return self._input("inp.slots", (self.tokens,), torch.int64, lambda b: b.slots)

    def bounds(self, window: int | None) -> Node:
        """int32 [T, 2], which slots each token sees."""
        return self._input(f"inp.bounds.{window or 'all'}", (self.tokens, 2), torch.int32, lambda b: b.bounds(window))

    def cache(self, layer: int, groups: int, head: int) -> Node:
        """A layer's cache [2, S, G, K], written in place."""
        return Node("input", (), Type.contiguous((2, self.slots, groups, head), self.dtype),
                    {"fill": lambda b: b.caches[layer], "state": True}, f"cache.{layer}")
