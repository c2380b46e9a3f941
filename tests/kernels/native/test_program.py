"""Programs under every schedule: random chunks, threads that stop in the middle, one alone, a busy core."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mtmd.kernels.cpu.native.compile import compile_kernel
from mtmd.kernels.cpu.native.emit import F32, Emitter
from mtmd.kernels.cpu.native.pool import Pool
from mtmd.kernels.cpu.native.program import CHUNK, PARTS, Frame, Instruction, Pointer, Program

SIZE = 97


def emit_mix(e: Emitter) -> None:
    """out[i] = a[i] * 0.5 + a[n - 1 - i]: every unit reads what other units of the last wrote."""
    a, out, n = e.arg_ptr(0), e.arg_ptr(1), e.arg(2)
    with e.loop(e.first, e.last) as i:
        far = e.load(a, F32, n - 1 - i)
        e.store(out, e.load(a, F32, i) * 0.5 + far, i)


def mixes(steps: int, seed: int, size: int = SIZE) -> tuple[Program, np.ndarray, np.ndarray]:
    """A chain of mixes with random chunks: the program, its memory, and what has to come out."""
    draw = random.Random(seed)
    address = compile_kernel(emit_mix)
    memory = np.full((steps + 1, size), np.nan, np.float32)
    memory[0] = np.random.default_rng(seed).standard_normal(size, np.float32) * 0.5**steps
    row = memory.strides[0]
    program = Program(
        [
            Instruction(
                address,
                (Pointer(0, i * row), Pointer(0, (i + 1) * row), size),
                size,
                draw.choice((1, 2, 3, 7, 50, size, 1000)),
                again=draw.random() < 0.8,
            )
            for i in range(steps)
        ]
    )
    expected = memory[0]
    for _ in range(steps):
        expected = expected * np.float32(0.5) + expected[::-1]
    return program, memory, expected


def opened(program: Program, memory: np.ndarray, threads: int) -> Frame:
    frame = program.frame(threads)
    frame.open([memory.ctypes.data], memory)
    return frame


def run(pool: Pool, program: Program, memory: np.ndarray) -> Frame:
    frame = opened(program, memory, pool.threads)
    pool.run(frame)
    frame.close()
    return frame


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_any_schedule(threads: int) -> None:
    pool = Pool(threads)
    for seed in range(30):
        program, memory, expected = mixes(40, seed)
        run(pool, program, memory)
        np.testing.assert_array_equal(memory[-1], expected)


def test_one_thread_finishes_what_it_was_to_share() -> None:
    program, memory, expected = mixes(40, 1)
    opened(program, memory, 4).work(2)
    np.testing.assert_array_equal(memory[-1], expected)


def emit_order(e: Emitter) -> None:
    """order[place++] = unit, of one thread at a time."""
    order, location = e.arg_ptr(0), e.arg_ptr(1)
    with e.loop(e.first, e.last) as unit:
        e.store(order, unit, e.atomic_add(location, 1))


@pytest.mark.parametrize("units", [1, 3, 10, 64, 130])
def test_each_thread_begins_at_its_share_and_goes_on_from_there(units: int) -> None:
    memory = np.zeros(1 + units, np.int64)
    order = Instruction(compile_kernel(emit_order), (Pointer(0, 8), Pointer(0)), units)
    program = Program([order])
    chunk = program.table[0, CHUNK]
    parts = program.table[0, PARTS]
    for threads in (1, 2, 3, 4):
        for thread in range(threads):
            memory[:] = 0
            opened(program, memory, threads).work(thread)
            begin = parts * thread // threads * chunk
            assert memory[1:].tolist() == [*range(begin, units), *range(begin)]


def test_a_late_thread_changes_nothing() -> None:
    program, memory, _ = mixes(40, 1)
    frame = opened(program, memory, 2)
    frame.work(0)
    memory[1:] = np.nan
    frame.work(1)
    assert np.isnan(memory[1:]).all()


def test_a_thread_that_stops_in_the_middle() -> None:
    """Its chunk is done by the other; when it goes on, nothing changes."""
    entered, go = threading.Event(), threading.Event()
    stopped: list[int] = []
    kernel = ctypes.CFUNCTYPE(
        None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
    )
    mix = kernel(compile_kernel(emit_mix))

    def hold(args: int, first: int, last: int, scratch: int) -> None:
        if not stopped:
            stopped.append(first)
            entered.set()
            assert go.wait(20)
        mix(args, first, last, scratch)

    stored = kernel(hold)
    address = ctypes.cast(stored, ctypes.c_void_p).value
    assert address
    program, memory, expected = mixes(5, 3)
    steps = list(program.instructions)
    steps[2] = Instruction(address, steps[2].args, SIZE, 10)
    frame = opened(Program(steps), memory, 2)
    other = threading.Thread(target=frame.help, args=(1,))
    other.start()
    assert entered.wait(20)
    frame.work(0)
    np.testing.assert_array_equal(memory[-1], expected)
    assert not frame.close(), "somebody is in it still"
    go.set()
    other.join(20)
    assert not other.is_alive() and frame.close()
    np.testing.assert_array_equal(memory[-1], expected)


def test_a_frame_is_used_again_with_other_memory() -> None:
    pool = Pool(2)
    program, memory, expected = mixes(40, 1)
    frame = program.frame(2)
    for _ in range(50):
        other = np.full_like(memory, np.nan)
        other[0] = memory[0]
        frame.open([other.ctypes.data], other)
        pool.run(frame)
        np.testing.assert_array_equal(other[-1], expected)
        while not frame.close():
            time.sleep(0.001)


def test_two_callers_at_once() -> None:
    pool = Pool(2)
    actual = []

    def call(seed: int) -> None:
        for i in range(40):
            program, memory, expected = mixes(20, seed * 100 + i)
            run(pool, program, memory)
            actual.append(np.array_equal(memory[-1], expected))

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(actual) == 120 and all(actual)


def test_busy_cores() -> None:
    """Threads of other work on every core: it takes longer, and comes out the same."""
    stop = threading.Event()

    def burn() -> None:
        values = np.random.default_rng(0).standard_normal(1 << 16)
        while not stop.is_set():
            np.sort(values)  # without the interpreter's lock

    others = [threading.Thread(target=burn) for _ in range(3)]
    for other in others:
        other.start()
    try:
        pool, end = Pool(2), time.monotonic() + 1.0
        seed = 0
        while time.monotonic() < end:
            program, memory, expected = mixes(100, seed, size=1013)
            run(pool, program, memory)
            np.testing.assert_array_equal(memory[-1], expected)
            seed += 1
        assert seed
    finally:
        stop.set()
        for other in others:
            other.join()


def test_full_words() -> None:
    """64 chunks use the sign bit too."""
    program, memory, expected = mixes(3, 5, size=64)
    program = Program([Instruction(i.address, i.args, 64, 1) for i in program.instructions])
    for threads in (1, 2):
        memory[1:] = np.nan
        run(Pool(threads), program, memory)
        np.testing.assert_array_equal(memory[-1], expected)


def test_a_pool_is_closed_and_used_again() -> None:
    pool = Pool(3)
    for seed in range(3):
        program, memory, expected = mixes(20, seed)
        run(pool, program, memory)
        np.testing.assert_array_equal(memory[-1], expected)
        before = threading.active_count()
        pool.close()
        assert threading.active_count() <= before - 2
    pool.close()


def test_a_process_ends_while_threads_work() -> None:
    """Whatever they are in when the interpreter goes: of three forks of one that has imported
    everything, and has no threads.
    """
    script = (
        f"import os, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_program import *\n"
        "for _ in range(3):\n"
        "    if not os.fork(): break\n"
        "    if ended := os.waitstatus_to_exitcode(os.wait()[1]): sys.exit(ended)\n"
        "else: sys.exit()\n"
        "pool, (program, memory, _) = Pool(4), mixes(200, 1, 5000)\n"
        "for _ in range(20): run(pool, program, memory)\n"
        "sys.stdout.write('done ')\n"
    )
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done done done ", ""), ran.stderr


def test_any_number_of_threads_does_all_the_work() -> None:
    """Also where those who helped in the last run come late to one that is its owner's alone."""
    pool, draw = Pool(3), random.Random(1)
    program, memory, expected = mixes(40, 3)
    frame = program.frame(3)
    for _ in range(300):
        threads = draw.choice((1, 2, 3))
        memory[1:] = np.nan
        frame.open([memory.ctypes.data], memory, alone=threads == 1)
        assert pool.run(frame, threads)
        if not frame.close():  # somebody is in it still, and writes what nobody reads
            memory = memory.copy()
            frame = program.frame(3)
            continue
        np.testing.assert_array_equal(memory[-1], expected)
    pool.close()
