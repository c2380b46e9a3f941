"""A real run of a graph: for its times, for NaN, and for each op's distance from its reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mtmd.base.cores import usable_cores
from mtmd.kernels.backends.backend import Backend
from mtmd.kernels.graph import Node
from mtmd.kernels.ops import OPS
from mtmd.kernels.plan.executor import Executor, Residency
from mtmd.kernels.plan.scheduler import Plan
from mtmd.kernels.report.facts import Check, NativeRun
from mtmd.kernels.report.from_plans import op_times
from mtmd.kernels.resources.threads import why_threads

LIMITS = {
    torch.float32: 1e-9,
    torch.bfloat16: 1e-4,
    torch.float16: 1e-5,
}  # NMSE of one op against fp32, per compute type
PACKED = 1e-7
"""The same of a product with quantized weights: a CPU keeps 16 bits of x, of each group's largest
value (kernels/cpu/native/layouts.py)."""
GROUP = 32
"""Numbers of x whose largest value is that of its integers in 8 bits, or 7."""
DEPTH = 300  # how much larger the error of a whole graph may be: what a step rounds, all others see
ROWS = 256  # rows of an attention node that are checked: the reference's scores are rows x keys
STEADY_RUNS = 3
QUOTA_S = (
    0.5  # of runs under a CPU quota: several of its periods, in which threads run and stand still
)
MAX_TRIES = 64  # runs until the number of threads is chosen: some of each that is tried


def run_check(
    graph: str, what: str, plan: Plan, residency: Residency, dtype: torch.dtype, batch: Any
) -> Check:
    """Run `plan` on a batch, as answers do, and without overwriting, under the eyes of the
    reference.
    """
    executor = Executor(plan, residency)
    devices = tuple({s.backend.space: s.backend for s in plan.steps}.values())
    first = _timed(executor, batch, devices)
    steady = _steady(lambda: _timed(executor, batch, devices), usable_cores().quota)
    watches = [_Stopwatch(devices) for _ in range(STEADY_RUNS)]
    for watch in watches:
        watch.start()
        executor.run(batch, watch)
    judge = _Judge()
    Executor(plan.intact, residency).run(batch, judge)
    worst = sorted(
        ((op, node, error) for op, (error, node) in judge.worst.items()), key=lambda row: -row[2]
    )
    best = [
        (runs[0][0], min(seconds for _, seconds in runs))
        for runs in zip(*(w.timeline for w in watches), strict=True)
    ]
    return Check(
        graph,
        what,
        judge.first_nan,
        tuple(worst),
        LIMITS[dtype],
        first * 1e3,
        steady * 1e3,
        op_times(best),
        _native(executor, batch, dtype) if plan.native is not None else None,
        {op: limit for op, limit in judge.limits.items() if LIMITS[dtype] < limit},
    )


def _native(executor: Executor, batch: Any, dtype: torch.dtype) -> NativeRun:
    """One run as programs, and one node by node from the same states."""
    from mtmd.kernels.cpu.native.compile import compiler

    states = [
        s.inputs[0].attrs["fill"](batch)
        for s in executor.plan.steps
        if s.node.op == "state_store" and s.inputs[0] is not None
    ]
    before = [state.clone() for state in states]
    result = executor.run(batch)[-1].double()
    for state, value in zip(states, before, strict=True):
        state.copy_(value)
    expected = executor.run(batch, lambda *_: None)[-1].double()
    power = float(expected.square().mean()) or 1.0
    choice = executor.threads
    assert choice is not None  # the plan runs as machine code
    for _ in range(MAX_TRIES):
        if choice.settled:
            break
        executor.run(batch)
    error, stats = float((result - expected).square().mean()) / power, compiler().stats
    return NativeRun(
        error,
        LIMITS[dtype] * DEPTH,
        stats.kernels,
        stats.from_cache,
        stats.compile_ms,
        stats.load_ms,
        stats.folder,
        choice.best,
        tuple((count, seconds * 1e3) for count, seconds in choice.seconds.items()),
        why_threads() or ("all there are" if choice.best == choice.counts[0] else ""),
    )


class _Judge:
    """An observer that compares each node with the reference on the same inputs, in fp32."""

    def __init__(self) -> None:
        self.first_nan: str | None = None
        self.worst: dict[str, tuple[float, str]] = {}
        self.limits: dict[str, float] = {}  # of those ops, what multiplies quantized weights

    def __call__(self, node: Node, value: Tensor, inputs: list[Tensor | None]) -> None:
        if self.first_nan is None and not bool(torch.isfinite(value).all()):
            self.first_nan = node.name
        if node.op == "copy" or node.alias:
            return
        if node.op == "attention":
            value, inputs = _some_rows(node, value, inputs)
        floats = [i.float() if i is not None and i.is_floating_point() else i for i in inputs]
        error = _error(node, value, floats)
        if node.attrs.get("int8") and not error <= PACKED:  # many rows, on most CPUs
            error = min(_error(node, value, [_rounded(node, floats[0]), *floats[1:]]), error)
        op = node.op
        if node.op != "embed" and any(k.endswith("quant") and v for k, v in node.attrs.items()):
            op = f"{node.op}, {'int8' if node.attrs.get('int8') else 'quantized'}"
            self.limits[op] = PACKED
        if not error <= self.worst.get(op, (-1.0, ""))[0]:
            self.worst[op] = error, node.name


def _error(node: Node, value: Tensor, inputs: list[Tensor | None]) -> float:
    """The NMSE of a node's result against its reference on `inputs`."""
    expected = OPS[node.op].reference(*inputs, **node.attrs)
    ours, theirs = value.cpu().double(), expected.cpu().double()  # not every device has fp64
    power = float(theirs.square().sum())
    return float((ours - theirs).square().sum()) / power if power else float(ours.square().sum())


