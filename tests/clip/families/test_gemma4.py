"""What is special to Gemma 4's eye: sizes of pictures and budgets, settings, tensor names, GGUF,
standardization in fp32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import picture, randomize

from mtmd.base.errors import ModelError, OptionError
from mtmd.clip.encoder import Encoder
from mtmd.clip.families.gemma4 import vision as gemma4
from mtmd.clip.family import gguf_vision_family, vision_family
from mtmd.clip.resolution.fixed_area import largest_grid
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.backends import Cpu
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, check_no_extra
from mtmd.kernels.checkpoint.open_weights import open_weights
from mtmd.kernels.checkpoint.settings import Settings

TINY = {
    "hidden_size": 40,
    "intermediate_size": 58,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 224,
}
IMAGE = {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70}


def read(
    vision: dict[str, Any] | None = None,
    image: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> gemma4.Gemma4Vision:
    config = {
        "model_type": "gemma4",
        "vision_config": TINY | (vision or {}),
        "text_config": {"hidden_size": 20} | (text or {}),
    }
    result = vision_family(
        "gemma4",
        Settings(config, "config.json"),
        Settings(IMAGE | (image or {}), "processor_config.json"),
    )
    assert isinstance(result, gemma4.Gemma4Vision)
    return result


def usual() -> gemma4.Gemma4Vision:
    """As published: 16 pixels a patch, 280 tokens."""
    return gemma4.read(Settings({}, "config.json"), Settings({}, "processor_config.json"))


def test_defaults_are_those_of_transformers() -> None:
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig, Gemma4VisionConfig
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        _SUPPORTED_SOFT_TOKENS,
        Gemma4ImageProcessorPil,
    )

    expected, image, actual = Gemma4VisionConfig(), Gemma4ImageProcessorPil(), usual()
    tower = actual.tower
    assert (
        tower.layers,
        tower.width,
        tower.ffn,
        tower.heads,
        tower.groups,
        tower.head,
        tower.eps,
        tower.clipped,
    ) == (
        expected.num_hidden_layers,
        expected.hidden_size,
        expected.intermediate_size,
        expected.num_attention_heads,
        expected.num_key_value_heads,
        expected.head_dim,
        expected.rms_norm_eps,
        expected.use_clipped_linears,
    )
    assert (
        actual.patch,
        actual.pool,
        actual.locations,
        actual.standardized,
        actual.text_width,
        actual.bidirectional,
    ) == (
        expected.patch_size,
        expected.pooling_kernel_size,
        expected.position_embedding_size,
        expected.standardize,
        Gemma4TextConfig().hidden_size,
        False,
    )
    assert (actual.resolution.cell, actual.resolution.tokens, actual.resolution.sizes) == (
        image.patch_size * image.pooling_kernel_size,
        image.max_soft_tokens,
        _SUPPORTED_SOFT_TOKENS,
    )
    assert (
        actual.tower.rotary.frequencies[0] == 1
        and len(actual.tower.rotary.axes) == expected.head_dim // 2
    )


def test_sizes_are_those_of_the_reference() -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        get_aspect_ratio_preserving_size,
    )

    rng, narrow = np.random.default_rng(0), 0
    for _ in range(3000):
        height, width = (int(2 ** rng.uniform(0, 13)) for _ in range(2))
        patch, pool, tokens = (
            int(rng.choice([4, 14, 16])),
            int(rng.choice([1, 2, 3])),
            int(rng.choice(gemma4.SIZES)),
        )
        expected = get_aspect_ratio_preserving_size(height, width, patch, tokens * pool**2, pool)
        actual = largest_grid(height, width, patch * pool, tokens)
        assert tuple(side * patch * pool for side in actual) == expected, (
            height,
            width,
            patch,
            pool,
            tokens,
        )
        assert 0 < actual[0] * actual[1] <= tokens
        narrow += 1 in actual
    assert narrow > 100


@pytest.mark.parametrize("width, height", [(31, 19), (200, 2), (2, 700), (96, 96)])
def test_pixels_and_prompt(width: int, height: int) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    pixels = picture(width, width, height)
    plan, expected = (
        read().resolution.prepare(pixels),
        Gemma4ImageProcessorPil(**IMAGE)(images=pixels, return_tensors="np"),
    )
    assert plan.tokens == int(expected["num_soft_tokens_per_image"][0]) and not plan.notes
    assert read().prompt(plan) == "<|image>" + "<|image|>" * plan.tokens + "<image|>"
    _, rows, columns = (side // 4 for side in plan.tiles[0].shape)
    cells = (
        plan.tiles[0]
        .reshape(3, rows, 4, columns, 4)
        .transpose(1, 3, 2, 4, 0)
        .reshape(rows * columns, -1)
    )
    np.testing.assert_array_equal(cells, expected["pixel_values"][0][: rows * columns])
    assert (expected["image_position_ids"][0] >= 0).all(-1).sum() == rows * columns


def test_normalized_pixels_where_the_settings_say_so() -> None:
    plain, moved = (
        read(image=more).resolution.prepare(picture(1, 30, 30)).tiles[0]
        for more in (
            {"image_mean": [0.5] * 3, "image_std": [0.25] * 3},
            {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.25] * 3},
        )
    )
    assert 0 <= plain.min() < 0.2 and 0.8 < plain.max() <= 1
    np.testing.assert_allclose(moved, (plain - 0.5) / 0.25, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "budget, size, maximum",
    [
        (DEFAULT_BUDGET, 280, 280),
        (Budget(detail="high"), 280, 280),
        (Budget(detail="low"), 140, 140),
        (Budget(max_tokens=100), 70, 70),
        (Budget(max_tokens=1000), 560, 560),
        (Budget(max_tokens=5000), 1120, 1120),
        (Budget(min_tokens=100), 280, 1120),
        (Budget(min_tokens=300), 560, 1120),
        (Budget(min_tokens=275), 560, 1120),
        (Budget(min_tokens=4000), 1120, 1120),
        (Budget(min_tokens=275, max_tokens=300), 280, 280),
        (Budget(max_tokens=1120, detail="low"), 1120, 1120),
    ],
)
def test_a_budget_is_one_of_the_sizes(budget: Budget, size: int, maximum: int) -> None:
    family, pixels = usual(), picture(2, 64, 64)
    plan, side = family.resolution.prepare(pixels, budget), int(size**0.5)
    assert plan.sizes == ((side * 48, side * 48),) and plan.tokens == side * side
    assert family.resolution.max_tokens(budget) == maximum
    assert plan.notes == (
        ()
        if size == 280
        else (f"shown in {side * side:,} tokens by the image budget, 256 without it",)
    )
    for shape in ((3, 500), (77, 1000), (1, 1)):
        assert family.resolution.prepare(np.zeros((*shape, 3), np.uint8), budget).tokens <= maximum


def test_too_small_a_budget_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        OptionError,
        match="image_max_tokens is 69; this model shows a picture in up to 70 tokens or more, "
        "raise it",
    ):
        usual().resolution.prepare(picture(0, 20, 20), Budget(max_tokens=69))


def test_tiles_to_expect() -> None:
    family = usual()
    assert family.resolution.tile_type().shape == (3, 16 * 48, 16 * 48)
    assert family.resolution.largest_tile_type().shape == (3, 14 * 48, 20 * 48)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"standardize": True, "pooling_kernel_size": 2, "num_key_value_heads": 1},
        {"use_clipped_linears": True, "num_key_value_heads": 4},
    ],
)
def test_the_tower_is_transformers(more: dict[str, Any], tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig, Gemma4VisionConfig
    from transformers.models.gemma4.modeling_gemma4 import (
        Gemma4MultimodalEmbedder,
        Gemma4VisionModel,
    )

    config = Gemma4VisionConfig(**TINY | more)
    config._attn_implementation = "eager"
    holder = torch.nn.Module()  # for the names of a checkpoint
    holder.model = torch.nn.Module()
    holder.model.vision_tower = tower = Gemma4VisionModel(config).eval()
    holder.model.embed_vision = Gemma4MultimodalEmbedder(
        config, Gemma4TextConfig(hidden_size=20)
    ).eval()
    tower.set_experts_implementation = lambda *_: None
    randomize(tower, 4)
    rng = torch.Generator().manual_seed(2)
    for name, buffer in tower.named_buffers():
        if "inv_freq" not in name:
            minimum, maximum = (1, 2) if "max" in name or "scale" in name else (-2, -1)
            buffer.copy_(torch.rand(buffer.shape, generator=rng) * (maximum - minimum) + minimum)
    tensors = {name: t.clone() for name, t in holder.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    pool = config.pooling_kernel_size
    family, file = read(more, {"pooling_kernel_size": pool}), open_weights(tmp_path)
    weights = CanonicalWeights(file, family.parameters(), "folder")
    check_no_extra(file, weights.sources, family.unused, "folder")
    tiles = family.resolution.prepare(picture(5, 50, 21)).tiles
    _, height, width = tiles[0].shape
    patches = (
        torch.from_numpy(tiles[0])
        .reshape(3, height // 4, 4, width // 4, 4)
        .permute(1, 3, 2, 4, 0)
        .reshape(1, -1, 48)
    )
    locations = torch.cartesian_prod(torch.arange(height // 4), torch.arange(width // 4)).flip(1)[
        None
    ]
    with torch.no_grad():
        expected = holder.model.embed_vision(tower(patches, locations).last_hidden_state)
    assert (
        nmse(Encoder(family, weights, [Cpu()], dtype=torch.float32).encode(tiles)[0], expected)
        < 1e-10
    )
    assert (
        nmse(Encoder(family, weights, [Cpu()], dtype=torch.bfloat16).encode(tiles)[0], expected)
        < 1e-3
    )


def nmse(result: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected|^2 / |expected|^2"""
    return float((result.float() - expected).square().sum() / expected.square().sum())


