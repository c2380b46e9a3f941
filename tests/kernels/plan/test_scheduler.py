"""Placement: what runs where, what is copied, what is freed and overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from random_graphs import Batch, RandomGraph, Source, device, evaluate, given
from torch import Tensor

from mtmd.base.errors import OptionError, PlacementError
from mtmd.kernels import ops
from mtmd.kernels.backends import Backend, Cpu, Reference
from mtmd.kernels.graph import Node, toposort
from mtmd.kernels.ops import OPS
from mtmd.kernels.plan.executor import Executor, Residency
from mtmd.kernels.plan.scheduler import Override, Plan, make_plan

pytestmark = pytest.mark.usefixtures("poisoned")


def names(nodes: Sequence[Node]) -> list[str]:
    return [n.name for n in nodes]


def small(source: Source | None = None) -> Node:
    """x -> up -> act -> down -> out = down + up"""
    source = source or Source()
    up = ops.matmul(given("x", 3, 5), source.node("up.weight", 7, 5), name="up")
    act = ops.gelu(up, approximate="none", name="act")
    down = ops.matmul(act, source.node("down.weight", 7, 7), name="down")
    return ops.add(down, up, name="out")


def test_without_a_seam_there_is_one_split_and_no_copy():
    plan = make_plan([small()], [device("gpu"), Cpu()])
    assert [(s.backend.name, names([t.node for t in s.steps])) for s in plan.splits] == [
        ("gpu", ["up", "act", "down", "out"])
    ]
    assert plan.copies == () and plan.refusals == () and plan.nodes == 4


def test_a_refused_node_makes_two_seams_each_with_its_copy():
    plan = make_plan([small()], [device("gpu", "gelu"), Cpu()])
    reported = [
        (s.backend.name, names(s.copies), names([t.node for t in s.steps])) for s in plan.splits
    ]
    assert reported == [
        ("gpu", [], ["up"]),
        ("cpu", ["up@cpu"], ["act"]),
        ("gpu", ["act@gpu"], ["down", "out"]),
    ]
    assert [
        (c.name, c.attrs["source"], c.attrs["destination"], c.type.bytes) for c in plan.copies
    ] == [("up@cpu", "gpu", "cpu", 3 * 7 * 4), ("act@gpu", "cpu", "gpu", 3 * 7 * 4)]
    assert [(r.node.name, r.backend, r.reason) for r in plan.refusals] == [
        ("act", "gpu", "op gelu is not supported")
    ]
    assert plan.nodes == 4 and plan.backend_of["act"].name == "cpu"


def test_a_value_is_copied_once_to_each_memory_however_often_it_is_used_there():
    x = ops.gelu(given("x", 4), approximate="none", name="x1")
    twice = ops.add(
        ops.softcap(x, cap=1.0, name="c1"), ops.softcap(x, cap=2.0, name="c2"), name="both"
    )
    far = ops.add(x, ops.add(x, x, name="on_far"), name="on_far_too")
    plan = make_plan(
        [twice, far],
        [device("gpu", "softcap", "*:/on_far/"), device("far", "softcap"), Cpu()],
        [Override.parse("both=gpu")],
    )
    assert sorted(names(plan.copies)) == ["c1@gpu", "c2@gpu", "x1@cpu", "x1@far"]


def test_backends_of_one_memory_need_no_copies():
    class Picky(Reference):
        def rejects(self, node: Node) -> str | None:
            return "only products" if node.op != "matmul" else None

    plan = make_plan([small()], [Picky(), Cpu()])
    assert [s.backend.name for s in plan.splits] == ["reference", "cpu", "reference", "cpu"]
    assert plan.copies == ()


def test_views_stay_where_their_source_lies():
    flat = ops.reshape(
        ops.softcap(given("x", 4, 6), cap=1.0, name="capped"), shape=(24,), name="flat"
    )
    plan = make_plan(
        [ops.gelu(flat, approximate="none", name="act")], [device("gpu", "softcap"), Cpu()]
    )
    assert {name: b.name for name, b in plan.backend_of.items()} == {
        "capped": "cpu",
        "flat": "cpu",
        "flat@gpu": "gpu",
        "act": "gpu",
    }


def test_an_override_moves_a_view_too():
    x = ops.softcap(given("x", 4, 6), cap=1.0, name="capped")
    plan = make_plan(
        [ops.reshape(x, shape=(24,), name="flat")],
        [device("gpu"), Cpu()],
        [Override.parse("flat=cpu")],
    )
    assert names(plan.copies) == ["capped@cpu"] and plan.backend_of["flat"].name == "cpu"


def test_overrides_go_by_node_name_by_weight_name_and_first_come_first():
    backends: list[Backend] = [device("gpu"), Cpu(), Reference()]
    overrides = [
        Override.parse(t) for t in (r"down\.weight=reference", "^(up|down)$=cpu", "up=gpu")
    ]
    plan = make_plan([small()], backends, overrides)
    assert {s.node.name: s.backend.name for s in plan.steps if s.node.op != "copy"} == {
        "up": "cpu",
        "act": "gpu",
        "down": "reference",
        "out": "gpu",
    }


def test_an_override_goes_before_a_refusal_of_the_preferred_backend():
    plan = make_plan([small()], [device("gpu", "gelu"), Cpu()], [Override.parse("act=cpu")])
    assert plan.refusals == () and plan.backend_of["act"].name == "cpu"


@pytest.mark.parametrize(
    "text", ["", "act", "=cpu", "act=", "a(=cpu", "a{99999999999999999999}=cpu"]
)
def test_an_override_that_is_none_is_refused(text):
    with pytest.raises(OptionError, match="override"):
        Override.parse(text)


def test_an_override_may_hold_equals_signs():
    assert Override.parse("a=b=cpu") == Override.parse("a=b=cpu")
    assert (Override.parse("a=b=cpu").pattern.pattern, Override.parse("a=b=cpu").target) == (
        "a=b",
        "cpu",
    )


def test_an_unknown_target_is_refused_with_those_there_are():
    with pytest.raises(OptionError, match="'tpu': expected one of gpu, cpu, reference"):
        make_plan([small()], [device("gpu"), Cpu(), Reference()], [Override.parse("nothing=tpu")])


def test_an_override_may_name_the_kind_of_a_device():
    plan = make_plan(
        [small()], [Cpu(), device("cuda:1"), Reference()], [Override.parse("^act$=cuda")]
    )
    assert plan.backend_of["act"].name == "cuda:1" and plan.backend_of["up"].name == "cpu"


def test_an_override_to_a_backend_that_rejects_is_refused_with_its_reason():
    with pytest.raises(
        PlacementError,
        match=r"gpu, as the override asks, does not take act = gelu .* \(gpu: op gelu is not supported\)",
    ):
        make_plan([small()], [device("gpu", "gelu"), Cpu()], [Override.parse("act=gpu")])


def test_a_node_that_nothing_takes_is_refused_with_every_reason():
    with pytest.raises(
        PlacementError,
        match=r"no backend does take act .*gpu: op gelu is not supported; far: head|far: op gelu",
    ):
        make_plan([small()], [device("gpu", "gelu"), device("far", "gelu")])


def test_a_weight_is_counted_once_in_each_memory_that_reads_it():
    source = Source()
    x = given("x", 3, 5)
    first = ops.matmul(x, source.node("tied", 5, 5), name="first")
    second = ops.matmul(
        first, source.node("tied", 5, 5), name="second"
    )  # another node of the same weight
    third = ops.matmul(second, source.node("other", 5, 5), name="third")
    plan = make_plan([third], [device("gpu"), Cpu()])
    assert plan.weight_bytes == {"gpu": 2 * 100}
    split = make_plan([third], [device("gpu", "*:/second/"), Cpu()])
    assert split.weight_bytes == {"gpu": 200, "cpu": 100}
    residency = Residency()
    Executor(split, residency)
    Executor(plan, residency)
    assert residency.bytes == {"gpu": 200, "cpu": 100} and source.reads == {"tied": 2, "other": 1}


def run_poisoned(plan: Plan, batch: Batch) -> list[Tensor]:
    """The plan by its own words, memory filled with NaN as soon as no value that is still held lies
    in it.
    """
    batch = {name: t.clone() for name, t in batch.items()}
    leaves = {
        key: key[0].attrs["fill"](batch)
        if key[0].op == "input"
        else key[0].attrs["source"].read(key[0].name, key[0].dtype)
        for key in plan.leaves
    }
    values: dict[Node, Tensor] = {}
    for step in plan.steps:
        inputs = [
            None if i is None else leaves[i, step.backend.space] if i.is_leaf else values[i]
            for i in step.inputs
        ]
        if step.node.op == "copy":
            values[step.node] = inputs[0].clone()
        else:
            values[step.node] = step.backend.lower(step.node, step.in_place)(*inputs)
        if step.in_place:
            assert values[step.node].data_ptr() == inputs[0].data_ptr()
        for node in step.frees:
            storage = values.pop(node).untyped_storage()
            stored = {t.untyped_storage()._cdata for t in (*values.values(), *leaves.values())}
            if storage._cdata not in stored:
                storage.copy_(
                    torch.full((storage.nbytes(),), 255, dtype=torch.uint8).untyped_storage()
                )  # all bits set is NaN
    saved = {values[o].untyped_storage()._cdata for o in plan.outputs}
    assert {t.untyped_storage()._cdata for t in values.values()} == saved, (
        "all memory but that of the outputs is freed"
    )
    return [values[o] for o in plan.outputs]


def placements(graph: RandomGraph, rng: Random) -> list[tuple[list[Backend], list[Override]]]:
    nodes = [n for n in toposort(*graph.outputs) if not n.is_leaf]
    refused = [f"*:/^{n.name}$/" for n in nodes if rng.random() < 0.3]
    scattered = [
        Override.parse(f"^{n.name}$={rng.choice(('gpu', 'far', 'cpu', 'reference'))}")
        for n in nodes
        if rng.random() < 0.5
    ]
    return [
        ([Reference()], []),
        ([Cpu(native=False)], []),
        ([device("gpu", *refused), Cpu(native=False), Reference()], []),
        ([device("gpu"), device("far"), Cpu(native=False), Reference()], scattered),
    ]


@pytest.mark.parametrize("seed", range(40))
def test_any_split_of_a_random_graph_gives_the_reference(seed):
    graph = RandomGraph(seed)
    expected = evaluate(graph.outputs, graph.batch)
    for backends, overrides in placements(graph, Random(seed)):
        plain, over = (
            make_plan(graph.outputs, backends, overrides, overwrite) for overwrite in (False, True)
        )
        assert not any(s.in_place for s in plain.steps)
        runs = [run_poisoned(plain, graph.batch), run_poisoned(over, graph.batch)]
        for plan in (plain, over):
            batch = {name: t.clone() for name, t in graph.batch.items()}
            runs.append(Executor(plan, Residency()).run(batch))
        for actual, *others, right in zip(*runs, expected, strict=True):
            assert all(torch.equal(actual, other) for other in others), backends[0].name
            torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-5)


def test_the_random_graphs_overwrite_and_share():
    """Else the test above would say nothing about overwriting."""
    plans = [make_plan(RandomGraph(seed).outputs, [Cpu()]) for seed in range(40)]
    steps = [s for p in plans for s in p.steps]
    assert sum(s.in_place for s in steps) > 60
    could = [s for s in steps if OPS[s.node.op].in_place and not s.inputs[0].is_leaf]
    assert sum(not s.in_place for s in could) > 60


def overwrites(*outputs: Node) -> list[str]:
    plan = make_plan(outputs, [Reference()])
    return [s.node.name for s in plan.steps if s.in_place]


def gelu(x: Node, name: str) -> Node:
    return ops.gelu(x, approximate="none", name=name)


def test_what_may_be_overwritten():
    def start() -> Node:
        return ops.matmul(given("x", 4, 6), Source().node("w", 6, 6), name="start")

    a = start()
    assert overwrites(gelu(gelu(a, "b"), "c")) == ["b", "c"]
    assert overwrites(gelu(given("x", 4), "b")) == [], "an input belongs to the caller"
    assert overwrites(ops.add(gelu(a, "b"), a, name="c")) == ["c"], (
        "a is read later; c goes over b, not over a"
    )
    assert overwrites(gelu(a, "b"), a) == [], "an output stays"
    assert overwrites(gelu(a, "b"), ops.reshape(a, shape=(24,), name="v")) == [], (
        "memory of an output stays"
    )
    assert overwrites(gelu(ops.reshape(a, shape=(24,), name="v"), "b")) == ["b"], "through a view"
    v = ops.reshape(a, shape=(24,), name="v")
    assert overwrites(ops.add(ops.reshape(gelu(v, "b"), shape=(4, 6), name="w"), a, name="c")) == [
        "c"
    ], "the viewed value is read later"
    late = ops.reshape(a, shape=(4, 6), name="late")
    assert overwrites(ops.add(gelu(a, "b"), late, name="c")) == ["c"], (
        "a view of the value is read later"
    )
    assert overwrites(ops.add(a, a, name="b")) == [], "the same value twice"
    assert overwrites(ops.add(a, ops.reshape(a, shape=(4, 6), name="v"), name="b")) == [], (
        "the same memory twice"
    )
    assert overwrites(ops.add(a, gelu(a, "b"), name="c")) == ["c"], (
        "b reads a before; c may go over it"
    )
    narrow = ops.add(
        ops.reshape(a, shape=(24,), name="v"), Source().node("r", 24, dtype=torch.float64), name="b"
    )
    assert overwrites(narrow) == [], "the result is wider than the memory"


def test_a_cache_is_never_overwritten_by_what_reads_it():
    cache = given("cache", 2, 4, 1, 6, state=True)
    kv = ops.kv_store(
        cache,
        given("k", 2, 1, 6),
        given("k", 2, 1, 6),
        given("at", 2, dtype=torch.int64),
        name="kv",
    )
    assert overwrites(gelu(ops.kv_half(kv, which=0, name="keys"), "act")) == []


def test_every_value_is_freed_at_its_last_use():
    for seed in range(10):
        graph = RandomGraph(seed)
        plan = make_plan(graph.outputs, [device("gpu", "gelu"), Cpu()])
        last: dict[Node, int] = {}
        for index, step in enumerate(plan.steps):
            last.update(
                dict.fromkeys((step.node, *(i for i in step.inputs if i is not None)), index)
            )
        freed = [(n, index) for index, step in enumerate(plan.steps) for n in step.frees]
        assert (
            len(freed) > 10
            and len(dict(freed)) == len(freed)
            and all(last[n] == index for n, index in freed)
        )
