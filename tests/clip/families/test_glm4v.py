"""GLM-4V's eye: sizes against the reference processor, transformers' defaults, what cannot be
followed, names, what a GGUF says.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mtmd.base.errors import ImageError, ModelError
from mtmd.clip.families import glm4v
from mtmd.clip.family import gguf_vision_family, vision_family
from mtmd.clip.token_budget import Budget
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.settings import Settings


def read(image: dict[str, Any] | None = None, **vision: Any) -> glm4v.Glm4Vision:
    result = vision_family(
        "glm4v",
        Settings({"vision_config": vision}, "config.json"),
        Settings(image or {}, "preprocessor_config.json"),
    )
    assert isinstance(result, glm4v.Glm4Vision)
    return result


def sides(rng: random.Random) -> tuple[int, int]:
    """Height and width, log-uniform, small ones too, within the ratio that the reference takes."""
    while True:
        height, width = (round(math.exp(rng.uniform(0, 8))) for _ in range(2))
        if max(height, width) <= 199 * min(height, width):
            return height, width


def test_sizes_are_the_reference_ones() -> None:
    """Limits count a picture's two frames, and narrow pictures are scaled up first."""
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

    rng = random.Random(0)
    for _ in range(3000):
        minimum = 2 * rng.randint(1, 100_000)
        maximum = minimum + 2 * 784 + 2 * rng.randint(0, 250_000)
        actual, (height, width) = (
            read({"size": {"shortest_edge": minimum, "longest_edge": maximum}}).resolution,
            sides(rng),
        )
        expected = smart_resize(2, height, width, 2, 28, minimum, maximum)
        assert actual.size(height, width) == expected, (height, width, minimum, maximum)
        assert expected[0] * expected[1] // 784 <= actual.max_tokens()


def test_narrow_pictures() -> None:
    assert read().resolution.size(10, 1000) == (28, 2800)
    assert read().resolution.size(10, 1000, Budget(max_tokens=40)) == (28, 28 * 40)
    with pytest.raises(
        ImageError,
        match="picture of 10 x 2100 pixels, expected sides that differ by a factor of at most 200",
    ):
        read().resolution.size(2100, 10)


def test_defaults_are_those_of_transformers() -> None:
    from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    c, p, result = Glm4vVisionConfig(), Glm4vImageProcessorPil(), read()
    assert (
        result.layers,
        result.width,
        result.merger,
        result.heads,
        result.text_width,
        result.eps,
        result.bias,
        result.side,
    ) == (
        c.depth,
        c.hidden_size,
        c.intermediate_size,
        c.num_heads,
        c.out_hidden_size,
        c.rms_norm_eps,
        c.attention_bias,
        c.image_size // c.patch_size,
    )
    pictures = result.resolution
    assert (pictures.patch, pictures.merge, pictures.resample) == (
        p.patch_size,
        p.merge_size,
        p.resample.name.lower(),
    )
    assert (2 * pictures.minimum, 2 * pictures.maximum) == (
        p.size["shortest_edge"],
        p.size["longest_edge"],
    )
    assert (pictures.normalize.mean, pictures.normalize.std) == (
        tuple(p.image_mean),
        tuple(p.image_std),
    )


def test_only_size_limits_pictures() -> None:
    assert read({"min_pixels": 4000, "max_pixels": 8000}) == read()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "activation": (
        {"hidden_act": "gelu"},
        "vision_config: hidden_act is 'gelu', expected one of silu",
    ),
    "frames": (
        {"temporal_patch_size": 1},
        "vision_config: temporal_patch_size is 1, expected one of 2",
    ),
    "heads": (
        {"num_heads": 7},
        "vision_config: 7 heads of width 1536; expected heads that divide the width",
    ),
    "sides": (
        {"image_size": [336, 336]},
        r"vision_config: image_size is \[336, 336\], expected an integer",
    ),
    "rope": (
        {"rope_parameters": {"rope_type": "yarn"}},
        "vision_config: rope_parameters: rope_type is 'yarn', expected one of axial",
    ),
    "depth": ({"depth": 1025}, "vision_config: depth is 1025, expected an integer from 1 to 1024"),
}