def _rounded(node: Node, x: Tensor | None) -> Tensor:
    """x [..., K], float32, as products read it that round it (kernels/cpu/tiled/octets.py)."""
    from mtmd.kernels.cpu.native.compile import compiler
    from mtmd.kernels.cpu.tiled.octets import bits_of

    assert x is not None
    limit = 2 ** (bits_of(node.attrs["quant"], compiler().cpu.has) - 1) - 1
    groups = x.unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    numbers = (groups * (torch.full_like(largest, limit) / largest)).round()
    result: Tensor = (numbers * (largest * (1 / limit))).flatten(-2)
    return result


def _some_rows(
    node: Node, value: Tensor, inputs: list[Tensor | None]
) -> tuple[Tensor, list[Tensor | None]]:
    """Attention over fewer rows, spread over all: rows do not depend on each other where nothing
    limits what they see.
    """
    q, k, v, mask, bounds = (*inputs, None, None)[:5]
    assert q is not None
    if (
        q.shape[1] <= ROWS
        or mask is not None
        or bounds is not None
        or node.attrs.get("causal")
        or node.attrs.get("window")
    ):
        return value, inputs
    step = -(-q.shape[1] // ROWS)
    return value[:, ::step], [q[:, ::step], k, v]


class _Stopwatch:
    """An observer that notes how long each node took."""

    def __init__(self, devices: Sequence[Backend]):
        self.timeline: list[tuple[Node, float]] = []
        self.devices, self.last = devices, 0.0

    def start(self) -> None:
        _wait_for(self.devices)
        self.last = time.perf_counter()

    def __call__(self, node: Node, value: Tensor, inputs: list[Tensor | None]) -> None:  # noqa: ARG002
        _wait_for(self.devices)
        self.timeline.append((node, time.perf_counter() - self.last))
        self.last = time.perf_counter()


def _timed(executor: Executor, batch: Any, devices: Sequence[Backend]) -> float:
    _wait_for(devices)
    start = time.perf_counter()
    executor.run(batch)
    _wait_for(devices)
    return time.perf_counter() - start


def _steady(run: Callable[[], float], quota: float | None) -> float:
    """Seconds of a run at best; under a quota on average, as short ones may be over before it is
    used up.
    """
    seconds = [run() for _ in range(STEADY_RUNS)]
    if quota is None:
        return min(seconds)
    while sum(seconds) < QUOTA_S:
        seconds.append(run())
    return sum(seconds) / len(seconds)


def _wait_for(devices: Sequence[Backend]) -> None:
    for device in devices:
        device.synchronize()
