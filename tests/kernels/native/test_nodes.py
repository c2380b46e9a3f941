"""Every op's native rule against its reference, one node at a time, in memory full of NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mtmd.base.cores import Cores
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.cpu.native.pool import Pool
from mtmd.kernels.gpu.quant_matmul.cases import random_blocks
from mtmd.kernels.graph import Node, Type, weight
from mtmd.kernels.ops import OPS
from mtmd.kernels.ops.moe import Routing
from mtmd.kernels.plan import native_run
from mtmd.kernels.plan.lower import RULES, Lowering, StepFacts
from mtmd.kernels.plan.native_run import NativePlan
from mtmd.kernels.quantization.kv_rows import quantize_rows

F, B = torch.float32, torch.bfloat16
LIMIT = {F: 1e-11, B: 5e-5}


class Stored:
    """Weights that are there."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def type_of(self, name: str, dtype: torch.dtype) -> Type:  # noqa: ARG002
        return Type.of(self.tensors[name])

    def read(self, name: str, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        return self.tensors[name]

    def quant(self, name: str) -> str | None:  # noqa: ARG002
        return None

    def order(self, name: str) -> str | None:  # noqa: ARG002
        return None


def given(name: str, value: Tensor) -> Node:
    return Node("input", (), Type.of(value), {"fill": lambda b: b[name]}, name)


def plan_of(
    build: Any, values: Sequence[Tensor | None], weights: Sequence[int], threads: int
) -> tuple[Node, NativePlan]:
    """Of one node, those of its operands that `weights` numbers as weights."""
    stored, nodes = Stored(), []
    for i, value in enumerate(values):
        if value is None:
            nodes.append(None)
        elif i in weights:
            stored.tensors[str(i)] = value
            nodes.append(weight(str(i), stored, value.dtype))
        else:
            nodes.append(given(str(i), value))
    node = build(*nodes)
    steps = [StepFacts(node, node.inputs, True)]
    lowered = Lowering(steps, [node], lambda n: stored.tensors[n.name]).run()
    assert not lowered.refused, lowered.refused
    calls = [(lambda: None, node.inputs, node)]
    pool = Pool(threads)
    return node, NativePlan(lowered, calls, [node], lambda _, t, *__: t, set(), lambda: pool)


def result_of(plan: NativePlan, values: Sequence[Tensor | None]) -> Tensor:
    run = plan.steps({str(i): v for i, v in enumerate(values)})
    while True:
        try:
            next(run)
        except StopIteration as done:
            return done.value[0]


def run_native(
    build: Any, values: Sequence[Tensor | None], weights: Sequence[int], threads: int
) -> tuple[Node, Tensor]:
    """What one node gives."""
    node, plan = plan_of(build, values, weights, threads)
    return node, result_of(plan, values)


def check(
    op: str,
    values: list[Tensor | None],
    weights: Sequence[int] = (),
    threads: int = 2,
    **attrs: Any,
) -> None:
    fresh = [None if v is None else v.clone() if v.is_contiguous() else v for v in values]
    node, actual = run_native(
        lambda *nodes: OPS[op](*nodes, name=op, **attrs), fresh, weights, threads
    )
    expected = OPS[op].reference(*[None if v is None else v.clone() for v in values], **attrs)
    assert Type.of(actual) == node.type == Type.of(expected)
    if not expected.dtype.is_floating_point:
        assert torch.equal(actual, expected)
        return
    a, b = actual.double(), expected.double()
    assert torch.isfinite(a).all()
    error = ((a - b) ** 2).mean() / (b**2).mean().clamp(min=1e-30)
    assert error <= LIMIT[actual.dtype], float(error)


def rand(*shape: int, dtype: torch.dtype = F, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


SHAPES = [(1, 5), (3, 64), (2, 3, 40), (1, 4, 1037), (16, 7)]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [F, B])
@pytest.mark.parametrize("shape", SHAPES)
def test_elementwise(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, y = rand(*shape, dtype=dtype), rand(*shape, dtype=dtype, seed=1)
    for op in ("silu", "relu", "sigmoid", "softplus"):
        check(op, [x])
    for how in ("none", "tanh", "quick"):
        check("gelu", [x], approximate=how)
        check("gelu_mul", [x, y], approximate=how)
    check("silu_mul", [x, y])
    check("add", [x, y])
    check("mul", [x, y])
    check("scale", [x], factor=0.37, offset=-1.5)
    check("softcap", [x], cap=2.5)
    check("clamp", [x, torch.tensor([-0.4], dtype=dtype), torch.tensor([0.7], dtype=dtype)])
    check("cast", [x], dtype=B if dtype == F else F)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [F, B])
def test_broadcasts(dtype: torch.dtype) -> None:
    for a, b in (
        ((3, 4, 40), (3, 1, 1)),
        ((3, 40), (40,)),
        ((3, 40), (3, 1)),
        ((2, 3, 5), (3, 5)),
        ((4, 7), (1,)),
    ):
        for op in ("add", "mul"):
            check(op, [rand(*a, dtype=dtype), rand(*b, dtype=dtype)])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [F, B])
