"""Blocks of threads that run a program: every register is an array of all lanes, and of the stretches
that lanes wait to run the one that stands first in the text runs next, so that lanes which went
different ways meet where these do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx import matrix
from ptx.instructions import Array, Step
from ptx.memory import THREADS_LIMIT, UNWRITTEN, Clock, Fault, Memory
from ptx.program import Address, Instruction, Name, Program, Register, Unsupported
from ptx.table import step_of

AT_ONCE = 1 << 13  # lanes
GROUP = 128  # lanes of the four warps that multiply together


@dataclass(frozen=True)
class Product:
    """A product of matrices that is under way: of which four warps, of what they committed as which,
    the addresses of what it reads, and the registers that it adds to and that it reads.
    """

    group: int
    number: int
    reads: Array
    results: frozenset[int]
    factors: frozenset[int]


@dataclass(frozen=True)
class Steps:
    """A stretch, made ready."""

    steps: Sequence[tuple[Step, Instruction]]
    end: Instruction | None
    goal: int | None  # of a branch


def prepare(program: Program) -> list[Steps]:
    """Raises Unsupported for an instruction that is not known, whether or not it would run."""
    for ins in program.instructions():
        for operand in ins.operands:
            if isinstance(operand, Name) and operand.text not in (*program.variables, "_"):
                raise ins.refused("found no such variable")
    return [
        Steps(
            [(step_of(i), i) for i in stretch.instructions],
            stretch.end,
            _goal(program, stretch.end),
        )
        for stretch in program.stretches
    ]


def _goal(program: Program, end: Instruction | None) -> int | None:
    if end is None or end.opcode in ("ret", "exit"):
        return None
    if end.opcode in ("bra", "bra.uni"):
        (label,) = end.operands
        if isinstance(label, Name) and label.text in program.labels:
            return program.labels[label.text]
    elif end.opcode in ("bar.sync", "barrier.sync") and len(end.operands) == 1 and not end.guard:
        return None
    raise end.refused()


class Lanes:
    """The threads of some blocks of a launch: what steps read and write."""

    def __init__(
        self,
        program: Program,
        parameters: bytes,
        memory: Memory,
        base: int,
        shared_bytes: int,
        blocks: range,
        grid: tuple[int, int],
        grain: int,
    ):
        threads = program.threads
        self.program, self.grid = program, grid
        self.blocks, self.threads, self.count = blocks, threads, len(blocks) * threads
        self.memory, self.base = memory, base
        self.parameters = np.frombuffer(parameters, np.uint8)
        self.block = np.repeat(np.arange(blocks.start, blocks.stop), threads)
        self.thread = np.tile(np.arange(threads), len(blocks))
        self.lane = self.thread % 32
        self.warp_begin = np.arange(self.count) // 32 * 32
        self.clock = Clock(blocks.start * threads, self.count, threads)
        self.registers: list[Array | None] = [None] * program.registers
        self.defined: dict[int, Array] = {}  # of registers that only some lanes have written
        self.active, self.all = np.ones(self.count, np.bool_), True
        self.stride = -(-shared_bytes // 16) * 16
        self.shared_bytes = shared_bytes
        self.shared = Memory(self.stride * len(blocks), grain, threads, self._where_shared)
        self.shared.status[:] = UNWRITTEN
        self.begin = (self.block - blocks.start) * self.stride
        self.group = np.ones(self.count, np.int64)  # of the copies that a lane starts next
        self.wide = any(ins.words[0] == "wgmma" for ins in program.instructions())
        if self.wide:
            if threads % GROUP:
                raise Unsupported(f"wgmma by {threads} threads")
            self.shared.expect_asynchronous_reads()
        self.products: list[Product] = []
        self.committed = np.zeros(self.count // GROUP, np.int64)
        self.unfenced: dict[int, Array] = {}  # lanes that wrote registers since their last fence

    def _where_shared(self, at: int) -> str:
        return f"byte {at % max(self.stride, 1)} of shared memory ({self.shared_bytes} bytes)"

    def fault(self, what: str, wrong: Array) -> Fault:
        first = int(np.flatnonzero(wrong)[0])
        return Fault(
            f"{what}; block {self.block[first]}, thread {self.thread[first]}; {int(wrong.sum())} threads in all"
        )

    def require(self, right: Array, what: str) -> None:
        """Raises Fault unless it holds for every active lane."""
        wrong = self.active & ~right
        if wrong.any():
            raise self.fault(what, wrong)

    # Registers

    def read(self, number: int) -> Array:
        if self.products:
            self._untouched("read", [p for p in self.products if number in p.results])
        value = self.registers[number]
        if value is None:
            raise self.fault("a register is read that nothing was written to", self.active)
        if self.defined and number in self.defined:
            self.require(self.defined[number], "a register is read that nothing was written to")
        return value

    def write(self, target: Register, value: Array) -> None:
        number = target.number
        if self.wide:
            used = [p for p in self.products if number in p.results or number in p.factors]
            self._untouched("written", used)
            before = self.unfenced.get(number)
            self.unfenced[number] = self.active if before is None else before | self.active
        self._put(number, value)

    def _put(self, number: int, value: Array) -> None:
        if self.all:
            self.registers[number] = value
            if self.defined:
                self.defined.pop(number, None)
            return
        before = self.registers[number]
        if before is None:
            self.registers[number], self.defined[number] = value, self.active
            return
        self.registers[number] = np.where(self.active, value, before)
        if number in self.defined:
            self.defined[number] = self.defined[number] | self.active

    def write_some(self, target: Register, value: Array) -> None:
        """Values of the active lanes only."""
        if len(value) != self.count:
            full: Array = np.zeros(self.count, value.dtype)
            full[self.active] = value
            value = full
        self.write(target, value)

    def spread(self, value: Array) -> Array:
        return np.broadcast_to(value, (self.count,))

    def guarded(self, number: int, expected: bool, step: Step) -> None:
        before, all_before = self.active, self.all
        holds = self.read(number) == expected
        self.active = holds if all_before else before & holds
        self.all = bool(self.active.all())
        try:
            if self.active.any():
                step(self)
        finally:
            self.active, self.all = before, all_before

    def special(self, name: str) -> Array:
        across, along = self.grid
        values: Mapping[str, Any] = {
            "%tid.x": self.thread,
            "%ctaid.x": self.block % across,
            "%ctaid.y": self.block // across,
            "%ctaid.z": 0,
            "%nctaid.x": across,
            "%nctaid.y": along,
            "%nctaid.z": 1,
            "%ntid.x": self.threads,
            "%laneid": self.lane,
            "%warpid": self.thread // 32,
        }
        if name not in values:
            raise Unsupported(name)
        return np.broadcast_to(np.asarray(values[name]), (self.count,)).astype(np.uint32)

    # Memory

    def address_of(self, name: str) -> Array:
        if name not in self.program.variables:
            raise Unsupported(f"variable {name}")
        return np.zeros(self.count, np.uint64)

    def parameter(self, address: Address, size: int) -> Array:
        if not isinstance(address.base, str) or address.base not in self.program.parameters:
            raise Unsupported(f"parameter {address}")
        at, _ = self.program.parameters[address.base]
        row = self.parameters[at + address.offset :][:size]
        active = int(self.active.sum())
        return np.ascontiguousarray(np.broadcast_to(row, (active, size)))

    def _locations(self, space: str, address: Address, width: int) -> tuple[Memory, Array, Array]:
        """Memory, and where active lanes access it, with their stamps."""
        if isinstance(address.base, str):
            base = self.address_of(address.base)
        else:
            base = self.read(address.base.number)
        at = base[self.active].astype(np.int64) + address.offset
        stamps = self.clock.stamps[self.active]
        if space == "global":
            return self.memory, at - self.base, stamps
        wrong = (at < 0) | (at + width > self.shared_bytes)
        if wrong.any():
            byte = int(at[wrong][0])
            lanes = self.active.copy()
            lanes[lanes] = wrong
            raise self.fault(
                f"byte {byte} is out of bounds of shared memory ({self.shared_bytes} bytes)", lanes
            )
        return self.shared, at + self.begin[self.active], stamps

    def load(self, space: str, address: Address, width: int) -> Array:
        """uint8 [active lanes, width]"""
        memory, at, stamps = self._locations(space, address, width)
        return memory.load(at, width, stamps)

    def store(self, space: str, address: Address, rows: Array) -> None:
        """rows: uint8 [lanes, width]"""
        memory, at, stamps = self._locations(space, address, rows.shape[1])
        memory.store(at, rows[self.active], stamps)

    def load_rows(self, address: Address, warps: Array, rows: int) -> Array:
        """uint8 [warps, rows, 16] at the addresses of the first lanes of each active warp."""
        before, all_before = self.active, self.all
        self.active, self.all = before & (self.lane < rows), all_before and rows == 32
        try:
            return self.load("shared", address, 16).reshape(len(warps), rows, 16)
        finally:
            self.active, self.all = before, all_before

    def store_rows(self, address: Address, rows: Array) -> None:
        """uint8 [warps, rows, 16] to the addresses of the first lanes of each active warp."""
        before, all_before = self.active, self.all
        self.active, self.all = before & (self.lane < rows.shape[1]), False
        try:
            memory, at, stamps = self._locations("shared", address, 16)
            memory.store(at, rows.reshape(-1, 16), stamps)
        finally:
            self.active, self.all = before, all_before

    def copy_later(self, to: Address, of: Address, count: int, read: Array | None) -> None:
        """Start copies of `count` bytes, of which so many are read, else zero."""
        rows = np.zeros((self.count, count), np.uint8)
        whole = np.full(self.count, count) if read is None else read
        self.require((whole == count) | (whole == 0), f"a copy of {count} bytes reads some of them")
        before, all_before = self.active, self.all
        self.active = before & (whole != 0)
        self.all = bool(self.active.all())
        if self.active.any():
            rows[self.active] = self.load("global", of, count)
        self.active, self.all = before, all_before
        memory, at, stamps = self._locations("shared", to, count)
        memory.store(at, rows[self.active], stamps, self.group[self.active])

    def commit(self) -> None:
        self.group = self.group + self.active

    def wait_for_copies(self, remaining: int, all_of_them: bool) -> None:
        """Until at most so many of the groups that a lane committed are under way."""
        done = self.group if all_of_them else self.group - 1 - remaining
        self.shared.arrive(self.active, done, self.clock.stamps)

    # Warps

    def active_warps(self) -> Array:
        """Numbers of the warps that are here; all lanes of each have to be."""
        warps = self.active.reshape(-1, 32)
        here = warps.any(1)
        if not self.all and (here != warps.all(1)).any():
            raise self.fault(
                "some lanes of a warp are elsewhere", np.repeat(here != warps.all(1), 32)
            )
        return np.flatnonzero(here)

    def whole_warps(self, members: Array) -> None:
        self.require(members == 0xFFFFFFFF, "some lanes of a warp are left out")
        self.active_warps()

    def warp_barrier(self, members: Array) -> None:
        self.whole_warps(members)
        self.clock.pass_warp_barrier(self.active)

    # Groups of four warps

    def active_groups(self) -> Array:
        """Numbers of the groups that are here; all lanes of each have to be."""
        lanes = self.active.reshape(-1, GROUP)
        here = lanes.any(1)
        self.active_warps()
        if (here != lanes.all(1)).any():
            raise self.fault("a warp of a group is elsewhere", self.active)
        return np.flatnonzero(here)

    def of_groups(self, values: Array, groups: Array) -> Array:
        """The value that all lanes of each group have."""
        rows = np.broadcast_to(values, (self.count,)).reshape(-1, GROUP)[groups]
        if (rows != rows[:, :1]).any():
            raise self.fault("lanes of a group say different things", self.active)
        return np.ascontiguousarray(rows[:, 0])

    def _untouched(self, done: str, products: list[Product]) -> None:
        """Raises Fault where an active lane has a part in one of the products."""
        for product in products:
            lanes = np.zeros(self.count, np.bool_)
            lanes[product.group * GROUP : (product.group + 1) * GROUP] = True
            if (lanes & self.active).any():
                what = f"a register is {done} that a product still uses"
                raise self.fault(what, lanes & self.active)

    def fence_products(self) -> None:
        """`wgmma.fence`: registers written so far are what products that follow read."""
        self.active_groups()
        for number, lanes in list(self.unfenced.items()):
            rest = lanes & ~self.active
            if rest.any():
                self.unfenced[number] = rest
            else:
                del self.unfenced[number]

    def fenced(self, numbers: frozenset[int]) -> None:
        for number in numbers & self.unfenced.keys():
            self.require(~self.unfenced[number], "a product uses a register that no fence follows")

    def fence_proxy(self) -> None:
        """`fence.proxy.async`: what was written so far is what products that follow read."""
        self.shared.fence(self.active, self.clock.stamps)

    def load_pieces(self, at: Array, groups: Array) -> Array:
        """uint8 [groups, pieces, 16] of shared memory, at addresses [groups, pieces]."""
        first = groups * GROUP
        if ((at < 0) | (at + 16 > self.shared_bytes)).any():
            raise self.fault(
                f"a matrix is out of bounds of shared memory ({self.shared_bytes} bytes)",
                self.active,
            )
        stamps = np.repeat(self.clock.stamps[first], at.shape[1])
        there = (at + self.begin[first][:, None]).reshape(-1)
        return self.shared.begin_read(there, 16, stamps).reshape(*at.shape, 16)

    def accumulators(self, targets: Sequence[Register], groups: Array) -> Array:
        """fp32 [groups, 4 warps, 32, registers], which products that are under way may add to."""
        values = []
        for target in targets:
            value = self.registers[target.number]
            if value is None or not self.defined.get(target.number, self.active)[self.active].all():
                raise self.fault("a product adds to what nothing was written to", self.active)
            values.append(value.view(np.float32).reshape(-1, 4, 32)[groups])
        return np.stack(values, 3)

    def multiply(
        self,
        a: Array,
        b: Array,
        targets: Sequence[Register],
        adds: bool,
        groups: Array,
        reads: Array,
        factors: frozenset[int],
    ) -> None:
        """Start products of groups: registers `targets` with A B^T, added to what is in them or not.
        reads: addresses [groups, pieces] in shared memory; factors: registers that A lies in.
        """
        results = frozenset(target.number for target in targets)
        self.fenced(results | factors)
        sums = self.accumulators(targets, groups) if adds else None
        values = matrix.multiply_add_wide(a, b, sums)
        for place, target in enumerate(targets):
            full: Array = np.zeros(self.count, np.uint32)
            full[self.active] = values[..., place].reshape(-1).view(np.uint32)
            self._put(target.number, full)
        for group, at in zip(groups.tolist(), reads, strict=True):
            there = at + self.begin[group * GROUP]
            number = int(self.committed[group]) + 1
            self.products.append(Product(group, number, there, results, factors))

    def commit_products(self) -> None:
        self.committed[self.active_groups()] += 1

    def wait_for_products(self, remaining: int) -> None:
        """Until at most so many that a group committed are under way."""
        groups = set(self.active_groups().tolist())
        rest = []
        for product in self.products:
            if (
                product.group in groups
                and product.number <= self.committed[product.group] - remaining
            ):
                stamp = self.clock.stamps[product.group * GROUP]
                self.shared.end_read(product.reads, 16, np.full(len(product.reads), stamp))
            else:
                rest.append(product)
        self.products = rest

    # Control flow

    def run(self, stretches: Sequence[Steps]) -> None:
        waiting: dict[int, Array] = {0: np.ones(self.count, np.bool_)}
        at_barrier: dict[int, Array] = {}
        while waiting:
            number = min(waiting)
            here = waiting.pop(number)
            self.active, self.all = here, bool(here.all())
            stretch = stretches[number]
            for step, instruction in stretch.steps:
                try:
                    step(self)
                except Fault as fault:
                    raise Fault(f"{instruction.text} ({instruction.source}): {fault}") from None
            for goal, lanes in self._next(stretch, number, here):
                waiting[goal] = waiting[goal] | lanes if goal in waiting else lanes
            if stretch.end is not None and stretch.end.words[0] in ("bar", "barrier"):
                waits = at_barrier.get(number + 1)
                at_barrier[number + 1] = here if waits is None else waits | here
            if not waiting and at_barrier:
                waiting, at_barrier = self._released(at_barrier), {}

    def _next(self, stretch: Steps, number: int, here: Array) -> list[tuple[int, Array]]:
        end = stretch.end
        if end is None:
            return [(number + 1, here)]
        if stretch.goal is None:
            return []
        if end.guard is None:
            return [(stretch.goal, here)]
        register, expected = end.guard
        goes = here & (self.read(register.number) == expected)
        stays = here & ~goes
        ways = (stretch.goal, goes), (number + 1, stays)
        return [(goal, lanes) for goal, lanes in ways if lanes.any()]

    def _released(self, at_barrier: dict[int, Array]) -> dict[int, Array]:
        """Where lanes go on that wait at a barrier, when no other lane can run."""
        if len(at_barrier) > 1:
            blocks = [set(self.block[lanes].tolist()) for lanes in at_barrier.values()]
            if len(set.union(*blocks)) != sum(map(len, blocks)):
                raise Fault(f"{self.program.name}: threads of a block wait at different barriers")
        for lanes in at_barrier.values():
            self.clock.pass_barrier(lanes)
        return at_barrier


def grain_of(program: Program, space: str) -> int:
    """The fewest bytes that an instruction moves to or from `shared` or `global` memory."""
    sizes = [16]
    for ins in program.instructions():
        if ins.words[0] in ("ld", "st") and ins.words[1].startswith(space):
            count = next((int(w[1:]) for w in ins.words if w in ("v2", "v4")), 1)
            sizes.append(int(ins.words[-1][1:]) // 8 * count)
        elif ins.words[:2] == ("cp", "async") and len(ins.operands) > 2:
            sizes.append(ins.operands[2].bits)  # type: ignore[union-attr]
    return min(sizes)


def launch(
    program: Program,
    parameters: bytes,
    memory: Memory,
    base: int,
    shared_bytes: int,
    grid: tuple[int, int],
) -> None:
    """Run all blocks of a grid. `base`: the address of the memory's first byte.

    Raises Fault, Unsupported.
    """
    stretches, count = prepare(program), grid[0] * grid[1]
    grain = grain_of(program, "shared")
    if count * program.threads > THREADS_LIMIT:
        raise Unsupported(f"{count} blocks of {program.threads} threads")
    at_once = max(1, AT_ONCE // program.threads)
    memory.forget_threads()
    with np.errstate(all="ignore"):
        for first in range(0, count, at_once):
            blocks = range(first, min(first + at_once, count))
            lanes = Lanes(program, parameters, memory, base, shared_bytes, blocks, grid, grain)
            lanes.run(stretches)
