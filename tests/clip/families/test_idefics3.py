"""What is special to Idefics3 and SmolVLM: how pictures are cut, which positions tiles get,
budgets, settings, GGUF.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mtmd.base.errors import ModelError, OptionError
from mtmd.clip.blocks import position_buckets
from mtmd.clip.families.idefics3 import Idefics3Vision, read
from mtmd.clip.family import gguf_vision_family
from mtmd.clip.resolution.longest_edge import scaled_to_edge
from mtmd.clip.token_budget import Budget
from mtmd.kernels.checkpoint.open_weights import GgufFile
from mtmd.kernels.checkpoint.settings import Settings, read_json

GOLDEN = Path(__file__).parents[4] / "shared" / "golden" / "smolvlm"
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 6,
}


def family(
    tile: int = 24, longest: int = 72, top: dict[str, Any] | None = None, **image: Any
) -> Idefics3Vision:
    config = {
        "vision_config": VISION | {"image_size": tile},
        "text_config": {"hidden_size": 16},
    } | (top or {})
    return read(
        Settings(config, "config.json"),
        Settings(
            {"max_image_size": {"longest_edge": tile}, "size": {"longest_edge": longest}} | image,
            "preprocessor_config.json",
        ),
    )


def picture(seed: int, width: int, height: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize(
    ("tile", "longest"), [(24, 72), (24, 75), (36, 75), (24, 24), (24, 17), (36, 100)]
)
def test_pictures_are_cut_as_by_the_reference(tile: int, longest: int, splits: bool) -> None:
    from PIL import Image
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    ours = family(tile, longest, do_image_splitting=splits)
    theirs = SmolVLMImageProcessorPil(
        size={"longest_edge": longest},
        max_image_size={"longest_edge": tile},
        do_image_splitting=splits,
        return_row_col_info=True,
    )
    rng = np.random.default_rng(tile + longest)
    sizes = [
        (1, 1),
        (7, 200),
        (300, 2),
        (50, 50),
        (51, 50),
        *map(tuple, rng.integers(1, 120, (8, 2)).tolist()),
    ]
    for seed, size in enumerate(sizes):
        pixels = picture(seed, *size)
        plan, result = (
            ours.resolution.prepare(pixels),
            theirs([Image.fromarray(pixels)], return_tensors="np"),
        )
        assert np.array_equal(np.stack(plan.tiles), result["pixel_values"][0]), size
        rows, columns = result["rows"][0][0], result["cols"][0][0]
        assert ours.prompt(plan).count("<row_") == rows * columns == len(plan.tiles) - 1
        assert (
            ours.prompt(plan).count("<image>")
            == plan.tokens
            == (rows * columns + 1) * ours.resolution.tile_tokens
            <= ours.resolution.max_tokens()
        )


def test_edges_of_large_pictures_are_limited_as_by_the_reference() -> None:
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        get_resize_output_image_size,
    )

    rng = np.random.default_rng(0)
    for width, height, longest in rng.integers(1, 9000, (300, 3)).tolist():
        expected = get_resize_output_image_size(
            np.broadcast_to(np.uint8(0), (3, height, width)), longest
        )
        assert scaled_to_edge((width, height), longest) == expected[::-1], (width, height, longest)


def test_positions_are_those_of_the_reference() -> None:
    """Not the identity for every grid: rounding in fp32 puts some patches into the bucket before
    their own.
    """
    from transformers import Idefics3VisionConfig
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

    moved = 0
    for positions in range(1, 40):
        for grid in {positions, max(positions // 2, 1), positions + 3}:
            table = Idefics3VisionEmbeddings(
                Idefics3VisionConfig(
                    hidden_size=1, image_size=positions, patch_size=1, num_attention_heads=1
                )
            )
            with torch.no_grad():
                table.patch_embedding.weight.zero_()
                table.patch_embedding.bias.zero_()
                table.position_embedding.weight.copy_(torch.arange(positions**2.0)[:, None])
                result = table(
                    torch.zeros(1, 3, grid, grid), torch.ones(1, grid, grid, dtype=torch.bool)
                )[0, :, 0]
            ours = position_buckets((grid, grid), positions)
            assert torch.equal(ours.float(), result), (positions, grid)
            moved += grid == positions and not torch.equal(ours, torch.arange(grid**2))
    assert moved


BUDGETS: dict[
    str, tuple[Budget, int, int]
] = {  # tiles of a square and of a wide picture; 10 tiles, 7 at most, are the checkpoint's own
    "none": (Budget(), 10, 7),
    "high": (Budget(detail="high"), 10, 7),
    "low": (Budget(detail="low"), 1, 1),
    "room for 8": (Budget(max_tokens=35), 5, 7),
    "room for 5": (Budget(max_tokens=20), 5, 5),
    "room for 1": (Budget(max_tokens=4), 1, 1),
    "room to spare": (Budget(max_tokens=1000), 10, 7),
    "least of 14": (Budget(min_tokens=56), 17, 21),
    "more than there is": (Budget(min_tokens=10000), 37, 25),
    "both": (Budget(min_tokens=8, max_tokens=30), 5, 7),
    "numbers go before detail": (Budget(max_tokens=40, detail="low"), 10, 7),
}


@pytest.mark.parametrize("case", BUDGETS)
def test_budgets(case: str) -> None:
    budget, square, wide = BUDGETS[case]
    ours = family()
    assert ours.resolution.tile_tokens == 4
    for size, tiles, own in (((60, 60), square, 10), ((60, 40), wide, 7)):
        plan = ours.resolution.prepare(picture(0, *size), budget)
        assert len(plan.tiles) == tiles
        assert (
            plan.tokens
            == 4 * tiles
            == ours.prompt(plan).count("<image>")
            <= ours.resolution.max_tokens(budget)
        )
        assert plan.notes == (
            ()
            if tiles == own
            else (f"shown in {4 * tiles} tokens, {4 * own} without limits of its own",)
        )


def test_a_budget_below_the_whole_picture_is_refused() -> None:
    with pytest.raises(
        OptionError, match="at least 4 tokens with this model, more than image_max_tokens 3"
    ):
        family().resolution.prepare(picture(0, 60, 60), Budget(max_tokens=3))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "not resized": ({"do_resize": False}, "do_resize false is not supported"),
    "a square": (
        {"size": {"height": 72, "width": 72}},
        "size is .*, expected a longest_edge alone",
    ),
    "a number": ({"size": 72}, "size: found int, expected an object"),
    "many tiles": (
        {"longest": 24 * 17},
        "max_image_size 24 does not fit size 408, .* at most 16 tiles in a row",
    ),
    "part of a patch": ({"tile": 25}, "max_image_size 25 does not fit .* patch_size 6"),
    "factor": ({"top": {"scale_factor": 3}}, "max_image_size 24 does not fit .* scale_factor 3"),
    "resample": ({"resample": 9}, "resample is 9, expected one of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^preprocessor_config.json: {reported}"):
        family(**values)


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Idefics3Config
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    config, image = Idefics3Config(), Idefics3ImageProcessorPil()
    ours = read(
        Settings({"vision_config": {"patch_size": 14, "image_size": 364}}, "config.json"),
        Settings({}, "preprocessor_config.json"),
    )
    vision = SimpleNamespace(**config.vision_config.to_dict())
    assert (ours.vit.layers, ours.vit.width, ours.vit.ffn, ours.vit.heads, ours.vit.eps) == (
        vision.num_hidden_layers,
        vision.hidden_size,
        vision.intermediate_size,
        vision.num_attention_heads,
        vision.layer_norm_eps,
    )
    assert (ours.factor, ours.text_width) == (config.scale_factor, config.text_config.hidden_size)
    assert (ours.resolution.longest, ours.resolution.tile) == (
        image.size.longest_edge,
        image.max_image_size["longest_edge"],
    )
    assert (
        ours.resolution.normalize.mean,
        ours.resolution.normalize.std,
        ours.resolution.resample,
    ) == (tuple(image.image_mean), tuple(image.image_std), "lanczos")


@pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="GOLDEN CHECKPOINTS ARE MISSING: there is no ../shared/golden"
)
def test_a_gguf_says_what_the_checkpoint_does() -> None:
    file = GgufFile(GOLDEN / "mmproj-BF16.gguf")
    actual = gguf_vision_family(
        "idefics3", file.metadata, {name: file.meta(name)[0] for name in file.names()}, "mmproj"
    )
    hf = GOLDEN / "hf"
    expected = read(
        Settings(read_json(hf / "config.json"), "config.json"),
        Settings(read_json(hf / "preprocessor_config.json"), "image"),
    )
    assert isinstance(actual, Idefics3Vision)
    assert actual.vit.eps == pytest.approx(expected.vit.eps)
    unsaid = {"vit": None, "video": None}  # which of the two models it is, a GGUF does not say
    assert {**vars(actual), **unsaid} == {**vars(expected), **unsaid}