def test_halves_of_one_projection(dtype: torch.dtype) -> None:
    x = rand(3, 80, dtype=dtype)
    check("silu_mul", [x[:, :40], x[:, 40:]])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [F, B])
@pytest.mark.parametrize("shape", SHAPES)
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = rand(*shape, dtype=dtype)
    check("rms_norm", [x, rand(shape[-1])], [1], eps=1e-5)
    check("rms_norm", [x, None], eps=1e-5)
    w, b = (rand(shape[-1]).to(dtype) for _ in range(2))
    check("layer_norm", [x, w, b], [1, 2], eps=1e-5)
    check("layer_norm", [x + 7, w, None], [1], eps=1e-5)
    check("l2_norm", [x], eps=1e-6)
    wide = rand(*shape[:-1], 3 * shape[-1], dtype=dtype)
    check("l2_norm", [wide[..., shape[-1] : 2 * shape[-1]]], eps=1e-6)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [F, B])
@pytest.mark.parametrize("pairs", ["half", "adjacent"])
@pytest.mark.parametrize(("size", "turned"), [(8, 4), (64, 32), (80, 40), (128, 16), (40, 10)])
def test_rope(size: int, turned: int, pairs: str, dtype: torch.dtype) -> None:
    rotary = Rotary(tuple(10000 ** (-i / turned) for i in range(turned)))
    positions = torch.tensor([[0, 3, 131071]] * 3)
    table = ops.rope_table.reference(positions, rotary=rotary)
    check("rope", [rand(3, 5, size, dtype=dtype), table], pairs=pairs)


@pytest.mark.usefixtures("poisoned")
def test_rope_table() -> None:
    for count, axes, scale in ((3, (), 1.0), (32, (), 0.7), (24, (0, 1, 2) * 8, 1.0)):
        rotary = Rotary(tuple(10000 ** (-i / count) for i in range(count)), axes, scale)
        positions = torch.tensor([[0, 5, 70001], [2, 9, 4], [0, 11, 12345]])
        check("rope_table", [positions, None], rotary=rotary)
        check("rope_table", [positions, rand(count).abs() + 1], [1], rotary=rotary)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [F, B])
def test_rows(dtype: torch.dtype) -> None:
    x, locations = rand(7, 37, dtype=dtype), torch.tensor([3, 0, 6])
    check("take_rows", [x, locations])
    check("take_rows", [rand(1, 7, 37, dtype=dtype), locations])
    check("take_rows", [rand(5, 7, 37, dtype=dtype), locations])
    columns = torch.randperm(700)
    check("take_rows", [rand(700, 1, dtype=dtype), columns])
    check("take_rows", [rand(5, 700, 1, dtype=dtype), columns])
    check("take_rows", [rand(5, 900, 1, dtype=dtype)[:, :700], columns])
    check("embed", [locations, x], [1])
    check("embed", [locations, x], [1], scale=24.3)
    check("place_rows", [x, rand(3, 37, dtype=dtype), locations])
    check("add_rows", [x, rand(3, 37, dtype=dtype), locations])
    check("place_rows", [x, rand(3, 111, dtype=dtype)[:, 37:74], locations])
    for axis in (0, 1, 2):
        check(
            "concat", [rand(2, 3, 17, dtype=dtype), rand(2, 3, 17, dtype=dtype, seed=1)], axis=axis
        )


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [F, B])
@pytest.mark.parametrize("count", [1, 3, 16])
def test_products(count: int, dtype: torch.dtype) -> None:
    for width in (70, 96):
        x, w = rand(count, width, dtype=dtype), rand(33, width, dtype=dtype)
        check("matmul", [x, w], [1])
        check("matmul", [x, w, rand(33, dtype=dtype)], [1, 2])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [F, B])
