"""Each rule of the rewriting by itself: what it makes, that it computes the same, and when it leaves
a graph as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
from stand_in import StandIn

from mtmd.kernels import ops
from mtmd.kernels.backends import Limited, Reference
from mtmd.kernels.backends.backend import Backend
from mtmd.kernels.gpu.quant_matmul.cases import random_blocks
from mtmd.kernels.graph import Node, Type, graph_input, toposort, weight
from mtmd.kernels.ops import OPS
from mtmd.kernels.ops.elementwise import GELUS
from mtmd.kernels.plan.executor import Executor, Residency
from mtmd.kernels.plan.fusion.rewrite import rewritten
from mtmd.kernels.plan.fusion.rules import RULES
from mtmd.kernels.plan.scheduler import Override, Plan, make_plan

T, G, H, K, D = 5, 2, 4, 16, 24
N = 3  # streams of a token


class Source:
    """Random weights by name and shape, `NAME:3x4`; of several bytes a value where they are."""

    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        return Type.contiguous(map(int, name.partition(":")[2].split("x")), dtype)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        rng = torch.Generator().manual_seed(sum(map(ord, name)))
        return torch.randn(self.type_of(name, dtype).shape, generator=rng).to(dtype)

    def quant(self, name: str) -> str | None:  # noqa: ARG002
        return None

    def order(self, name: str) -> str | None:  # noqa: ARG002
        return None


SOURCE = Source()


def parameter(name: str, *shape: int) -> Node:
    return weight(f"{name}:{'x'.join(map(str, shape))}", SOURCE, torch.float32)


def value(name: str, *shape: int, dtype: torch.dtype = torch.float32, **facts: Any) -> Node:
    rng = torch.Generator().manual_seed(len(name) + sum(shape))
    stored = torch.randn(shape, generator=rng).to(dtype)
    return graph_input(name, shape, dtype, lambda _: stored, **facts)


def given(name: str, tensor: torch.Tensor, **facts: Any) -> Node:
    return graph_input(name, tensor.shape, tensor.dtype, lambda _: tensor.clone(), **facts)


def ops_of(plan: Plan) -> Counter[str]:
    nodes = (s.node for s in plan.steps if s.node.op != "copy")
    return Counter(n.op for n in nodes if not OPS[n.op].is_view)


def compared(*outputs: Node) -> Plan:
    """The plan with rewriting, once it has been seen to compute what the one without does."""
    plans = [make_plan(outputs, [b, Reference()]) for b in (StandIn(), Reference())]
    actual, expected = (Executor(plan, Residency()).run(None) for plan in plans)
    for a, b in zip(actual, expected, strict=True):
        assert Type.of(a).shape == b.shape and torch.allclose(a, b, atol=1e-5)
    graph = rewritten(outputs, RULES, StandIn(), ())
    assert list(graph.nodes) == toposort(*graph.outputs)
    names = {s.node.name for s in plans[0].steps}
    assert {o.name for o in outputs} <= names, "what a graph is asked for keeps its name"
    return plans[0]


def angles(pairs: int = K // 2) -> Node:
    turned = torch.arange(T * pairs).view(T, pairs) * 0.3
    return given("angles", torch.stack((turned.cos(), turned.sin()), 1))


def cached(turned: bool = True, norms: bool = True) -> tuple[Node, Node]:
    """What a layer's cache holds after the tokens of a batch, and its attention."""
    table = angles()

    def heads(name: str, count: int) -> Node:
        x = value(name, T, count, K)
        x = (
            ops.rms_norm(x, parameter(f"{name}_norm", K), eps=1e-6, name=f"{name}.n")
            if norms
            else x
        )
        return ops.rope(x, table, pairs="adjacent", name=f"{name}.rope") if turned else x

    starts = given("starts", torch.tensor([0, 2, T]))
    pages = given("pages", torch.tensor([3, 1, 2]), starts=starts)
    bounds = given("bounds", torch.tensor([[0, 4], [0, 5], [8, 9], [8, 10], [9, 11]]).int())
    memory = torch.randn(2, 32, G, K, generator=torch.Generator().manual_seed(1))
    cache = Node("input", (), Type.of(memory), {"fill": lambda _: memory.clone()}, "kv.0")
    slots = given("slots", torch.tensor([28, 29, 8, 9, 10]))
    kv = ops.kv_store(cache, heads("k", G), value("v", T, G, K), slots, name="store")
    keys, values = (ops.gather_pages(kv, pages, which=w, size=8, name=f"gather{w}") for w in (0, 1))
    q = ops.reshape(heads("q", H), shape=(1, T, H, K), name="q.batch")
    return kv, ops.attention(q, keys, values, None, bounds, scale=0.25, softcap=9.0, name="attn")