@pytest.mark.parametrize("case", WRONG)
def test_towers_that_cannot_be(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^config.json: {reported}"):
        read(**values)


def test_limits_without_room() -> None:
    with pytest.raises(
        ModelError,
        match=r"^preprocessor_config.json: 1 to 783 pixels a picture, expected limits that allow 784 and more",
    ):
        read({"size": {"shortest_edge": 1, "longest_edge": 2 * 784 - 1}})


def test_names_of_published_checkpoints() -> None:
    result = read(depth=1).parameters()
    assert result["v.norm_embd.weight"].sources[0] == "model.visual.post_conv_layernorm.weight"
    assert result["mm.model.fc.weight"].sources[0] == "model.visual.merger.proj.weight"
    assert result["v.blk.0.attn_qkv.weight"].sources == (
        "model.visual.blocks.0.attn.qkv.weight",
        "visual.blocks.0.attn.qkv.weight",
        "vision_tower.blocks.0.attn.qkv.weight",
    )
    assert {n for n in result if n.endswith(".bias")} == {
        "v.patch_embd.bias",
        "mm.patch_merger.bias",
        "mm.post_norm.bias",
    }
    assert "v.blk.0.attn_qkv.bias" in read(depth=1, attention_bias=True).parameters()


def test_the_convolution_is_a_product() -> None:
    generator, image = torch.Generator().manual_seed(0), {"merge_size": 3}
    parameter = read(
        image, hidden_size=16, num_heads=2, out_hidden_size=5, spatial_merge_size=3
    ).parameters()["mm.patch_merger.weight"]
    kernels, x = (
        torch.randn(5, 16, 3, 3, generator=generator),
        torch.randn(1, 6 * 9, 16, generator=generator),
    )
    assert (
        parameter.convert
        and parameter.stored == kernels.shape
        and parameter.gguf[0].shape == kernels.shape
    )
    cells = ops.unshuffle.reference(x, grid=(6, 9), factor=3, channels_first=True)
    expected = F.conv2d(x.view(1, 6, 9, 16).permute(0, 3, 1, 2), kernels, stride=3)
    torch.testing.assert_close(
        cells @ parameter.convert(kernels).t(),
        expected.flatten(2).transpose(1, 2),
        rtol=0,
        atol=1e-5,
    )


@pytest.mark.parametrize("grid", [(1, 100), (4, 6), (24, 24), (60, 38)], ids=str)
def test_positions_are_scaled_as_the_reference_scales_them(grid: tuple[int, int]) -> None:
    from transformers.models.glm4v.modeling_glm4v import Glm4vVisionConfig, Glm4vVisionEmbeddings

    reference = Glm4vVisionEmbeddings(Glm4vVisionConfig(hidden_size=16))
    rows, columns = torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1])).t()
    with torch.no_grad():
        expected = reference(
            torch.zeros(grid[0] * grid[1], 16),
            [grid[0] * grid[1]],
            torch.tensor([[1, *grid]]),
            rows,
            columns,
        )
        actual = ops.resize2d.reference(
            reference.position_embedding.weight, grid=(24, 24), size=grid, mode="bicubic"
        )
    assert float((actual - expected).square().sum() / expected.square().sum()) < 1e-10


def test_a_gguf_of_the_published_one() -> None:
    """Limits that it does not say are the published ones; biases are there where a tensor is."""
    keys = {
        "clip.vision.block_count": 24,
        "clip.vision.embedding_length": 1536,
        "clip.vision.feed_forward_length": 13696,
        "clip.vision.attention.head_count": 12,
        "clip.vision.patch_size": 14,
        "clip.vision.projection_dim": 4096,
        "clip.vision.image_size": 336,
        "clip.vision.attention.layer_norm_epsilon": 1e-5,
        "clip.use_silu": True,
    }
    published = {"size": {"shortest_edge": 12544, "longest_edge": 9633792}}
    result: Any = gguf_vision_family("glm4v", keys, {}, "mmproj.gguf")
    assert result == read(published)
    assert gguf_vision_family(
        "glm4v", keys, {"v.blk.0.attn_qkv.bias": (4608,)}, "mmproj.gguf"
    ) == read(published, attention_bias=True)


def test_videos_of_glm46v() -> None:
    """Its model_type says so, or, of a mixture of experts, its video processor."""
    from mtmd.clip.video.rules import ByLength
    from mtmd.clip.video.video import Video, VideoFacts

    named = {"video_processor": {"video_processor_type": "Glm46VVideoProcessor"}}
    for kind, image in (("glm46v", {}), ("glm4v_moe", named)):
        family = vision_family(
            kind,
            Settings({"model_type": kind}, "config.json"),
            Settings(image, "preprocessor_config.json"),
        )
        assert family.video is not None and isinstance(family.video.rule.pick, ByLength)
    frames = np.zeros((4, 56, 56, 3), np.uint8)
    video = Video(tuple(frames), (0, 5, 10, 15), (0, 0.5, 1, 1.5), VideoFacts(20, 10, 2, 56, 56))
    shape = family.video.shape(56, 56, 4)
    pictures = "<|image|>" * shape.tokens
    expected = [
        f"<|begin_of_image|>{pictures}<|end_of_image|>{at} seconds" for at in ("0.0", "1.0")
    ]
    assert family.video.prompt(video, shape) == "".join(expected)


def test_whole_tokens_alone() -> None:
    with pytest.raises(ModelError, match="patch_expand_factor is 2, expected one of 1"):
        read({"patch_expand_factor": 2})
