"""What the GPU backend takes and why not, with the CUDA device faked; the kernel itself runs in
Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from mtmd.kernels.backends import Cpu, Reference, gpu
from mtmd.kernels.backends.gpu import Gpu
from mtmd.kernels.backends.target import Target
from mtmd.kernels.estimate.launches import cost
from mtmd.kernels.gpu.flash_attention.kernel import KERNEL
from mtmd.kernels.graph import Node, graph_input
from mtmd.kernels.ops import OPS, attention, channel_attention, gelu, matmul
from mtmd.kernels.plan.scheduler import make_plan


@pytest.fixture
def ampere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")


def value(*shape, dtype=torch.float32):
    return graph_input("x", shape, dtype, lambda _: None)


def attention_node(width=72, batch=1, **attrs) -> Node:
    q, k = value(batch, 9, 4, width), value(batch, 9, 2, width)
    return attention(q, k, k, name="attn", scale=0.1, **attrs)


def test_without_a_device_it_takes_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in Gpu().rejects(gelu(value(2, 3), approximate="none"))


@pytest.mark.usefixtures("ampere")
def test_takes_every_head_size_and_batch():
    for batch in range(1, 6):
        assert Gpu().rejects(attention_node(batch=batch)) is None
        assert (
            Gpu().rejects(attention_node(8, batch))
            == "q has head size 8; the kernel supports 16 to 576"
        )


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("batch", [1, 2])
def test_attention_of_channels_is_products_of_torchs_on_the_device(batch):
    """Its scores are channels by channels, few: it needs no kernel of ours, and is not sent to the
    host. A warm-up lists what torch launches for it.
    """
    q, k, v = (torch.randn(batch, 49, 3, 32) for _ in range(3))
    node = channel_attention(*(value(*x.shape) for x in (q, k, v)), scale=0.1, name="channels")
    assert torch.equal(
        Gpu().lower(node)(q, k, v), OPS["channel_attention"].reference(q, k, v, scale=0.1)
    )
    for target in (Target("cuda:90"), Target("hip:gfx942")):
        plan = make_plan([node], [target, Cpu(), Reference()])
        (step,), used = plan.steps, cost(plan.steps[0], target)
        assert step.backend is target and plan.refusals == ()
        assert used.triton == 0 and 5 <= used.torch <= 10 and used.bytes > 4 * q.nbytes
        assert target.workspace(node) > 0
    assert Gpu().rejects(node) is None and not OPS["channel_attention"].waits


@pytest.mark.usefixtures("ampere")
def test_missing_triton_is_told(monkeypatch):
    monkeypatch.setattr(gpu, "find_spec", lambda _: None)
    assert "pip install" in Gpu().rejects(attention_node())
    assert Gpu().rejects(matmul(value(2, 3), value(4, 3))) is None


@pytest.mark.usefixtures("ampere")
def test_old_card_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert (
        Gpu().rejects(attention_node())
        == "the attention kernel needs compute capability 8.0, found 7.5 (a card)"
    )


def test_attention_is_lowered_to_the_kernel():
    node = attention_node(causal=True)
    q, k = torch.randn(1, 9, 4, 72), torch.randn(1, 9, 2, 72)
    got = Gpu().lower(node)(q, k, k)
    torch.testing.assert_close(
        got, attention.reference(q, k, k, scale=0.1, causal=True), atol=1e-5, rtol=1e-5
    )
    assert Gpu().workspace(node) == 0


def test_few_tokens_over_many_keys_take_memory_for_the_parts():
    """8 blocks of 16 keys or more for each of 2 x 2 programs: parts of 72 columns with their
    maximum and sum, of 2 x 4 rows.
    """
    q, k = value(2, 1, 4, 72), value(2, 1000, 2, 72)
    node = attention(q, k, k, name="attn", scale=0.1)
    splits = KERNEL.main(q.type, k.type, k.type, scale=0.1).call.across
    assert (
        splits == 8
        and Gpu().workspace(node) == Target("cuda:90").workspace(node) == 4 * splits * 8 * 74
    )
    assert Gpu().workspace(attention_node()) == 0


def test_other_ops_are_lowered_to_their_reference():
    node = gelu(value(2, 3), approximate="tanh")
    x = torch.randn(2, 3)
    assert torch.equal(Gpu().lower(node)(x), torch.nn.functional.gelu(x, approximate="tanh"))
    saved = x.clone()
    assert Gpu().lower(node, in_place=True)(saved) is saved
