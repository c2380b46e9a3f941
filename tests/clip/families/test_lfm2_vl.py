"""LFM2-VL's eye: many tiles at once where the device takes one (llama.cpp PR 19884), transformers'
defaults, what a GGUF says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtmd.base.errors import ModelError
from mtmd.clip.encoder import BATCH, Encoder
from mtmd.clip.families import lfm2_vl
from mtmd.clip.family import gguf_vision_family, vision_family
from mtmd.clip.resolution.resolution import tile_of
from mtmd.clip.warmup import encoder_graphs, encoder_placement
from mtmd.kernels.backends import Cpu, Limited, Reference
from mtmd.kernels.checkpoint.open_weights import GgufFile
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type
from mtmd.kernels.report.warmup_report import WarmupReport

GOLDEN = Path(__file__).parents[4] / "shared" / "golden" / "lfm2_vl"
CONFIG = {
    "vision_config": {
        "hidden_size": 72,
        "intermediate_size": 110,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_patches": 25,
        "patch_size": 8,
    },
    "text_config": {"hidden_size": 40},
    "projector_hidden_size": 94,
}
IMAGE = {
    "encoder_patch_size": 8,
    "tile_size": 48,
    "min_image_tokens": 4,
    "max_image_tokens": 9,
    "max_pixels_tolerance": 1.2,
}


def read(config: dict[str, Any] = CONFIG, **image: Any) -> lfm2_vl.Lfm2Vision:
    return lfm2_vl.read(
        Settings(config, "config.json"), Settings({**IMAGE, **image}, "preprocessor_config.json")
    )


FAMILY = read()
TILES = list(
    FAMILY.resolution.prepare(
        np.random.default_rng(7).integers(0, 256, (100, 150, 3), np.uint8)
    ).tiles
)
# Ops whose first operand has no batch: the table of positions is resized once, whatever the batch.
OPS = ("patch_embed", "add", "layer_norm", "matmul", "attention", "gelu", "unshuffle", "*")


class Noise:
    """The family's weights, the same for everyone who asks."""

    def __init__(self) -> None:
        self.shapes = {name: p.shape for name, p in FAMILY.parameters().items()}

    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        return Type.contiguous(self.shapes[name], dtype)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape, generator = (
            self.shapes[name],
            torch.Generator().manual_seed(sorted(self.shapes).index(name)),
        )
        return (
            torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 1.0)
        ).to(dtype)

    def quant(self, name: str) -> str | None:  # noqa: ARG002
        return None

    def order(self, name: str) -> str | None:  # noqa: ARG002
        return None


def encoder(*rules: str, flash: str = "on") -> Encoder:
    return Encoder(
        FAMILY,
        Noise(),
        [Limited(Cpu(), rules), Cpu(), Reference()],
        dtype=torch.float32,
        flash_attn=flash,
    )


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    """Each tile by itself, by the meaning of the ops."""
    subject = Encoder(FAMILY, Noise(), [Reference()], dtype=torch.float32)
    return [subject.encode([tile])[0] for tile in TILES]


def test_the_picture_has_tiles_and_a_thumbnail() -> None:
    assert [t.shape[1:] for t in TILES] == [(48, 48)] * 6 + [(32, 48)]
    assert len(TILES) > BATCH