def test_pictures_are_blocks_where_the_decoder_says_so() -> None:
    assert read(text={"use_bidirectional_attention": "vision"}).bidirectional
    assert not read().bidirectional


def test_a_gguf_says_what_its_keys_and_tensors_say() -> None:
    keys = {
        "vision.block_count": 2,
        "vision.embedding_length": 48,
        "vision.feed_forward_length": 58,
        "vision.attention.head_count": 4,
        "vision.attention.layer_norm_epsilon": 1e-6,
        "vision.patch_size": 16,
        "vision.image_size": 224,
        "vision.projection_dim": 20,
        "vision.image_mean": [0.0] * 3,
        "vision.image_std": [1.0] * 3,
    }
    shapes = {
        "v.position_embd.weight": (2, 10240, 48),
        "v.std_bias": (48,),
        "v.blk.0.attn_q.input_max": (1,),
    }
    result = gguf_vision_family(
        "gemma4v", {f"clip.{key}": value for key, value in keys.items()}, shapes, "mmproj.gguf"
    )
    assert isinstance(result, gemma4.Gemma4Vision)
    assert (
        result.tower.head,
        result.tower.groups,
        result.tower.clipped,
        result.standardized,
        result.pool,
    ) == (12, 4, True, True, 3)
    assert (
        result.locations,
        result.resolution.tokens,
        result.bidirectional,
        result.text_width,
    ) == (10240, 280, True, 20)
    short = gguf_vision_family(
        "gemma4v",
        {f"clip.{key}": value for key, value in keys.items()},
        {"v.position_embd.weight": (2, 500, 48)},
        "mmproj.gguf",
    )
    assert isinstance(short, gemma4.Gemma4Vision)
    assert (short.resolution.tokens, short.resolution.sizes, short.standardized) == (
        140,
        (70, 140),
        False,
    )


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "activation": (
        {"hidden_activation": "silu"},
        {},
        "vision_config: hidden_activation is 'silu', expected one of gelu_pytorch_tanh",
    ),
    "rope": (
        {"rope_parameters": {"rope_type": "linear"}},
        {},
        "rope_parameters: rope_type is 'linear', expected one of axial, default",
    ),
    "groups": ({"num_key_value_heads": 3}, {}, "4 heads of size 12 in 3 groups"),
    "heads": ({"head_dim": 10}, {}, "4 heads of size 10 in 2 groups; expected .* a multiple of 4"),
    "patch": (
        {},
        {"patch_size": 16},
        "processor_config.json: patch_size is 16, expected 4 as config.json says",
    ),
    "pool": (
        {},
        {"pooling_kernel_size": 2},
        "processor_config.json: pooling_kernel_size is 2, expected 3 as config.json says",
    ),
    "tokens": ({}, {"max_soft_tokens": 100}, "max_soft_tokens is 100, expected one of 70"),
    "places": ({}, {"max_soft_tokens": 140}, "max_soft_tokens is 140, expected one of 70"),
    "rescaling": (
        {},
        {"do_rescale": False},
        "processor_config.json: do_rescale false is not supported",
    ),
    "resizing": (
        {},
        {"do_resize": False},
        "processor_config.json: do_resize false is not supported",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_followed_is_refused(case: str) -> None:
    vision, image, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        read(vision, image)
