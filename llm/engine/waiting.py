"""Sequences that wait for a place, in a line for each owner."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from mtmd.base.turns import Shares
from mtmd.llm.engine.sequence import Sequence


class Waiting:
    """The next is of the owner who has fewest running; of those who have equally many, of who has
    been let in least. Within an owner's line, who came first.
    """

    def __init__(self) -> None:
        self._lines: dict[str, deque[Sequence]] = {}
        self._shares = Shares()
        self._count = 0

    def append(self, sequence: Sequence) -> None:
        self._count += 1
        self._lines.setdefault(sequence.owner, deque()).append(sequence)

    def appendleft(self, sequence: Sequence) -> None:
        """Before the others of its owner."""
        self._count += 1
        self._lines.setdefault(sequence.owner, deque()).appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        line = self._lines[sequence.owner]
        line.remove(sequence)
        self._count -= 1
        if not line:
            del self._lines[sequence.owner]

    def next(self, running: Mapping[str, int]) -> Sequence | None:
        """`running`: how many sequences each owner has in the batch."""
        order = self._shares.order(self._lines)
        owner = min(order, key=lambda each: running.get(each, 0), default=None)
        return None if owner is None else self._lines[owner][0]

    def let_in(self, sequence: Sequence) -> None:
        """It waits no more, and its owner has had a turn."""
        self._shares.add(sequence.owner, 1)
        self.remove(sequence)

    @property
    def owners(self) -> int:
        """How many wait. As `len`, to be asked by any thread."""
        return len(self._lines)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        for line in self._lines.values():
            yield from line

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._lines.get(sequence.owner, ())