def test_attention_reads_pages_and_turns_what_it_reads():
    kv, attention = cached()
    plan = compared(attention)
    assert ops_of(plan) == {"paged_attention": 1, "rope_store": 1}
    # What is asked for has to be there
    turned = next(n for n in kv.operands if n.op == "rope")
    assert ops_of(compared(attention, turned)) == {
        "paged_attention": 1,
        "kv_store": 1,
        "rope": 1,
        "rms_norm": 1,
    }


def test_layers_that_read_the_same_keys_read_their_pages():
    _, attention = cached()
    q, *others = attention.inputs
    assert q is not None
    twice = ops.scale(q, factor=2.0, name="twice")
    again = ops.attention(twice, *others, scale=0.25, softcap=9.0, name="again")
    result = ops_of(compared(attention, again))
    assert result["paged_attention"] == 2 and "gather_pages" not in result


@pytest.mark.parametrize("norms", [False, True])
def test_keys_that_do_not_turn_are_stored_as_they_are(norms: bool):
    _, attention = cached(turned=False, norms=norms)
    result = ops_of(compared(attention))
    assert result.pop("rms_norm", 0) == 2 * norms
    assert result == {"paged_attention": 1, "kv_store": 1}


def test_keys_that_are_read_elsewhere_are_gathered():
    _, attention = cached()
    keys = attention.inputs[1]
    assert keys is not None
    result = ops_of(compared(attention, keys))
    assert result["gather_pages"] == 1 and result["paged_attention"] == 1


def test_nothing_is_known_of_a_table_without_starts():
    _, attention = cached()
    pages = next(n for n in attention.operands if n.op == "gather_pages").inputs[1]
    assert pages is not None
    object.__setattr__(pages, "attrs", {"fill": pages.attrs["fill"]})
    assert ops_of(compared(attention))["gather_pages"] == 2


@pytest.mark.parametrize("last", [False, True], ids=["x first", "x last"])
@pytest.mark.parametrize("normed", [False, True])
def test_residual_and_norms(normed: bool, last: bool):
    x, y = value("x", T, D), value("yy", T, D)
    added = ops.rms_norm(y, parameter("post", D), eps=1e-5, name="post") if normed else y
    total = ops.add(*((added, x) if last else (x, added)), name="residual")
    norm = ops.rms_norm(total, parameter("w", D), eps=1e-6, name="norm")
    plan = compared(ops.scale(norm, factor=2.0, name="a"), ops.scale(total, factor=3.0, name="b"))
    assert ops_of(plan) == {"add_norm": 1, "scale": 2}


@pytest.mark.parametrize("bias", [False, True])
def test_residual_and_layer_norm(bias: bool):
    x, y = value("x", 2, T, D), value("yy", 2, T, D)
    total = ops.add(x, y, name="residual")
    weights = [parameter("w", D), parameter("b", D) if bias else None]
    norm = ops.layer_norm(total, *weights, eps=1e-6, name="norm")
    plan = compared(ops.scale(norm, factor=2.0, name="a"), ops.scale(total, factor=3.0, name="b"))
    assert ops_of(plan) == {"add_layer_norm": 1, "scale": 2}
    assert {s.node.name for s in plan.steps if s.node.op == "half"} == {"residual", "norm"}


