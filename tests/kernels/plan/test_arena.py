"""Memory shared out to values that are not needed at the same time."""

from __future__ import annotations

import random
from itertools import pairwise

from mtmd.kernels.cpu.native.program import Instruction, Pointer
from mtmd.kernels.plan.arena import ARENA, Arena, StepUse, packed


def instruction(*args: Pointer | int) -> Instruction:
    return Instruction(1, args, 1)


def test_a_chain_takes_the_memory_of_two_values():
    arena = Arena()
    rooms = [arena.room(1000) for _ in range(5)]
    program = [instruction(a, 7, b) for a, b in pairwise(rooms)]
    packing = packed(arena, [program], {}, [])
    assert packing.bytes == 2 * 1024
    moved = [packing.location(room).offset for room in rooms]
    assert moved == [0, 1024, 0, 1024, 0]
    assert packing.instruction(program[1]).args == (Pointer(ARENA, 1024), 7, Pointer(ARENA, 0))


def test_places_inside_a_value_and_other_memory_are_kept():
    arena = Arena()
    first, second = arena.room(64), arena.room(256)
    cache, inside = Pointer(3, 40), Pointer(ARENA, second.offset + 100)
    program = [instruction(first, cache), instruction(inside)]
    packing = packed(arena, [program], {}, [])
    assert packing.location(cache) == cache
    assert packing.location(inside) == Pointer(ARENA, 100)
    assert packing.bytes == 256


def test_what_a_step_reads_lives_as_long_as_its_result():
    """It may have been made in the same memory."""
    arena = Arena()
    x, y, z = (arena.room(64) for _ in range(3))
    made = Pointer(5)
    steps = {1: StepUse((x,), 5), 4: StepUse((made,), 6)}
    parts: list[list[Instruction] | int] = [
        [instruction(x)],
        1,
        [instruction(y), instruction(z)],
        4,
        [instruction(Pointer(6)), instruction(y)],
    ]
    packing = packed(arena, parts, steps, [])
    assert packing.location(x) not in (packing.location(y), packing.location(z))


def test_what_is_needed_after_the_run_is_kept():
    arena = Arena()
    x, y = arena.room(64), arena.room(64)
    parts: list[list[Instruction] | int] = [[instruction(x), instruction(y)]]
    assert packed(arena, parts, {}, []).bytes == 64
    assert packed(arena, parts, {}, [x]).bytes == 128


def test_no_two_values_that_live_at_once_share_memory():
    rng = random.Random(3)
    for _ in range(30):
        arena = Arena()
        rooms = [arena.room(rng.randrange(0, 5000)) for _ in range(40)]
        program = [instruction(*rng.sample(rooms, 3)) for _ in range(30)]
        packing = packed(arena, [program], {}, [])
        lives = {}
        for room in rooms:
            used = [i for i, each in enumerate(program) if room in each.args]
            if used:
                at, size = packing.location(room).offset, arena.size(arena.number(room))
                assert at + size <= packing.bytes
                lives[room] = at, at + size, used[0], used[-1]
        for a, (begin, end, first, last) in lives.items():
            for b, (other, stop, start, final) in lives.items():
                together = first <= final and start <= last
                assert a == b or not together or end <= other or stop <= begin
