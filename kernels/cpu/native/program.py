"""A program: instructions that several threads carry out together, one call a thread.

An instruction is a kernel with its arguments, and units of work in at most 64 chunks. `run` below
is what every thread calls. It goes through the instructions in order; of each, threads claim chunks
by setting the chunk's bit in a word, and set it in a second word when its results are written. The
next instruction begins when all bits are set. Each thread begins at its share of the chunks and
goes on from there, so that it reads a weight as it lies in memory and what is asked for ahead is
what it reads next; who is done with a share goes on in the next one. So nobody has a part that only
they can do: a thread that the system has put aside between two chunks is not waited for, one thread
alone finishes all, and one that comes late passes over what is done.

Who finds no chunk left waits for the bits of others, a few microseconds. If that lasts (a thread
was put aside in the middle of a chunk), it does the missing chunks itself: kernels write nothing
but results that depend on nothing but their inputs, so both write the same. It does not yield its
core before: where others want it, that is to give it away for milliseconds. For that
no memory of a run may be used twice while somebody might still write to it: each run has a `Frame`
that is used again only when every thread has left it, and instructions that write to memory beyond
it (caches, states) are never done again.

Memory order: a chunk's bit is set with release and read with acquire; setting is a
read-modify-write, so whoever reads the full word has seen what was written before each of the bits.
Claims need to be atomic only: what a chunk reads was written before the word of an earlier
instruction was full, and every thread has read that word before it claims.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from mtmd.kernels.cpu.native.compile import compiler
from mtmd.kernels.cpu.native.emit import I1, I32, I64, PTR, VOID, Emitter, Value

CHUNKS = 64  # bits of a word
LINE = 8  # words of a cache line: what threads write to is apart from what others read
HEADER = 8  # words before the counters
PAUSES = 100  # before a waiting thread does the work of others itself: 3 to 5 microseconds
SIGNATURE = (PTR, I64)

# Words of the header and of an instruction in its table
COUNT, TABLE, ARGS, SCRATCH, SCRATCH_BYTES, ALONE, YIELD, THREADS = range(8)
FUNCTION, AT, UNITS, CHUNK, PARTS, FULL, AGAIN = range(7)
WORDS = 8


class Instruction(NamedTuple):
    """`args` are whole numbers, and `Pointer`s that a run puts addresses in the place of. `chunk`
    units are claimed at once. `again`: it may be done twice, even after the run.
    """

    address: int
    args: tuple[int | Pointer, ...]
    units: int
    chunk: int = 1
    again: bool = True
    name: str = ""


def scratch_bytes(size: int, threads: int) -> int:
    """Return the bytes of scratch memory of so many threads, `size` for each."""
    return -(-size // 64) * 64 * threads + 64


class Pointer(NamedTuple):
    """A place in the memory that is number `root` of a run, `offset` bytes on."""

    root: int
    offset: int = 0


def emit_run(e: Emitter) -> None:
    """`void run(i64* frame, i64 thread)`"""
    frame, thread = e.params

    def head(word: int) -> Value:
        return e.load(frame, I64, word)

    count, table, args = head(COUNT), head(TABLE).to_ptr(), head(ARGS).to_ptr()
    scratch = head(SCRATCH).to_ptr().at(thread * head(SCRATCH_BYTES))
    alone, rest, threads = head(ALONE), head(YIELD), head(THREADS)
    pauses = e.const(I64, PAUSES)
    with e.loop(0, count) as i:
        row = table.at(i * WORDS, I64)
        line = frame.at(i * LINE + HEADER, I64)
        claimed, done = line, line.at(1, I64)
        field = [e.load(row, I64, word) for word in range(WORDS)]
        units, chunk, full = field[UNITS], field[CHUNK], field[FULL]
        own = args.at(field[AT], I64)

        def work(part: Value) -> None:
            first = part * chunk
            last = first + chunk
            last = e.select(last < units, last, units)
            e.call_address(field[FUNCTION], own, first, last, scratch)
            e.atomic_or(done, e.i64(1) << part)

        with e.either(alone.ne(0)) as (yes, no):
            with yes:
                e.call_address(field[FUNCTION], own, e.i64(0), units, scratch)
            with no, e.when(e.atomic_load(done).ne(full)):
                own_share = e.const(I64, -1) << field[PARTS] * thread // threads
                with e.forever() as leave:
                    free = full & (e.atomic_load(claimed, "monotonic") ^ -1)
                    leave(free.eq(0))
                    later = free & own_share
                    part = _lowest(e, e.select(later.ne(0), later, free))
                    bit = e.i64(1) << part
                    with e.when((e.atomic_or(claimed, bit, "monotonic") & bit).eq(0)):
                        work(part)
                waits = e.var(I64, 0)
                with e.forever() as leave:
                    now = e.atomic_load(done)
                    leave(now.eq(full))
                    waits.add(1)
                    with e.either(waits.get() < pauses) as (shortly, long):
                        with shortly:
                            _pause(e)
                        with long, e.either(field[AGAIN].ne(0)) as (again, never):
                            with again:
                                work(_lowest(e, full & (now ^ -1)))
                                waits.set(0)
                            with never:
                                function = ir.FunctionType(I32, [])
                                e.b.call(e.b.inttoptr(rest.ir, function.as_pointer()), [])


def _lowest(e: Emitter, bits: Value) -> Value:
    """The lowest bit's number, of bits that are not all 0."""
    return e.call("llvm.cttz.i64", I64, bits, e.const(I1, 1))


