"""What kernels take that unpack quantized weights, against arithmetic done by hand."""

from __future__ import annotations

import pytest
import torch

from mtmd.kernels import ops
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.backends.target import Target
from mtmd.kernels.estimate.cards import CARDS
from mtmd.kernels.estimate.launches import cost
from mtmd.kernels.estimate.roofline import AMD, FAST, MIDDLE, NVIDIA, SLOW, Estimate, estimate
from mtmd.kernels.estimate.unpacking import CYCLES, Unpacking
from mtmd.kernels.gpu.quant_matmul.cases import KINDS
from mtmd.kernels.graph import Node, graph_input
from mtmd.kernels.ops.moe import Routing
from mtmd.kernels.plan.scheduler import make_plan
from mtmd.kernels.quantization.blocks import row_bytes

H200, F = CARDS["h200"], NVIDIA[MIDDLE]
RATE = 66.9e12 / 2  # threads' instructions a second


def value(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Node:
    return graph_input(name, shape, dtype, lambda batch: batch)


def product(
    rows: int, kind: str = "Q4_K", outer: int = 4096, dtype: torch.dtype = torch.bfloat16
) -> Node:
    w = value("w", outer, row_bytes(kind, 4096), dtype=torch.uint8)
    return ops.matmul(value("x", rows, 4096, dtype=dtype), w, name="y", quant=kind)


def experts(tokens: int, kind: str | None = "Q4_K") -> Node:
    """Two of eight, with 256 values and 512 units."""
    tables = [
        value(name, 8, *shape)
        if kind is None
        else value(name, 8, shape[0], row_bytes(kind, shape[1]), dtype=torch.uint8)
        for name, shape in (("gate", (512, 256)), ("up", (512, 256)), ("down", (256, 512)))
    ]
    kinds = {f"{part}_quant": kind for part in ("gate", "up", "down") if kind}
    x, router = value("x", tokens, 256), value("router", tokens, 8)
    return ops.moe(x, router, *tables, routing=Routing(2, normalize=True), **kinds)


def taken(node: Node, target: str = "cuda:90") -> tuple[Unpacking, ...]:
    device = Target(target)
    plan = make_plan((node,), [device, Cpu(), Reference()])
    return cost(plan.steps[-1], device).unpacking


def estimated(node: Node, card: str = "h200") -> Estimate:
    device = Target(CARDS[card].target)
    result = estimate(make_plan((node,), [device, Cpu(), Reference()]), device, CARDS[card])
    assert result is not None
    return result


def test_every_kernel_of_16_bits_was_counted_for_every_type() -> None:
    for form, counted in CYCLES.items():
        assert set(counted) == set(KINDS) and all(2 < c < 100 for c in counted.values()), form
    for kind in KINDS:
        for rows in (1, 8, 9, 32, 33, 64, 65, 4096):
            assert len(taken(product(rows, kind))) == 1, (kind, rows)
        for tokens in (1, 8, 64, 128, 129, 4096):  # of four times as many rows as experts
            assert len(taken(experts(tokens, kind))) == 2, (kind, tokens)


def test_a_weight_is_unpacked_once_for_each_block_of_rows() -> None:
    weights = 4096**2
    few, many = CYCLES["operand_kernel", 8]["Q4_K"], CYCLES["tile_kernel", 128]["Q4_K"]
    assert taken(product(1)) == taken(product(8)) == (Unpacking(weights * few, 256),)
    assert taken(product(512)) == (Unpacking(4 * weights * many, 4 * 64),)
    assert taken(product(513))[0].cycles == pytest.approx(5 * weights * many)


def test_experts_unpack_what_an_even_router_would_choose() -> None:
    gate, down = (CYCLES[f"few_{part}_kernel", 8]["Q4_K"] for part in ("gated", "down"))
    table = 512 * 256
    one = taken(experts(1))  # two experts' three tables
    assert [u.cycles for u in one] == pytest.approx([2 * 2 * table * gate, 2 * table * down])
    assert [u.programs for u in one] == [2 * 512 // 16, 2 * 256 // 16]
    # Of 64 choices each of the eight experts has eight: a block of 16 rows
    gate, down = (CYCLES[f"few_{part}_kernel", 16]["Q4_K"] for part in ("gated", "down"))
    every = taken(experts(32))
    assert [u.cycles for u in every] == pytest.approx([8 * 2 * table * gate, 8 * table * down])
    assert taken(experts(4096))[0].cycles == pytest.approx(
        8 * (4096 * 2 // 8 // 64) * 2 * table * CYCLES["gated_kernel", 64]["Q4_K"]
    )


def test_plain_weights_and_fp32_take_none() -> None:
    assert taken(experts(4, kind=None)) == ()
    assert taken(product(4, dtype=torch.float32)) == ()


def test_time_is_of_cycles_where_memory_is_faster() -> None:
    """An H200's, of a row of Q4_K; with 512 rows both, and the rate of products, are slower."""
    one = estimated(product(1, outer=32768))
    cycles = taken(product(1, outer=32768))[0].cycles
    assert one.bound == "unpacking" and one.ms == pytest.approx(
        (cycles / RATE / F.instructions + F.floor) * 1e3  # and the copy of the output
    )
    for range_, ms in ((SLOW, one.slow_ms), (FAST, one.fast_ms)):
        assert ms >= cycles / RATE / NVIDIA[range_].instructions * 1e3 * 0.999  # type: ignore[operator]
    slow = estimated(product(1, outer=32768), "rtx4090")
    moved = 32768 * (row_bytes("Q4_K", 4096) + 2) + 8192
    assert slow.bound == "bandwidth"
    assert slow.ms == pytest.approx((moved / (1008e9 * 0.6) + F.floor) * 1e3)
    many = estimated(product(512))
    flops_ms = 2 * 512 * 4096**2 / (989.4e12 * F.product) * 1e3
    assert many.bound == "unpacking" and many.ms > flops_ms
    assert estimated(experts(32768)).bound == "unpacking"


def test_programs_that_do_not_fill_a_card_leave_a_part_of_it_idle() -> None:
    (narrow,) = taken(product(1, outer=1024))
    assert narrow.programs == 64
    result = estimated(product(1, outer=1024))
    assert result.device_ms == pytest.approx(
        (max(narrow.cycles / RATE / (64 / 132) / F.instructions, F.floor) + F.floor) * 1e3
    )


def test_amd_was_not_counted() -> None:
    """There the part of the bandwidth is taken lower."""
    moved = 32768 * (row_bytes("Q4_K", 4096) + 2) + 8192
    result = estimated(product(1, outer=32768), "mi300x")
    floor = AMD[MIDDLE].floor  # of the copy of the output
    assert result.bound == "bandwidth"
    assert result.ms == pytest.approx((moved / (5300e9 * 0.2) + floor) * 1e3)
