"""Pictures on their way through machines, as events of simpy. Units of a backlog are shared out by
`mtmd.cluster.schedule`, the code that `mtmd batch --ray` runs.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import simpy
from scenario import Scenario
from shared_cores import Shared

from mtmd.base.errors import OptionError
from mtmd.cluster.schedule import Schedule, Task

SLICE_S = 0.01  # of encoding between two steps of the decoder, as in mtmd/service/run_loop.py
STEPS_AT_ONCE = 8  # of the decoder, where nothing else waits: one event in place of so many
VAIN_MAX = 1000  # nodes lost, while no picture is answered
Process = Generator[Any, Any, None]


@dataclass(eq=False)
class Picture:
    """`size` is relative to the mean. `unit` is that of a backlog."""

    number: int
    came: float
    size: float
    output: int
    known: bool
    unit: int = -1
    begun: float = 0.0


@dataclass
class Result:
    """`utilization` is by resource: the part of what it could do that it did. `ready` is when the
    first worker was, from which on `mtmd batch --ray` counts its rows a second. `latencies` are
    seconds from a picture's coming to its answer, of those that came by themselves.
    """

    seconds: float = 0.0
    ready: float = 0.0
    came: int = 0
    rejected: int = 0
    finished: int = 0
    begun: int = 0
    lost_nodes: int = 0
    latencies: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    utilization: dict[str, float] = field(default_factory=dict)
    stages: Counter[str] = field(default_factory=Counter)
    present: float = 0.0
    """Pictures that have come and are not answered, in the mean over time."""
    max_waiting: int = 0
    times: Counter[int] = field(default_factory=Counter)
    """How often each picture got its row."""
    series: list[tuple[float, int, int, int]] = field(default_factory=list)
    """Now and then: the time, and how many had come, finished and been rejected until then."""

    @property
    def rate(self) -> float:
        """Pictures a second, from when the first worker was ready."""
        return self.finished / max(self.seconds - self.ready, 1e-9)

    @property
    def again(self) -> int:
        """Pictures begun more than once."""
        return self.begun - self.finished


class Source(Protocol):
    """Where workers get pictures."""

    @property
    def is_over(self) -> bool: ...

    def next_for(self, worker: Worker) -> Picture | None: ...

    def finished(self, worker: Worker, picture: Picture) -> None: ...

    def lost(self, worker: Worker, pictures: list[Picture]) -> None: ...


class Machine:
    """Cores and a link, of one node or of several."""

    def __init__(self, run: Simulation):
        costs, fleet = run.scenario.costs, run.scenario.fleet
        busy = costs.background_cores * fleet.share
        if costs.device == "gpu":
            busy += costs.engine_cores * fleet.workers * fleet.share
        self.cores = Shared(run.env, max(fleet.cores - busy, 0.01))
        self.link = Shared(run.env, 1.0)


class Node:
    def __init__(self, run: Simulation, number: int, machine: Machine):
        self.run, self.number, self.machine = run, number, machine
        self.workers: list[Worker] = []
        self.is_up = False
        # pictures that come by themselves come to machines that are there already
        self.begin(loads=run.scenario.traffic.pattern == "backlog")

    def begin(self, loads: bool) -> None:
        self.is_up = True
        number = self.run.scenario.fleet.workers
        self.workers = [Worker(self.run, self, loads) for _ in range(number)]

    def lose(self) -> None:
        self.is_up = False
        self.run.result.lost_nodes += 1
        self.run.look_whether_vain()
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.end()

    def live(self) -> Process:
        """Lost now and then, and there again."""
        failures, chance = self.run.scenario.failures, self.run.chance("failures", self.number)
        assert failures.mtbf_s
        while True:
            yield self.run.env.timeout(chance.expovariate(1 / failures.mtbf_s))
            self.lose()
            yield self.run.env.timeout(failures.restart_s)
            self.begin(loads=True)


class Worker:
    """A model in memory: threads that prepare pictures, and an engine."""

    def __init__(self, run: Simulation, node: Node, loads: bool):
        self.run, self.node = run, node
        self.number = run.next_worker()
        fleet = run.scenario.fleet
        backlog = run.scenario.traffic.pattern == "backlog"
        # a worker of `mtmd batch --ray` has two units at once, each with threads of its own
        self.locations = (fleet.slots + fleet.ahead) * (2 if backlog else 1)
        self.stored: dict[Picture, None] = {}
        self.is_ready = False
        self.lock = simpy.Resource(run.env)
        """The interpreter's, for threads that prepare pictures."""
        self.encoding: deque[list[Any]] = deque()  # picture, tiles left
        self.reading: deque[list[Any]] = deque()  # picture, tokens of the prompt left
        self.writing: dict[Picture, int] = {}  # tokens left
        self.engine_s = self.since = self.cpu_s = 0.0
        self._asleep: simpy.Event | None = None
        self._batch: tuple[int, float] = (0, 0.0)  # tiles being encoded, seconds left
        self._processes: set[simpy.Process] = set()
        self.go(self._load(loads))

    def go(self, work: Process) -> None:
        """As a process that ends with the worker."""
        process = self.run.env.process(_until_lost(work))
        self._processes.add(process)
        process.callbacks.append(self._gone)

    def _gone(self, event: Any) -> None:
        self._processes.discard(event)

    def end(self) -> None:
        self.is_ready = False
        for process in [p for p in self._processes if p.is_alive]:
            process.interrupt()
        self.run.lose(self)

    @property
    def free(self) -> int:
        return self.locations - len(self.stored)

    def pull(self) -> None:
        """Begin with what the source has, as far as there is a place."""
        while self.is_ready and len(self.stored) < self.locations:
            picture = self.run.source.next_for(self)
            if picture is None:
                return
            self.begin(picture)

    def begin(self, picture: Picture) -> None:
        self.stored[picture], picture.begun = None, self.run.env.now
        self.run.result.begun += 1
        self.run.result.waits.append(self.run.env.now - picture.came)
        self.go(self._prepare(picture))

    def _load(self, loads: bool) -> Process:
        run = self.run
        if not loads:
            yield run.env.timeout(0)
        elif run.scenario.traffic.pattern == "backlog" and not run.first_ready.triggered:
            # one alone says how much memory a worker takes, before others are started
            with run.alone.request() as turn:
                yield turn | run.first_ready
                yield from self._open()
        else:
            yield from self._open()
        self.is_ready, self.since = True, run.env.now
        self.go(self._engine())
        run.worker_ready(self)
        self.pull()

    def _open(self) -> Process:
        costs = self.run.scenario.costs
        if costs.load_wait_s:
            yield self.run.env.timeout(costs.load_wait_s)
        yield from self.node.machine.cores.hold(costs.load_cpu_s)

    def _prepare(self, picture: Picture) -> Process:
        run, costs, machine = self.run, self.run.scenario.costs, self.node.machine
        if run.scenario.fleet.fetch_wait_s:
            yield run.env.timeout(run.scenario.fleet.fetch_wait_s)
        bytes_s = run.scenario.fleet.link_gbit * 1e9 / 8
        yield from machine.link.hold(costs.picture_bytes * picture.size / bytes_s)
        seconds = costs.fetch_s + costs.request_s
        seconds += (costs.decode_s + costs.preprocess_s) * picture.size
        if costs.locked:
            with self.lock.request() as turn:
                yield turn
                yield from machine.cores.hold(seconds * costs.locked)
        yield from machine.cores.hold(seconds * (1 - costs.locked))
        stages = run.result.stages
        for stage in ("fetch", "decode", "preprocess", "request"):
            scale = picture.size if stage in ("decode", "preprocess") else 1.0
            stages[stage] += getattr(costs, f"{stage}_s") * scale
        tiles = 0 if picture.known else _rounded(costs.tiles * picture.size, run.chance_of_tiles)
        if tiles:
            self.encoding.append([picture, tiles])
        else:
            self._encoded(picture)
        self._wake()

    def _encoded(self, picture: Picture) -> None:
        tokens = self.run.scenario.costs.prompt_tokens
        if picture.known:
            tokens = min(tokens, self.run.scenario.traffic.page_tokens)
        self.reading.append([picture, tokens])

    def _wake(self) -> None:
        if self._asleep is not None and not self._asleep.triggered:
            self._asleep.succeed()

    def _compute(self, stage: str, seconds: float) -> Process:
        costs, run = self.run.scenario.costs, self.run
        if costs.device == "cpu":
            yield from self.node.machine.cores.hold(seconds, costs.engine_cores)
        elif seconds > 0:
            yield run.env.timeout(seconds)
        run.result.stages[stage] += seconds
        self.engine_s += seconds

    def _engine(self) -> Process:
        """Turns of a slice of encoding and a step of the decoder, as the service takes them on a
        CPU. On a GPU it encodes beside the decoder, in a stream of its own; that is counted here as
        turns, too, each as long as if it had the card to itself.
        """
        step_s = 0.0
        while True:
            if not (self.encoding or self._batch[0] or self.reading or self.writing):
                self._asleep = self.run.env.event()
                yield self._asleep
                self._asleep = None
                continue
            if self.encoding or self._batch[0]:
                yield from self._encode(max(SLICE_S, step_s))
            before = self.engine_s
            if self.reading or self.writing:
                yield from self._step()
            step_s = self.engine_s - before

    def _encode(self, seconds: float) -> Process:
        costs = self.run.scenario.costs
        tiles, left = self._batch
        if not tiles:
            tiles = min(costs.tiles_at_once, sum(one[1] for one in self.encoding))
            left = costs.encode_batch_s + tiles * costs.encode_tile_s
        if not (self.reading or self.writing):
            seconds = left  # as nobody waits for a step
        part = min(left, seconds)
        self._batch = tiles, left - part
        yield from self._compute("encode", part)
        if left - part > 1e-12:
            return
        self._batch = 0, 0.0
        while tiles:
            first = self.encoding[0]
            taken = min(tiles, first[1])
            first[1] -= taken
            tiles -= taken
            if not first[1]:
                self._encoded(self.encoding.popleft()[0])

    def _step(self) -> Process:
        costs, slots = self.run.scenario.costs, self.run.scenario.fleet.slots
        room = costs.concurrent_tokens if self.writing else costs.step_tokens
        read, answered, admitted = 0.0, list[Picture](), slots - len(self.writing)
        waiting = iter(self.reading)
        while room > 0 and admitted > 0 and (one := next(waiting, None)) is not None:
            taken = min(room, one[1])
            one[1] -= taken
            room -= taken
            read += taken
            admitted -= 1
            if one[1] <= 0:
                answered.append(one[0])
        steps = 1
        if self.writing and not (answered or read or self.encoding or self._batch[0]):
            steps = min(STEPS_AT_ONCE, min(self.writing.values()))
        each = costs.step_s + len(self.writing) * costs.output_token_s
        yield from self._compute("decoding", steps * each)
        if read:
            yield from self._compute("prefill", read * costs.prompt_token_s)
        for _ in answered:
            self.reading.popleft()
        for picture in list(self.writing):
            self.writing[picture] -= steps
        for picture in answered:
            self.writing[picture] = picture.output - 1  # the first came with the prompt's end
        over = [picture for picture, left in self.writing.items() if left <= 0]
        for picture in over:
            del self.writing[picture]
            yield from self._compute("answer", costs.answer_s)
            del self.stored[picture]
            self.cpu_s += self.run.env.now - picture.begun
            self.run.source.finished(self, picture)
        self.pull()


