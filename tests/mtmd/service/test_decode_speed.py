"""How fast an answer is written beside what memory allows, out of reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtmd.kernels.report.facts import Check, GraphFacts, NativeRun, OpTime
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.kernels.report.why_slow import step_bytes
from mtmd.service.decode_speed import decode_speed

GIB = 1 << 30
GRAPH = GraphFacts(
    "decoder", "decode", "1 token", 1, {"cpu": 1}, 1, (), {"cpu": 2 * GIB}, {}, {}, 0.0
)
# 40 ms at 40 GB/s, and 10 ms that read nothing: 1.6 GB a token
OPS = (OpTime("matmul", 9, 40.0, 1.0, 40.0), OpTime("rope", 3, 10.0, 1.0, 0.0))
STEP = Check("decoder", "one token decoded", None, (), 1e-4, 90.0, 50.0, OPS)
REPORT = WarmupReport("a model", "cpu", "a CPU", "bf16", (), (), (GRAPH,), (STEP,))


def test_what_is_reached_of_what_memory_allows():
    speed = decode_speed(REPORT, 64e9)
    assert speed.tokens_per_s == 20 and speed.most_tokens_per_s == pytest.approx(40)
    assert "at 20 tokens/s" in str(speed) and "64 GB/s" in str(speed) and "50%" in str(speed)


def test_the_number_of_threads_that_is_best_counts():
    native = NativeRun(0.0, 1.0, 1, 1, 0.0, 0.0, None, 2, ((1, 60.0), (2, 25.0)))
    report = replace(REPORT, checks=(replace(STEP, native=native),))
    assert decode_speed(report, 64e9).tokens_per_s == 40


@pytest.mark.parametrize(
    "report",
    [
        replace(REPORT, checks=()),
        replace(REPORT, graphs=(replace(GRAPH, weight_bytes={"cpu": 10 << 20}),)),
        replace(REPORT, checks=(replace(STEP, graph="encoder"),)),
    ],
    ids=["nothing was run", "weights that caches hold", "an encoder"],
)
def test_where_memory_says_nothing(report):
    assert step_bytes(report) == 0 and decode_speed(report, 64e9) is None
