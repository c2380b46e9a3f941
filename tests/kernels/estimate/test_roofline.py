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
from mtmd.kernels.graph import Node, graph_input
from mtmd.kernels.plan.scheduler import Plan, make_plan

H100, F = CARDS["h100"], NVIDIA[MIDDLE]


def value(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Node:
    return graph_input(name, shape, dtype, lambda batch: batch)


def planned(*outputs: Node, target: str = "cuda:90") -> tuple[Plan, Target]:
    device = Target(target)
    return make_plan(outputs, [device, Cpu(), Reference()]), device


def product(rows: int, width: int = 4096) -> tuple[Plan, Target]:
    return planned(ops.matmul(value("x", rows, width), value("w", width, width), name="y"))


def test_a_large_product_is_bound_by_flops() -> None:
    found = estimate(*product(4096), H100)
    assert found is not None and (found.bound, found.launches) == ("FLOPs", 1)
    assert found.gflop == pytest.approx(2 * 4096**3 / 1e9)
    assert found.ms == pytest.approx(2 * 4096**3 / (989.4e12 * F.product) * 1e3)
    assert found.fast_ms == pytest.approx(2 * 4096**3 / (989.4e12 * 0.80) * 1e3)
    assert found.slow_ms == pytest.approx(2 * 4096**3 / (989.4e12 * 0.40) * 1e3)
    assert found.host_ms == pytest.approx((F.torch_launch + F.step) * 1e3)


def test_a_product_with_one_row_is_bound_by_bandwidth() -> None:
    found = estimate(*product(1, 16384), H100)
    moved = (16384**2 + 2 * 16384) * 2
    assert found is not None and found.bound == "bandwidth"
    assert found.gib == pytest.approx(moved / 2**30)
    assert found.ms == pytest.approx(moved / (3350e9 * F.bandwidth) * 1e3)


def test_many_small_nodes_are_bound_by_launches() -> None:
    x = value("x", 1, 64)
    for _ in range(50):
        x = ops.add(x, x)
    found = estimate(*planned(x), H100)
    assert found is not None and (found.bound, found.launches) == ("launches", 50)
    assert found.ms == found.device_ms == pytest.approx(50 * F.floor * 1e3)
    assert found.host_ms == pytest.approx(F.replay * 1e3), "it is recorded, and replayed"


def test_what_is_not_recorded_is_launched_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtmd.kernels.plan.replay.MOST_BYTES", 0)
    x = value("x", 1, 64)
    for _ in range(50):
        x = ops.add(x, x)
    found = estimate(*planned(x), H100)
    assert found is not None and (found.bound, found.launches) == ("launches", 50)
    assert found.ms == found.host_ms == pytest.approx(50 * (F.torch_launch + F.step) * 1e3)


def test_fp32_products_take_the_rate_of_fp32() -> None:
    wide = ops.matmul(
        value("x", 4096, 4096, dtype=torch.float32), value("w", 4096, 4096, dtype=torch.float32)
    )
    found = estimate(*planned(wide), H100)
    assert found is not None
    assert found.ms == pytest.approx(2 * 4096**3 / (66.9e12 * F.product) * 1e3)


def test_attention_takes_the_rate_of_attention_and_one_launch_of_triton() -> None:
    q, k, v = (value(name, 1, 4096, 16, 64) for name in "qkv")
    plan, device = planned(ops.attention(q, k, v, scale=0.125))
    found = estimate(plan, device, H100)
    flops = 2 * 16 * 4096**2 * 128
    assert found is not None and (found.bound, found.launches) == ("FLOPs", 1)
    assert found.ms == pytest.approx(flops / (989.4e12 * F.attention) * 1e3)
    assert found.host_ms == pytest.approx((F.triton_launch + F.step) * 1e3)
    assert [(s.op, s.kernel) for s in shares(plan, device, H100)] == [
        ("attention", "attention (Triton)")
    ]


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
    plan, device = planned(ops.moe(*inputs, top_k=2, normalize=True))
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