def _until_lost(work: Process) -> Process:
    try:
        yield from work
    except simpy.Interrupt:
        return


def _rounded(value: float, chance: Random) -> int:
    """One of the whole numbers beside it, in the mean `value`."""
    whole = math.floor(value)
    rest = value - whole
    return whole + (rest > 0 and chance.random() < rest)


class Arrivals:
    """Pictures that come by themselves, wait in one line, and are told to come later where it is
    full. One that was with a worker that ended waits again, before all others.
    """

    def __init__(self, run: Simulation):
        self.run = run
        self.line: deque[Picture] = deque()
        self._come = False
        queue = run.scenario.fleet.queue
        workers = run.scenario.fleet.nodes * run.scenario.fleet.workers
        self.maximum = math.inf if queue is None else queue * workers
        run.env.process(self._arrive())

    @property
    def is_over(self) -> bool:
        return self._come and self.run.present == 0

    def rates(self) -> Iterator[tuple[float, float]]:
        """Pictures a second, and for how long, for `bursts`."""
        traffic, chance = self.run.scenario.traffic, self.run.chance("bursts")
        part = traffic.burst_s / traffic.period_s
        between = traffic.rate / (1 - part + part * traffic.peak)
        while True:
            yield between, chance.expovariate(1 / (traffic.period_s - traffic.burst_s))
            yield between * traffic.peak, traffic.burst_s

    def times(self) -> Iterator[float]:
        """A Poisson process; one of a changing rate is one of the highest rate, thinned (Lewis and
        Shedler, 1979), or for bursts goes on anew at each change.
        """
        traffic, chance = self.run.scenario.traffic, self.run.chance("arrivals")
        now = 0.0
        if traffic.pattern == "bursts":
            for rate, seconds in self.rates():
                end = now + seconds
                while (now := now + chance.expovariate(rate)) < end:
                    yield now
                now = end
        highest = traffic.rate * (traffic.peak if traffic.pattern == "wave" else 1.0)
        while True:
            now += chance.expovariate(highest)
            if traffic.pattern == "wave":
                # from the trough on
                turn = -math.cos(2 * math.pi * now / traffic.period_s)
                if chance.random() * highest > traffic.rate * (1 + (traffic.peak - 1) * turn):
                    continue
            yield now

    def _arrive(self) -> Process:
        run, times = self.run, self.times()
        for number in range(run.scenario.traffic.pictures):
            yield run.env.timeout(next(times) - run.env.now)
            self._offer(run.picture(number))
        self._come = True
        run.look_whether_over()

    def _offer(self, picture: Picture) -> None:
        run = self.run
        run.result.came += 1
        worker = max(run.ready, key=lambda w: w.free, default=None)
        if worker is not None and worker.free > 0:
            run.change_present(1)
            worker.begin(picture)
        elif len(self.line) < self.maximum:
            run.change_present(1)
            self.line.append(picture)
            run.result.max_waiting = max(run.result.max_waiting, len(self.line))
        else:
            run.result.rejected += 1

    def next_for(self, worker: Worker) -> Picture | None:  # noqa: ARG002
        return self.line.popleft() if self.line else None

    def finished(self, worker: Worker, picture: Picture) -> None:
        run = self.run
        costs = run.scenario.costs
        run.result.latencies.append(run.env.now - picture.came)
        worker.go(worker.node.machine.cores.hold(costs.write_s / run.scenario.traffic.unit))
        run.change_present(-1)
        run.finish(picture)

    def lost(self, worker: Worker, pictures: list[Picture]) -> None:  # noqa: ARG002
        self.line.extendleft(reversed(pictures))
        for one in self.run.ready:
            one.pull()


