"""How far an op may be from its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mtmd.kernels import ops
from mtmd.kernels.backends.cpu import Cpu
from mtmd.kernels.cpu.native.compile import host
from mtmd.kernels.cpu.quantize import quantize
from mtmd.kernels.cpu.tiled import octets
from mtmd.kernels.cpu.tiled.cpu import host_form
from mtmd.kernels.gpu.quant_matmul.cases import random_blocks
from mtmd.kernels.graph import Node, Type, graph_input, weight
from mtmd.kernels.plan.executor import Executor, Residency
from mtmd.kernels.plan.scheduler import make_plan
from mtmd.kernels.quantization.blocks import dequantize
from mtmd.kernels.report.check import PACKED, run_check
from mtmd.kernels.report.facts import Check

WIDTH = 512


class Blocks:
    """A weight in Q4_K."""

    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        return Type.of(self.read(name, dtype))

    def read(self, name: str, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        return random_blocks("Q4_K", 64, WIDTH)


class Off(Cpu):
    """Its results are off by a part of them."""

    def __init__(self, part: float):
        super().__init__()
        self.part = part

    def lower(self, node: Node, in_place: bool = False) -> Any:
        run = super().lower(node, in_place)
        return lambda *inputs: run(*inputs) * (1 + self.part)


def checked(backend: Cpu, x: Tensor, quantized: bool = True) -> Check:
    given = graph_input("x", x.shape, x.dtype, lambda batch: batch)
    w = weight("w", Blocks(), torch.uint8)
    product = ops.matmul(given, w, quant="Q4_K", name="product")
    plan = make_plan([product if quantized else ops.silu(given, name="silu")], [backend])
    return run_check("decoder", "a product", plan, Residency(), torch.float32, x)


def spiked() -> Tensor:
    """One large value in each group that shares a scale: where 16 bits of x are the furthest off,
    and as what goes down in a gated unit often is.
    """
    x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(0))
    x[:, ::128] *= 100
    return x


def test_a_product_with_quantized_weights_may_keep_16_bits_of_x() -> None:
    check = checked(Cpu(), spiked())
    [(op, node, error)] = check.worst
    assert (op, node) == ("matmul, quantized", "product") and 1e-9 < error < 1e-7
    assert check.failed == ()


@pytest.mark.parametrize(
    ("part", "quantized", "limit"), [(1e-3, True, "1e-07"), (1e-4, False, "1e-09")]
)
def test_what_is_further_off_is_told(part: float, quantized: bool, limit: str) -> None:
    check = checked(Off(part), spiked(), quantized)
    [problem] = check.failed
    assert check.worst[0][1] in problem and problem.endswith(f"expected at most {limit}")


class Outliers:
    """A weight whose columns of x's large channels are small."""

    def __init__(self, kind: str):
        w = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2))
        w[:, ::32] *= 0.1
        self.kind, self.rows = kind, quantize(w, kind)

    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        return Type.of(self.read(name, dtype))

    def read(self, name: str, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        return self.rows


def checked_int8(backend: Cpu, rows: int, source: Outliers) -> tuple[Check, float]:
    """The check of a product whose x may be rounded, and the product's distance from that with x as
    it is.
    """
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(3))
    x[:, ::32] *= 60
    given = graph_input("x", x.shape, x.dtype, lambda batch: batch)
    w = weight("w", source, torch.uint8)
    product = ops.matmul(given, w, quant=source.kind, int8=True, name="product")
    plan = make_plan([product], [backend])
    result = Executor(plan, Residency()).run(x)[-1].double()
    exact = x.double() @ dequantize(source.rows, source.kind).double().T
    off = float((result - exact).square().sum() / exact.square().sum())
    return run_check("encoder", "a product", plan, Residency(), torch.float32, x), off


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_product_may_round_x_to_8_bits(kind: str) -> None:
    """However far from x they are: here in each group one is 60 times as large as the others."""
    check, off = checked_int8(Cpu(), 64, Outliers(kind))
    if octets.why_not(host_form("f32"), host()) is None:
        assert off > 1e-3
    assert [op for op, *_ in check.worst] == ["matmul, int8"]
    assert check.failed == () and check.limits == {"matmul, int8": PACKED}


def test_a_product_of_few_rows_keeps_16_bits_of_x() -> None:
    check, off = checked_int8(Cpu(), 2, Outliers("Q8_0"))
    assert off < PACKED and check.failed == ()


@pytest.mark.parametrize("rows", [2, 64])
def test_a_rounded_product_that_is_further_off_is_told(rows: int) -> None:
    [problem] = checked_int8(Off(1e-3), rows, Outliers("Q8_0"))[0].failed
    assert "product" in problem and problem.endswith("expected at most 1e-07")
