"""How far an op may be from its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mtmd.kernels import ops
from mtmd.kernels.backends.cpu import Cpu
from mtmd.kernels.gpu.quant_matmul.cases import random_blocks
from mtmd.kernels.graph import Node, Type, graph_input, weight
from mtmd.kernels.plan.executor import Residency
from mtmd.kernels.plan.scheduler import make_plan
from mtmd.kernels.report.check import run_check
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
