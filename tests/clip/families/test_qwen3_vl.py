"""Qwen3-VL's tower, which Qwen3.5 has too: against transformers' own on awkward grids, settings,
budgets, GGUF, and what is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import picture, randomize

from mtmd.base.errors import ModelError
from mtmd.clip.encoder import Encoder
from mtmd.clip.families import qwen3_vl
from mtmd.clip.family import gguf_vision_family, vision_family
from mtmd.clip.token_budget import Budget
from mtmd.kernels import ops
from mtmd.kernels.backends import Cpu
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, check_no_extra
from mtmd.kernels.checkpoint.open_weights import GgufFile, open_weights
from mtmd.kernels.checkpoint.settings import Settings

GOLDEN = Path(__file__).parents[4] / "shared" / "golden"
needs_golden = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="GOLDEN CHECKPOINTS ARE MISSING: there is no ../shared/golden"
)
TINY = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_heads": 3,
    "patch_size": 4,
    "num_position_embeddings": 36,
    "out_hidden_size": 20,
}
IMAGE = {
    "patch_size": 4,
    "merge_size": 2,
    "size": {"shortest_edge": 8 * 8, "longest_edge": 8 * 8 * 40},
}


def read(
    vision: dict[str, Any] | None = None,
    kind: str = "qwen3_vl",
    image: dict[str, Any] | None = None,
) -> qwen3_vl.Qwen3Vision:
    config = {
        "model_type": kind,
        "vision_config": TINY | {"deepstack_visual_indexes": [1]} | (vision or {}),
    }
    return qwen3_vl.read(
        Settings(config, "config.json"), Settings(IMAGE | (image or {}), "preprocessor_config.json")
    )


def patches(tile: np.ndarray, patch: int, merge: int) -> torch.Tensor:
    """As the reference processor lays them out, each picture shown in two frames."""
    _, height, width = tile.shape
    cells = tile.reshape(
        3, height // patch // merge, merge, patch, width // patch // merge, merge, patch
    ).transpose(1, 4, 2, 5, 0, 3, 6)
    return torch.from_numpy(
        np.repeat(cells[:, :, :, :, :, None], 2, 5).reshape(height * width // patch**2, -1)
    )


@pytest.mark.parametrize(
    "kind, stacked",
    [
        ("qwen3_vl", [0, 1]),
        ("qwen3_vl", []),
        ("qwen3_vl_moe", [1]),
        ("qwen3_5", []),
        ("qwen3_5_moe", []),
    ],
)
def test_the_tower_is_transformers(kind: str, stacked: list[int], tmp_path: Path) -> None:
    import importlib

    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    name = {
        "qwen3_vl": "Qwen3VL",
        "qwen3_vl_moe": "Qwen3VLMoe",
        "qwen3_5": "Qwen3_5",
        "qwen3_5_moe": "Qwen3_5Moe",
    }[kind]
    settings = TINY | ({"deepstack_visual_indexes": stacked} if "_vl" in kind else {})
    config = getattr(module, f"{name}VisionConfig")(**settings)
    config._attn_implementation = "eager"
    holder = torch.nn.Module()  # for the names of a checkpoint
    holder.model = torch.nn.Module()
    holder.model.visual = tower = getattr(module, f"{name}VisionModel")(config).eval()
    tower.set_experts_implementation = lambda *_: None
    randomize(tower, 5)
    from safetensors.torch import save_file

    save_file(dict(holder.state_dict()), tmp_path / "model.safetensors", metadata={"format": "pt"})
    family, file = read({"deepstack_visual_indexes": stacked}, kind), open_weights(tmp_path)
    weights = CanonicalWeights(file, family.parameters(), "folder")
    check_no_extra(file, weights.sources, family.unused, "folder")
    encoder = Encoder(family, weights, [Cpu()], dtype=torch.float32)
    # Grids of one row and one column of tokens, the table's own, and two pictures of one size,
    # which go as a batch.
    sizes = ((8, 72), (80, 8), (24, 24), (40, 24), (40, 24))
    tiles = [
        np.random.default_rng(i).normal(size=(3, *size)).astype(np.float32)
        for i, size in enumerate(sizes)
    ]
    grids = torch.tensor([[1, height // 4, width // 4] for height, width in sizes])
    with torch.no_grad():
        expected = tower(torch.cat([patches(tile, 4, 2) for tile in tiles]), grids)
    rows = torch.cat(
        [expected.pooler_output, *(getattr(expected, "deepstack_features", None) or [])], -1
    )
    actual = torch.cat([rows.reshape(-1, rows.shape[-1]) for rows in encoder.encode(tiles)])
    assert actual.shape == (sum(h * w // 64 for h, w in sizes), 20 * (1 + len(stacked)))
    assert float((actual - rows).square().sum() / rows.square().sum()) < 1e-11


@pytest.mark.parametrize("side", [5, 7, 48])
def test_positions_are_scaled_as_the_reference_scales_them(side: int) -> None:
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights as reference

    table = torch.randn(side * side, 9, generator=torch.Generator().manual_seed(side))
    for grid in ((2, 2), (2, 62), (14, 2), (side, side), (22, 30)):
        at, weights = reference(torch.tensor([[1, *grid]]), side, align_corners=True)
        expected = (table[at] * weights[:, :, None]).sum(1)
        actual = ops.resize2d.reference(
            table, grid=(side, side), size=grid, mode="bilinear", align_corners=True
        )
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=1e-6 * side
        )  # places up to `side` are rounded, in either


def test_budgets_and_the_prompt() -> None:
    family, pixels = read(), picture(1, 100, 50)
    plan = family.resolution.prepare(pixels)
    rows, columns = plan.grids[0]
    assert (
        plan.tokens == rows * columns <= 40 and family.prompt(plan) == "<|image_pad|>" * plan.tokens
    )
    assert plan.tiles[0].shape == (3, rows * 8, columns * 8) and plan.notes == ()
    small = family.resolution.prepare(pixels, Budget(max_tokens=10))
    assert small.tokens <= 10 < plan.tokens and "image budget" in small.notes[0]
    assert (
        family.resolution.max_tokens(Budget(max_tokens=10)) == 10
        and family.resolution.max_tokens() >= 40
    )
    tiny = picture(2, 17, 9)
    assert (
        family.resolution.prepare(tiny, Budget(min_tokens=30)).tokens
        >= 30
        > family.resolution.prepare(tiny).tokens
    )


@needs_golden
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "kquants"])
def test_a_gguf_says_what_its_config_says(name: str) -> None:
    file = GgufFile(GOLDEN / name / "mmproj-BF16.gguf")
    actual = gguf_vision_family(
        "qwen3vl_merger", file.metadata, {n: file.meta(n)[0] for n in file.names()}, "mmproj.gguf"
    )
    config, image = (
        json.loads((GOLDEN / name / "hf" / part).read_text())
        for part in ("config.json", "preprocessor_config.json")
    )
    expected = vision_family(
        config["model_type"],
        Settings(config, "config.json"),
        Settings(image, "preprocessor_config.json"),
    )
    assert isinstance(actual, qwen3_vl.Qwen3Vision) and isinstance(expected, qwen3_vl.Qwen3Vision)
    assert {k: v for k, v in vars(actual).items() if k != "resolution"} == {
        k: v for k, v in vars(expected).items() if k != "resolution"
    }
    assert actual.stacked == (() if name == "qwen3_5" else actual.stacked)
    assert (actual.resolution.minimum, actual.resolution.maximum) == (
        1 << 16,
        1 << 24,
    )  # as published; no GGUF says the checkpoint's own
    weights = CanonicalWeights(file, actual.parameters(), "mmproj.gguf")
    check_no_extra(file, weights.sources, actual.unused, "mmproj.gguf")


def test_defaults_are_those_of_transformers() -> None:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

    expected = Qwen3VLVisionConfig()
    actual = qwen3_vl.read(
        Settings({"model_type": "qwen3_vl"}, "config.json"),
        Settings({"patch_size": 16}, "preprocessor_config.json"),
    )
    assert (
        actual.layers,
        actual.width,
        actual.ffn,
        actual.heads,
        actual.text_width,
        actual.side**2,
        actual.stacked,
        actual.gelu,
    ) == (
        expected.depth,
        expected.hidden_size,
        expected.intermediate_size,
        expected.num_heads,
        expected.out_hidden_size,
        expected.num_position_embeddings,
        tuple(expected.deepstack_visual_indexes),
        "tanh",
    )
    assert (
        qwen3_vl.read(
            Settings({"model_type": "qwen3_5"}, "config.json"),
            Settings({"patch_size": 16}, "image"),
        ).stacked
        == ()
    )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"num_heads": 5}, "5 heads of width 48"),
    "frames": ({"temporal_patch_size": 3}, "temporal_patch_size is 3, expected one of 2"),
    "positions": (
        {"num_position_embeddings": 50},
        "num_position_embeddings is 50, expected those of a square",
    ),
    "stacked twice": (
        {"deepstack_visual_indexes": [1, 1]},
        r"deepstack_visual_indexes is \[1, 1\], expected layers below 2, in order",
    ),
    "stacked beyond": (
        {"deepstack_visual_indexes": [0, 2]},
        r"deepstack_visual_indexes is \[0, 2\], expected layers below 2, in order",
    ),
    "no list": ({"deepstack_visual_indexes": "all"}, "deepstack_visual_indexes is 'all'"),
    "activation": ({"hidden_act": "relu"}, "hidden_act is 'relu', expected one of"),
    "depth": ({"depth": 1 << 20}, "depth is 1048576, expected an integer from 1 to 1024"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        read(values)