def test_stores(dtype: torch.dtype) -> None:
    slots = torch.tensor([5, 0, 63])
    cache = rand(2, 64, 3, 20, dtype=dtype)
    check(
        "kv_store", [cache, rand(3, 3, 20, dtype=dtype), rand(3, 3, 20, dtype=dtype, seed=1), slots]
    )
    wide = rand(3, 3, 40, dtype=dtype)
    check("kv_store", [cache, wide[..., :20], wide[..., 20:], slots])
    check(
        "state_store",
        [rand(5, 3, 7, 1001, dtype=dtype), rand(6, 7, 1001, dtype=F), torch.tensor([4, 1])],
    )


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [F, B])
@pytest.mark.parametrize(
    "starts", [[0, 1], [0, 1, 2, 3], [0, 5], [0, 3, 3, 4], [0, 20, 20, 57, 58]]
)
def test_recurrent(starts: list[int], dtype: torch.dtype) -> None:
    tokens, count = starts[-1], len(starts) - 1
    at, slots = torch.tensor(starts), torch.randperm(count + 2)[:count]
    for channels, taps, activation in ((5, 2, "none"), (67, 4, "silu")):
        x, w = rand(tokens, channels, dtype=dtype), rand(channels, taps, dtype=dtype)
        state, bias = rand(count + 2, taps - 1, channels, dtype=dtype), rand(channels, dtype=dtype)
        check("short_conv", [x, w, state, at, slots], [1], activation=activation)
        check("short_conv", [x, w, state, at, slots, bias], [1, 5], activation=activation)
    for groups, heads, size, value in ((1, 1, 3, 5), (2, 4, 16, 70), (2, 2, 32, 128)):
        q, k = (
            torch.nn.functional.normalize(rand(tokens, groups, size, seed=s), dim=-1).to(dtype)
            for s in (0, 1)
        )
        v, state = rand(tokens, heads, value, dtype=dtype), rand(count + 2, size, heads, value)
        decay, beta = -rand(tokens, heads).abs(), rand(tokens, heads, seed=2).sigmoid()
        given = [q, k, v, decay, beta, state, at, slots]
        check("linear_attention", given, scale=0.3)
        check("linear_attention", given, scale=1.0, delta=False)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [F, B])
@pytest.mark.parametrize("tokens", [1, 5])
def test_experts(tokens: int, dtype: torch.dtype) -> None:
    x, router = rand(tokens, 40, dtype=dtype), rand(tokens, 6, dtype=dtype)
    gate, up, down = (
        rand(6, 24, 40, dtype=dtype),
        rand(6, 24, 40, dtype=dtype, seed=1),
        rand(6, 40, 24, dtype=dtype),
    )
    shares, bias = rand(6).abs(), rand(6, seed=2)
    grouped = {"groups": 3, "top_groups": 2}
    reads = (torch.arange(tokens) % 2).int()
    for act, routing, *more in (
        ("silu", Routing(2, normalize=True)),
        ("gelu_tanh", Routing(2, normalize=False), shares),
        ("silu", Routing(3, True, "sigmoid", eps=0.1, scale=2.5, **grouped), None, bias),
        ("silu", Routing(2, False, group_best=1, **grouped), shares),
        ("silu", Routing(2, True), None, bias),
        ("silu", Routing(2, False, "sigmoid", on_input=True)),
        ("silu", Routing(2, True), None, bias, reads),
        ("silu", Routing(2, False, "sigmoid", on_input=True), None, None, 1 - reads),
    ):
        inputs = [x, router, gate, up, down, *more]
        check("moe", inputs, range(2, min(len(inputs), 7)), routing=routing, act=act)


def test_under_a_cpu_quota_threads_are_chosen_by_the_time_that_they_take_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run's processor time, at a millionth of a core, is far more than its time by the clock."""
    monkeypatch.setattr(native_run, "usable_cores", lambda: Cores(2, 1e-6))
    values = [rand(3, 40), rand(3, 40, seed=1)]
    _, plan = plan_of(OPS["add"], values, [], 2)
    for _ in range(20):
        result_of(plan, values)
    assert plan.threads.settled and min(plan.threads.seconds.values()) > 0.1


def test_every_rule_is_tested_here_or_in_programs() -> None:
    elsewhere = {"attention", "gather_pages", "reshape", "rows", "columns", "kv_half"}
    text = __import__("pathlib").Path(__file__).read_text()
    assert [op for op in RULES if op not in elsewhere and f'"{op}"' not in text] == []


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [F, B])
@pytest.mark.parametrize(("rows", "rank", "width"), [(1, 1, 5), (3, 16, 64), (13, 17, 40)])
def test_lora(rows: int, rank: int, width: int, dtype: torch.dtype) -> None:
    y, x = rand(rows, 33, dtype=dtype), rand(rows, width, dtype=dtype)
    a, b = rand(rank, width, dtype=dtype), rand(33, rank, dtype=dtype)
    check("lora", [y, x, a, b, rand(rows, 1)], [2, 3])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [F, B])
