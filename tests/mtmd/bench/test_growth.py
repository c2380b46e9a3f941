"""How stages grow along an axis: in the table, in JSON and on the page, from made-up measurements."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mtmd.bench.html import render_page
from mtmd.bench.measure import Sample
from mtmd.bench.report import Machine, OpRow, Point, PredictedMemory, Report, Stage, growths
from mtmd.bench.table import render_table

MIB = 2**20
BASE = Point(256, 1, 64, 1, 2, 0)


def encode(side: int, added: int | None = None) -> Stage:
    """Time with the square of the patches, memory with the patches."""
    patches = (side // 16) ** 2
    at = Point(side, 1, 64, 1, 2, 0)
    return Stage("encode", at, Sample((patches**2 / 1e3,)), 64, None, None, added, patches)


def report(*stages: Stage) -> Report:
    machine = Machine("cpu", "2 threads", "Linux", "x", 2, "2", 10.0, 100.0, 50.0)
    memory = tuple(PredictedMemory(s, 1, (s // 16) ** 2, s * MIB, s * s * MIB) for s in (256, 512))
    return Report(
        "tiny", "mtmd bench", "0", "bf16", MIB, machine, 1, 8, 1.0, 1.0, None, 300 * MIB, BASE, stages, (),
        memory,
    )  # fmt: skip


SIDES = (256, 512, 1024)


def test_an_encode_grows_with_patches_in_time_and_memory():
    rows = [encode(side, added=side * side) for side in SIDES]
    result = {g.of: (g.against, round(g.exponent, 3)) for g in growths("resolution", rows)}
    assert result == {"time": ("patches", 2.0), "memory": ("patches", 1.0)}
    reported = report(*rows).asdict()["growth"]
    assert {
        "axis": "resolution", "stage": "encode", "of": "time", "against": "patches",
        "exponent": pytest.approx(2),
    } in reported  # fmt: skip
    assert "time ~ patches^2.00, memory ~ patches^1.00" in render_table(report(*rows))


def test_memory_that_the_process_had_already_is_left_out():
    rows = [encode(128, added=0), *(encode(side, added=side * side) for side in SIDES)]
    assert growths("resolution", rows)[1].exponent == pytest.approx(1)
    few = [encode(256, added=None), encode(512, added=None), encode(1024, added=5)]
    assert growths("resolution", few)[1].exponent is None
    assert "memory ~" not in render_table(report(*few))


def test_other_stages_grow_with_the_axis_and_in_time_alone():
    rows = [
        Stage("decode", Point(256, 1, context, 1, 2, 0), Sample((3.0,)), 1, None, MIB, MIB)
        for context in (64, 128, 256)
    ]
    (growth,) = growths("context", rows)
    assert (growth.of, growth.against) == ("time", "context")
    assert growth.exponent == pytest.approx(0, abs=1e-9)


def test_the_page_has_memory_measured_beside_predicted():
    page = render_page(report(*(encode(side, added=side * side) for side in SIDES)))
    assert page.count('aria-label="memory of an encode"') == 1
    chart = page[page.index('aria-label="memory of an encode"') :]
    assert "measured" in chart[: chart.index("</svg>")]
    assert "predicted" in chart[: chart.index("</svg>")]
    nothing = render_page(report(*(encode(side) for side in SIDES)))
    assert 'aria-label="memory of an encode"' not in nothing


def test_times_far_apart_are_drawn_by_their_logarithm():
    wide = render_page(report(*(encode(side) for side in SIDES)))
    near = render_page(report(encode(256), encode(272), encode(288)))

    def heights(page: str) -> list[float]:
        chart = page[page.index('aria-label="time against resolution"') :]
        return [float(y) for y in re.findall(r'cy="([\d.]+)"', chart[: chart.index("</svg>")])]

    first, second, third = heights(wide)
    assert first - second == pytest.approx(second - third, abs=0.2), "16 times each"
    first, second, third = heights(near)
    assert first - second < second - third


def test_more_than_the_roofline_is_explained_where_it_is_told():
    def decode(floor_ms):
        return Stage("decode", BASE, Sample((2.0,)), 1, floor_ms, None, None)

    reported = render_table(report(decode(3.0)))
    assert " 150%*" in reported
    assert "\n* above 100 %: weights, 1.00 MiB in all, lie in the processor's caches" in reported
    assert "Above 100 %: weights, 1.00 MiB in all, lie in" in render_page(report(decode(3.0)))
    assert "*" not in render_table(report(decode(1.0)))
    op = OpRow("decoder", "matmul", "8 x 8", 1, 1.0, 1.0, 1.0, 1.0, 2.18)
    reported = render_table(replace(report(decode(1.0)), ops=(op,)))
    assert " 218%*" in reported
    assert (
        "\n* above 100 %: operands of an op that is run by itself lie in the processor's"
        in reported
    )
