"""Plans of many rows: what becomes one product, against the ops' references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtmd.kernels import ops
from mtmd.kernels.cpu.native.pool import Pool
from mtmd.kernels.gpu.quant_matmul.cases import random_blocks
from mtmd.kernels.graph import Node, Type, toposort, weight
from mtmd.kernels.ops import OPS
from mtmd.kernels.plan.lower import Lowering, StepFacts
from mtmd.kernels.plan.native_run import NativePlan

LIMIT = {torch.float32: 1e-10, torch.bfloat16: 5e-5}


class Stored:
    def __init__(self, tensors: dict[str, Tensor]):
        self.tensors = tensors

    def type_of(self, name: str, dtype: torch.dtype) -> Type:  # noqa: ARG002
        return Type.of(self.tensors[name])

    def read(self, name: str, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        return self.tensors[name]

    def quant(self, name: str) -> str | None:  # noqa: ARG002
        return None

    def order(self, name: str) -> str | None:  # noqa: ARG002
        return None


def run(output: Node, x: Tensor, stored: Stored) -> tuple[Tensor, NativePlan]:
    steps = [StepFacts(n, n.inputs, True) for n in toposort(output) if not n.is_leaf]
    lowered = Lowering(steps, [output], lambda node: stored.tensors[node.name]).run()
    assert lowered.wide and not lowered.refused, lowered.refused
    calls = [(lambda: None, step.inputs, step.node) for step in steps]
    pool = Pool(2)
    plan = NativePlan(lowered, calls, [output], lambda _, t, *__: t, set(), lambda: pool)
    steps_of_run = plan.steps({"x": x})
    while True:
        try:
            next(steps_of_run)
        except StopIteration as done:
            return done.value[0], plan


def reference(output: Node, x: Tensor, stored: Stored) -> Tensor:
    values: dict[Node, Tensor] = {}
    for node in toposort(output):
        if node.op == "input":
            values[node] = x
        elif node.op == "weight":
            values[node] = stored.tensors[node.name]
        else:
            inputs = [None if i is None else values[i] for i in node.inputs]
            values[node] = OPS[node.op].reference(*inputs, **node.attrs)
    return values[output]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(("rows", "ffn"), [(50, 5), (64, 72), (97, 160)])
@pytest.mark.parametrize("act", ["silu", "tanh"])
def test_a_gated_layer_is_two_products(dtype: torch.dtype, rows: int, ffn: int, act: str) -> None:
    width = 64
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(dtype)
    stored = Stored(
        {
            "gate": random_blocks("Q8_0", ffn, width),
            "up": random_blocks("Q8_0", ffn, width, seed=1),
            "out": random_blocks("Q4_0", width, width),
        }
    )
    given = Node("input", (), Type.of(x), {"fill": lambda b: b["x"]}, "x")
    ways = {name: weight(name, stored, torch.uint8) for name in stored.tensors}
    gate, up = (
        ops.matmul(given, ways[name], None, quant="Q8_0", name=f"{name}.out")
        for name in ("gate", "up")
    )
    if act == "silu":
        gated = ops.silu_mul(gate, up, name="gated")
    else:
        gated = ops.gelu_mul(gate, up, approximate=act, name="gated")
    actual, plan = run(gated, x, stored)
    assert sum(len(part.instructions) for part in plan.lowered.parts) == 1
    expected = reference(gated, x, stored)
    error = ((actual.double() - expected.double()) ** 2).mean() / (expected.double() ** 2).mean()
    assert torch.isfinite(actual).all() and error <= LIMIT[dtype]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("rows", [50, 79])
def test_a_sum_is_a_part_of_its_product(dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)).to(dtype)
    stored = Stored({"w": random_blocks("Q4_0", 96, 96)})
    given = Node("input", (), Type.of(x), {"fill": lambda b: b["x"]}, "x")
    made = ops.matmul(given, weight("w", stored, torch.uint8), None, quant="Q4_0", name="made")
    total = ops.add(given, made, name="total")
    actual, plan = run(total, x, stored)
    assert sum(len(part.instructions) for part in plan.lowered.parts) == 1
    expected = reference(total, x, stored)
    error = ((actual.double() - expected.double()) ** 2).mean() / (expected.double() ** 2).mean()
    assert torch.isfinite(actual).all() and error <= LIMIT[dtype]
