"""Products whose weight has rows that are filled up to whole blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtmd.kernels.backends.cpu import Cpu
from mtmd.kernels.graph import Type, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.executor import Executor, Residency
from mtmd.kernels.plan.scheduler import make_plan
from mtmd.kernels.quantization.blocks import BLOCKS, row_bytes


class Filled:
    """A weight whose rows are filled up to whole blocks."""

    def __init__(self, kind: str, width: int):
        self.kind, self.width = kind, width + -width % BLOCKS[kind].values

    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        return Type.of(self.read(name, dtype))

    def read(self, name: str, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        return torch.zeros(4, row_bytes(self.kind, self.width), dtype=torch.uint8)

    def quant(self, name: str) -> str | None:  # noqa: ARG002
        return self.kind

    def order(self, name: str) -> str | None:  # noqa: ARG002
        return None


@pytest.mark.parametrize(
    ("kind", "width"),
    [("Q8_0", n) for n in (64, 72, 80, 84, 95, 65)] + [("Q4_K", n) for n in (250, 288, 300, 500)],
)
def test_x_is_filled_up_by_what_leaves_its_groups_largest_values(kind: str, width: int) -> None:
    """The columns before the last group are larger."""
    x = torch.arange(3.0 * width, 0, -1).view(3, width)
    given = graph_input("x", x.shape, x.dtype, lambda batch: batch)
    source = Filled(kind, width)
    product = Weights(source, torch.float32).linear(given, "blk.0.some")
    assert product.inputs[0] is not None
    if source.width == width:
        assert product.inputs[0] is given
        return
    plan = make_plan([product.inputs[0]], [Cpu()])
    whole = Executor(plan, Residency()).run(x)[-1]
    assert whole.shape == (3, source.width) and torch.equal(whole[:, :width], x)
    assert torch.isin(whole, x).all()
    if width % 32:
        first = width - width % 32
        assert torch.equal(whole[:, first : first + 32].amax(1), x[:, first])
