"""The graph inputs of a decoder: each says, beside its use, how it is filled from a `Batch`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
import torch

from mtmd.kernels import ops
from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.graph import Node, constant, graph_input
from mtmd.llm.batch import Batch, BatchShape
from mtmd.llm.state import PAGE, KVType, State

T = TypeVar("T")


@dataclass(frozen=True)
class TextInputs:
    """The inputs of one shape of batch. `image_width` is the length of an image's rows; `sequences`
    and `pages` are those of the cache. `only`: the layers that the graph has, where it is made to
    see what they launch.
    """

    batch: BatchShape
    image_width: int
    sequences: int
    pages: int
    dtype: torch.dtype
    kv: KVType
    only: Collection[int] | None = None
    saved: list[Node] = field(default_factory=list, compare=False)
    """Nodes that no logit depends on and that have to run all the same: states that are written for
    later.
    """
    _made: dict[str, Node] = field(default_factory=dict, compare=False)

    def layers(self, count: int) -> Sequence[int]:
        """Return the numbers of the layers that the graph has, of so many."""
        return [n for n in range(count) if self.only is None or n in self.only]

    def each(self, kinds: Sequence[T]) -> Iterator[tuple[int, T]]:
        """Yield the numbers and the kinds of these layers, of the kinds of all."""
        return ((n, kinds[n]) for n in self.layers(len(kinds)))

    @property
    def tokens(self) -> int:
        return self.batch.tokens

    @property
    def images(self) -> int:
        return self.batch.images

    def _input(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        fill: Callable[[Batch], torch.Tensor | np.ndarray],
        **facts: Any,
    ) -> Node:
        """One node per name, however many layers ask for it."""
        if name not in self._made:
            self._made[name] = graph_input(name, shape, dtype, fill, **facts)
        return self._made[name]

    def token_ids(self) -> Node:
        return self._input("inp.tokens", (self.tokens,), torch.int64, lambda b: b.tokens)

    def text_ids(self, pad: int, below: int | None = None) -> Node:
        """The tokens, with `pad` in the place of those that images are put at and of those that are
        not `below` a number.
        """
        if below is None and not self.images:
            return self.token_ids()

        def fill(batch: Batch) -> np.ndarray:
            ids = _put(batch.tokens, batch.image_positions(), pad) if self.images else batch.tokens
            return ids if below is None else np.where(ids < below, ids, pad)

        return self._input("inp.text_tokens", (self.tokens,), torch.int64, fill)

    def image_rows(self) -> Node:
        return self._input(
            "inp.images", (self.images, self.image_width), self.dtype, Batch.image_rows
        )

    def image_at(self) -> Node:
        return self._input("inp.image_at", (self.images,), torch.int64, Batch.image_positions)

    def context_rows(self) -> Node:
        """[N, D], what is stored for tokens to attend to; where that is nothing, a row that is put
        where nobody looks, so that graphs of all batches cut these states among ranks alike.
        """
        shape = (self.batch.context or 1, self.image_width)

        def fill(batch: Batch) -> torch.Tensor:
            return torch.zeros(shape) if batch.context is None else batch.context

        return self._input("inp.context", shape, self.dtype, lambda b: fill(b).to(self.dtype))

    def context_slots(self) -> Node:
        def fill(batch: Batch) -> np.ndarray:
            unseen = batch.cache.sequences * batch.cache.context
            return np.array([unseen]) if batch.context_slots is None else batch.context_slots

        return self._input("inp.context_slots", (self.batch.context or 1,), torch.int64, fill)

    def context_pages(self, rows: int) -> Node:
        """int64 [P], the pages of the sequences' contexts of so many rows, one after another."""
        each = rows // PAGE

        def fill(batch: Batch) -> np.ndarray:
            result: np.ndarray = batch.sequence_slots[:, None] * each + np.arange(each)
            return result.reshape(-1)

        shape = (self.batch.sequences * each,)
        return self._input("inp.context_pages", shape, torch.int64, fill, starts=self.starts)

    def context_bounds(self) -> Node:
        """int32 [T, 2], which rows of the contexts each token attends to."""
        return self._input(
            "inp.context_bounds", (self.tokens, 2), torch.int32, Batch.context_bounds
        )

    def context_factor(self, which: int) -> Node:
        """[T, 1]: 1 for tokens that attend to a context (0), or that a picture stands before (1),
        else 0.
        """
        return self._input(
            f"inp.context_factor.{which}",
            (self.tokens, 1),
            self.dtype,
            lambda b: torch.from_numpy(cast("np.ndarray", b.sights)[:, 2 + which : 3 + which]).to(
                self.dtype
            ),
        )

    def of_pictures(self, marks: tuple[int, ...], *, others: bool = False) -> Node:
        """int32 [T]: 1 for the tokens of pictures and, in a prompt, for those around them, whose
        ids are `marks`; else 0. `others`: the other way round.
        """

        def fill(batch: Batch) -> np.ndarray:
            result: np.ndarray = (batch.of_pictures(marks) != others).astype(np.int32)
            return result

        name = f"inp.of_{'others' if others else 'pictures'}"
        return self._input(name, (self.tokens,), torch.int32, fill)

    def requested_rows(self) -> Node:
        return self._input(
            "inp.wanted", (self.batch.requested,), torch.int64, lambda b: b.requested
        )

    def angles(
        self, rotary: Rotary, name: str = "inp.angles", divisors: Node | None = None
    ) -> Node:
        """The table of one kind of rotary embedding, fp32 [T, 2, R], made once per batch. `name`
        tells several kinds apart; `divisors` [R] divide the frequencies.
        """
        if name not in self._made:
            axes = 4 if 3 in rotary.axes else 3
            positions = self._input(
                "inp.positions", (axes, self.tokens), torch.int64, lambda b: b.positions[:axes]
            )
            self._made[name] = ops.rope_table(positions, divisors, rotary=rotary, name=name)
        return self._made[name]

    def position_rows(self, first: int) -> Node:
        """int64 [T], the row of a table that each token takes by its position, where the first one
        takes row `first`.
        """
        return self._input(
            "inp.position_rows", (self.tokens,), torch.int64, lambda b: b.positions[0] + first
        )

    def position_sines(self, width: int, first: int, blank: int) -> Node:
        """[T, D], sines, then cosines, of each token's position, counted from `first`, at D / 2
        frequencies from 1 to 1 / 10000 (arXiv:1706.03762, as tensor2tensor has them); zeros for the
        token `blank`.
        """
        steps = torch.arange(width // 2, dtype=torch.float32)
        frequencies = torch.exp(steps * -(math.log(10000) / (width // 2 - 1)))

        def fill(batch: Batch) -> torch.Tensor:
            angles = torch.from_numpy(batch.positions[0] + first).float()[:, None] * frequencies
            rows = torch.cat((angles.sin(), angles.cos()), 1)
            rows[torch.from_numpy(batch.tokens == blank)] = 0
            return rows.to(self.dtype)

        return self._input("inp.position_sines", (self.tokens, width), self.dtype, fill)

    def growth(self, temper: tuple[float, float] | None) -> Node | None:
        """[T, 1, 1], what the queries of each token are multiplied by where they grow with its
        position: 1 + beta log(1 + floor(position / period)), `temper` being beta and period.
        """
        if temper is None:
            return None
        beta, period = temper

        def fill(batch: Batch) -> torch.Tensor:
            periods = (torch.from_numpy(batch.positions[0]) / period).floor()
            return (1 + beta * (1 + periods).log()).view(-1, 1, 1).to(self.dtype)

        return self._input("inp.temper", (self.tokens, 1, 1), self.dtype, fill)

    def cache_slots(self) -> Node:
        return self._input("inp.slots", (self.tokens,), torch.int64, lambda b: b.slots)

    def page_table(self) -> Node:
        """int64 [P], the pages that hold the past of the batch's sequences, one sequence after
        another.
        """
        return self._input(
            "inp.pages",
            (self.batch.pages,),
            torch.int64,
            lambda b: b.pages,
            starts=self.starts,  # whose pages they are, by the tokens that read them
        )

    def bounds(
        self,
        window: int | None = None,
        *,
        blocks: bool = True,
        whole: bool = False,
        chunked: bool = False,
    ) -> Node:
        """int32 [T, 2], which rows of the gathered pages each token sees; see `Batch.bounds`."""
        name = f"inp.bounds.{window or 'all'}{'' if blocks else '.causal'}{'.whole' * whole}"
        name += ".chunked" * chunked

        def fill(batch: Batch) -> np.ndarray:
            return batch.bounds(window, blocks, whole, chunked)

        return self._input(name, (self.tokens, 2), torch.int32, fill, window=window)

    def hidden(self, window: int) -> Node:
        """fp32 [T, rows of the gathered pages], what is added to the scores of attention where an
        answer sees no more than `window` tokens of itself; see `Batch.hidden`.
        """
        rows = self.batch.pages * PAGE
        return self._input(
            f"inp.hidden.{window}",
            (self.tokens, rows),
            torch.float32,
            lambda b: b.hidden(window, rows),
        )

    def constant(self, name: str, locations: torch.Tensor) -> Node:
        """int64 [N], the same in every batch."""
        if name not in self._made:
            self._made[name] = constant(name, locations)
        return self._made[name]

    @cached_property
    def starts(self) -> Node:
        """int64 [S + 1], where each sequence begins among the tokens."""
        return graph_input(
            "inp.starts", (self.batch.sequences + 1,), torch.int64, lambda b: b.starts
        )

    @cached_property
    def sequence_slots(self) -> Node:
        """int64 [S]"""
        return graph_input(
            "inp.sequence_slots", (self.batch.sequences,), torch.int64, lambda b: b.sequence_slots
        )

    def adapter_scale(self, adapter: int) -> Node:
        """fp32 [T, 1], by what an adapter's change of each token is multiplied."""
        return self._input(
            f"inp.adapter.{adapter}",
            (self.tokens, 1),
            torch.float32,
            lambda b: b.scales_of(adapter),
        )

    def always(self, name: str, scale: float) -> Node:
        """The same of an adapter that is part of the model."""
        scales = np.full((self.tokens, 1), scale, np.float32)
        return self._input(f"inp.adapter.{name}", scales.shape, torch.float32, lambda _: scales)

    def state(self, layer: int, state: State) -> Node:
        """A layer's part of the cache, written in place."""
        name = f"{state.name}.{layer}"
        if name not in self._made:
            self._made[name] = Node(
                "input",
                (),
                state.type(self.sequences + 1, self.pages, self.dtype, self.kv),
                {"fill": lambda b: b.cache.tensors[name], "state": True},
                name,
            )
        return self._made[name]


def _put(numbers: np.ndarray, locations: np.ndarray, value: int) -> np.ndarray:
    result: np.ndarray = numbers.copy()
    result[locations] = value
    return result
