"""Chains over blocks of rows: which steps they take, that results are the same, what they hold."""

from __future__ import annotations

import pytest
import torch
from random_graphs import Source, given, transformer

from mtmd.kernels import ops
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.graph import Node
from mtmd.kernels.plan import row_blocks
from mtmd.kernels.plan.executor import Executor, Residency, finish
from mtmd.kernels.plan.scheduler import Plan, make_plan

pytestmark = pytest.mark.usefixtures("poisoned", "small")
ROWS, WIDTH, WIDE = 40, 16, 48


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of a few KiB count as large."""
    monkeypatch.setattr(row_blocks, "LARGE", ROWS * WIDE * 4)
    monkeypatch.setattr(row_blocks, "BLOCK", 8 * WIDE * 4)
    monkeypatch.setattr(row_blocks, "STEP", 4)
    monkeypatch.setattr(row_blocks, "MINIMUM", 8)


def mlp(x: Node, gated: bool = False) -> Node:
    source, width = Source(), x.shape[-1]
    y = ops.layer_norm(x, source.node("ln", width), source.node("ln.b", width), eps=1e-5, name="ln")
    up = ops.matmul(y, source.node("up", WIDE, width), source.node("up.b", WIDE), name="up")
    if gated:
        gate = ops.matmul(y, source.node("gate", WIDE, width), name="gate")
        up = ops.silu_mul(gate, up, name="act")
    else:
        up = ops.gelu(up, approximate="tanh", name="act")
    down = ops.matmul(up, source.node("down", width, WIDE), name="down")
    return ops.add(down, x, name="residual")


def names(plan: Plan) -> list[list[str]]:
    return [[step.node.name for step in chain.steps] for chain in plan.chains]


def started(x: Node) -> Node:
    """A chain reads values and no inputs."""
    return ops.relu(x, name="start")


def both_ways(*outputs: Node, batch: dict[str, torch.Tensor]) -> tuple[list, list]:
    executor = Executor(make_plan(outputs, [Cpu()]), Residency())
    return executor.run(batch), executor.run(batch, lambda *_: None)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(1, ROWS, WIDTH), (2, ROWS // 2, WIDTH), (ROWS + 3, WIDTH)])
def test_an_mlp_is_run_in_blocks_and_gives_the_same(shape, gated):
    out = mlp(started(given("x", *shape)), gated)
    plan = make_plan([out], [Cpu()])
    wide = ["gate", "up", "act", "down"] if gated else ["up", "act", "down"]
    assert names(plan) == [wide]
    (chain,) = plan.chains
    assert chain.parts[0] == (0, 8) and chain.parts[-1][1] == chain.rows == out.type.count // WIDTH
    (blocked,), (whole,) = both_ways(out, batch={"x": torch.randn(shape)})
    assert blocked.shape == whole.shape
    torch.testing.assert_close(blocked, whole, rtol=1e-5, atol=1e-6)


def test_somebody_who_looks_on_sees_every_node_as_a_whole():
    seen = {}
    executor = Executor(make_plan([mlp(started(given("x", ROWS, WIDTH)))], [Cpu()]), Residency())
    executor.run({"x": torch.randn(ROWS, WIDTH)}, lambda n, v, _: seen.setdefault(n.name, v.shape))
    assert seen["up"] == (ROWS, WIDE) and list(seen)[-1] == "residual"


def test_a_run_rests_between_the_nodes_of_each_block():
    plan = make_plan([mlp(started(given("x", ROWS, WIDTH)))], [Cpu()])
    steps = Executor(plan, Residency()).steps({"x": torch.randn(ROWS, WIDTH)})
    rests = sum(1 for _ in steps)
    assert rests == len(plan.steps) - 3 + 3 * len(plan.chains[0].parts)


def test_what_is_wide_is_predicted_as_a_block_of_it(peak_bytes):
    x = started(given("x", 40 * ROWS, WIDTH))
    plan = make_plan([mlp(x)], [Cpu()])
    assert plan.chains and not make_plan([mlp(x)], [Reference()]).chains
    executor, batch = Executor(plan, Residency()), {"x": torch.randn(40 * ROWS, WIDTH)}
    measured = peak_bytes(lambda: executor.run(batch))
    assert measured < x.type.bytes * 5, "x given and begun, normalised, down: not the wide value"
    predicted = plan.compute_bytes["cpu"]
    assert 0.9 < predicted / measured < 1.25 and predicted <= plan.rough_bytes["cpu"]


def test_layers_one_after_another_predict_no_more_than_one():
    x = started(given("x", 40 * ROWS, WIDTH))
    one, three = make_plan([mlp(x)], [Cpu()]), make_plan([mlp(mlp(mlp(x)))], [Cpu()])
    assert len(three.chains) == 3
    assert one.compute_bytes["cpu"] <= three.compute_bytes["cpu"] <= one.compute_bytes["cpu"] * 1.1


def test_what_others_need_as_a_whole_is_made_as_a_whole():
    x = started(given("x", ROWS, WIDTH))
    out = mlp(x)
    down = next(i for i in out.operands if i.name == "down")
    up = next(next(down.operands).operands)
    assert names(make_plan([out, up], [Cpu()])) == [["act", "down"]]
    (a, b), (c, d) = both_ways(out, up, batch={"x": torch.randn(ROWS, WIDTH)})
    torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(b, d, rtol=1e-5, atol=1e-6)


def test_steps_that_mix_rows_are_no_part_of_it():
    source = Source()
    x = started(given("x", ROWS, WIDTH))
    wide = ops.matmul(x, source.node("up", WIDE, WIDTH), name="up")
    located = ops.add(wide, source.node("places", ROWS, WIDE), name="placed")  # by row
    out = ops.matmul(located, source.node("down", WIDTH, WIDE), name="down")
    assert names(make_plan([out], [Cpu()])) == []
    wide = ops.matmul(x, source.node("qkv", WIDE, WIDTH), name="qkv")
    part = ops.columns(wide, start=0, stop=WIDTH, name="q")
    assert names(make_plan([part], [Cpu()])) == [], "it is read as a whole"
    narrow = ops.matmul(x, source.node("square", WIDTH, WIDTH), name="square")
    assert make_plan([narrow], [Cpu()]).chains == ()


def test_a_transformer_in_blocks_is_itself():
    shape = {"batch": 2, "rows": 30, "width": 16, "heads": 2, "ffn": 64}
    out = transformer(Source(), **shape)
    assert make_plan([out], [Cpu()]).chains
    (blocked,), (whole,) = both_ways(out, batch={"x": torch.randn(2, 30, 16)})
    torch.testing.assert_close(blocked, whole, rtol=1e-4, atol=1e-5)


def test_an_encode_that_is_given_up_leaves_nothing():
    plan = make_plan([mlp(started(given("x", ROWS, WIDTH)))], [Cpu()])
    executor = Executor(plan, Residency())
    steps = executor.steps({"x": torch.randn(ROWS, WIDTH)})
    for _ in range(4):
        next(steps)
    steps.close()
    (again,) = finish(executor.steps({"x": torch.zeros(ROWS, WIDTH)}))
    assert again.isfinite().all()