@pytest.mark.parametrize("last", [False, True], ids=["x first", "x last"])
def test_what_is_scaled_before_it_is_added(last: bool):
    x, scale = value("x", T, D), parameter("scale", D)
    y = ops.mul(value("yy", T, D), scale, name="scaled")
    total = ops.add(*((y, x) if last else (x, y)), name="residual")
    norm = ops.layer_norm(total, parameter("w", D), eps=1e-6, name="norm")
    assert ops_of(compared(norm, total)) == {"add_layer_norm": 1}
    assert ops_of(compared(norm, y)) == {"mul": 1, "add_layer_norm": 1}


def heads_of(product: Node, at: int, count: int, name: str) -> Node:
    columns = ops.columns(product, start=at * K, stop=(at + count) * K, name=f"{name}.columns")
    return ops.reshape(columns, shape=(*product.shape[:-1], count, K), name=f"{name}.heads")


def turned_heads(product: Node) -> list[Node]:
    """What reads queries and keys that turn, and values that do not."""
    table = angles()
    q, k = (
        ops.rope(heads_of(product, at, count, name), table, name=f"{name}.rope")
        for name, at, count in (("q", 0, H), ("k", H, G))
    )
    v = heads_of(product, H + G, G, "v")
    return [ops.scale(n, factor=2.0, name=f"{n.name}.2") for n in (q, k, v)]


@pytest.mark.parametrize("shape", [(T,), (2, T)], ids=["tokens", "pictures"])
def test_heads_next_to_each_other_are_turned_in_their_product(shape: tuple[int, ...]):
    product = ops.matmul(value("x", *shape, D), parameter("w", (H + 2 * G) * K, D), name="p")
    made = turned_heads(product)
    plan = compared(*made)
    assert ops_of(plan) == {"matmul": 1, "rope_columns": 1, "scale": 3}
    assert next(s for s in plan.steps if s.node.op == "rope_columns").in_place
    turned = made[0].inputs[0]
    assert turned is not None
    for saved in (product, turned):
        result = ops_of(compared(*made, saved))
        assert result == {"matmul": 1, "rope": 2, "scale": 3}
    read = ops.scale(product, factor=3.0, name="all of it")
    assert ops_of(compared(*made, read)) == {"matmul": 1, "rope": 2, "scale": 4}
    table, locations = angles(), {"q": 0, "w": H + G}  # with a gap between them
    separate = [
        ops.scale(ops.rope(heads_of(product, at, G, n), table, name=n), factor=2.0, name=f"{n}.3")
        for n, at in locations.items()
    ]
    assert ops_of(compared(*separate)) == {"matmul": 1, "rope": 2, "scale": 2}


def test_heads_next_to_each_other_are_brought_to_length_one_together():
    product = value("p", T, 3 * G * K)
    normed = [
        ops.l2_norm(heads_of(product, at, G, f"n{at}"), eps=eps, name=f"l{at}")
        for at, eps in ((0, 1e-6), (G, 1e-6), (2 * G, 1e-5))
    ]
    made = [ops.scale(n, factor=1.5, name=f"{n.name}.2") for n in normed]
    assert ops_of(compared(*made)) == {"l2_norm": 2, "scale": 3}
    assert ops_of(compared(*made, normed[1])) == {"l2_norm": 3, "scale": 3}


def test_a_sum_is_put_into_one_of_two_layer_norms():
    total = ops.add(value("x", T, D), value("yy", T, D), name="residual")
    norms = [ops.layer_norm(total, parameter(w, D), eps=1e-6, name=w) for w in "vw"]
    assert ops_of(compared(*norms)) == {"add_layer_norm": 1, "layer_norm": 1}


def test_a_sum_that_is_kept_for_others_is_made_alone():
    """As Qwen3-VL's encoder keeps some for the end: beside each would lie its norm."""
    total = ops.add(value("x", T, D), value("yy", T, D), name="residual")
    norm = ops.layer_norm(total, parameter("w", D), eps=1e-6, name="norm")
    others = [ops.scale(total, factor=f, name=f"s{f}") for f in (2.0, 3.0)]
    assert ops_of(compared(norm, *others)) == {"add": 1, "layer_norm": 1, "scale": 2}


