"""Orders in which a decoder reads the frames and the sound of a video, both laid out by time as
positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Piece: TypeAlias = "int | tuple[int, int]"
"""A group of frames by its number, or a range of tokens of sound."""


class SoundOrder(Protocol):
    """Describes how groups of frames and tokens of sound, one for each position, take turns.
    `shares`: the marks of both that stand before them have one position, and those behind.
    """

    shares: bool

    def __call__(self, times: Sequence[float], tokens: int) -> list[Piece]:
        """Return all groups, which begin at `times` as positions, and all `tokens`, in order."""


@dataclass(frozen=True)
class Chunks:
    """Stretches of so many `positions`: the frames of each, then its sound (arXiv:2503.20215)."""

    positions: int

    shares = True

    def __call__(self, times: Sequence[float], tokens: int) -> list[Piece]:
        made: list[Piece] = []
        of_groups = [int(time // self.positions) for time in times]
        last = max([*of_groups, (tokens - 1) // self.positions])
        for chunk in range(last + 1):
            made += [group for group, at in enumerate(of_groups) if at == chunk]
            start, stop = chunk * self.positions, min((chunk + 1) * self.positions, tokens)
            if start < stop:
                made.append((start, stop))
        return made


@dataclass(frozen=True)
class ByTime:
    """Each group before the first sound that does not begin earlier (arXiv:2509.17765)."""

    shares = False

    def __call__(self, times: Sequence[float], tokens: int) -> list[Piece]:
        made: list[Piece] = []
        start = 0
        for group, time in enumerate(times):
            stop = min(math.ceil(time), tokens)
            if start < stop:
                made.append((start, stop))
                start = stop
            made.append(group)
        if start < tokens:
            made.append((start, tokens))
        return made
