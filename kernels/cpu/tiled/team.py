"""Native kernels on torch's own threads.

A pool beside torch's would fight it: threads of OpenMP go on spinning for milliseconds after each
of torch's operators, on the cores that the other pool's threads want. So the OpenMP that torch has
loaded is asked for its team, and every thread of the team claims chunks of units until none is
left. Where torch has another library for its threads, those of `native.pool` do the work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from mtmd.kernels.cpu.native.compile import compiler
from mtmd.kernels.cpu.native.emit import I64, PTR, Emitter
from mtmd.kernels.cpu.native.pool import shared_pool
from mtmd.kernels.cpu.native.program import Instruction, Program

ALIGN = 64
# Words of a task, which all threads of a team read; the last two, which they write, are in a cache
# line of their own
FUNCTION, ARGS, UNITS, CHUNK, SCRATCH, SCRATCH_BYTES, CLAIMED, ENTERED = (*range(6), 8, 9)
WORDS = 16


def emit_member(e: Emitter) -> None:
    """`void member(i64* task)`, called by every thread of a team."""
    (task,) = e.params
    function, args, units, chunk, scratch, size = (e.load(task, I64, w) for w in range(6))
    thread = e.atomic_add(task.at(ENTERED, I64), 1, "monotonic")
    own = (scratch + thread * size).to_ptr()
    with e.forever() as leave:
        first = e.atomic_add(task.at(CLAIMED, I64), chunk, "monotonic")
        leave(first >= units)
        last = first + chunk
        last = e.select(last < units, last, units)
        e.call_address(function, args.to_ptr(), first, last, own)


@lru_cache(maxsize=1)
def _openmp() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel(function, data, threads, flags)` of the OpenMP that torch runs on."""
    for file in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:  # a name is looked for in what the library was linked with, too
            parallel = ctypes.CDLL(str(file)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
        return parallel
    return None


def _member() -> int:
    """Not kept here: the process may have another compiler later, and this one's code with it."""
    return compiler().kernel(emit_member, signature=(PTR,))


def run(address: int, args: Sequence[int], units: int, chunk: int = 1, scratch: int = 0) -> None:
    """All units of a native kernel, `chunk` of them claimed at once, with `scratch` bytes for each
    thread. What `args` point to has to live until this returns; then nobody works any more.
    """
    threads = max(1, min(torch.get_num_threads(), -(-units // chunk)))
    parallel = _openmp()
    if threads > 1 and parallel is None:
        program = Program([Instruction(address, tuple(args), units, chunk, False)], scratch)
        pool = shared_pool()
        frame = program.frame(pool.threads)
        frame.open([])
        try:
            pool.run(frame)
        finally:
            frame.close()
        return
    size = -(-scratch // ALIGN) * ALIGN
    memory = torch.empty(size * threads + ALIGN, dtype=torch.uint8)
    words = np.array(args, np.int64)
    task = np.zeros(WORDS + 8, np.int64)
    task = task[-(task.ctypes.data // 8) % 8 :][:WORDS]
    task[[FUNCTION, ARGS, UNITS, CHUNK]] = address, words.ctypes.data, units, chunk
    task[SCRATCH] = -(-memory.data_ptr() // ALIGN) * ALIGN
    task[SCRATCH_BYTES] = size
    if threads == 1 or parallel is None:
        _alone(_member())(task.ctypes.data)
    else:
        parallel(_member(), task.ctypes.data, threads, 0)


@lru_cache(maxsize=1)
def _alone(member: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(member)


def scratch_bytes(scratch: int, units: int, chunk: int = 1) -> int:
    """Return what `run` takes."""
    threads = max(1, min(torch.get_num_threads(), -(-units // chunk)))
    return -(-scratch // ALIGN) * ALIGN * threads + ALIGN