def test_what_is_added_to_each_picture_is_not_put_into_a_layer_norm():
    """Positions, which lie there once: the sum is a launch of its own."""
    total = ops.add(value("x", 2, T, D), value("places", T, D), name="sum")
    norm = ops.layer_norm(total, parameter("w", D), eps=1e-6, name="norm")
    assert ops_of(compared(norm)) == {"add": 1, "layer_norm": 1}


def gated_heads(dtype: torch.dtype) -> tuple[Node, Node]:
    """The norm of heads in fp32, rounded where its gate is, and their gated unit."""
    x, gate = value("x", T, H, K), value("gate", T, H * K, dtype=dtype)
    norm = ops.rms_norm(x, parameter("w", K), eps=1e-6, name="norm")
    if dtype != torch.float32:
        norm = ops.cast(norm, dtype=dtype, name="norm.cast")
    heads = ops.reshape(gate, shape=(T, H, K), name="gate.heads")
    return norm, ops.silu_mul(heads, norm, name="gated")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_heads_and_their_gate(dtype: torch.dtype):
    norm, made = gated_heads(dtype)
    assert ops_of(compared(made)) == {"gated_norm": 1}
    saved = {"rms_norm": 1, "silu_mul": 1} | ({"cast": 1} if dtype != torch.float32 else {})
    assert ops_of(compared(made, norm)) == saved


@pytest.mark.parametrize("wide", [False, True], ids=["a row", "each value"])
def test_what_a_sigmoid_lets_through(wide: bool):
    x, y, gate = value("x", T, D), value("yy", T, D), value("gate", T, D if wide else 1)
    opened = ops.sigmoid(gate, name="open")
    part = ops.mul(x, opened, name="part")
    total = ops.add(part, y, name="total")
    assert ops_of(compared(ops.scale(part, factor=2.0, name="a"))) == {
        "sigmoid_gate": 1,
        "scale": 1,
    }
    assert ops_of(compared(total)) == {"sigmoid_gate": 1}
    assert ops_of(compared(ops.add(y, part, name="turned"))) == {"sigmoid_gate": 1}
    assert ops_of(compared(total, part)) == {"sigmoid_gate": 1, "add": 1}
    assert ops_of(compared(total, opened)) == {"sigmoid": 1, "mul": 1, "add": 1}
    twice = ops.add(part, part, name="twice")
    assert ops_of(compared(twice)) == {"sigmoid_gate": 1, "add": 1}


def delta_layer(cast: bool, delta: bool = True) -> tuple[Node, Node]:
    """Numbers of each head, and the delta rule, or the scan of Mamba-2, that reads what is made of
    them.
    """
    dtype = torch.bfloat16 if cast else torch.float32
    alpha, beta = (value(name, T, H, dtype=dtype) for name in ("alpha", "beta"))
    if cast:
        alpha, beta = (ops.cast(n, dtype=torch.float32, name=f"{n.name}.32") for n in (alpha, beta))
    soft = ops.softplus(ops.add(alpha, parameter("dt", H), name="sum"), name="soft")
    decay = ops.mul(soft, given("a", -torch.rand(H)), name="decay")
    sequences = given("starts", torch.tensor([0, 2, T])), given("slots", torch.tensor([1, 0]))
    q, k = (value(name, T, G, K) for name in "qk")
    gain = ops.sigmoid(beta, name="gain") if delta else soft
    state = value("state", 3, K, H, K)
    made = ops.linear_attention(
        q,
        k,
        value("v", T, H, K),
        decay,
        gain,
        state,
        *sequences,
        scale=0.1,
        delta=delta,
        name="delta",
    )
    return decay, made


