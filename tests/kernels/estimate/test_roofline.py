"""The estimate against arithmetic done by hand, and launches against runs that were watched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mtmd.kernels import ops
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.backends.target import Target
from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.estimate.cards import CARDS, find_card
from mtmd.kernels.estimate.launches import cost
from mtmd.kernels.estimate.roofline import (
    AMD,
    FAST,
    MIDDLE,
    NVIDIA,
    SLOW,
    Estimate,
    estimate,
    factors_of,
    shares,
)
from mtmd.kernels.graph import Node, Type, graph_input
from mtmd.kernels.ops.moe import Routing
from mtmd.kernels.plan.scheduler import Plan, make_plan

H100, F = CARDS["h100"], NVIDIA[MIDDLE]
COPY = 1  # launch, of the output of a replayed run


def value(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Node:
    return graph_input(name, shape, dtype, lambda batch: batch)


def planned(*outputs: Node, target: str = "cuda:90") -> tuple[Plan, Target]:
    device = Target(target)
    return make_plan(outputs, [device, Cpu(), Reference()]), device


def product(rows: int, width: int = 4096) -> tuple[Plan, Target]:
    return planned(ops.matmul(value("x", rows, width), value("w", width, width), name="y"))


def copy_s(size: int, bandwidth: float) -> float:
    """Of the output of a replayed run, on the device of an H100."""
    return 2 * size / (3350e9 * bandwidth)


def test_a_large_product_is_bound_by_flops() -> None:
    result = estimate(*product(4096), H100)
    assert result is not None and (result.bound, result.launches) == ("FLOPs", 1 + COPY)
    assert result.gflop == pytest.approx(2 * 4096**3 / 1e9)
    size = 2 * 4096**2
    assert result.gib == pytest.approx((3 + 2) * size / 2**30), "three matrices, and a copy"
    for ms, product_rate, bandwidth in (
        (result.ms, F.product, F.bandwidth),
        (result.fast_ms, 0.80, 0.90),
        (result.slow_ms, 0.40, 0.55),
    ):
        flops_s = 2 * 4096**3 / (989.4e12 * product_rate)
        assert ms == pytest.approx((flops_s + copy_s(size, bandwidth)) * 1e3)
    assert result.host_ms == pytest.approx((2 * F.torch_launch + F.step) * 1e3)


def test_a_product_with_one_row_is_bound_by_bandwidth() -> None:
    result = estimate(*product(1, 16384), H100)
    moved = (16384**2 + 2 * 16384) * 2
    assert result is not None and result.bound == "bandwidth"
    assert result.gib == pytest.approx(moved / 2**30)
    assert result.ms == pytest.approx(moved / (3350e9 * F.bandwidth) * 1e3)


def test_many_small_nodes_are_bound_by_launches() -> None:
    x = value("x", 1, 64)
    for _ in range(50):
        x = ops.add(x, x)
    result = estimate(*planned(x), H100)
    assert result is not None and (result.bound, result.launches) == ("launches", 50 + COPY)
    assert result.ms == result.device_ms == pytest.approx((50 + COPY) * F.floor * 1e3)
    replayed = F.replay + F.torch_launch
    assert result.host_ms == pytest.approx(replayed * 1e3), "it is recorded, and its output copied"


def test_what_is_not_recorded_is_launched_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtmd.kernels.plan.scheduler.MAX_RECORDED", 0)
    x = value("x", 1, 64)
    for _ in range(50):
        x = ops.add(x, x)
    result = estimate(*planned(x), H100)
    assert result is not None and (result.bound, result.launches) == ("launches", 50)
    assert result.ms == result.host_ms == pytest.approx(50 * (F.torch_launch + F.step) * 1e3)


def test_fp32_products_take_the_rate_of_fp32() -> None:
    wide = ops.matmul(
        value("x", 4096, 4096, dtype=torch.float32), value("w", 4096, 4096, dtype=torch.float32)
    )
    result = estimate(*planned(wide), H100)
    assert result is not None
    assert result.launches == 1, "of more values than are kept for a recording"
    assert result.ms == pytest.approx(2 * 4096**3 / (66.9e12 * F.product) * 1e3)


def test_attention_takes_the_rate_of_attention_and_one_launch_of_triton() -> None:
    q, k, v = (value(name, 1, 4096, 16, 64) for name in "qkv")
    plan, device = planned(ops.attention(q, k, v, scale=0.125))
    result = estimate(plan, device, H100)
    flops = 2 * 16 * 4096**2 * 128
    assert result is not None and (result.bound, result.launches) == ("FLOPs", 1 + COPY)
    copy = copy_s(2 * 4096 * 16 * 64, F.bandwidth)
    assert result.ms == pytest.approx((flops / (989.4e12 * F.attention) + copy) * 1e3)
    launched = F.triton_launch + F.step + F.torch_launch
    assert result.host_ms == pytest.approx(launched * 1e3)
    assert [(s.op, s.kernel, s.launches) for s in shares(plan, device, H100)] == [
        ("attention", "attention (Triton)", 1),
        ("output", "copy", COPY),
    ]


def test_states_are_not_copied_out_of_a_replay() -> None:
    """What a run leaves in them lies there; logits are another's memory by the next run."""
    pool = Type.contiguous((5, 2, 4096), torch.bfloat16)
    state = Node("input", (), pool, {"fill": lambda batch: batch, "state": True}, "state")
    rows, at = value("rows", 2, 4096), value("at", 1, dtype=torch.int64)
    saved, y = ops.state_store(state, rows, at, name="kept"), ops.scale(rows, factor=2.0)
    (plan, device), (plain, other) = planned(saved, y), planned(y)
    assert plan.copied_out == plain.copied_out == (y,)
    result, alone = estimate(plan, device, H100), estimate(plain, other, H100)
    assert result is not None and alone is not None and alone.launches == 1 + COPY
    assert result.launches - cost(plan.steps[0], device).torch == 1 + COPY
    on_cpu = make_plan((y,), [Cpu(), Reference()])
    assert on_cpu.copied_out == ()
    moved = plain.compute_bytes["cuda:90"] - on_cpu.compute_bytes["cpu"]
    assert moved == y.type.bytes, "memory of its own"


