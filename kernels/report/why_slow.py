"""Why a model may be slow though everything runs where it should: threads, other programs, and how
near its times come to what the machine can do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mtmd.base.text import plural
from mtmd.kernels.report.facts import WarmupFacts
from mtmd.kernels.report.machine import thread_report

# Of weights: fewer may lie in a processor's cache, and how fast memory is read says nothing.
MIN_BYTES = 128 << 20
MIN_GFLOP = 10.0  # of an encode: in smaller ones, products are not what takes the time
SLOW = 0.25  # of what the machine can do, below which the report says so


@dataclass(frozen=True)
class Reached:
    """`share` of what the machine can do, which is `ceiling`, in words."""

    share: float
    ceiling: str

    def __str__(self) -> str:
        if self.share > 1:
            return f"more than this machine's {self.ceiling}: some comes from its caches"
        return f"{self.share:.0%} of this machine's {self.ceiling}"


def step_bytes(report: WarmupFacts) -> float:
    """Return what a step of decoding reads and writes, as the warm-up has counted it; 0 where it
    has run none, or the weights are so few that caches may hold them.
    """
    weights = [sum(g.weight_bytes.values()) for g in report.graphs if g.graph == "decoder"]
    if max(weights, default=0) < MIN_BYTES:
        return 0.0
    steps = [check for check in report.checks if check.graph == "decoder"]
    return sum(op.gb_per_s * 1e9 * op.ms / 1e3 for check in steps[:1] for op in check.ops)


def encode_flops(report: WarmupFacts) -> float:
    """Return the FLOPs of the encode that was run; 0 where none was, or it is small."""
    if all(check.graph != "encoder" for check in report.checks):
        return 0.0
    result = [g.gflop for g in report.graphs if g.graph == "encoder" and g.label == "warm-up"]
    return sum(result[:1]) * 1e9 if sum(result[:1]) >= MIN_GFLOP else 0.0


def reached(report: WarmupFacts) -> dict[str, Reached]:
    """Return by graph how much of what the machine can do; without those of which nothing is
    known.
    """
    machine, result = report.machine, dict[str, Reached]()
    if machine is None:
        return result
    for check in report.checks:
        seconds = check.best_ms / 1e3
        if not seconds:
            continue
        if check.graph == "decoder" and machine.read_bytes_per_s and (work := step_bytes(report)):
            rate = machine.read_bytes_per_s
            reported = f"memory rate ({rate / 1e9:.1f} GB/s)"
        elif check.graph == "encoder" and machine.flops_per_s and (work := encode_flops(report)):
            rate = machine.flops_per_s
            reported = f"{report.dtype} rate ({rate / 1e12:.3g} TFLOP/s)"
        else:
            continue
        result[check.graph] = Reached(work / rate / seconds, reported)
    return result


def hindrances(report: WarmupFacts) -> Sequence[tuple[str, str]]:
    """(what makes it slow, what to do about it), of the machine; empty where nothing does."""
    return tuple(_hindrances(report)) if report.machine is not None else ()


def _hindrances(report: WarmupFacts) -> Iterator[tuple[str, str]]:
    machine = report.machine
    assert machine is not None
    cores = machine.cores
    if machine.oversubscribed:
        what = thread_report(machine.threads, cores)
        yield what, f"--threads {cores.usable}: {what}, and wait for each other"
    elif machine.is_limited:
        assert machine.throttled is not None
        quota, share = cores.quota or 0.0, machine.throttled.share
        what = f"the CPU quota of {quota:g} was used up in {share:.0%} of its periods"
        yield (
            what,
            f"a larger quota, as by `docker run --cpus` or a pod's `limits.cpu`: {what}, and then "
            "every thread stands still until the next one",
        )
    if machine.crowded:
        what = f"other programs keep {machine.others:.1f} of {plural(cores.affinity, 'core')} busy"
        yield what, f"end what else computes, and measure again: {what}"
    if machine.oversubscribed or machine.is_limited or machine.crowded:
        return  # which are reason enough
    for graph, result in reached(report).items():
        if result.share < SLOW:
            yield (
                f"the {graph} is far from what the machine can do",
                f"`mtmd bench` shows which op takes the time: the {graph} reaches {result}",
            )
