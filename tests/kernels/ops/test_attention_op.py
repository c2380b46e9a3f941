"""The attention op, as one and as three, against torch and against its definition written out."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from op_cases import draw
from torch import Tensor

from mtmd.kernels import ops

pytestmark = pytest.mark.usefixtures("poisoned")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bounds: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Row by row in fp64, by the words of the definition."""
    q, k, v = q.double(), k.double(), v.double()
    batch, rows, heads, _ = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    out = torch.zeros(batch, rows, heads, v.shape[3], dtype=torch.float64)
    full = None if mask is None else mask.double().expand(batch, heads, rows, keys)
    for b in range(batch):
        for t in range(rows):
            here = t + keys - rows
            seen = [
                s
                for s in range(keys)
                if (not causal or s <= here) and (window is None or s > here - window)
            ]
            if bounds is not None:
                low, high = (int(x) for x in (bounds[t] if bounds.ndim == 2 else bounds[b, t]))
                seen = [s for s in seen if low <= s <= high]
            for h in range(heads):
                score = (k[b, :, h // group] @ q[b, t, h]) * scale
                score = score if softcap is None else softcap * torch.tanh(score / softcap)
                score = score if full is None else score + full[b, h, t]
                see = [s for s in seen if score[s] > -math.inf]
                if see:
                    out[b, t, h] = torch.softmax(score[see], 0) @ v[b, see, h // group]
    return out


@pytest.mark.parametrize("groups", [6, 3, 1])
@pytest.mark.parametrize(
    "mask", [(), (9, 11), (6, 9, 11), (2, 6, 9, 11), (2, 1, 9, 11), (1, 6, 9, 11)], ids=str
)
def test_attention_is_torchs(groups, mask):
    q, k, v = (
        random(2, 9, 6, 18),
        random(2, 11, groups, 18, seed=1),
        random(2, 11, groups, 18, seed=2),
    )
    added = random(*mask, seed=3) if mask else None
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(
        *heads_first, added, scale=0.3, enable_gqa=groups != 6
    )
    actual = ops.attention.reference(q, k, v, added, scale=0.3)
    torch.testing.assert_close(actual, expected.transpose(1, 2), rtol=1e-5, atol=2e-6)
    assert actual.is_contiguous()


def test_causal_attention_is_torchs_where_rows_and_keys_are_as_many():
    q, k, v = random(1, 9, 2, 8), random(1, 9, 2, 8, seed=1), random(1, 9, 2, 8, seed=2)
    expected = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=0.3
    )
    torch.testing.assert_close(
        ops.attention.reference(q, k, v, scale=0.3, causal=True), expected.transpose(1, 2)
    )


@pytest.mark.parametrize("rows, keys", [(7, 7), (3, 9), (9, 4), (1, 6), (5, 1)])
@pytest.mark.parametrize(
    "limits",
    [
        {"causal": True},
        {"window": 3},
        {"causal": True, "window": 2},
        {"causal": True, "window": 1},
        {"softcap": 1.5},
        {"causal": True, "softcap": 0.7, "window": 100},
        {},
    ],
    ids=str,
)
def test_attention_is_its_definition(rows, keys, limits):
    q, k, v = random(2, rows, 4, 6), random(2, keys, 2, 6, seed=1), random(2, keys, 2, 5, seed=2)
    bounds = torch.randint(
        -1, keys + 1, (2, rows, 2), generator=torch.Generator().manual_seed(rows)
    ).int()  # at times first > last
    mask = random(4, rows, keys, seed=4).masked_fill(
        random(4, rows, keys, seed=5) > 0.8, -torch.inf
    )
    for extra in ((None, None), (mask, None), (None, bounds), (None, bounds[0]), (mask, bounds)):
        result = ops.attention.reference(q, k, v, *extra, scale=0.4, **limits)
        torch.testing.assert_close(
            result.double(),
            naive_attention(q, k, v, *extra, scale=0.4, **limits),
            rtol=1e-5,
            atol=1e-6,
        )


def test_a_row_that_sees_nothing_gives_zeros():
    q, k, v = random(1, 4, 2, 8), random(1, 5, 2, 8, seed=1), random(1, 5, 2, 8, seed=2)
    mask = torch.zeros(4, 5)
    mask[1] = -torch.inf
    assert ops.attention.reference(q, k, v, mask, scale=1.0)[:, 1].eq(0).all()
    bounds = torch.tensor([[0, 4], [3, 2], [-5, -1], [5, 9]]).int()
    result = ops.attention.reference(q, k, v, None, bounds, scale=1.0)
    assert result[:, 1:].eq(0).all() and result[:, 0].ne(0).all()
    early = ops.attention.reference(
        q, k[:, :2], v[:, :2], scale=1.0, causal=True
    )  # rows before the first key
    assert early[:, :2].eq(0).all() and early[:, 2:].ne(0).all()


def test_an_image_block_sees_itself_in_both_directions():
    """Cache slots 0..7, tokens 3..6 a picture: bounds say what the mask of a causal model with one
    block says.
    """
    q, k, v = random(1, 8, 2, 8), random(1, 8, 2, 8, seed=1), random(1, 8, 2, 8, seed=2)
    block = torch.zeros(8, dtype=torch.bool)
    block[3:7] = True
    seen = torch.ones(8, 8).tril().bool() | (block[:, None] & block[None])
    bounds = torch.stack((torch.zeros(8), torch.where(block, 6, torch.arange(8))), 1).int()
    expected = ops.attention.reference(
        q, k, v, torch.zeros(8, 8).masked_fill(~seen, -torch.inf), scale=0.5
    )
    torch.testing.assert_close(ops.attention.reference(q, k, v, None, bounds, scale=0.5), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_explicit_three_are_attention(dtype):
    for seed in range(20):
        inputs, attrs = draw("attention", seed, dtype)
        q, k, v, mask, bounds = inputs
        limits = {name: attrs[name] for name in ("causal", "window")}
        scored = {name: attrs[name] for name in ("scale", "softcap", "mask_capped")}
        scores = ops.attn_scores.reference(q, k, mask, **scored)
        result = ops.attn_mix.reference(ops.attn_softmax.reference(scores, bounds, **limits), v)
        assert torch.equal(result, ops.attention.reference(*inputs, **attrs)), f"seed {seed}"