def _pause(e: Emitter) -> None:
    """Tells the core that this thread waits."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        e.call("llvm.x86.sse2.pause", VOID)
    elif machine in ("aarch64", "arm64"):
        e.call("llvm.aarch64.hint", VOID, e.const(I32, 1))


@lru_cache(maxsize=1)
def _runner() -> tuple[Callable[[int, int], None], int]:
    """The compiled `run`, to be called without the interpreter's lock, and the system's function
    that gives a core to others.
    """
    address = compiler().kernel(emit_run, signature=SIGNATURE)
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(address)
    if sys.platform == "win32":
        rest = ctypes.windll.kernel32.SwitchToThread
    else:
        rest = ctypes.CDLL(None).sched_yield
    result = ctypes.cast(rest, ctypes.c_void_p).value
    assert result is not None
    return run, result


class Program:
    """Instructions for any number of runs; `scratch` are bytes that a kernel may write to."""

    def __init__(self, instructions: Sequence[Instruction], scratch: int = 0, again: bool = True):
        self.instructions = tuple(instructions)
        self.scratch = -(-scratch // 64) * 64
        table: list[tuple[int, ...]] = []
        values: list[int] = []
        locations: dict[int, list[int]] = {}
        for address, args, units, chunk, is_repeatable, _ in self.instructions:
            chunk = max(chunk, -(-units // CHUNKS), 1)
            parts = max(-(-units // chunk), 1)
            full = (1 << parts) - 1
            full = full - (1 << 64) if full >> 63 else full
            table.append(
                (address, len(values), units, chunk, parts, full, is_repeatable and again, 0)
            )
            for at, arg in enumerate(args, len(values)):
                if isinstance(arg, Pointer):
                    root, offset = arg
                    locations.setdefault(root, []).append(at)
                    values.append(offset)
                else:
                    values.append(arg)
        self.table = np.array(table, np.int64).reshape(-1, WORDS)
        self._args = np.array(values or [0], np.int64)
        self.roots = 0
        self.locations: list[np.ndarray] = []
        """Of each root, where in the arguments its addresses are."""
        self.set_roots(max(locations, default=-1) + 1)
        for root, result in locations.items():
            self.locations[root] = np.array(result, np.int64)

    def set_roots(self, count: int) -> None:
        """There are `count` of them, some of which nothing here may point to."""
        self.locations += [np.array([], np.int64)] * (count - self.roots)
        self.roots = count

    def frame(self, threads: int, scratch: np.ndarray | None = None) -> Frame:
        """Counters and arguments of a run; scratch memory (`scratch_bytes`) may be that of another
        frame in which the same threads work, at another time.
        """
        return Frame(self, threads, scratch)

    @property
    def frame_bytes(self) -> int:
        """Return the bytes of a frame, without scratch memory."""
        return 8 * (HEADER + LINE * (len(self.instructions) + 1)) + self._args.nbytes

    @property
    def args(self) -> np.ndarray:
        """The arguments, with offsets in the place of addresses."""
        result: np.ndarray = self._args.copy()
        return result


class Frame:
    """Describes what one run writes to, in which a program may run again when every thread has left
    it.

    Threads that come to help enter and leave; who owns the frame opens it, works and closes it.
    """

    def __init__(self, program: Program, threads: int, scratch: np.ndarray | None = None):
        self.program, self.threads = program, threads
        self._args = program.args
        self._roots = [0] * program.roots
        if scratch is None:
            scratch = np.empty(scratch_bytes(program.scratch, threads), np.uint8)
        self._scratch = scratch
        # Counters begin at 0, each instruction's in a cache line of its own
        count = len(program.instructions)
        size = HEADER + LINE * count
        self._words = np.zeros(size + LINE, np.int64)
        skip = -(self._words.ctypes.data // 8) % LINE
        words = self._words[skip : skip + size]
        words[COUNT], words[TABLE] = count, program.table.ctypes.data
        words[ARGS] = self._args.ctypes.data
        words[SCRATCH] = -(-self._scratch.ctypes.data // 64) * 64
        words[SCRATCH_BYTES], words[THREADS] = program.scratch, threads
        self._run, words[YIELD] = _runner()
        self._words_of_run = words
        self.address = words.ctypes.data
        # Few enough for numpy to keep the interpreter while it sets them
        self._counters = words[HEADER:].reshape(count, LINE)[:, :2]
        self._lock = Lock()
        self._inside, self._open, self._alone = 0, False, False
        self._stored: Any = None

    def open(self, roots: Sequence[int], stored: Any = None, alone: bool = False) -> None:
        """Begin a run with these addresses of the program's roots; `stored` is what has to live as
        long as a thread is in it. Nobody may be in the frame, and nobody comes to help where its
        owner is to work `alone`.
        """
        alone = alone or self.threads == 1
        self._counters[...] = 0
        if roots != self._roots:
            for root, (was, now) in enumerate(zip(self._roots, roots, strict=True)):
                if was != now:
                    self._args[self.program.locations[root]] += now - was
            self._roots = list(roots)
        with self._lock:
            self._open, self._stored, self._alone = True, stored, alone
            self._words_of_run[ALONE] = alone

    def close(self) -> bool:
        """End the run: nobody enters any more. Whether all have left, so that the frame may be
        opened again; what those write who have not is read by nobody.
        """
        with self._lock:
            self._open = False
            if self._inside == 0:
                self._stored = None
            return self._inside == 0

    def help(self, thread: int) -> None:
        """Work if there is a run."""
        with self._lock:
            if not self._open or self._alone:
                return
            self._inside += 1
        self._run(self.address, thread)
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and not self._open:
                self._stored = None

    def work(self, thread: int = 0) -> None:
        """Do what is left to do, together with whoever helps; returns when all is done."""
        self._run(self.address, thread)