@pytest.mark.parametrize("delta", [True, False], ids=["delta", "mamba-2"])
@pytest.mark.parametrize("cast", [False, True])
def test_the_gates_of_linear_attention(cast: bool, delta: bool):
    decay, made = delta_layer(cast, delta)
    assert ops_of(compared(made)) == {"delta_gates": 1, "linear_attention": 1}
    result = ops_of(compared(made, decay))
    assert result["softplus"] == 1 and "delta_gates" not in result


def routed(read: Node, name: str, *shape: int) -> Node:
    """Shares of N streams by a router, as alternating updates have them."""
    y = ops.rms_norm(read, parameter(f"{name}.norm", D), eps=1e-6, name=f"{name}.normed")
    y = ops.scale(y, factor=1 / D, name=f"{name}.scaled")
    y = ops.matmul(y, parameter(f"{name}.router", N, D), name=f"{name}.routed")
    y = ops.softcap(y, cap=1.0, name=f"{name}.capped")
    return ops.matmul(y, parameter(f"{name}.mix", prod(shape), N), name=f"{name}.shares")


def stream(streams: Node, number: int) -> Node:
    flat = ops.reshape(streams, shape=(T, N * D))
    return ops.columns(flat, start=number * D, stop=(number + 1) * D)


def updated(number: int, other: int, offset: float = 1.0) -> tuple[Node, Node, Node]:
    """Streams predicted, what a layer makes of one of them, and the streams corrected by that."""
    streams = value("streams", T, N, D)
    shares = ops.reshape(routed(stream(streams, number), "before", N, N), shape=(T, N, N))
    predicted = ops.add_mixed(streams, streams, shares, name="predicted")
    active = stream(predicted, number)
    y = ops.add(value("y", T, D), active, name="made")
    shares = ops.scale(routed(y, "after", N), factor=1.0, offset=offset, name="more")
    less = ops.scale(stream(predicted, other), factor=-1.0, name="less")
    change = ops.reshape(ops.add(y, less, name="change"), shape=(T, 1, D))
    shares = ops.reshape(shares, shape=(T, N, 1))
    return predicted, y, ops.add_mixed(predicted, change, shares, name="corrected")


@pytest.mark.parametrize("number", range(N))
def test_streams_that_a_router_updates(number: int):
    predicted, y, corrected = updated(number, number)
    assert ops_of(compared(corrected)) == {"altup": 2, "add": 1}
    assert ops_of(compared(corrected, predicted, y)) == {"altup": 2, "add": 1}
    other = ops_of(compared(updated(number, (number + 1) % N)[2]))
    assert other["altup"] == 2  # less another stream than the active one: that is in its attributes
    assert ops_of(compared(updated(number, number, 0.5)[2]))["altup"] == 1


def test_streams_whose_shares_are_read_elsewhere_are_mixed_as_before():
    streams = value("streams", T, N, D)
    shares = routed(stream(streams, 1), "before", N, N)
    each = ops.reshape(shares, shape=(T, N, N))
    mixed = ops.add_mixed(streams, streams, each, name="predicted")
    assert ops_of(compared(mixed)) == {"altup": 1}
    assert "altup" not in ops_of(compared(mixed, shares))
    others = value("others", T, N, D)
    assert "altup" not in ops_of(compared(ops.add_mixed(streams, others, each, name="other")))
    assert "altup" not in ops_of(compared(ops.add_mixed(others, others, each, name="not its own")))


def low_rank(offset: float = 0.0, eps: float = 1e-6) -> tuple[Node, Node, Node]:
    """Two residuals with norms, their mean, and the norm of that."""
    parts = []
    for name in ("attention", "low"):
        y = ops.rms_norm(value(name, T, D), parameter(f"{name}.w", D), eps=eps, name=f"{name}.norm")
        parts.append(ops.add(y, value(f"{name}.x", T, D), name=f"{name}.sum"))
    total = ops.scale(
        ops.add(*parts, name="sum"), factor=0.7, **({"offset": offset} if offset else {}), name="s"
    )
    return parts[0], total, ops.rms_norm(total, parameter("w", D), eps=1e-6, name="norm")


