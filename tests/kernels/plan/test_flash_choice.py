"""The warm-up's decision: setting by setting, with all attention nodes taken, some refused, or
all.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from random_graphs import Source, evaluate, given, transformer

from mtmd.base.errors import OptionError
from mtmd.kernels import ops
from mtmd.kernels.backends import Cpu, Limited, Reference
from mtmd.kernels.graph import Node, toposort
from mtmd.kernels.plan.executor import Executor, Residency
from mtmd.kernels.plan.flash_choice import AttentionForm, FlashChoice, choose
from mtmd.kernels.plan.scheduler import Override, Plan, make_plan
from mtmd.kernels.report.facts import GraphFacts
from mtmd.kernels.report.from_plans import graph_facts, placement
from mtmd.kernels.report.warmup_report import WarmupReport

SHAPE = {"rows": 5, "width": 16, "heads": 2, "ffn": 12}


def build(form: AttentionForm) -> list[list[Node]]:
    """Two layers, asked about with a batch of one and of four."""
    return [[transformer(Source(), batch=batch, attention=form, **SHAPE)] for batch in (1, 4)]


def attention_nodes(form: AttentionForm) -> dict[str, str]:
    return {n.name: n.op for n in toposort(*build(form)[0]) if n.op in ("attention", "attn_mix")}


def chosen(setting: str, *rules: str, overrides: Sequence[Override] = ()) -> FlashChoice:
    return choose(build, [Limited(Cpu(), rules), Cpu(), Reference()], overrides, setting)


ALL, FLASH, EXPLICIT = ("blk.0.attn", "blk.1.attn"), "attention", "attn_mix"


@pytest.mark.parametrize(
    "setting, rules, state, forms, refused",
    [
        ("auto", (), "on", (FLASH, FLASH), ()),
        ("auto", (r"attention:/blk\.1/",), "mixed", (FLASH, EXPLICIT), ALL[1:]),
        ("auto", ("attention",), "off", (EXPLICIT, EXPLICIT), ALL),
        ("auto", ("attention:batch>1",), "off", (EXPLICIT, EXPLICIT), ALL),
        ("auto", ("gelu",), "on", (FLASH, FLASH), ()),
        ("on", (), "on", (FLASH, FLASH), ()),
        ("on", (r"attention:/blk\.1/",), "on", (FLASH, FLASH), ALL[1:]),
        ("on", ("attention",), "on", (FLASH, FLASH), ALL),
        ("off", (), "off", (EXPLICIT, EXPLICIT), ()),
        ("off", ("attention",), "off", (EXPLICIT, EXPLICIT), ()),
    ],
)
def test_the_table(setting, rules, state, forms, refused):
    choice = chosen(setting, *rules)
    assert choice.state == state and choice.setting == setting
    assert attention_nodes(choice.form) == dict(zip(ALL, forms, strict=True))
    assert tuple(r.node.name for r in choice.refusals) == refused
    assert all(r.backend == "limited" for r in choice.refusals)


def test_a_refusal_at_one_size_only_names_that_size():
    refusal = chosen("auto", "attention:batch>1").refusals[0]
    assert refusal.reason == "batch 4 is not supported" and refusal.node.shape[0] == 4


def test_rebuilt_nodes_stay_on_the_device_and_kept_ones_run_elsewhere():
    backends = [Limited(Cpu(), [r"attention:/blk\.1/"]), Cpu(), Reference()]
    for setting, elsewhere in (("auto", []), ("on", ["blk.1.attn"])):
        choice = choose(build, backends, (), setting)
        plan = make_plan(build(choice.form)[0], backends)
        result = [
            s.node.name
            for s in plan.steps
            if s.backend.name != "limited" and s.node.op != "copy" and not s.node.alias
        ]
        assert result == elsewhere


def test_every_choice_computes_the_same():
    batch = {"x": torch.randn(4, 5, 16)}
    expected = evaluate(build(AttentionForm())[1], batch)[0]
    for setting in ("auto", "on", "off"):
        for rules in ((), (r"attention:/blk\.1/",), ("attention",)):
            backends = [Limited(Cpu(), rules), Cpu(), Reference()]
            form = choose(build, backends, (), setting).form
            actual = Executor(make_plan(build(form)[1], backends), Residency()).run(batch)[0]
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_nodes_that_an_override_places_are_not_asked_about():
    choice = chosen("auto", "attention", overrides=[Override.parse(r"blk\.0\.attn$=cpu")])
    assert choice.state == "mixed" and choice.form.explicit == {"blk.1.attn"}


def test_flash_that_nothing_takes_is_rebuilt():
    choice = choose(build, [Limited(Cpu(), ["attention"])], (), "auto")
    assert choice.state == "off"
    assert make_plan(build(choice.form)[0], [Limited(Cpu(), ["attention"])]).refusals == ()


def test_options_reach_both_forms():
    q, bounds = given("q", 1, 3, 2, 4), given("b", 3, 2, dtype=torch.int32)
    mask = given("m", 3, 3)
    batch = {
        "q": torch.randn(1, 3, 2, 4),
        "b": torch.tensor([[0, 1], [1, 2], [2, 0]]).int(),
        "m": torch.randn(3, 3),
    }
    values = []
    for form in (
        AttentionForm(),
        AttentionForm(all_explicit=True),
        AttentionForm(frozenset({"a"})),
    ):
        node = form(q, q, q, mask, bounds, name="a", scale=0.3, softcap=2.0, causal=True, window=2)
        assert node.name == "a"
        values.append(evaluate([node], batch)[0])
    assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])
    names = [
        n.name
        for n in toposort(AttentionForm(all_explicit=True)(q, q, q, name="a", scale=1.0))
        if not n.is_leaf
    ]
    assert names == ["a.scores", "a.softmax", "a"]


def test_a_setting_that_is_none_is_refused():
    with pytest.raises(OptionError, match="'maybe': expected one of auto, on, off"):
        chosen("maybe")


def test_a_graph_without_attention_is_no_flaw():
    choice = choose(
        lambda _: [[ops.gelu(given("x", 3), approximate="none", name="a")]], [Cpu()], (), "auto"
    )
    assert choice.total == 0 and choice.refusals == () and choice.form == AttentionForm()


def report(setting: str, *rules: str, overrides: Sequence[Override] = ()) -> WarmupReport:
    backends = [Limited(Cpu(), rules), Cpu(), Reference()]
    choice = choose(build, backends, overrides, setting)
    plans: list[Plan] = [make_plan(outputs, backends, overrides) for outputs in build(choice.form)]
    facts: list[GraphFacts] = [
        graph_facts("encoder", label, "", plan)
        for label, plan in zip(("warm-up", "largest"), plans, strict=True)
    ]
    located = placement("encoder", choice, tuple(plans), ("limited",))
    return WarmupReport(
        "demo", "limited", "cpu", "fp32", (located.flash,), located.refused, tuple(facts)
    )


@pytest.mark.parametrize(
    "setting, rules, overrides, accelerated, verdict",
    [
        ("auto", (), (), True, "everything runs on limited"),
        ("auto", ("attention",), (), False, "2 nodes refused; flash attention off"),
        ("on", ("attention",), (), False, "2 nodes refused"),
        ("off", (), (), False, "flash attention off in the encoder"),
        ("auto", ("gelu",), (), False, "2 nodes refused"),
        ("auto", (), (r"blk\.1\.ffn_gelu=cpu",), False, "1 node placed elsewhere by override"),
        ("auto", (), (r"blk\.1\.attn$=cpu",), False, "placed elsewhere by override"),
    ],
)
def test_fully_accelerated_means_every_node_on_the_device(
    setting, rules, overrides, accelerated, verdict
):
    match = report(setting, *rules, overrides=[Override.parse(t) for t in overrides])
    assert match.fully_accelerated == accelerated
    (result,) = [line for line in str(match).splitlines() if line.startswith("result: ")]
    assert verdict in result
    assert match.asdict()["fully_accelerated"] == accelerated


def test_a_node_refused_at_every_size_is_told_of_once():
    refused = report("auto", "gelu", "attention:batch>1").refused
    assert [(r.op, r.count, r.reason) for r in refused] == [
        ("attention", 2, "batch 4 is not supported"),
        ("gelu", 2, "op gelu is not supported"),
    ]
    dst, *operands = refused[0].tensors
    assert (dst.role, dst.shape) == ("dst", (4, 5, 2, 8)) and [t.role for t in operands] == [
        "q",
        "k",
        "v",
    ]
    assert refused[0].runs_on == "limited, as explicit attention" and refused[1].runs_on == "cpu"
