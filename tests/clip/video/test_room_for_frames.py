"""Frames made smaller before they are left out."""

from __future__ import annotations

import pytest

from mtmd.clip.family import vision_family
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.clip.video.family import VideoFamily
from mtmd.clip.video.room_for_frames import MINIMUM, STEPS, fitting
from mtmd.kernels.checkpoint.settings import Settings

FULL_HD = 1920, 1080


def family(kind: str) -> VideoFamily:
    image = {"video_processor": {"max_pixels": 12845056}, "size": {"height": 448, "width": 448}}
    if kind != "internvl":
        del image["size"]
    result = vision_family(kind, Settings({"model_type": kind}, "config"), Settings(image, "image"))
    assert result.video is not None
    return result.video


def test_steps() -> None:
    assert STEPS[:6] == (128, 256, 384, 512, 768, 1024)


@pytest.mark.parametrize("room", [900, 4000, 8000, 16000, 60000])
def test_as_large_as_there_is_room_for(room: int) -> None:
    ours, frames = family("qwen2_5_vl"), 60
    usual = ours.shape(*FULL_HD, frames)
    assert usual.tokens > 2000, "frames are not made smaller by this checkpoint's limits"
    shape = ours.shape(*FULL_HD, frames, fitting(ours, FULL_HD, frames, DEFAULT_BUDGET, room))
    assert shape.groups == 30 and shape.tokens < usual.tokens
    assert shape.all_tokens <= max(room, MINIMUM * 30)
    assert shape.tokens > min(room / 30, MINIMUM) / 2


def test_a_question_of_a_few_more_words_changes_nothing() -> None:
    ours = family("qwen2_5_vl")
    budgets = {fitting(ours, FULL_HD, 60, DEFAULT_BUDGET, room) for room in range(8000, 8200)}
    assert budgets == {Budget(max_tokens=256)}


def test_what_fits_stays() -> None:
    ours = family("qwen2_5_vl")
    assert fitting(ours, FULL_HD, 2, DEFAULT_BUDGET, 9000) == DEFAULT_BUDGET
    requested = Budget(max_tokens=100)
    assert fitting(ours, FULL_HD, 60, requested, 1000) == requested, "smaller than any step already"


@pytest.mark.parametrize("kind", ["internvl", "gemma4"])
def test_frames_of_one_size_stay(kind: str) -> None:
    ours = family(kind)
    assert fitting(ours, FULL_HD, 60, DEFAULT_BUDGET, 500) == DEFAULT_BUDGET
