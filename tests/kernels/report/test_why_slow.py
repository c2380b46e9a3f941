"""The warm-up answers why a model is slow though every op runs where it should."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mtmd.base.cores import Cores
from mtmd.base.throttling import Throttled
from mtmd.kernels.backends import Cpu
from mtmd.kernels.report import machine_facts as module
from mtmd.kernels.report.facts import Check, GraphFacts, NativeRun, OpTime
from mtmd.kernels.report.machine import MachineFacts
from mtmd.kernels.report.machine_facts import machine_facts, thread_warnings
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.kernels.report.why_slow import hindrances, reached

TWO = Cores(2)


def graph(name: str, gflop: float) -> GraphFacts:
    size = ("warm-up" if name == "encoder" else "decode", "1 x 896 x 896 px")
    return GraphFacts(name, *size, 9, {"cpu": 9}, 1, (), {"cpu": 1 << 30}, {}, {}, gflop)


def check(name: str, ms: float) -> Check:
    """A step that reads 1 GB; an encode."""
    what = "one image encoded" if name == "encoder" else "one token decoded"
    return Check(name, what, None, (), 1e-4, ms, ms, (OpTime("matmul", 9, 100.0, 1.0, 10.0),))


REPORT = WarmupReport(
    *("a model", "cpu", "2 threads", "bf16", (), ()),
    (graph("encoder", 100.0), graph("decoder", 2.0)),
    checks=(check("encoder", 1000.0), check("decoder", 80.0)),
    machine=MachineFacts(TWO, 2, 0.0, 16e9, 200e9),
)


def with_machine(**changes: object) -> WarmupReport:
    assert REPORT.machine is not None
    return replace(REPORT, machine=replace(REPORT.machine, **changes))


def to_do(report: WarmupReport) -> list[str]:
    lines = (line.strip() for line in str(report).splitlines())
    return [line for line in lines if line.startswith("to do:")]


def test_a_machine_that_does_what_it_can() -> None:
    text = str(REPORT)
    assert "result: everything runs on cpu as intended\n" in text and to_do(REPORT) == []
    assert "80.0 ms, 12 a second; 78% of this machine's memory rate (16.0 GB/s)" in text
    assert "1000.0 ms, 1 a second; 50% of this machine's bf16 rate (0.2 TFLOP/s)" in text


def test_more_threads_than_cores() -> None:
    report = with_machine(threads=64)
    assert to_do(report) == [
        "to do: --threads 2: 64 threads share 2 cores, and wait for each other"
    ]
    assert "as intended, and slower than it could: 64 threads share 2 cores\n" in str(report)
    quota = with_machine(threads=8, cores=Cores(64, 1.5))
    assert "--threads 2: 8 threads share 2 cores (a CPU quota of 1.5, of 64)" in to_do(quota)[0]
    assert report.fully_accelerated, "every op does run where it should"


def test_a_quota_that_is_used_up() -> None:
    some = {"cores": Cores(4, 1.5), "throttled": Throttled(20, 15)}
    (line,) = to_do(with_machine(**some))
    assert line.startswith("to do: a larger quota, as by `docker run --cpus`")
    assert "the CPU quota of 1.5 was used up in 75% of its periods, and then every thread" in line
    assert "slower than it could: the CPU quota of 1.5 was used up" in str(with_machine(**some))
    assert to_do(with_machine(**some | {"throttled": Throttled(20, 2)})) == []
    (line,) = to_do(with_machine(**some, threads=8))
    assert line.startswith("to do: --threads 2: 8 threads share 2 cores"), "which use it up"


def test_other_programs() -> None:
    (line,) = to_do(with_machine(others=1.7))
    assert line.startswith("to do: end what else computes") and "1.7 of 2 cores busy" in line
    assert to_do(with_machine(others=1.7, cores=Cores(64), threads=32)) == [], "there is room"
    assert to_do(with_machine(others=None)) == to_do(with_machine(others=0.2)) == []


def test_far_from_what_the_machine_can_do() -> None:
    slow = replace(REPORT, checks=(check("encoder", 1000.0), check("decoder", 800.0)))
    (line,) = to_do(slow)
    assert (
        line.startswith("to do: `mtmd bench` shows which op") and "the decoder reaches 8%" in line
    )
    assert len(hindrances(replace(slow, machine=MachineFacts(TWO, 64, 0.0, 16e9)))) == 1, (
        "known why"
    )
    assert reached(with_machine(read_bytes_per_s=None, flops_per_s=None)) == {}
    assert "caches" in str(reached(with_machine(read_bytes_per_s=1e9))["decoder"])


def test_the_best_number_of_threads_counts() -> None:
    native = NativeRun(0.0, 1.0, 1, 1, 0.0, 0.0, None, 1, ((2, 80.0), (1, 70.0)))
    decoder = replace(check("decoder", 80.0), native=native)
    result = reached(replace(REPORT, checks=(decoder,)))["decoder"]
    assert result.share == pytest.approx(1e9 / 16e9 / 0.07)


def test_the_times_of_a_step_are_one() -> None:
    """Of the number of threads that decodes, not of steps with others that were tried."""
    native = NativeRun(0.0, 1.0, 1, 1, 0.0, 0.0, None, 1, ((2, 128.54), (1, 58.51)))
    decoder = replace(check("decoder", 92.2), native=native)
    text = str(replace(REPORT, checks=(decoder,)))
    assert "one token decoded in 58.5 ms, 17 a second" in text and "in 92.2" not in text
    assert "steady 58.5 ms" in text and "decodes with 1 thread, measured: 2: 128.54 ms" in text
    slower = replace(decoder, steady_ms=50.0)
    assert slower.best_ms == 58.51, "measured once, by chance"


def test_the_table_of_ops_is_told_apart_from_the_step() -> None:
    """Ops by themselves take longer than machine code that does them all."""
    native = NativeRun(0.0, 1.0, 1, 1, 0.0, 0.0, None, 1, (), "as the model is very small")
    text = str(replace(REPORT, checks=(replace(check("decoder", 0.6), native=native),)))
    assert (
        "op by op, each by itself, as it is checked; as machine code the step takes 0.6 ms" in text
    )
    assert "decodes with 1 thread, as the model is very small" in text


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates only where they say something, and nothing where nothing was run."""
    requested = []
    monkeypatch.setattr(module, "_read_rate", lambda d: requested.append(d) or 5e9)
    monkeypatch.setattr(module, "_flops_rate", lambda d, t: requested.append((d, t)) or 6e9)
    monkeypatch.setattr(module, "_has_room", lambda _: True)

    class Watch:
        def cores(self) -> float:
            return 0.5

    report = replace(REPORT, machine=None)
    reported = machine_facts(Cpu(), TWO, 2, Watch(), report)
    assert reported == MachineFacts(TWO, 2, 0.5, 5e9, 6e9) and requested == ["cpu", ("cpu", "bf16")]
    assert machine_facts(Cpu(), TWO, 2, None, report) == MachineFacts(TWO, 2)
    small = replace(report, graphs=(replace(graph("decoder", 1.0), weight_bytes={"cpu": 1}),))
    assert machine_facts(Cpu(), TWO, 2, Watch(), small) == MachineFacts(TWO, 2, 0.5)

    class Throttling:
        def throttled(self) -> Throttled:
            return Throttled(9, 3)

    reported = machine_facts(Cpu(), TWO, 2, Watch(), small, Throttling())
    assert reported is not None and reported.throttled == Throttled(9, 3) and reported.is_limited


def test_a_receipt_warns_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "requested_threads", lambda: 64)
    (line,) = thread_warnings(Cpu(), TWO)
    assert "64 threads share 2 cores" in line and "threads=2" in line
    assert thread_warnings(Cpu(), Cores(64)) == ()
    monkeypatch.setattr(module, "requested_threads", lambda: None)
    assert thread_warnings(Cpu(), TWO) == ()
    assert torch.get_num_threads() >= 1
