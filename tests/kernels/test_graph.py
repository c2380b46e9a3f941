"""Types, the order of nodes, and what a graph that cannot be meant is told."""

from __future__ import annotations

import pytest
import torch

from mtmd.base.errors import PlacementError
from mtmd.kernels import ops
from mtmd.kernels.graph import Node, Type, graph_input, toposort


def leaf(*shape: int, name: str = "x", dtype: torch.dtype = torch.float32) -> Node:
    return graph_input(name, shape, dtype, lambda batch: batch)


@pytest.mark.parametrize("shape", [(), (5,), (3, 1, 7), (2, 0, 4), (1, 1), (4, 3, 2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_contiguous_type_is_what_torch_makes(shape, dtype):
    tensor = torch.zeros(shape, dtype=dtype)
    kind = Type.contiguous(shape, dtype)
    assert kind == Type.of(tensor)
    assert (kind.count, kind.bytes, kind.is_contiguous) == (tensor.numel(), tensor.nbytes, True)
    assert Type.of(kind.meta()) == kind and kind.meta().device.type == "meta"


def test_strides_are_kept_except_where_they_say_nothing():
    tensor = torch.zeros(4, 6).t()[:, ::2]
    assert Type.of(tensor).strides == (1, 12) and not Type.of(tensor).is_contiguous
    assert Type.of(torch.zeros(9).as_strided((1, 3, 1), (77, 2, 50))).strides == (6, 2, 1)


def test_a_type_and_a_node_are_printed_in_few_words():
    assert str(Type.contiguous((2, 3), torch.bfloat16)) == "bf16 [2, 3]"
    assert str(ops.gelu(leaf(2, 3), approximate="none", name="act")) == "act = gelu -> fp32 [2, 3]"
    assert str(ops.gelu(leaf(2, 3), approximate="none")) == "(unnamed) = gelu -> fp32 [2, 3]"


def test_order_is_inputs_first_each_node_once_as_they_are_asked_for():
    a, b = leaf(2, name="a"), leaf(2, name="b")
    left, right = ops.add(a, b, name="left"), ops.add(b, a, name="right")
    top = ops.add(ops.add(left, right, name="sum"), left, name="top")
    assert [n.name for n in toposort(top)] == ["a", "b", "left", "right", "sum", "top"]
    assert [n.name for n in toposort(right, top)] == ["b", "a", "right", "left", "sum", "top"]
    assert toposort(a, a) == [a]


def test_order_of_a_graph_deeper_than_the_stack():
    x = leaf(2)
    for _ in range(5000):
        x = ops.add(x, x)
    order = toposort(x)
    assert len(order) == 5001 and order[-1] is x


def test_an_absent_input_stays_in_its_place():
    node = ops.matmul(leaf(3, 5), leaf(4, 5), None)
    assert len(node.inputs) == 3 and node.inputs[2] is None and len(list(node.operands)) == 2


def test_views_and_written_caches_are_told_as_alias():
    x, cache = leaf(4, 6), leaf(2, 8, 1, 6)
    assert ops.reshape(x, shape=(24,)).alias and not ops.gelu(x, approximate="none").alias
    kv = ops.kv_store(cache, leaf(3, 1, 6), leaf(3, 1, 6), leaf(3, dtype=torch.int64))
    assert kv.alias and ops.kv_half(kv, which=1).alias
    turned = Node("input", (), Type((6, 4), torch.float32, (1, 6)), {}, "turned")
    assert not ops.reshape(turned, shape=(24,)).alias  # strides forbid a view: this one copies


@pytest.mark.parametrize(
    "build, words",
    [
        (
            lambda: ops.matmul(leaf(3, 5), leaf(4, 6), name="proj"),
            ("matmul proj", "fp32 [3, 5]", "fp32 [4, 6]", "inner sizes differ"),
        ),
        (lambda: ops.add(leaf(3, 5), leaf(2, 3, 5)), ("add (unnamed)", "does not broadcast")),
        (lambda: ops.gelu_mul(leaf(3, 5), leaf(3, 1), approximate="tanh"), ("gelu_mul", "differ")),
        (lambda: ops.rms_norm(leaf(3, 5), leaf(4), eps=1e-6), ("rms_norm", "does not match")),
        (
            lambda: ops.layer_norm(leaf(3, 5), leaf(5), leaf(4), eps=1e-6),
            ("layer_norm", "does not match"),
        ),
        (lambda: ops.rope(leaf(3, 2, 5), leaf(3, 2, 3)), ("rope", "[3, 2, 5]")),
        (
            lambda: ops.patch_embed(leaf(1, 3, 8, 9), leaf(4, 3, 2, 2)),
            ("patch_embed", "no multiple of patch 2"),
        ),
        (
            lambda: ops.conv2d(leaf(1, 12, 4), leaf(5, 4, 3, 3), grid=(3, 5)),
            ("conv2d", "not a grid of 3 x 5"),
        ),
        (
            lambda: ops.conv2d(leaf(1, 12, 4), leaf(5, 3, 3, 3), grid=(3, 4)),
            ("conv2d", "in 1 groups"),
        ),
        (
            lambda: ops.conv2d(leaf(1, 8, 4), leaf(5, 4, 3, 3), grid=(2, 4)),
            ("conv2d", "[3, 3] does not fit"),
        ),
        (
            lambda: ops.pool2d(leaf(1, 12, 4), grid=(3, 5), size=(3, 5)),
            ("pool2d", "not a grid of 3 x 5"),
        ),
        (
            lambda: ops.pool2d(leaf(1, 12, 4), grid=(3, 4), size=(3, 5)),
            ("pool2d", "grid 3 x 4 has no 3 x 5 parts"),
        ),
        (
            lambda: ops.place_rows(leaf(5, 4), leaf(2, 3), leaf(2, dtype=torch.int64)),
            ("place_rows", "[2, 3]"),
        ),
        (
            lambda: ops.kv_store(
                leaf(2, 8, 1, 6), leaf(3, 2, 6), leaf(3, 2, 6), leaf(3, dtype=torch.int64)
            ),
            ("kv_store", "[2, 8, 1, 6]"),
        ),
        (lambda: ops.kv_half(leaf(2, 8, 1, 6), which=2), ("kv_half", "which")),
        (lambda: ops.reshape(leaf(2, 3), shape=(7,), name="v"), ("reshape v", "[2, 3]")),
        (
            lambda: ops.attention(leaf(1, 3, 4, 8), leaf(1, 3, 3, 8), leaf(1, 3, 3, 8), scale=1.0),
            ("attention", "[1, 3, 4, 8]"),
        ),
        (
            lambda: ops.attention(
                leaf(1, 3, 2, 8), leaf(1, 5, 2, 8), leaf(1, 5, 2, 8), leaf(3, 3), scale=1.0
            ),
            ("attention", "mask [3, 3]"),
        ),
        (
            lambda: ops.attn_scores(
                leaf(2, 3, 2, 8), leaf(2, 5, 2, 8), leaf(2, 3, 3, 5), scale=1.0
            ),
            ("attn_scores", "mask [2, 3, 3, 5]"),
        ),
        (
            lambda: ops.attn_scores(
                leaf(1, 3, 2, 8), leaf(1, 5, 2, 8), leaf(3, 5, dtype=torch.bool), scale=1.0
            ),
            ("attn_scores", "mask"),
        ),
        (
            lambda: ops.attention(leaf(1, 3, 2, 8), leaf(1, 3, 2, 8), leaf(1, 3, 2, 8)),
            ("attention", "scale"),
        ),
        (lambda: ops.gelu(leaf(3), approximate="tanh", fast=True), ("gelu", "fast")),
        (lambda: ops.add(leaf(3), None), ("add", "operand b is missing")),
        (
            lambda: ops.matmul(leaf(3, 5), leaf(4, 5, dtype=torch.bfloat16)),
            ("matmul", "fp32 [3, 5]", "bf16 [4, 5]", "several types"),
        ),
        (lambda: ops.embed(leaf(3), leaf(7, 4)), ("embed", "fp32 [3] for places, expected i64")),
        (
            lambda: ops.attn_softmax(leaf(2, 2, 3, 5), leaf(3, 3, 2, dtype=torch.int32)),
            ("attn_softmax", "bounds i32 [3, 3, 2]", "expected i32 [3, 2] or [2, 3, 2]"),
        ),
    ],
)
def test_a_graph_that_cannot_be_meant_is_refused_with_its_shapes(build, words):
    with pytest.raises(PlacementError) as refused:
        build()
    assert all(word in str(refused.value) for word in words), str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_node_is_printed_without_its_inputs():
    node = graph_input("x", (2,), torch.float32, lambda _: torch.zeros(2))
    for _ in range(60):
        node = ops.add(node, node, name="doubled")
    assert repr(node) == "<doubled = add -> fp32 [2]>"