def test_a_residual_of_low_rank():
    part, total, norm = low_rank()
    assert ops_of(compared(norm)) == {"laurel": 1}
    assert ops_of(compared(total, norm)) == {"laurel": 1}
    assert "laurel" not in ops_of(compared(norm, part))
    assert "laurel" not in ops_of(compared(low_rank(offset=1.0)[2]))
    assert "laurel" not in ops_of(compared(low_rank(eps=1e-5)[2]))


def test_a_norm_that_is_read_twice_stays():
    x, y = value("x", T, D), value("yy", T, D)
    post = ops.rms_norm(y, parameter("post", D), eps=1e-5, name="post")
    norm = ops.rms_norm(ops.add(x, post, name="sum"), parameter("w", D), eps=1e-6, name="norm")
    assert ops_of(compared(norm, post)) == {"add_norm": 1, "rms_norm": 1}


def products(bias: bool, sizes: Sequence[int]) -> list[Node]:
    x = value("x", T, D)
    return [
        ops.matmul(
            x, parameter(f"w{i}", n, D), parameter(f"b{i}", n) if bias else None, name=f"p{i}"
        )
        for i, n in enumerate(sizes)
    ]


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_one_value_are_one(bias: bool):
    plan = compared(*products(bias, (16, 8, 8)))
    assert ops_of(plan) == {"matmul": 1}
    assert plan.weight_bytes == {"stand-in": 4 * 32 * (D + bias)}


def test_products_that_would_begin_anywhere_stay():
    assert ops_of(compared(*products(False, (16, 7, 8, 3)))) == {"matmul": 3}


def test_a_weight_of_two_products_stays():
    x, y = value("x", T, D), value("yy", T, D)
    w = parameter("w", 16, D)
    nodes = [ops.matmul(x, w, name="a"), ops.matmul(x, parameter("v", 8, D), name="b")]
    assert ops_of(compared(*nodes, ops.matmul(y, w, name="c"))) == {"matmul": 3}


