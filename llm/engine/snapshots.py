"""Recurrent states saved for prompts that begin alike."""

from __future__ import annotations

from collections import OrderedDict

from mtmd.llm.engine.sequence import Sequence, State
from mtmd.llm.state import PAGE, Cache, Snapshot

SNAPSHOTS = 32  # at most, and
SNAPSHOT_BYTES = 512 << 20  # of memory, unless one takes more


class Snapshots:
    """States at the ends of pages, by the keys of these; the least recently used ones go."""

    def __init__(self, cache: Cache):
        self._cache = cache
        self._saved: OrderedDict[bytes, Snapshot] = OrderedDict()

    def begin(self, sequence: Sequence) -> None:
        """Give an admitted sequence the states after what is cached of it."""
        if sequence.done and self._cache.recurrent:
            assert sequence.slot is not None
            key = sequence.keys[sequence.done // PAGE - 1]
            self._saved.move_to_end(key)
            self._cache.restore(sequence.slot, self._saved[key])

    def advance(self, sequence: Sequence) -> None:
        """Save the states of a sequence that has come to the page where a prompt like it can be
        resumed.
        """
        is_there = sequence.done == sequence.snapshot_at and sequence.state is not State.WAITING
        if not is_there or not sequence.keys or sequence.slot is None:
            return
        key = sequence.keys[sequence.done // PAGE - 1]
        self._saved[key] = self._cache.snapshot(sequence.slot)
        self._saved.move_to_end(key)
        each = sum(state.nbytes for state in self._saved[key].states.values())
        while len(self._saved) > max(min(SNAPSHOTS, SNAPSHOT_BYTES // each), 1):
            self._saved.popitem(last=False)

    def reset(self) -> None:
        self._saved.clear()

    def __contains__(self, key: object) -> bool:
        return key in self._saved

    def __len__(self) -> int:
        return len(self._saved)