class Backlog:
    """Units of pictures that are there from the start, shared out as by `mtmd batch --ray`."""

    def __init__(self, run: Simulation):
        self.run = run
        traffic = run.scenario.traffic
        units = -(-traffic.pictures // traffic.unit)
        self.sizes = [
            min(traffic.unit, traffic.pictures - unit * traffic.unit) for unit in range(units)
        ]
        self.schedule = Schedule(enumerate(self.sizes))
        self.stored: dict[Worker, dict[int, Unit]] = {}
        self.written: set[int] = set()
        run.result.came = traffic.pictures
        run.change_present(traffic.pictures)

    @property
    def is_over(self) -> bool:
        return self.schedule.finished

    def _more(self, worker: Worker) -> None:
        if worker not in self.stored:
            self.stored[worker] = {}
            self.schedule.started(worker.number)
        units = self.stored[worker]
        while (task := self.schedule.next_for(worker.number)) is not None:
            first = task.unit * self.run.scenario.traffic.unit
            pictures = deque(
                self.run.picture(first + at, task.unit) for at in range(self.sizes[task.unit])
            )
            units[task.unit] = Unit(task, pictures, len(pictures))

    def next_for(self, worker: Worker) -> Picture | None:
        self._more(worker)
        # each unit has its half of the places
        for unit in self.stored[worker].values():
            if unit.waiting and unit.begun < worker.locations // 2:
                unit.begun += 1
                return unit.waiting.popleft()
        return None

    def finished(self, worker: Worker, picture: Picture) -> None:
        unit = self.stored[worker][picture.unit]
        unit.begun -= 1
        unit.left -= 1
        unit.done.append(picture)
        if not unit.left:
            worker.go(self._write(worker, unit))

    def _write(self, worker: Worker, unit: Unit) -> Process:
        run = self.run
        yield from worker.node.machine.cores.hold(run.scenario.costs.write_s)
        # from here on the file is there, whatever becomes of the worker
        del self.stored[worker][unit.task.unit]
        for picture in unit.done if unit.task.unit not in self.written else ():
            run.change_present(-1)
            run.finish(picture)
        self.written.add(unit.task.unit)
        # by the process that shares out, on the first machine
        yield from run.machines[0].cores.hold(run.scenario.costs.assign_s)
        run.assigned_s += run.scenario.costs.assign_s
        self.schedule.done(worker.number, unit.task)
        run.look_whether_over()
        worker.pull()

    def lost(self, worker: Worker, pictures: list[Picture]) -> None:  # noqa: ARG002
        if self.stored.pop(worker, None) is not None:
            self.schedule.ended(worker.number, blame=False)
        for one in self.run.ready:
            one.pull()
        self.run.look_whether_over()


@dataclass
class Unit:
    task: Task
    waiting: deque[Picture]
    left: int
    begun: int = 0
    done: list[Picture] = field(default_factory=list)


class Simulation:
    """One run of a scenario. Its chance is the seed's alone, by use: what one thing draws does not
    depend on how often another does.
    """

    def __init__(self, scenario: Scenario, watch_s: float | None = None):
        """`watch_s`: how often the result's `series` is continued."""
        self.scenario, self.env, self.result = scenario, simpy.Environment(), Result()
        self.over, self.first_ready = self.env.event(), self.env.event()
        self.alone = simpy.Resource(self.env)
        """The worker that loads before all others."""
        self.ready: list[Worker] = []
        self.present = 0
        self.assigned_s = self.engine_s = self.engines_s = self.cpu_s = self.locations_s = 0.0
        self._present_s = self._present_since = 0.0
        self._workers = self._lost_at_finish = 0
        self._kills = list(scenario.failures.kills)
        self.chance_of_tiles = self.chance("tiles")
        fleet, traffic = scenario.fleet, scenario.traffic
        self.source: Source = Backlog(self) if traffic.pattern == "backlog" else Arrivals(self)
        self.machines = [Machine(self) for _ in range(fleet.nodes // fleet.share)]
        self.nodes = [
            Node(self, number, self.machines[number // fleet.share])
            for number in range(fleet.nodes)
        ]
        if scenario.failures.mtbf_s:
            for node in self.nodes:
                self.env.process(node.live())
        if watch_s:
            self.env.process(self._watch(watch_s))

    def run(self) -> Result:
        """Until every picture that was taken has its answer. Raises OptionError where that never
        comes.
        """
        self.env.run(until=self.over)
        result, seconds = self.result, self.env.now
        result.seconds = seconds
        self.change_present(0)
        result.present = self._present_s / seconds if seconds else 0.0
        for worker in list(self.ready):
            self._account(worker)
        for machine in self.machines:
            machine.cores.settle()
            machine.link.settle()
        cores = [machine.cores for machine in self.machines]
        links = [machine.link for machine in self.machines]
        whole = max(seconds, 1e-9)
        result.utilization = {
            "cores": sum(c.used for c in cores) / (sum(c.capacity for c in cores) * whole),
            "engine": self.engine_s / max(self.engines_s, 1e-9),
            "places": self.cpu_s / max(self.locations_s, 1e-9),
            "link": sum(c.used for c in links) / (len(links) * whole),
        }
        if isinstance(self.source, Backlog):
            result.utilization["assigning"] = self.assigned_s / whole
        return result

    def chance(self, *what: object) -> Random:
        return Random(" ".join(str(part) for part in (self.scenario.seed, *what)))

    def next_worker(self) -> int:
        self._workers += 1
        return self._workers

    def picture(self, number: int, unit: int = -1) -> Picture:
        """The same whenever it is asked for."""
        traffic, output = self.scenario.traffic, self.scenario.costs.output_tokens
        if not (traffic.size_cv or traffic.length_cv or traffic.cache_hits or output % 1):
            return Picture(number, self.env.now, 1.0, int(output), False, unit)
        chance = Random(self.scenario.seed * 1_000_000_007 + number)
        size, length = (
            chance.gammavariate(1 / cv**2, cv**2) if cv else 1.0
            for cv in (traffic.size_cv, traffic.length_cv)
        )
        known = chance.random() < traffic.cache_hits
        tokens = max(1, _rounded(output * length, chance))
        return Picture(number, self.env.now, size, tokens, known, unit)

    def worker_ready(self, worker: Worker) -> None:
        self.ready.append(worker)
        if not self.first_ready.triggered:
            self.result.ready = self.env.now
            self.first_ready.succeed()

    def lose(self, worker: Worker) -> None:
        """What it had is known to be lost after a while."""
        if worker in self.ready:
            self._account(worker)
            self.ready.remove(worker)
        self.env.process(self._notice(worker, list(worker.stored)))

    def _notice(self, worker: Worker, pictures: list[Picture]) -> Process:
        yield self.env.timeout(self.scenario.failures.notice_s)
        self.source.lost(worker, pictures)

    def _account(self, worker: Worker) -> None:
        there = self.env.now - worker.since
        self.engine_s += worker.engine_s
        self.engines_s += there
        stored = sum(self.env.now - picture.begun for picture in worker.stored)
        self.cpu_s += worker.cpu_s + stored
        self.locations_s += worker.locations * there

    def change_present(self, by: int) -> None:
        now = self.env.now
        self._present_s += self.present * (now - self._present_since)
        self._present_since = now
        self.present += by

    def finish(self, picture: Picture) -> None:
        self.result.times[picture.number] += 1
        self._lost_at_finish = self.result.lost_nodes
        self.result.finished += 1
        for kill in list(self._kills):
            if self.result.finished >= kill.after * self.scenario.traffic.pictures:
                self._kills.remove(kill)
                self.env.process(self._kill(self.nodes[kill.node]))
        self.look_whether_over()

    def _kill(self, node: Node) -> Process:
        yield self.env.timeout(0)
        if node.is_up:
            node.lose()

    def look_whether_over(self) -> None:
        if not self.over.triggered and self.source.is_over:
            self.over.succeed()

    def look_whether_vain(self) -> None:
        """Raises OptionError, in `run`, where nodes are lost before they have done anything."""
        vain = self.result.lost_nodes - self._lost_at_finish
        if vain >= VAIN_MAX and not self.over.triggered:
            mtbf = self.scenario.failures.mtbf_s
            self.over.fail(
                OptionError(
                    f"mtbf_s: found {mtbf:g}, with which {vain} nodes were lost one after another "
                    "and no picture was answered, expected longer than it takes to load and to "
                    "answer some; or take a smaller unit"
                )
            )

    def _watch(self, every_s: float) -> Process:
        result = self.result
        while True:
            result.series.append((self.env.now, result.came, result.finished, result.rejected))
            yield self.env.timeout(every_s)


def simulate(scenario: Scenario, watch_s: float | None = None) -> Result:
    return Simulation(scenario, watch_s).run()
