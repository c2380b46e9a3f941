"""Runs the stages of a model at every point that is asked for, in rounds, so that a machine that
changes its speed changes it for all points.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mtmd import __version__
from mtmd.base.cores import usable_cores
from mtmd.base.process_memory import resident_bytes
from mtmd.base.throttling import SustainedClock
from mtmd.bench.measure import Sample, busy
from mtmd.bench.report import AXES, Machine, OpRow, Point, PredictedMemory, Report, Stage
from mtmd.bench.subject import OpCost, Prefilled, Subject, Work
from mtmd.kernels.report.measured_speeds import RUNS, Ceilings, multiplies_bf16
from mtmd.kernels.resources.threads import requested_threads
from mtmd.model import Model
from mtmd.options.load import LoadOptions

# What an axis can change; the rest is as at the base.
STAGES_OF = {
    "resolution": ("preprocess", "encode", "prefill", "first token"),
    "images": ("preprocess", "encode", "prefill", "first token"),
    "context": ("prefill", "decode", "first token"),
    "batch": ("decode",),
    "threads": ("preprocess", "encode", "prefill", "decode", "first token"),
    "load": ("preprocess", "encode", "prefill", "decode", "first token"),
}
COPIES = (("copy", "off"), ("speculative copy", "auto"))
SIDES = (224, 448, 672, 896, 1344, 1792, 2688)  # of pictures whose memory is predicted
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """Describes what to measure. Each of `axes` has one value or more: the first of all is the
    base, and one axis at a time is varied from there. `images` empty: one, where the model sees.
    `copying`: also answers that copy their prompt, at the base. `stages` are those measured, empty:
    all.
    """

    model: str | None
    random_weights: str | None
    resolution: tuple[int, ...]
    images: tuple[int, ...]
    context: tuple[int, ...]
    batch: tuple[int, ...]
    threads: tuple[int, ...]
    load: tuple[int, ...]
    decode_tokens: int
    rounds: int
    detail: str
    roofline: bool
    command: str
    copying: bool = False
    stages: tuple[str, ...] = ()

    def base(self) -> Point:
        return Point(
            self.resolution[0],
            self.images[0] if self.images else 0,
            self.context[0],
            self.batch[0],
            self.threads[0] if self.threads else None,
            self.load[0],
        )

    def points(self) -> list[tuple[Point, tuple[str, ...]]]:
        """Each once, with its stages; the base comes first."""
        base = self.base()
        result = {base: self.measured("load")}
        for axis in AXES:
            for value in getattr(self, axis):
                if stages := self.measured(axis):
                    result.setdefault(replace(base, **{axis: value}), stages)
        return list(result.items())

    def measured(self, axis: str) -> tuple[str, ...]:
        return tuple(s for s in STAGES_OF[axis] if not self.stages or s in self.stages)


@dataclass
class _Run:
    """One measurement, while it is made."""

    tokens: int


@dataclass
class _Series:
    """Measurements of one stage at one point."""

    tokens: int
    work: Work | None
    ms: list[float] = field(default_factory=list)
    peaks: list[tuple[int, int]] = field(default_factory=list)
    patches: int = 0
    tiles: int = 0
    added: int | None = None


def run(
    plan: Plan,
    options: LoadOptions,
    progress: Progress = lambda _: None,
    settle: Callable[[Model], None] = lambda _: None,
) -> Report:
    """Load, `settle` the model as its caller does, measure the machine's ceilings, then all points
    in rounds, after one that is not counted. Raises MtmdError.
    """
    progress("loading")
    subject = Subject(
        plan.model,
        plan.random_weights,
        replace(options, parallel=max(plan.batch), threads=plan.base().threads),
        prompt=max(plan.context),
        resolution=max(plan.resolution),
        images=max(plan.images) if plan.images else None,
        decode=plan.decode_tokens,
        detail=plan.detail,
    )
    settle(subject.model)
    subject.threads(requested_threads())
    if not plan.images:
        plan = replace(plan, images=(int(subject.encoder is not None),))
    progress("measuring the machine's ceilings")
    bench = _Bench(subject, plan, subject.ceilings(RUNS))
    first_ms, loaded = 0.0, None
    for number in range(plan.rounds + 1):
        if number:
            bench.raise_ceilings()
        for point, stages in plan.points():
            progress(f"round {number} of {plan.rounds}: {_title(plan, point)}")
            clock = time.perf_counter()
            bench.visit(point, stages, counted=number > 0)
            if number == 0 and point == plan.base():
                first_ms, loaded = (time.perf_counter() - clock) * 1e3, resident_bytes()
    progress("measuring memory")
    bench.weigh()
    costs = []
    if plan.roofline:
        progress("looking at every op")
        costs = bench.watch()
    progress("predicting memory")
    predicted = _predicted(subject) if not plan.stages or "encode" in plan.stages else ()
    return Report(
        subject.name,
        plan.command,
        __version__,
        subject.dtype_name,
        subject.weight_bytes,
        bench.machine(),
        plan.rounds,
        plan.decode_tokens,
        subject.open_ms,
        first_ms,
        loaded,
        bench.peak_bytes,
        plan.base(),
        bench.results(),
        tuple(bench.row(cost) for cost in costs),
        tuple(predicted),
    )


class _Bench:
    """One model, its measurements so far, and what is known from one visit to the next."""

    def __init__(self, subject: Subject, plan: Plan, ceilings: Ceilings):
        self.subject, self.plan, self.ceilings = subject, plan, ceilings
        self.threads = requested_threads()
        on_cpu = subject.device.type == "cpu"
        self._clock = SustainedClock(usable_cores().quota if on_cpu else None)
        self.series: dict[tuple[str, Point], _Series] = {}
        self.peak_bytes: int | None = None
        self._pictures: dict[tuple[int, int], tuple[list[Any], list[Any]]] = {}

    def weigh(self) -> None:
        """Measure what each encode adds to the memory held, apart from its time: giving back what
        is free slows the next run down.
        """
        base, subject = self.plan.base(), self.subject
        for (name, point), series in self.series.items():
            if name != "encode":
                continue
            plans = subject.prepare(point.resolution, point.images)
            series.patches = subject.patches(plans)
            series.tiles = sum(len(plan.tiles) for plan in plans)
            if (point.threads, point.load) == (base.threads, base.load):
                peaks: list[tuple[int, int]] = []
                subject.give_back()
                with subject.peak(peaks):
                    subject.encode(plans)
                series.added = max((added for _, added in peaks), default=None)

    def raise_ceilings(self) -> None:
        """Measured once more, in every round: the machine may have been busy the first time."""
        self.ceilings = self.ceilings.best(self.subject.ceilings(1))

    def visit(self, point: Point, stages: Sequence[str], counted: bool) -> None:
        """One pass through the stages at one point."""
        self.subject.threads(point.threads or self.threads)
        with busy(point.load):
            spans = self._look(point, stages, counted)
            self._answer(point, stages, counted, spans)
            if self.plan.copying and point == self.plan.base():
                self._copy(point, counted)
            if "first token" in stages:
                self._first_token(point, counted)
        self.subject.threads(self.threads)

    def _look(self, point: Point, stages: Sequence[str], counted: bool) -> list[Any]:
        """-> the prompt as spans, its pictures encoded"""
        subject, seen = self.subject, (point.resolution, point.images)
        if point.images and ("encode" in stages or seen not in self._pictures):
            with self._timed("preprocess", point, counted and "preprocess" in stages):
                plans = subject.prepare(point.resolution, point.images)
            tokens = sum(plan.tokens for plan in plans)
            work = lambda: subject.encode_work(plans)  # noqa: E731
            with self._timed("encode", point, counted and "encode" in stages, tokens, work):
                self._pictures[seen] = plans, subject.encode(plans)
        return subject.prompt(point.context, *self._pictures.get(seen, ([], [])))

    def _answer(self, point: Point, stages: Sequence[str], counted: bool, spans: list[Any]) -> None:
        subject, read = self.subject, []
        if not {"prefill", "decode"}.intersection(stages):
            return
        total = sum(map(len, spans))
        work = lambda: subject.prefill_work(spans)  # noqa: E731
        with self._timed("prefill", point, counted and "prefill" in stages, total, work):
            read.append(subject.prefill(spans, 0))
        if "decode" not in stages:
            return
        read += [subject.prefill(spans, slot) for slot in range(1, point.batch)]
        ready = Prefilled(tuple(r for r, _ in read), tuple(token for _, token in read))
        steps = self.plan.decode_tokens
        step_work = lambda: subject.decode_work(ready)  # noqa: E731
        with self._timed("decode", point, counted, point.batch, step_work, steps):
            subject.decode(ready, steps)

    def _copy(self, point: Point, counted: bool) -> None:
        """Tokens of an answer that repeats its prompt, with speculative decoding and without."""
        for name, mode in COPIES:
            ms = self.subject.copy(mode)
            if counted:
                self.series.setdefault((name, point), _Series(1, None)).ms.append(ms)

    def _first_token(self, point: Point, counted: bool) -> None:
        self.subject.start_service()
        try:
            with self._timed("first token", point, counted) as run:
                run.tokens = self.subject.first_token(point.resolution, point.images, point.context)
        finally:  # its caches are no part of the other stages
            self.subject.stop_service()

    @contextmanager
    def _timed(
        self,
        name: str,
        point: Point,
        counted: bool,
        tokens: int = 0,
        work: Callable[[], Work] | None = None,
        runs: int = 1,
    ) -> Iterator[_Run]:
        """Time and peak memory of the body, which does the same `runs` times, and may say itself
        how many tokens it had. What a user waits
        for once, the first token, takes as long as it takes, under a CPU quota, too.
        """
        clock = SustainedClock(None) if name == "first token" else self._clock
        peaks: list[tuple[int, int]] = []
        run = _Run(tokens)
        self.subject.synchronize()
        with self.subject.peak(peaks):
            begun = clock.now()
            yield run
            self.subject.synchronize()
            ms = clock.since(begun) * 1e3 / runs
        for maximum, _ in peaks:
            self.peak_bytes = max(maximum, self.peak_bytes or 0)
        if counted:
            series = self.series.get((name, point))
            if series is None:
                series = _Series(run.tokens, work() if work else None)
                self.series[name, point] = series
            series.ms.append(ms)
            series.peaks += peaks

    def results(self) -> tuple[Stage, ...]:
        return tuple(
            Stage(
                name,
                point,
                Sample(tuple(s.ms)),
                s.tokens,
                self._floor_ms(s.work),
                max((maximum for maximum, _ in s.peaks), default=None),
                s.added,
                s.patches,
                s.tiles,
            )
            for (name, point), s in self.series.items()
        )

    def _floor_ms(self, work: Work | None) -> float | None:
        return None if work is None else self.ceilings.floor_ms(work, self.subject.dtype)

    def watch(self) -> list[OpCost]:
        """Every node of an encode and of a step of decode at the base."""
        base, stages = self.plan.base(), self.plan.measured("load")
        encode = self.subject.watch_encode() if "encode" in stages else []
        if "decode" not in stages:
            return encode
        spans = self._look(base, (), counted=False)
        read = [self.subject.prefill(spans, slot) for slot in range(base.batch)]
        ready = Prefilled(tuple(r for r, _ in read), tuple(token for _, token in read))
        return [*encode, *self.subject.watch_decode(ready)]

    def row(self, cost: OpCost) -> OpRow:
        seconds = max(cost.ms / 1e3, 1e-9)
        rate = self.ceilings.flops_per_s(self.subject.dtype)
        floor = max(cost.flops / rate, cost.bytes / self.ceilings.read_bytes_per_s)
        return OpRow(
            cost.graph,
            cost.op,
            cost.size,
            cost.count,
            cost.ms,
            cost.flops / seconds / 1e9,
            cost.bytes / seconds / 1e9,
            cost.flops / cost.bytes if cost.bytes else 0.0,
            floor / seconds,
        )

    def machine(self) -> Machine:
        subject, c = self.subject, self.ceilings
        return Machine(
            subject.backend_name,
            subject.device_name,
            f"{platform.system()} {platform.release()}",
            processor(),
            usable_cores().usable,
            torch.__version__,
            c.read_bytes_per_s / 1e9,
            c.bf16_flops_per_s / 1e9 if multiplies_bf16(subject.device) else None,
            c.fp32_flops_per_s / 1e9,
        )


def _predicted(subject: Subject) -> Iterator[PredictedMemory]:
    """Nothing is run for it. Sizes that come to the same tiles are told once."""
    if subject.encoder is None:
        return
    seen = set()
    for side in SIDES:
        flash, patches, tiles = subject.predicted_encode_bytes(side, "on")
        if (patches, tiles) not in seen:
            seen.add((patches, tiles))
            explicit, _, _ = subject.predicted_encode_bytes(side, "off")
            yield PredictedMemory(side, tiles, patches, flash, explicit)


def processor() -> str:
    """Return what Linux calls it; its kind elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.machine()


def _title(plan: Plan, point: Point) -> str:
    """The axes that have several values."""
    varied = [f"{a} {point.value(a)}" for a in AXES if len(getattr(plan, a)) > 1]
    return ", ".join(varied) or "all stages"
