"""What is special to LLaVA-OneVision: canvases thinned between tokens, one of several pictures,
frames pooled, settings.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

from mtmd.base.errors import ModelError, OptionError
from mtmd.clip.families.llava.onevision import PooledFrames
from mtmd.clip.families.llava.vision import LlavaVision
from mtmd.clip.family import vision_family
from mtmd.clip.resolution.anyres import mixed
from mtmd.clip.token_budget import Budget
from mtmd.clip.video.rules import Beginnings, FrameRule
from mtmd.kernels.checkpoint.settings import Settings

SIDE = 30  # of which 28 are patches
EDGES = (SIDE, 2 * SIDE, 3 * SIDE)
PINPOINTS = [[down, across] for down in EDGES for across in EDGES]


def family(
    tiles: int = 2,
    top: dict[str, Any] | None = None,
    video: dict[str, Any] | None = None,
    **image: Any,
) -> LlavaVision:
    pinpoints = {"image_grid_pinpoints": PINPOINTS}
    config = {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": 7,
        },
        "text_config": {"hidden_size": 24},
        "vision_aspect_ratio": f"anyres_max_{tiles}",
    }
    size = {"height": SIDE, "width": SIDE}
    settings = {"size": size, "video_processor": {"size": size} | (video or {})}
    result = vision_family(
        "llava_onevision",
        Settings(config | pinpoints | (top or {}), "config.json"),
        Settings(settings | pinpoints | image, "preprocessor_config.json"),
    )
    assert isinstance(result, LlavaVision) and isinstance(result.video, PooledFrames)
    return result


def picture(seed: int, width: int, height: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize(("old", "new"), [((27, 27), (14, 14)), ((9, 4), (5, 4)), ((3, 8), (1, 7))])
def test_cells_are_mixed_as_torch_interpolates(old: tuple[int, int], new: tuple[int, int]) -> None:
    values = torch.randn(3, *old, generator=torch.manual_seed(0))
    requested = interpolate(values[None], list(new), mode="bilinear")[0]
    order, weights = mixed(np.arange(old[0] * old[1]).reshape(old), *new)
    assert order.shape == weights.shape == (*new, 4)
    result = (values.flatten(1)[:, order] * torch.from_numpy(weights)).sum(-1)
    assert torch.allclose(result, requested, atol=1e-5)


def test_no_picture_has_more_tokens_than_are_told() -> None:
    rng = np.random.default_rng(3)
    for tiles in (1, 2, 5, 9):
        resolution, maximum = family(tiles).resolution, 0
        for width, height in [*rng.integers(1, 200, (80, 2)).tolist(), (90, 90), (90, 30)]:
            plan = resolution.prepare(picture(0, width, height))
            assert plan.order is not None and plan.tokens == len(plan.order)
            assert plan.order.min() >= -1 and plan.order.max() < len(plan.tiles) * 16
            if plan.weights is not None:
                assert plan.order.shape == plan.weights.shape == (plan.tokens, 4)
                assert np.allclose(plan.weights.sum(1), 1)
            assert {tile.shape for tile in plan.tiles} == {(3, 28, 28)}
            maximum = max(maximum, plan.tokens)
        assert 0.7 * resolution.max_tokens() < maximum <= resolution.max_tokens()


def test_one_of_several_is_shown_whole() -> None:
    resolution = family().resolution
    alone = resolution.prepare(picture(0, 80, 70))
    one = resolution.prepare(picture(0, 80, 70), Budget(several=True))
    assert len(alone.tiles) > len(one.tiles) == 1
    assert one.order is not None
    assert one.order.tolist() == [*range(16), -1] and one.tokens == 17
    assert "one of several" in one.notes[0] and not alone.notes
    with pytest.raises(OptionError, match="16 tokens"):
        resolution.prepare(picture(0, 80, 70), Budget(max_tokens=10, several=True))


@pytest.mark.parametrize(
    ("budget", "tokens"),
    [(Budget(), 16 + 8 * 9), (Budget(max_tokens=60), 36), (Budget(detail="low"), 17)],
)
def test_budgets(budget: Budget, tokens: int) -> None:
    resolution = family(tiles=9).resolution
    assert resolution.prepare(picture(0, 60, 60), budget).tokens == tokens


def test_frames() -> None:
    """A quarter of a tile's tokens, rounded up, and one newline after all of them."""
    video = family(tiles=9).video
    other = family(video={"num_frames": 8}).video
    assert video and other
    assert video.rule == FrameRule(Beginnings(32))
    assert other.rule == FrameRule(Beginnings(8))
    shape = video.shape(1920, 1080, 5)
    assert (shape.size, shape.groups, shape.tokens, shape.all_tokens) == ((SIDE, SIDE), 5, 4, 21)
    plan = video.group([video.scale(picture(0, 64, 48), shape)], shape)
    assert plan.tiles[0].shape == (3, 28, 28) and plan.tiles[0].dtype == np.uint8
    assert plan.order is not None and plan.order.shape == (4, 4)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no number of tiles": (
        {"top": {"vision_aspect_ratio": "anyres"}},
        "config.json: vision_aspect_ratio is 'anyres', expected anyres_max_ and the most tiles",
    ),
    "no tiles": ({"tiles": 0}, "config.json: vision_aspect_ratio is 'anyres_max_0', expected"),
    "no text": ({"top": {"vision_aspect_ratio": 9}}, "config.json: vision_aspect_ratio is 9"),
    "larger frames": (
        {"video": {"size": {"height": 40, "width": 30}}},
        "preprocessor_config.json: video_processor: size: height is 40, expected one of 30",
    ),
    "frames cut": (
        {"video": {"do_center_crop": True}},
        "preprocessor_config.json: video_processor: do_center_crop is True, expected one of",
    ),
    "without the first patch": (
        {"top": {"vision_feature_select_strategy": "default"}},
        "config.json: vision_feature_select_strategy gives 15 features for 16 patches",
    ),
    "larger pictures": (
        {"size": {"height": 40, "width": 40}},
        "preprocessor_config.json: size 40 without a crop does not give 30 x 30",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^{reported}"):
        family(**values)
