"""The backend that refuses by rules: what a rule says, and that everything else is its inner
backend.
"""

from __future__ import annotations

import pytest
import torch
from random_graphs import given

from mtmd.base.errors import OptionError
from mtmd.kernels import ops
from mtmd.kernels.backends import Cpu, Limited, Reference, backends_for
from mtmd.kernels.backends.limited import Rule
from mtmd.kernels.graph import Node


def attention(
    batch: int = 1,
    rows: int = 5,
    heads: int = 2,
    size: int = 72,
    dtype: torch.dtype = torch.float32,
) -> Node:
    return ops.attention(
        *(given("x", batch, rows, heads, size, dtype=dtype),) * 3, scale=1.0, name="v.blk.7.attn"
    )


def scores(batch: int = 1, rows: int = 5, heads: int = 2) -> Node:
    return ops.attn_softmax(given("s", batch, heads, rows, 9), name="v.blk.7.attn.softmax")


@pytest.mark.parametrize(
    "rule, node, reason",
    [
        ("attention", attention(), "op attention is not supported"),
        ("attention", scores(), None),
        ("*", scores(), "op attn_softmax is not supported"),
        ("attention:head=72", attention(), "head size 72 is not supported"),
        ("attention:head=72", attention(size=64), None),
        ("attention:head>64", attention(), "head size 72 is not supported"),
        ("attention:head<72", attention(), None),
        ("*:head=72", scores(), None),
        ("*:batch>1", attention(batch=4), "batch 4 is not supported"),
        ("*:batch>1", attention(batch=1), None),
        ("attention:rows>4", attention(), "rows 5 is not supported"),
        ("attn_softmax:rows=5", scores(), "rows 5 is not supported"),
        ("attn_softmax:rows=2", scores(), None),
        (
            "matmul:width=8",
            ops.matmul(given("x", 3, 8), given("w", 2, 8)),
            "width 8 is not supported",
        ),
        ("matmul:batch>1", ops.matmul(given("x", 3, 8), given("w", 2, 8)), None),
        ("*:batch>1", ops.kv_half(given("cache", 2, 9, 1, 8), which=0), None),
        ("*:batch>1", ops.rope(given("x", 7, 2, 8), given("p", 7, 2, 4)), None),
        ("attention:bf16", attention(dtype=torch.bfloat16), "dtype bf16 is not supported"),
        ("attention:bf16", attention(), None),
        (r"*:/blk\.7\./", attention(), r"name matches /blk\.7\./"),
        (r"attn_softmax:/blk\.7\./", attention(), None),
        (r"*:/blk\.8\./", attention(), None),
    ],
)
def test_what_a_rule_refuses(rule, node, reason):
    assert Rule.parse(rule).refuses(node) == reason
    assert Limited(Reference(), [rule]).rejects(node) == reason


@pytest.mark.parametrize(
    "text",
    [
        "",
        "attentoin",
        "attention:",
        "attention:head",
        "attention:head=",
        "attention:head=x",
        "attention:size=3",
        "attention:head>=3",
        "attention:head=-1",
        "attention:fp8",
        "attention:head=٧",
        "attention:head=" + "9" * 5000,
        "*:/(/",
        "*:/a{99999999999999999999}/",
        "attentoin:/x/",
        "/x/",
        "attention:head=72 ",
    ],
)
def test_a_rule_that_is_none_is_refused_in_one_line(text):
    with pytest.raises(OptionError, match="refuse rule") as refused:
        Rule.parse(text)
    assert "\n" not in str(refused.value)


def test_the_first_rule_that_refuses_gives_the_reason_then_the_inner_backend():
    limited = Limited(Cpu(), ["gelu", "attention:head=72", "attention"])
    assert limited.rejects(attention()) == "head size 72 is not supported"
    half = ops.softcap(given("x", 4, dtype=torch.float16), cap=1.0)
    assert limited.rejects(half) == Cpu().rejects(half) is not None
    assert limited.rejects(scores()) is None


def test_everything_else_is_the_inner_backends():
    limited, node = Limited(Cpu(), []), attention(rows=300)
    assert limited.device == torch.device("cpu") and limited.space == limited.name == "limited"
    assert limited.workspace(node) == Cpu().workspace(node) > 0
    x = torch.randn(1, 300, 2, 72)
    assert torch.equal(limited.lower(node)(x, x, x), Cpu().lower(node)(x, x, x))


def test_rules_go_in_front_of_the_device():
    assert [b.name for b in backends_for("cpu")] == ["cpu", "reference"]
    assert [b.name for b in backends_for("cpu", ["attention"])] == ["limited", "cpu", "reference"]


@pytest.mark.parametrize(
    "device",
    [
        "",
        "gpu",
        "cpu:0",
        "cuda:",
        "cuda:x",
        "cuda:-1",
        "cuda:²",
        "auto:0",
        "cuda:0:1",
        "CPU",
        "cuda:0\n",
    ],
)
def test_a_device_that_is_none_is_refused(device):
    with pytest.raises(OptionError, match=r"expected auto, cpu, cuda, cuda:N, mps, xpu or xpu:N"):
        backends_for(device)


def test_a_device_that_is_not_there_is_refused_with_how_many_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(
        OptionError,
        match="'cuda:0': found 0 CUDA devices; use device='cpu' or 'auto' \\(--device cpu or auto\\)",
    ):
        backends_for("cuda:0")
    assert [b.name for b in backends_for("auto")] == ["cpu", "reference"]
