"""Memory of a run shared out to values that are not needed at the same time.

Lowering gives every value a room of its own. Which instructions touch a room is in their arguments,
so it is known from when to when its value is needed, whatever made it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtmd.kernels.cpu.native.program import Instruction, Pointer

ALIGN = 64
ARENA = 0  # the root of a run's own memory


class Arena:
    """Rooms that follow one another."""

    def __init__(self) -> None:
        self.bytes = 0
        self._starts: list[int] = []

    def room(self, size: int) -> Pointer:
        """Memory for a value."""
        self._starts.append(self.bytes)
        self.bytes += max(-(-size // ALIGN), 1) * ALIGN
        return Pointer(ARENA, self._starts[-1])

    def number(self, location: Pointer) -> int:
        """Return the room that a place in the arena is in."""
        return bisect_right(self._starts, location.offset) - 1

    def size(self, number: int) -> int:
        stop = self._starts[number + 1] if number + 1 < len(self._starts) else self.bytes
        return stop - self._starts[number]

    def start(self, number: int) -> int:
        return self._starts[number]


@dataclass(frozen=True)
class StepUse:
    """Values that a step which no program has reads, and the root of its result, which may lie in
    memory of the first.
    """

    reads: tuple[Pointer, ...]
    root: int


def packed(
    arena: Arena,
    parts: Sequence[list[Instruction] | int],
    steps: Mapping[int, StepUse],
    saved: Sequence[Pointer],
) -> Packing:
    """Let rooms lie in the same memory where they may. `parts` are programs' instructions and
    numbers of `steps`; what lies at `saved` is needed after the run.
    """
    uses = _Uses(arena)
    made: list[tuple[int, StepUse]] = []
    index = 0
    for part in parts:
        if isinstance(part, list):
            for instruction in part:
                for arg in instruction.args:
                    if isinstance(arg, Pointer):
                        uses.add(arg, index)
                index += 1
        else:
            for location in steps[part].reads:
                uses.add(location, index)
            made.append((index, steps[part]))
            index += 1
    for location in saved:
        uses.add(location, index)
    for at, step in reversed(made):
        end = uses.last.get(-step.root, at)
        for location in step.reads:
            uses.add(location, end)
    return Packing(arena, *_located(arena, uses))


class _Uses:
    """Times at which rooms, by number, and results of steps, by their root made negative, are first
    and last used.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}

    def add(self, location: Pointer, index: int) -> None:
        """Note a use; they are noted in order, but for those that last longer than they seem to."""
        root = location[0]
        key = self.arena.number(location) if root == ARENA else -root
        if key not in self.first:
            self.first[key] = self.last[key] = index
        elif index > self.last[key]:
            self.last[key] = index


def _located(arena: Arena, uses: _Uses) -> tuple[dict[int, int], int]:
    """Return where each room begins, at the lowest place that is free, and the bytes of all."""
    moved: dict[int, int] = {}
    live: list[tuple[int, int, int]] = []  # begin, end, last use
    size = 0
    for first, number in sorted((f, n) for n, f in uses.first.items() if n >= 0):
        live = sorted(room for room in live if room[2] >= first)
        at, needed = 0, arena.size(number)
        for begin, end, _ in live:
            if begin - at >= needed:
                break
            at = end if end > at else at
        moved[number] = at
        live.append((at, at + needed, uses.last[number]))
        size = max(size, at + needed)
    return moved, size


@dataclass(frozen=True)
class Packing:
    """Offsets of the rooms of an arena, and how many bytes they take."""

    arena: Arena
    moved: Mapping[int, int]
    bytes: int

    def location(self, location: Pointer) -> Pointer:
        """Return where what was at a place of a run's memory is now."""
        root, offset = location
        if root != ARENA:
            return location
        number = self.arena.number(location)
        return Pointer(ARENA, self.moved.get(number, 0) + offset - self.arena.start(number))

    def instruction(self, instruction: Instruction) -> Instruction:
        """Return the same instruction, on what it read and wrote before."""
        location = self.location
        args = [location(arg) if isinstance(arg, Pointer) else arg for arg in instruction.args]
        return instruction._replace(args=tuple(args))