def test_attention_that_shares_out_its_keys_is_launched_twice() -> None:
    q = value("q", 1, 1, 8, 128)
    k, v = (value(name, 1, 8192, 4, 128) for name in "kv")
    plan, device = planned(ops.attention(q, k, v, scale=0.1))
    assert cost(plan.steps[-1], device).triton == 2


def test_an_op_of_several_kernels_is_counted_by_what_torch_is_asked() -> None:
    """x * factor + offset: one kernel each; a view costs nothing."""
    plan, device = planned(ops.scale(value("x", 8, 64), factor=2.0, offset=1.0))
    assert cost(plan.steps[-1], device).torch == 2


def test_what_runs_elsewhere_is_not_estimated() -> None:
    """On a card without bf16 attention stays on the CPU."""
    q, k, v = (value(name, 1, 64, 2, 64) for name in "qkv")
    plan, device = planned(ops.attention(q, k, v, scale=0.1), target="cuda:75")
    assert estimate(plan, device, replace(H100, target="cuda:75")) is None
    plan, device = product(16)
    assert estimate(plan, device, find_card("cuda:90")) is None


@pytest.mark.parametrize("factors", [NVIDIA, AMD], ids=["nvidia", "amd"])
def test_the_middle_lies_between_slow_and_fast(factors: dict) -> None:
    slow, middle, fast = (vars(factors[name]) for name in (SLOW, MIDDLE, FAST))
    for name in ("bandwidth", "quantized", "product", "attention"):
        assert 0 < slow[name] < middle[name] < fast[name] < 1, name
    for name in ("torch_launch", "triton_launch", "floor", "step", "replay"):
        assert slow[name] > middle[name] > fast[name] > 0, name
    assert factors_of(CARDS["mi300x"]) is AMD and factors_of(CARDS["l4"]) is NVIDIA


def test_runs_after_each_other_add_up() -> None:
    one = Estimate(2.0, 1.0, 3.0, "FLOPs", 0.5, 2.0, 10, 4.0, 0.5)
    two = Estimate(1.0, 0.5, 2.0, "launches", 1.0, 0.5, 7, 1.0, 0.25)
    assert one.plus(two, 3) == Estimate(5.0, 2.5, 9.0, "launches", 3.5, 3.5, 31, 7.0, 1.25)
    assert one.plus(two) == Estimate(3.0, 1.5, 5.0, "FLOPs", 1.5, 2.5, 17, 5.0, 0.75)


def test_experts_are_few_launches() -> None:
    """Whichever are used: that, only a run knows."""
    shapes = (64, 32), (64, 4), (4, 16, 32), (4, 16, 32), (4, 32, 16)
    inputs = [value(f"x{i}", *shape) for i, shape in enumerate(shapes)]
    plan, device = planned(ops.moe(*inputs, routing=Routing(2, normalize=True)))
    assert cost(plan.steps[-1], device)[:2] == (0, 5)


@pytest.mark.parametrize(
    ("axes", "scale", "launches"), [((), 1.0, 3), ((0, 1, 2, 1), 1.0, 4), ((), 1.3, 4)]
)
def test_a_table_of_angles_is_few_launches(
    axes: tuple[int, ...], scale: float, launches: int
) -> None:
    """A product, cosines and sines; each step has one or two such tables, for all layers."""
    kind = Rotary((1.0, 0.5, 0.25, 0.125), axes, scale)
    positions = value("positions", 3, 5, dtype=torch.int64)
    plan, device = planned(ops.rope_table(positions, rotary=kind))
    assert cost(plan.steps[-1], device)[:2] == (launches, 0)
