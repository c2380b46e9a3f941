"""Bytes of one address space, and for each of them who may read and write it when: whether it is an
operand's, whether anybody wrote it, which thread touched it last and before which barrier.

Threads are numbered through all blocks of a launch. A `Clock` says how many barriers each has passed:
two threads of a block have seen each other's work if a barrier of the block lies between, two of a
warp also if one of the warp does, and two of different blocks never.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
NOBODYS, UNWRITTEN, PENDING, WRITTEN = range(4)
NONE = np.int64(-1)
# Of a stamp: the thread, barriers of its warp, barriers of its block; then who else has read.
THREAD_BITS, WARP_BITS, BLOCK_BITS = 20, 18, 22
WARP_AT, BLOCK_AT = THREAD_BITS, THREAD_BITS + WARP_BITS
OF_WARP, OF_BLOCK = np.int64(1) << 60, np.int64(1) << 61
PLAIN = OF_WARP - 1
THREADS_LIMIT = 1 << THREAD_BITS


class Fault(Exception):
    """Something that a kernel may not do."""


@dataclass
class Clock:
    """Barriers passed by each thread. `first`: the number of the first of these threads; `block`: how
    many a block has.
    """

    first: int
    threads: int
    block: int

    def __post_init__(self) -> None:
        self.thread = np.arange(self.first, self.first + self.threads, dtype=np.int64)
        self.stamps = self.thread.copy()

    def pass_barrier(self, lanes: Array) -> None:
        self.stamps[lanes] += 1 << BLOCK_AT

    def pass_warp_barrier(self, lanes: Array) -> None:
        self.stamps[lanes] += 1 << WARP_AT


def _thread(stamps: Array) -> Array:
    return stamps & (THREADS_LIMIT - 1)


def _differ(a: Array, b: Array) -> Array:
    """Whether rows of bytes [lanes, width] are two results. Sums of fp32 that lanes exchanged are not:
    the compiler makes a square and the first sum one instruction, whose last bit says who added, and
    has every lane write what it found. Where addends cancel, that bit is theirs: it counts by the
    largest value of all lanes, too.
    """
    unequal = (a != b).any(1)
    if a.shape[1] % 4 or not unequal.any():
        return unequal
    x, y = a.view(np.float32), b.view(np.float32)
    sizes = np.maximum(np.abs(x), np.abs(y))
    largest = np.max(sizes, initial=0, where=np.isfinite(sizes))
    near = np.abs(x - y) <= np.maximum(2.0**-18 * sizes, 2.0**-24 * largest)
    return unequal & ~(near | (x.view(np.uint32) == y.view(np.uint32))).all(1)


class Memory:
    """size: bytes. grain: of how many of them a record is made; all accesses are multiples of it.
    where: says what lies at a byte.
    """

    def __init__(self, size: int, grain: int, block: int, where: Callable[[int], str]):
        size = -(-size // 16) * 16
        self.size, self.grain, self.block, self.where = size, grain, block, where
        self.bytes = np.zeros(size, np.uint8)
        self.status = np.zeros(size, np.uint8)
        self.writers = np.full(size // grain, NONE)
        self.readers = np.full(size // grain, NONE)
        self.groups = np.zeros(size // grain, np.int64)  # of pending copies
        # Of asynchronous reads: how many are under way, and what no fence has made visible to them.
        self.reading: Array = np.zeros(0, np.int32)
        self.hidden: Array = np.zeros(0, np.bool_)

    def expect_asynchronous_reads(self) -> None:
        """Watch over reads of matrices by `wgmma`, which lie where others write meanwhile."""
        self.reading = np.zeros(self.size // self.grain, np.int32)
        self.hidden = np.zeros(self.size // self.grain, np.bool_)

    def forget_threads(self) -> None:
        """As at the end of a launch, which all others begin after."""
        self.writers[:], self.readers[:] = NONE, NONE

    def _rows(self, array: Array, width: int, at: Array) -> Array:
        """Rows of `width` elements that begin at multiples of it."""
        return array.reshape(-1, width)[at // width]

    def _check(self, at: Array, width: int, stamps: Array, doing: str) -> None:
        wrong = at % width != 0
        if wrong.any():
            self._fault(f"{doing} of {width} bytes is misaligned", at, stamps, wrong)
        wrong = (at < 0) | (at + width > self.size)
        if not wrong.any():
            wrong = (self._rows(self.status, width, at) == NOBODYS).any(1)
        if wrong.any():
            self._fault(f"{doing} of {width} bytes out of bounds", at, stamps, wrong)

    def _fault(
        self, what: str, at: Array, stamps: Array, wrong: Array, other: Array | None = None
    ) -> None:
        first = int(np.flatnonzero(wrong)[0])
        thread = int(_thread(stamps[first]))
        block, thread = divmod(thread, self.block)
        who = f"block {block}, thread {thread}"
        if other is not None:
            who += ", and block {}, thread {}".format(
                *divmod(int(_thread(other[first])), self.block)
            )
        count = int(wrong.sum())
        raise Fault(f"{what}: {self.where(int(at[first]))}; {who}; {count} threads in all")

    def _raced(self, records: Array, stamps: Array, whole: bool = False) -> Array:
        """Whether what was recorded may be at the same time as these threads' work. whole: flags say
        that there were others too.
        """
        there = records != NONE
        if not there.any():
            return there
        plain = records & PLAIN
        mine = stamps[:, None]
        block = _thread(plain) // self.block != _thread(mine) // self.block
        later = (plain >> BLOCK_AT) != (mine >> BLOCK_AT)
        warp = _thread(plain) // 32 != _thread(mine) // 32
        at_once = ((plain >> WARP_AT) == (mine >> WARP_AT)) & (_thread(plain) != _thread(mine))
        if whole:
            many = (records & OF_BLOCK) != 0
            some = ((records & OF_WARP) != 0) & ((plain >> WARP_AT) == (mine >> WARP_AT))
            return there & (block | ~later & (many | warp | at_once | some))
        return there & (block | ~later & (warp | at_once))

    def load(self, at: Array, width: int, stamps: Array) -> Array:
        """uint8 [lanes, width] from bytes at [lanes], for threads with these stamps."""
        self._check(at, width, stamps, "a read")
        status = self._rows(self.status, width, at)
        if (status != WRITTEN).any():
            pending = (status == PENDING).any(1)
            if pending.any():
                self._fault("a read of what is still being copied", at, stamps, pending)
            self._fault("a read of what nobody wrote", at, stamps, (status != WRITTEN).any(1))
        units = width // self.grain
        records = self._rows(self.writers, units, at // self.grain)
        raced = self._raced(records, stamps)
        if raced.any():
            other = records[np.arange(len(at)), raced.argmax(1)]
            self._fault("a read races with a write", at, stamps, raced.any(1), other)
        self._note_readers(at // self.grain // units, units, stamps)
        return self._rows(self.bytes, width, at)

    def _note_readers(self, rows: Array, units: int, stamps: Array) -> None:
        readers = self.readers.reshape(-1, units)
        before, mine = readers[rows], stamps[:, None]
        noted = mine
        if (before != NONE).any():  # readers since the last barrier are not forgotten
            plain = before & PLAIN
            same = (before != NONE) & ((plain >> BLOCK_AT) == (mine >> BLOCK_AT))
            other = _thread(plain) // 32 != _thread(mine) // 32
            near = same & ~other & ((plain >> WARP_AT) == (mine >> WARP_AT))
            flags = np.where(same, before & OF_BLOCK, 0) | np.where(same & other, OF_BLOCK, 0)
            flags |= np.where(near, before & OF_WARP, 0)
            flags |= np.where(near & (_thread(plain) != _thread(mine)), OF_WARP, 0)
            noted = mine | flags
        readers[rows] = noted
        after = _thread(readers[rows])  # of one instruction the last thread remains
        for flag, of in ((OF_WARP, 1), (OF_BLOCK, 32)):
            others = (after // of != _thread(mine) // of).any(1)
            if others.any():
                readers[rows[others]] |= flag

    def store(self, at: Array, rows: Array, stamps: Array, group: Array | None = None) -> None:
        """uint8 [lanes, width] to bytes at [lanes]. group: of the asynchronous copies that bring them,
        which are there once it was waited for.
        """
        width = rows.shape[1]
        self._check(at, width, stamps, "a write")
        if (self._rows(self.status, width, at) == PENDING).any():
            pending = (self._rows(self.status, width, at) == PENDING).any(1)
            self._fault("a write to what is still being copied", at, stamps, pending)
        units = width // self.grain
        if len(self.reading):
            reading = self._rows(self.reading, units, at // self.grain).any(1)
            if reading.any():
                self._fault("a write to what a product still reads", at, stamps, reading)
        raced = self._raced(self._rows(self.readers, units, at // self.grain), stamps, True)
        if raced.any():
            other = self._rows(self.readers, units, at // self.grain)[
                np.arange(len(at)), raced.argmax(1)
            ]
            self._fault("a write races with a read", at, stamps, raced.any(1), other)
        records = self._rows(self.writers, units, at // self.grain)
        raced = self._raced(records, stamps).any(1)
        if raced.any():  # of the same value it does not matter who is first
            raced &= _differ(self._rows(self.bytes, width, at), rows)
            if raced.any():
                self._fault("two writes race", at, stamps, raced, records[:, 0])
        numbers = at // width
        self.bytes.reshape(-1, width)[numbers] = rows
        differs = _differ(self.bytes.reshape(-1, width)[numbers], rows)
        self.writers.reshape(-1, units)[numbers] = stamps[:, None]
        if differs.any():
            other = self.writers.reshape(-1, units)[numbers][:, 0]
            self._fault("two writes of one instruction race", at, stamps, differs, other)
        if len(self.hidden):
            self.hidden.reshape(-1, units)[numbers] = True
        if group is None:
            self.status.reshape(-1, width)[numbers] = WRITTEN
        else:
            self.status.reshape(-1, width)[numbers] = PENDING
            self.groups.reshape(-1, units)[numbers] = group[:, None]

    def arrive(self, waiting: Array, done: Array, stamps: Array) -> None:
        """Copies of groups up to `done` of the threads `waiting` are there, as if written now.
        waiting: bool, done: int64, stamps, by thread from the first of `stamps`.
        """
        pending = np.flatnonzero(self.status[:: self.grain] == PENDING)
        if not len(pending):
            return
        owner = _thread(self.writers[pending]) - int(_thread(stamps[0]))
        there = (owner >= 0) & (owner < len(stamps))
        pending, owner = pending[there], owner[there]
        there = waiting[owner] & (self.groups[pending] <= done[owner])
        pending, owner = pending[there], owner[there]
        self.status.reshape(-1, self.grain)[pending] = WRITTEN
        self.writers[pending] = stamps[owner]

    # Reads by `wgmma`, which go another way than those of threads ("Async proxy" of the PTX ISA)

    def begin_read(self, at: Array, width: int, stamps: Array) -> Array:
        """As `load`; until `end_read` nobody may write there."""
        result = self.load(at, width, stamps)
        rows, units = at // width, width // self.grain
        hidden = self.hidden.reshape(-1, units)[rows].any(1)
        if hidden.any():
            self._fault("a product reads what no fence made visible to it", at, stamps, hidden)
        np.add.at(self.reading.reshape(-1, units), rows, 1)
        return result

    def end_read(self, at: Array, width: int, stamps: Array) -> None:
        """Reads of threads with these stamps are over, as if they were made now."""
        rows, units = at // width, width // self.grain
        np.subtract.at(self.reading.reshape(-1, units), rows, 1)
        self._note_readers(rows, units, stamps)

    def fence(self, fencing: Array, stamps: Array) -> None:
        """What the threads `fencing` have written or can see, products can see from now on.
        fencing: bool, stamps, by thread from the first of `stamps`.
        """
        hidden = np.flatnonzero(self.hidden & (self.status[:: self.grain] != PENDING))
        if not len(hidden):
            return
        writers = self.writers[hidden]
        owner = _thread(writers) - int(_thread(stamps[0]))
        barriers = np.where(fencing, stamps >> BLOCK_AT, -1).reshape(-1, self.block).max(1)
        seen = fencing[owner] | ((writers >> BLOCK_AT) < barriers[owner // self.block])
        self.hidden[hidden[seen]] = False
