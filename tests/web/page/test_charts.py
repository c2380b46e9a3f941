from __future__ import annotations

from dataclasses import replace

from fake_service import FakeService

from mtmd.kernels.report.facts import (
    Check,
    CopyFact,
    FitFacts,
    FlashFacts,
    GraphFacts,
    LayersFacts,
    LayoutFacts,
    MemoryFacts,
    OpTime,
    RefusedOp,
    TensorFact,
)
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.web.app import create_app
from mtmd.web.page import charts
from mtmd.web.settings import ServerSettings


def graph(label, compute, ops):
    copies, weights = (CopyFact("c", "gpu", "cpu", 4096),), {"gpu": 3 << 20, "cpu": 1 << 10}
    return GraphFacts(
        "encoder",
        label,
        "1 x 96 x 96 px",
        10,
        ops,
        3,
        copies,
        weights,
        {"gpu": 1 << 20},
        {"gpu": compute},
        0.5,
    )


def report(checks=()):
    refused = RefusedOp(
        "encoder",
        "conv<b>",
        "v.conv",
        2,
        "gpu",
        "kernel size 7 > 5",
        "cpu",
        (TensorFact("dst", "fp32", (1, 2, 3), (6, 3, 1)),),
    )
    flash = FlashFacts("encoder", "auto", "mixed", 6, (), ("v.blk.0.attn",))
    return WarmupReport(
        "a model",
        "gpu",
        "A GPU",
        "bf16",
        (flash,),
        (refused,),
        (graph("warm-up", 1 << 20, {"gpu": 8, "cpu": 2}), graph("largest", 4 << 20, {"gpu": 10})),
        checks=checks,
    )


def test_bars_are_shares_of_the_longest():
    memory, nodes = charts.of(report())[0], charts.of(report())[2]
    small, large = memory.bars
    assert memory.title == "Memory on gpu" and [p.length for p in large.parts] == [
        3 / 8,
        1 / 8,
        4 / 8,
    ]
    assert (
        [p.start for p in large.parts] == [0, 3 / 8, 4 / 8]
        and sum(p.length for p in small.parts) == 5 / 8
        and large.total == "8.00 MiB"
    )
    assert [(p.name, p.style, p.value) for p in nodes.bars[0].parts] == [
        ("gpu", "a", "8"),
        ("cpu", "warn", "2"),
    ]


def test_a_report_that_ran_has_times_too():
    ops = tuple(OpTime(f"op{i}", 1, 20.0 - i, 1.0, 1.0) for i in range(15))
    titles = {
        c.title: c
        for c in charts.of(
            report((Check("encoder", "one image", None, (), 1e-9, 40.0, 12.5, ops),))
        )
    }
    assert [b.total for b in titles["Time of one run"].bars] == ["40 ms", "12 ms"]
    last = titles["Time by op, encoder"].bars[-1]
    assert (last.label, last.total) == ("others", f"{8 + 7 + 6} ms") and len(
        titles["Time by op, encoder"].bars
    ) == 13


def test_sizes_are_readable():
    assert [charts.readable_bytes(n) for n in (0, 1023, 1536, 5 << 20, 3 << 30, 200 << 20)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "5.00 MiB",
        "3.00 GiB",
        "200 MiB",
    ]


def test_the_report_is_written_out_with_what_was_refused_and_why():
    made = report(
        (Check("encoder", "one image", "v.nan", (("conv", "v.conv", 1.0),), 1e-9, 1.0, 1.0, ()),)
    )
    html = (
        create_app(FakeService(), ServerSettings(), warmup=made)
        .test_client()
        .get("/api/report")
        .get_data(as_text=True)
    )
    for words in (
        "A GPU, bf16",
        "mixed",
        "1 on another backend",
        "not fully accelerated",
        "conv&lt;b&gt;",
        "kernel size 7 &gt; 5",
        "[6, 3, 1]",
        "NaN first at v.nan",
        "1, 4.00 KiB",
        "Memory on cpu",
    ):
        assert words in html
    assert "<b>" not in html


def test_layers_over_devices_and_what_was_refused_for_them_are_written_out():
    memory = MemoryFacts("gpu", 3 << 20, 0, 1 << 20, 0, 2 << 20)
    made = replace(
        report(),
        layers=(LayersFacts("gpu", 0, 3, False), LayersFacts("gpu2", 4, 5, True)),
        fit=FitFacts((LayoutFacts("on gpu alone", (memory,)), LayoutFacts("layers")), "layers"),
    )
    client = create_app(FakeService(), ServerSettings(), warmup=made).test_client()
    html = " ".join(client.get("/api/report").get_data(as_text=True).split())
    assert "<dt>Layers, gpu2</dt><dd>4 to 5, encoder</dd>" in html
    assert "<dt>Refused, on gpu alone</dt> <dd>gpu: 4.00 MiB of 2.00 MiB, does not fit</dd>" in html
    assert "<dt>Chosen, layers</dt>" in html
