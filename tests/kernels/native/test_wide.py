"""Plans of many rows: what becomes one product, against the ops' references."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from mtmd.base import heartbeat
from mtmd.base.heartbeat import Heartbeat, heart_here
from mtmd.kernels import ops
from mtmd.kernels.cpu.native.pool import Pool
from mtmd.kernels.cpu.tiled.cpu import host_form
from mtmd.kernels.gpu.quant_matmul.cases import random_blocks
from mtmd.kernels.graph import Node, Type, toposort, weight
from mtmd.kernels.ops import OPS
from mtmd.kernels.ops.moe import Routing
from mtmd.kernels.plan import native_run
from mtmd.kernels.plan.executor import finish
from mtmd.kernels.plan.lower import Lowering, StepFacts
from mtmd.kernels.plan.native_run import NativePlan
from mtmd.kernels.plan.steps import SLOWEST

LIMIT = {torch.float32: 5e-9, torch.bfloat16: 6e-5}  # of fp32, with x in 16 bits


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


def products_of(plan: NativePlan) -> int:
    """Return the number of instructions, without those that lay x out."""
    instructions = (i for part in plan.lowered.parts for i in part.instructions)
    return sum(not i.name.endswith("prepared") for i in instructions)


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
    assert products_of(plan) == 1
    assert plan.lowered.flops[0] == sum(OPS[n.op].flops(n) for n in (gate, up, gated))
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
    assert products_of(plan) == 1
    expected = reference(total, x, stored)
    error = ((actual.double() - expected.double()) ** 2).mean() / (expected.double() ** 2).mean()
    assert torch.isfinite(actual).all() and error <= LIMIT[dtype]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(
    ("tokens", "kind", "routing", "more"),
    [
        (40, "Q8_0", Routing(3, True), ()),
        (97, "Q4_0", Routing(6, False, "sigmoid", groups=4, top_groups=2), ("bias",)),
        (150, "Q4_K", Routing(2, True, on_input=True), ("shares",)),
        (40, "BF16", Routing(6, True), ()),
        (97, "Q4_0", Routing(6, True), ("bias", "reads")),
        (40, "Q8_0", Routing(2, True, on_input=True), ("reads",)),
    ],
)
def test_experts_of_many_tokens(
    dtype: torch.dtype, tokens: int, kind: str, routing: Routing, more: tuple[str, ...]
) -> None:
    """Some of whom have no row, some one, some a few, one all."""
    width, ffn, experts = (256, 256, 24) if kind == "Q4_K" else (96, 64, 24)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, width, generator=generator)
    liked = x[:, :experts] + torch.linspace(-3, 3, experts)
    x[:, :experts] = liked.argsort(1).argsort(1) / 4 - 3  # no two alike
    x = x.to(dtype)
    quant = None if kind == "BF16" else kind

    def table(rows: int, values: int, seed: int) -> Tensor:
        if quant is None:
            made = torch.randn(experts, rows, values, generator=generator) / values**0.5
            return made.to(dtype)
        return random_blocks(kind, experts * rows, values, seed=seed).view(experts, rows, -1)

    stored = Stored(
        {
            "w": random_blocks("Q4_0", width, width),
            "gate": table(ffn, width, 1),
            "up": table(ffn, width, 2),
            "down": table(width, ffn, 3),
            "shares": torch.rand(experts, generator=generator) + 0.5,
            "bias": torch.rand(experts, generator=generator) - 0.5,
            "reads": (torch.arange(tokens) % 3 != 0).int(),
        }
    )
    given = Node("input", (), Type.of(x), {"fill": lambda b: b["x"]}, "x")
    ways = {name: weight(name, stored, t.dtype) for name, t in stored.tensors.items()}
    rows = ops.matmul(given, ways["w"], None, quant="Q4_0", name="rows")
    router = ops.columns(given, start=0, stop=experts, name="router")
    output = ops.moe(
        rows,
        router,
        *(ways[name] for name in ("gate", "up", "down")),
        *(ways[name] if name in more else None for name in ("shares", "bias", "reads")),
        routing=routing,
        **{f"{name}_quant": quant for name in ("gate", "up", "down")},
        name="experts",
    )
    if quant is None and _is_torchs(dtype):
        pytest.skip("torch multiplies these")
    actual, _ = run(output, x, stored)
    expected = reference(output, x, stored)
    error = ((actual.double() - expected.double()) ** 2).mean() / (expected.double() ** 2).mean()
    by_rows = 1e-8  # x is rounded to 15 bits where few rows are multiplied
    assert torch.isfinite(actual).all() and error <= max(LIMIT[dtype], by_rows)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("tokens", "rank"), [(40, 8), (97, 33)])
def test_adapters_of_many_tokens(tokens: int, rank: int) -> None:
    if _is_torchs(torch.bfloat16):
        pytest.skip("torch multiplies these")
    width, generator = 64, torch.Generator().manual_seed(tokens)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    x = numbers(tokens, width)
    scales = torch.linspace(0, 2, tokens).bfloat16()[:, None]  # 0: a row without an adapter
    tables = {"a": numbers(rank, width), "b": numbers(width, rank), "scales": scales}
    stored = Stored({"w": random_blocks("Q4_0", width, width), **tables})
    given = Node("input", (), Type.of(x), {"fill": lambda b: b["x"]}, "x")
    ways = {name: weight(name, stored, t.dtype) for name, t in stored.tensors.items()}
    y = ops.matmul(given, ways["w"], None, quant="Q4_0", name="y")
    output = ops.lora(y, given, ways["a"], ways["b"], ways["scales"], name="adapted")
    actual, _ = run(output, x, stored)
    expected = reference(output, x, stored)
    error = ((actual.double() - expected.double()) ** 2).mean() / (expected.double() ** 2).mean()
    assert torch.isfinite(actual).all() and error <= LIMIT[torch.bfloat16]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("tokens", [40, 97])
def test_heads_of_many_tokens(dtype: torch.dtype, tokens: int) -> None:
    """Heads side by side, of which a part is read, and one that all read."""
    heads, width, outer = 3, 64, 40
    x = torch.randn(tokens, heads * width, generator=torch.Generator().manual_seed(tokens))
    tables = {
        name: random_blocks("Q8_0", heads * rows, values, seed=rows).view(heads, rows, -1)
        for name, rows, values in (("first", outer, 32), ("second", 17, width))
    }
    stored = Stored({"w": random_blocks("Q4_0", heads * width, heads * width), **tables})
    x = x.to(dtype)
    given = Node("input", (), Type.of(x), {"fill": lambda b: b["x"]}, "x")
    ways = {name: weight(name, stored, t.dtype) for name, t in stored.tensors.items()}
    rows = ops.matmul(given, ways["w"], None, quant="Q4_0", name="rows")
    split = ops.reshape(rows, shape=(tokens, heads, width), name="split")
    part = ops.columns(split, start=16, stop=48, name="part")
    first = ops.head_matmul(part, ways["first"], quant="Q8_0", name="by head")
    one = ops.reshape(ops.columns(rows, start=0, stop=width), shape=(tokens, 1, width), name="one")
    second = ops.head_matmul(one, ways["second"], quant="Q8_0", name="of all")
    for output in (first, second):
        actual, _ = run(output, x, stored)
        expected = reference(output, x, stored)
        error = ((actual.double() - expected.double()) ** 2).mean()
        error /= (expected.double() ** 2).mean()
        assert torch.isfinite(actual).all() and error <= LIMIT[dtype]


def _is_torchs(dtype: torch.dtype) -> bool:
    form = host_form("bf16")
    return dtype != torch.bfloat16 or form is None or form[0] != "tiles"


def test_steps_between_programs_let_go_of_what_they_made_and_may_take_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_run, "LONG_S", 0.0)
    heart = Heartbeat()
    stored = Stored({"w": random_blocks("Q4_0", 64, 64)})
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    given = Node("input", (), Type.of(x), {"fill": lambda b: b["x"]}, "x")
    w = weight("w", stored, torch.uint8)
    made = ops.matmul(given, w, None, quant="Q4_0", name="made")
    first = ops.silu(made, name="first")
    second = ops.matmul(first, w, None, quant="Q4_0", name="second")
    output = ops.add(second, second, name="output")
    elsewhere = first, second
    steps = [StepFacts(n, n.inputs, n not in elsewhere) for n in toposort(output) if not n.is_leaf]
    lowered = Lowering(steps, [output], lambda node: stored.tensors[node.name]).run()
    assert [isinstance(part, int) for part in lowered.parts] == [False, True, True, False]
    assert [lowered.last[lowered.made[node]] for node in elsewhere] == [2, 3]
    patience = []

    def call(node: Node, *inputs: Tensor) -> Tensor:
        patience.append(heart.more_s)
        return OPS[node.op].reference(*inputs, **node.attrs)

    calls = [(partial(call, step.node), step.inputs, step.node) for step in steps]
    plan = NativePlan(lowered, calls, [output], lambda _, t, *__: t, set(), lambda: Pool(2))
    before = heart_here()
    heart.count_this_thread()
    try:
        (actual,) = finish(plan.steps({"x": x}))
    finally:
        if before is None:
            del heartbeat._here.heart
        else:
            before.count_this_thread()
    assert patience == [OPS[node.op].flops(node) / SLOWEST for node in elsewhere]
    torch.testing.assert_close(actual, reference(output, x, stored), rtol=1e-4, atol=1e-4)
