"""Relative positions: attention with longer heads is SAM's of a grid, whose windows are its, and
Granite Speech's of a sequence.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.sam.configuration_sam import SamVisionConfig
from transformers.models.sam.modeling_sam import SamVisionAttention, SamVisionLayer

from mtmd.kernels import ops


@pytest.mark.parametrize(("grid", "table"), [((5, 7), (5, 7)), ((4, 3), (6, 3)), ((6, 9), (4, 7))])
def test_attention_to_longer_heads_is_sams(grid, table):
    config = SamVisionConfig(hidden_size=24, num_attention_heads=3)
    model, generator = SamVisionAttention(config, 0).eval(), torch.Generator().manual_seed(0)
    model.rel_pos_h, model.rel_pos_w = (
        torch.nn.Parameter(torch.randn(2 * size - 1, 8, generator=generator)) for size in table
    )
    x = torch.randn(2, *grid, 24, generator=generator)
    with torch.no_grad():
        expected = model(x)[0].flatten(1, 2)
        qkv = model.qkv(x).flatten(1, 2).unflatten(2, (3, 3, 8))
        q, k, v = qkv.unbind(2)
        attrs = {"grid": grid, "scale": 8**-0.5}
        wide = ops.relative_queries.reference(q, model.rel_pos_h, model.rel_pos_w, **attrs)
        keys = ops.relative_keys.reference(k, grid=grid)
        assert wide.shape == keys.shape and wide.shape[3] % 16 == 0
        mixed = ops.attention.reference(wide, keys, v, scale=8**-0.5)
        actual = model.proj(mixed.flatten(2))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_lines_of_a_sequence_are_granites() -> None:
    from transformers import GraniteSpeechEncoderConfig
    from transformers.models.granite_speech import modeling_granite_speech as granite

    config = GraniteSpeechEncoderConfig(hidden_dim=24, num_heads=3, dim_head=8, context_size=5)
    torch.manual_seed(0)
    model = granite.GraniteSpeechConformerAttention(config).eval()
    places = torch.arange(5)
    distances = (places[:, None] - places).clamp(-5, 5) + model.max_pos_emb
    x = torch.randn(2, 13, 24)
    with torch.no_grad():
        expected = model(x, distances)
        y = torch.nn.functional.pad(model.pre_norm(x), (0, 0, 0, 2))  # the last line ends early
        q, k, v = torch.cat((model.to_q(y), model.to_kv(y)), 2).unflatten(2, (3, 3, 8)).unbind(2)
        table = (
            model.rel_pos_emb.weight[model.max_pos_emb - 4 : model.max_pos_emb + 5] * model.scale
        )
        q, k, v = q[:, :13], k[:, :13], v[:, :13]
        at = torch.arange(13, dtype=torch.int32) // 5 * 5
        bounds = torch.stack((at, (at + 4).clamp(max=12)), 1)
        wide = ops.relative_queries.reference(q, None, table, grid=(3, 5), scale=model.scale)
        keys = ops.relative_keys.reference(k, grid=(3, 5), rows=False)
        mixed = ops.attention.reference(wide, keys, v, None, bounds, scale=model.scale)
        actual = model.to_out(mixed.flatten(2))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("grid", "size"), [((5, 7), 3), ((4, 6), 2), ((2, 3), 5)])
def test_windows_are_sams(grid, size):
    config = SamVisionConfig(hidden_size=8, num_attention_heads=2, attn_implementation="eager")
    layer = SamVisionLayer(config, size)
    x = torch.randn(2, *grid, 6)
    expected, padded = layer.window_partition(x, size)
    squares = ops.windows.reference(x.flatten(1, 2), grid=grid, size=size)
    assert torch.equal(squares, expected.flatten(1, 2))
    back = ops.from_windows.reference(squares, grid=grid, size=size)
    assert torch.equal(back, layer.window_unpartition(expected, size, padded, grid).flatten(1, 2))