@pytest.mark.parametrize("op", OPS)
def test_one_tile_is_taken_and_four_are_refused(op: str, expected: list[torch.Tensor]) -> None:
    """The warm-up asks about both, says which nodes run elsewhere and why, and what runs computes
    the same.
    """
    subject = encoder(f"{op}:batch>1")
    actual, graphs = encoder_placement(subject), encoder_graphs(subject)
    report = WarmupReport(
        "tiny",
        "limited",
        "a machine of the tests",
        "fp32",
        (actual.flash,),
        actual.refused,
        tuple(graphs),
    )
    assert graphs[0].splits == 1 and set(graphs[0].ops_by_backend) == {"limited"}, "one tile"
    assert graphs[1].ops_by_backend["cpu"] > 0, "four tiles"
    assert {(r.reason, r.runs_on) for r in actual.refused} == {
        (f"batch {BATCH} is not supported", "cpu")
    }
    assert op in ("*", *{r.op for r in actual.refused})
    assert "not fully on the accelerated path" in str(
        report
    ) and f"batch {BATCH} is not supported; runs on cpu" in str(report)
    for ours, theirs in zip(subject.encode(TILES), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert {batch for batch, _ in subject.fallbacks} == {2, BATCH}, "six tiles go as four and two"


def test_refused_flash_attention_stays_on_the_device(expected: list[torch.Tensor]) -> None:
    subject = encoder("attention:batch>1", flash="auto")
    assert subject.flash.state == "off"
    assert {r.runs_on for r in encoder_placement(subject).refused} == {
        "limited, as explicit attention"
    }
    assert [set(g.ops_by_backend) for g in encoder_graphs(subject)] == [{"limited"}] * 2
    for ours, theirs in zip(subject.encode(TILES), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_everything_is_taken_where_nothing_is_refused(expected: list[torch.Tensor]) -> None:
    subject = encoder()
    assert not encoder_placement(subject).refused
    for ours, theirs in zip(subject.encode(TILES), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Lfm2VlConfig
    from transformers.models.siglip2.configuration_siglip2 import Siglip2VisionConfig

    reported, tower = Lfm2VlConfig(), Siglip2VisionConfig()
    result: Any = vision_family(
        "lfm2_vl", Settings({}, "config.json"), Settings({}, "preprocessor_config.json")
    )
    assert (
        result.inner,
        result.normed,
        result.bias,
        result.resolution.shuffle,
        result.text_width,
    ) == (
        reported.projector_hidden_size,
        reported.projector_use_layernorm,
        reported.projector_bias,
        reported.downsample_factor,
        reported.text_config.hidden_size,
    )
    assert (
        result.vit.layers,
        result.vit.width,
        result.vit.ffn,
        result.vit.heads,
        result.vit.eps,
        result.positions**2,
        result.resolution.patch,
    ) == (
        tower.num_hidden_layers,
        tower.hidden_size,
        tower.intermediate_size,
        tower.num_attention_heads,
        tower.layer_norm_eps,
        tower.num_patches,
        tower.patch_size,
    )
    assert (
        result.resolution.tile_type() == result.resolution.largest_tile_type() == tile_of(512, 512)
    )


def test_prompts() -> None:
    plan = FAMILY.resolution.prepare(np.zeros((100, 150, 3), np.uint8))
    tile = "<image>" * 9
    tiles = "".join(
        f"<|img_row_{row}_col_{column}|>{tile}" for row in (1, 2) for column in (1, 2, 3)
    )
    assert (
        FAMILY.prompt(plan)
        == f"<|image_start|>{tiles}<|img_thumbnail|>{'<image>' * 6}<|image_end|>"
    )
    without = read(use_thumbnail=False)
    plan = without.resolution.prepare(np.zeros((100, 150, 3), np.uint8))
    assert without.prompt(plan).endswith(f"<|img_row_2_col_3|>{tile}<|image_end|>")
    plan = FAMILY.resolution.prepare(np.zeros((40, 40, 3), np.uint8))
    assert FAMILY.prompt(plan) == f"<|image_start|>{'<image>' * 4}<|image_end|>"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "table": (
        {**CONFIG, "vision_config": {"patch_size": 8, "num_patches": 24}},
        "vision_config: num_patches is 24, expected a square",
    ),
    "activation": (
        {**CONFIG, "projector_hidden_act": "relu"},
        "projector_hidden_act is 'relu', expected one of",
    ),
    "grey": (
        {**CONFIG, "vision_config": {"patch_size": 8, "num_channels": 1}},
        "vision_config: num_channels is 1, expected one of 3",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_configurations_that_cannot_be_followed(case: str) -> None:
    config, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^config.json: {reported}"):
        read(config)


def test_patches_of_a_checkpoint_are_turned() -> None:
    """Their numbers lie by line, column and channel."""
    patch = FAMILY.parameters()["v.patch_embd.weight"]
    assert patch.convert and patch.stored == (72, 192)
    turned = patch.convert(torch.arange(72 * 192).view(72, 192))
    assert turned.shape == patch.shape and turned[2, 1, 5, 3] == 2 * 192 + (5 * 8 + 3) * 3 + 1


@pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="GOLDEN CHECKPOINTS ARE MISSING: there is no ../shared/golden"
)
def test_a_gguf_says_what_the_folder_says() -> None:
    """All but how pictures are cut, where every published model is as transformers' defaults; its
    image_size is of no table.
    """
    file = GgufFile(GOLDEN / "mmproj-BF16.gguf")
    shapes = {name: file.meta(name)[0] for name in file.names()}
    actual: Any = gguf_vision_family("lfm2", file.metadata, shapes, "mmproj.gguf")
    vision = {
        "hidden_size": 144,
        "intermediate_size": 208,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_patches": 64,
    }
    config = {
        "vision_config": vision,
        "text_config": {"hidden_size": 128},
        "projector_hidden_size": 160,
    }
    expected = lfm2_vl.read(
        Settings(config, "config.json"), Settings({}, "preprocessor_config.json")
    )
    assert actual.vit.eps == pytest.approx(expected.vit.eps)
    assert (
        actual.positions,
        actual.resolution,
        actual.inner,
        actual.normed,
        actual.bias,
        actual.gelu,
        actual.text_width,
    ) == (8, expected.resolution, 160, True, True, "none", 128)
    assert {name: p.shape for name, p in actual.parameters().items()} == shapes
    plain: Any = gguf_vision_family(
        "lfm2",
        file.metadata,
        {n: s for n, s in shapes.items() if "norm" not in n and n != "mm.1.bias"},
        "m",
    )
    assert not plain.normed and not plain.bias