@pytest.mark.parametrize("tokens", [1, 5])
def test_products_of_heads(tokens: int, dtype: torch.dtype) -> None:
    w = rand(3, 18, 40, dtype=dtype)
    check("head_matmul", [rand(tokens, 3, 40, dtype=dtype), w], [1])
    check("head_matmul", [rand(tokens, 3, 52, dtype=dtype)[..., 7:47], w], [1])
    check("head_matmul", [rand(tokens, 1, 40, dtype=dtype), w[:1].contiguous()], [1])
    for kind in ("Q8_0", "Q4_K") if dtype is B else ():  # which round x, as those of `matmul` do
        rows = random_blocks(kind, 3 * 18, 256, 0).view(3, 18, -1)
        check("head_matmul", [rand(tokens, 3, 256, dtype=dtype), rows], [1], quant=kind)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("quant", [None, "q8_0"])
@pytest.mark.parametrize("heads", [3, 34])
def test_keys_that_are_values(heads: int, quant: str | None) -> None:
    """A cache of keys alone, which all heads read: more of them than one unit computes."""
    size, pages = 72, torch.tensor([2, 0, 3])
    numbers = rand(1, 4 * 32, 1, size)
    cache = numbers if quant is None else quantize_rows(numbers, quant)
    of_rows = {"quant": quant} if quant else {}
    reading = {**of_rows, "head": size, "dtype": "fp32"} if quant else {}
    k, slots = rand(2, 1, size, seed=3), torch.tensor([5, 70])
    q, bounds = rand(1, 2, heads, size), torch.tensor([[0, 69], [3, 80]], dtype=torch.int32)

    def build(cache: Node, k: Node, slots: Node, pages: Node, q: Node, bounds: Node) -> list[Node]:
        stored = ops.kv_store(cache, k, k, slots, name="store", **of_rows)
        keys = ops.gather_pages(stored, pages, which=0, size=32, name="keys", **reading)
        attended = ops.attention(q, keys, keys, None, bounds, scale=0.1, name="attend")
        return [stored, keys, attended]

    values = [cache, k, slots, pages, q, bounds]
    nodes = build(*(given(str(i), v.clone()) for i, v in enumerate(values)))
    steps = [StepFacts(node, node.inputs, True) for node in nodes]
    lowered = Lowering(steps, nodes[-1:], lambda _: cache).run()
    assert not lowered.refused, lowered.refused
    calls = [(lambda: None, node.inputs, node) for node in nodes]
    pool = Pool(2)
    plan = NativePlan(lowered, calls, nodes[-1:], lambda _, t, *__: t, set(), lambda: pool)
    actual = result_of(plan, [v.clone() for v in values])
    kept = ops.kv_store.reference(cache.clone(), k, k, slots, **of_rows)
    keys = ops.gather_pages.reference(kept, pages, which=0, size=32, **reading)
    expected = ops.attention.reference(q, keys, keys, None, bounds, scale=0.1)
    assert ((actual - expected) ** 2).mean() / (expected**2).mean() <= 1e-9


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [F, B])
@pytest.mark.parametrize(("streams", "width"), [(4, 2048), (3, 37), (2, 1)])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_streams(tokens: int, streams: int, width: int, dtype: torch.dtype) -> None:
    """Mixed, spread apart from a wider value; one for all others; largest values of each."""
    x = rand(tokens, streams, width, dtype=dtype)
    shares = rand(tokens, streams, streams, dtype=dtype, seed=1)
    check("add_mixed", [x, x, shares])
    change = rand(tokens, 1, width, dtype=dtype, seed=2)
    check("add_mixed", [x, change, shares[:, :, :1].contiguous()])
    rest = x.flatten(1)[:, width:].unflatten(1, (streams - 1, width))
    for floor in (1e-5, 1.0):
        check("match_magnitude", [rest, change], floor=floor)
        check("match_magnitude", [rest.contiguous(), rest.contiguous() * 2], floor=floor)
    check("gaussian_topk", [x], deviations=-0.25)
    check("gaussian_topk", [rest], deviations=0.5 if width > 1 else -0.5)