def test_a_joint_weight_is_held_once():
    """Also where a plan that does not join read its parts before, or comes later."""
    nodes, device = products(True, (16, 8)), StandIn()
    joint, separate = (make_plan(nodes, [device], (), overwrite) for overwrite in (True, False))
    assert ops_of(joint) == {"matmul": 1} and ops_of(separate) == {"matmul": 2}
    for order in ((joint, separate), (separate, joint)):
        residency = Residency()
        executors = [Executor(plan, residency) for plan in order]
        result = [e.run(None) for e in executors]
        assert all(torch.allclose(a, b) for a, b in zip(*result, strict=True))
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for e in executors
            for t in e._by_node.template
            if t is not None
        }
        assert sum(storages.values()) == residency.bytes["stand-in"] == 4 * 24 * (D + 1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("approximate", GELUS)
def test_gelu_behind_a_product(approximate: str, bias: bool):
    x, w, b = value("x", 2, T, D), parameter("w", 16, D), parameter("b", 16) if bias else None
    plan = compared(ops.gelu(ops.matmul(x, w, b, name="p"), approximate=approximate, name="g"))
    fused = bias and approximate == "tanh"  # as cuBLAS has it
    assert ops_of(plan) == ({"matmul_gelu": 1} if fused else {"matmul": 1, "gelu": 1})


class Blocks(Source):
    """Random blocks of Q8_0, by rows and bytes; other weights as before."""

    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        kind = torch.uint8 if self.quant(name) else dtype
        return Type.contiguous(super().type_of(name, dtype).shape, kind)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if self.quant(name) is None:
            return super().read(name, dtype)
        rows, size = self.type_of(name, dtype).shape
        return random_blocks("Q8_0", rows, size // 34 * 32, sum(map(ord, name)))

    def quant(self, name: str) -> str | None:
        return "Q8_0" if name.startswith("q") else None


BLOCKS = Blocks()


def quantized(x: Node, name: str, rows: int, bias: bool = False) -> Node:
    size = x.shape[-1] // 32 * 34
    return ops.matmul(
        x,
        weight(f"q.{name}:{rows}x{size}", BLOCKS, torch.float32),
        weight(f"b.{name}:{rows}", BLOCKS, torch.float32) if bias else None,
        quant="Q8_0",
        name=name,
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("approximate", GELUS)
def test_gelu_behind_a_quantized_product(approximate: str, bias: bool):
    x = value("x", 2, T, 64)
    plan = compared(ops.gelu(quantized(x, "p", 16, bias), approximate=approximate, name="g"))
    assert ops_of(plan) == {"matmul_gelu": 1}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", ["silu", *GELUS])
def test_a_gated_unit_of_quantized_products(act: str, bias: bool):
    x = value("x", T, 64)
    gate, up = (quantized(x, name, 16, bias) for name in ("gate", "up"))
    made = (
        ops.silu_mul(gate, up, name="act")
        if act == "silu"
        else ops.gelu_mul(gate, up, approximate=act, name="act")
    )
    plan = compared(made)
    assert ops_of(plan) == {"matmul_gated": 1}
    (weight_of,) = {i.name for s in plan.steps for i in s.node.operands if i.name.startswith("q.")}
    assert weight_of == f"q.gate:16x{64 // 32 * 34}+q.up:16x{64 // 32 * 34}"


def test_a_gated_unit_that_keeps_its_product():
    """Of plain weights, whose product is cuBLAS's; of a third weight's product beside the two; of
    gate behind up; and where somebody reads a half, or all.
    """
    plain, x = value("x", T, D), value("x", T, 64)
    gate, up = (ops.matmul(plain, parameter(n, 16, D), name=n) for n in ("gate", "up"))
    assert ops_of(compared(ops.silu_mul(gate, up, name="act"))) == {"matmul": 1, "silu_mul": 1}
    gate, up, other = (quantized(x, name, 16) for name in ("gate", "up", "other"))
    act = ops.silu_mul(gate, up, name="act")
    assert ops_of(compared(act, other)) == {"matmul": 1, "silu_mul": 1}
    assert ops_of(compared(act, gate)) == {"matmul": 1, "silu_mul": 1}
    both = quantized(x, "both", 32)
    first, second = (ops.columns(both, start=s, stop=s + 16, name=f"c{s}") for s in (0, 16))
    turned = ops.silu_mul(second, first, name="act")
    assert ops_of(compared(turned)) == {"matmul": 1, "silu_mul": 1}
    act = ops.silu_mul(first, second, name="act")
    assert ops_of(compared(act)) == {"matmul_gated": 1}
    assert ops_of(compared(act, both)) == {"matmul": 1, "silu_mul": 1}


@pytest.mark.parametrize("rule", ["rope", "attention:head=16", "paged_attention", "gather_pages"])
def test_what_a_device_refuses_is_not_put_into_something_else(rule: str):
    _, attention = cached()
    backend = Limited(StandIn(), [rule])
    plan = make_plan([attention], [backend, StandIn(), Reference()])
    (actual,) = Executor(plan, Residency()).run(None)
    (expected,) = Executor(make_plan([attention], [Reference()]), Residency()).run(None)
    assert torch.allclose(actual, expected, atol=1e-5)
    assert ("paged_attention" in ops_of(plan)) == (rule == "rope")
    if rule == "rope":
        assert ops_of(plan)["rope"] == 2


@pytest.mark.parametrize("pattern", ["attn", "q_norm", "gather1"])
def test_what_an_override_names_stays(pattern: str):
    _, attention = cached()
    backends: list[Backend] = [StandIn(), Reference()]
    plan = make_plan([attention], backends, [Override.parse(f"{pattern}=reference")])
    named = [s for s in plan.steps if s.backend.name == "reference" and s.node.op != "copy"]
    assert named and all(
        pattern in s.node.name or any(pattern in i.name for i in s.node.operands) for s in named
    )


def test_a_plan_for_looking_on_is_not_rewritten():
    _, attention = cached()
    result = make_plan([attention], [StandIn()], overwrite=False)
    assert {n.op for n in (s.node for s in result.steps)} >= {"attention", "gather_pages", "rope"}
