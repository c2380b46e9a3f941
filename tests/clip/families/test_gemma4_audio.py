"""Settings of Gemma 4's audio encoder: those of transformers where nothing is said, and what is
refused; how far its attention reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from mtmd.base.errors import ModelError
from mtmd.clip.families.gemma4 import audio
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.gpu.table import choose
from mtmd.kernels.graph import Type, graph_input, toposort
from mtmd.kernels.plan.flash_choice import AttentionForm

FEATURES: Mapping[str, Any] = {}


def read(features: Mapping[str, Any] = FEATURES, **settings: Any) -> audio.Gemma4Audio:
    return audio.read(
        Settings({"audio_config": settings}, "config.json"),
        Settings(dict(features), "processor_config.json"),
    )


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Gemma4Config
    from transformers.models.gemma4.configuration_gemma4 import Gemma4AudioConfig

    theirs, ours = Gemma4AudioConfig(), read()
    c = ours.conformer
    assert (c.layers, c.width, c.heads, c.kernel, ours.output_width) == (
        theirs.num_hidden_layers,
        theirs.hidden_size,
        theirs.num_attention_heads,
        theirs.conv_kernel_size,
        theirs.output_proj_dims,
    )
    assert (list(ours.channels), c.ffn_scale, c.cap, c.clipped, c.eps) == (
        theirs.subsampling_conv_channels,
        theirs.residual_weight,
        theirs.attention_logit_cap,
        theirs.use_clipped_linears,
        theirs.rms_norm_eps,
    )
    assert ours.text_width == Gemma4Config().text_config.hidden_size
    assert c.reach == audio.Reach() and ours.resolution.max_tokens() == 750


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_act": "gelu"},
        {"gradient_clipping": 1.0},
        {"attention_invalid_logits_value": -1.0},
        {"num_attention_heads": 7},
        {"hidden_size": 1 << 40},
        {"subsampling_conv_channels": [100, 32]},
        {"subsampling_conv_channels": 128},
        {"conv_kernel_size": 10**6},
        {"attention_context_left": 1},
        {"attention_context_left": 10**6},
        {"attention_context_right": -1},
        {"attention_chunk_size": 0},
        {"attention_logit_cap": float("nan")},
        {"residual_weight": "half"},
        {"num_hidden_layers": 10**6},
    ],
)
def test_settings_that_are_refused(wrong: dict[str, Any]) -> None:
    key = next(iter(wrong))
    with pytest.raises(ModelError, match="heads of width" if key.startswith("num_att") else key):
        read(**wrong)


def test_bins_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match="frequencies that are left of 80"):
        read({"feature_size": 80})


@pytest.mark.parametrize(
    "other",
    [
        {"conv_kernel_size": 3},
        {"attention_context_right": 2},
        {"attention_logit_cap": 30.0},
        {"residual_weight": 1.0},
        {"rms_norm_eps": 1e-5},
    ],
)
def test_what_no_gguf_says_is_not_written(other: dict[str, Any]) -> None:
    assert audio.to_gguf(read(**other)) is None
    assert audio.to_gguf(read({"mel_floor": 1e-5})) is None
    assert audio.to_gguf(read()) is not None


class Described:
    """Weights of which nothing but their types is known."""

    def __init__(self, family: audio.Gemma4Audio) -> None:
        self.shapes = {name: p.shape for name, p in family.parameters().items()}

    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        return Type.contiguous(self.shapes[name], dtype)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError

    def quant(self, name: str) -> None:  # noqa: ARG002
        return None

    order = quant


def test_a_gpu_takes_all_of_it() -> None:
    family = read(num_hidden_layers=1)
    shape = (4, *family.resolution.largest_tile_type().shape)
    tiles = graph_input("tiles", shape, torch.bfloat16, lambda tiles: tiles)
    nodes = toposort(family.graph(tiles, Described(family), AttentionForm()))
    reasons = {n.name: choose(n, lambda _: None).reason for n in nodes if n.inputs}
    assert len(reasons) > 50 and not any(reasons.values())


@pytest.mark.parametrize(
    ("chunk", "left", "right"),
    [(12, 13, 0), (3, 6, 0), (5, 4, 3), (2, 9, 1), (7, 2, 5), (20, 3, 0)],
)
def test_attention_reaches_as_far_as_transformers(chunk: int, left: int, right: int) -> None:
    """Whatever the length: whole chunks, and one that ends early."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4AudioConfig, Gemma4AudioModel

    settings = {
        "attention_chunk_size": chunk,
        "attention_context_left": left,
        "attention_context_right": right,
        "attention_logit_cap": 1.5,
        "hidden_size": 24,
        "num_attention_heads": 3,
        "num_hidden_layers": 1,
    }
    torch.manual_seed(chunk)
    model = Gemma4AudioModel(Gemma4AudioConfig(**settings)).eval()
    layer, reach = model.layers[0].self_attn, read(**settings).conformer.reach
    with torch.no_grad():
        torch.nn.init.normal_(layer.relative_k_proj.weight)
        torch.nn.init.normal_(layer.q_proj.linear.weight)
        torch.nn.init.normal_(layer.k_proj.linear.weight, std=0.3)
        torch.nn.init.normal_(layer.v_proj.linear.weight)
        for count in (1, 2, 11, 2 * chunk):
            x = torch.randn(1, count, 24)
            q, k, v = (
                linear(x).unflatten(2, (3, 8))
                for linear in (layer.q_proj, layer.k_proj, layer.v_proj)
            )
            q = q * torch.nn.functional.softplus(layer.per_dim_scale)
            table = (reach.table(24) @ layer.relative_k_proj.weight.T).unflatten(1, (3, 8))
            grid = -(-count // reach.tokens), reach.tokens
            q = ops.relative_queries.reference(q, None, table, grid=grid, scale=layer.k_scale)
            k = ops.relative_keys.reference(k, grid=grid, rows=False)
            mixed = ops.attention.reference(
                q, k, v, None, reach.bounds(count), scale=layer.q_scale * layer.k_scale, softcap=1.5
            )
            actual = layer.post(mixed.flatten(2))
            expected = _attended(model, layer, x, settings)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def _attended(model: Any, layer: Any, x: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    from transformers.models.gemma4 import modeling_gemma4 as gemma4

    sizes = settings["attention_context_left"] - 1, settings["attention_context_right"]
    mask = gemma4.create_bidirectional_mask(
        config=model.config,
        inputs_embeds=x,
        attention_mask=torch.ones(x.shape[:2], dtype=torch.bool),
        and_mask_function=gemma4.sliding_window_mask_function(sizes),
    )
    blocked = model._convert_4d_mask_to_blocked_5d(mask)
    result: torch.Tensor = layer(x, model.rel_pos_enc(x), blocked)[0]
    return result
