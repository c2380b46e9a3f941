"""Describes what a sequence leaves behind in each layer, and the memory it is kept in. Ranks that
share a model each have a `part` of a state, cut along its axis 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from mtmd.kernels.dtype import DTYPES, name_of
from mtmd.kernels.graph import Type
from mtmd.kernels.quantization.kv_rows import CACHE_TYPES, PAIRS, cached_bytes, part_types
from mtmd.kernels.resources.result_memory import zeros_untouched

PAGE = 32  # tokens of keys and values that are held, shared and let go together
KV_TYPES = ("bf16", "fp32", *CACHE_TYPES)


@dataclass(frozen=True)
class KVType:
    """The type in which keys and values are stored: one of numbers, or one of `CACHE_TYPES`."""

    name: str

    @staticmethod
    def of(requested: str, dtype: torch.dtype) -> KVType:
        """`requested` or, for "auto", the type that is computed in."""
        return KVType(name_of(dtype) if requested == "auto" else requested)

    @property
    def quant(self) -> str | None:
        return self.name if self.name in CACHE_TYPES else None

    @property
    def keys(self) -> KVType:
        """Return the type of keys, which is also that of a cache of keys alone."""
        return KVType(part_types(self.name)[0])

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the memory's elements."""
        return DTYPES.get(self.name, torch.uint8)

    def row(self, head: int) -> int:
        """Return how many numbers of that type a head takes."""
        return cached_bytes(self.name, head) if self.quant else head

    def read_as(self, dtype: torch.dtype, head: int) -> dict[str, str | int]:
        """Attributes of the ops that read a cache to compute in `dtype`."""
        if self.dtype == dtype:
            return {}
        reading: dict[str, str | int] = {"dtype": name_of(dtype)}
        return reading | ({"quant": self.quant, "head": head} if self.quant else {})


@dataclass(frozen=True)
class KV:
    """Keys and values of every token: groups G, head size K. With `rows`, those of what tokens
    attend to beside each other, such as pictures: so many rows, of whole pages, for each sequence.
    Without `values` keys alone: they are the values, too.
    """

    groups: int
    head: int
    rows: int = 0
    values: bool = True

    @property
    def name(self) -> str:
        return "context" if self.rows else "kv"

    def type(self, sequences: int, pages: int, dtype: torch.dtype, kv: KVType) -> Type:  # noqa: ARG002
        """[2, S, G, K], or [1, S, G, K] of keys alone, S = pages * PAGE or sequences * rows; bytes
        of a head in place of K where it is quantized, and [1, S, G, bytes of both] where keys and
        values have types of their own
        """
        rows = sequences * self.rows if self.rows else pages * PAGE
        kv = kv if self.values else kv.keys
        halves = 2 if self.values and kv.name not in PAIRS else 1
        return Type.contiguous((halves, rows, self.groups, kv.row(self.head)), kv.dtype)

    def part(self, groups: int) -> KV:
        return replace(self, groups=groups)


@dataclass(frozen=True)
class ConvWindow:
    """The last `rows` inputs of a short convolution over C channels."""

    rows: int
    channels: int

    name = "conv"

    def type(self, sequences: int, pages: int, dtype: torch.dtype, kv: KVType) -> Type:  # noqa: ARG002
        return Type.contiguous((sequences, self.rows, self.channels), dtype)

    def part(self, channels: int) -> ConvWindow:
        return replace(self, channels=channels)


@dataclass(frozen=True)
class MatrixState:
    """The matrices of linear attention: keys K by values V for each of H heads, in fp32 whatever
    is computed in: a recurrence sums over the whole past.
    """

    head: int
    heads: int
    value: int

    name = "matrix"

    def type(self, sequences: int, pages: int, dtype: torch.dtype, kv: KVType) -> Type:  # noqa: ARG002
        return Type.contiguous((sequences, self.head, self.heads, self.value), torch.float32)

    def part(self, heads: int) -> MatrixState:
        return replace(self, heads=heads)


State: TypeAlias = "KV | ConvWindow | MatrixState"
Layers: TypeAlias = "Sequence[Sequence[State]]"


def context_rows(layers: Layers) -> int:
    """Return how many rows of a context the layers keep for each sequence, 0 for none."""
    rows = (s.rows for states in layers for s in states if isinstance(s, KV))
    return max(rows, default=0)


def states_by_name(layers: Layers) -> dict[str, State]:
    """Every state under the name of its graph input, `kv.3` or `conv.0`."""
    return {
        f"{state.name}.{layer}": state for layer, states in enumerate(layers) for state in states
    }


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A slot's recurrent states by name, at one token."""

    states: Mapping[str, Tensor]


class Mirror(Protocol):
    """Interface that does with other parts of a cache what is done with one."""

    def clear(self, slot: int) -> None: ...
    def snapshot(self, slot: int, snapshot: Snapshot) -> None: ...
    def restore(self, slot: int, snapshot: Snapshot) -> None: ...


class Cache:
    """The states of up to `sequences` sequences, in `pages` pages of keys and values. A sequence is
    known by its slot, 0 to sequences - 1.

    One slot more, and page 0, are for rows that only fill up a batch.
    """

    def __init__(
        self,
        layers: Layers,
        sequences: int,
        pages: int,
        dtype: torch.dtype,
        kv: KVType,
        device_of: Callable[[str], torch.device],
        in_place: bool = False,
        paged: bool = False,
        mirror: Mirror | None = None,
    ):
        """`in_place`: attention to a few tokens reads pages where they lie, and a table of pages
        that is longer than needed costs nothing. `paged`: so does attention to any number of them,
        and the table is as long as it can be, for plans that fit whatever is in it. `mirror`: those
        who keep parts of these states and do the same with them.
        """
        self.mirror = mirror
        self.sequences, self.pages, self.in_place = sequences, pages, in_place
        self.paged = paged
        self.context = context_rows(layers)
        self._states = states_by_name(layers)
        self.tensors: Mapping[str, Tensor] = {
            name: _zeros(state.type(sequences + 1, pages, dtype, kv), device_of(name))
            for name, state in self._states.items()
        }

    @property
    def recurrent(self) -> bool:
        """Return whether part of the past is known only as a whole: then it can be taken up again
        at snapshots alone, not at any token.
        """
        return any(not isinstance(state, KV) for state in self._states.values())

    def clear(self, slot: int) -> None:
        """Forget a slot's recurrent state. Keys and values need no clearing: nobody looks beyond
        what has been written.
        """
        if self.mirror is not None:
            self.mirror.clear(slot)
        for name, state in self._states.items():
            if not isinstance(state, KV):
                self.tensors[name][slot].zero_()

    def snapshot(self, slot: int) -> Snapshot:
        """A copy of a slot's recurrent states, to go back to."""
        snapshot = Snapshot(
            {
                name: self.tensors[name][slot].clone()
                for name, state in self._states.items()
                if not isinstance(state, KV)
            }
        )
        if self.mirror is not None:
            self.mirror.snapshot(slot, snapshot)
        return snapshot

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        if self.mirror is not None:
            self.mirror.restore(slot, snapshot)
        for name, value in snapshot.states.items():
            self.tensors[name][slot].copy_(value)


def _zeros(type_: Type, device: torch.device) -> Tensor:
    """Make zeros, on the CPU without touching the memory."""
    if device.type != "cpu":
        return torch.zeros(type_.shape, dtype=type_.dtype, device=device)
    return zeros_untouched(*type_.shape, dtype=type_.dtype)
