"""How large the frames of a clip are, as transformers' video processors scale them; settings that
cannot be followed; clips in groups of two.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torchvision_stand_in import torchvision_here

from mtmd.base.errors import ImageError, ModelError
from mtmd.clip.token_budget import Budget
from mtmd.clip.video.pairs import AllFrames, EachFrame, Limits, PairedFrames, read_each_frame
from mtmd.clip.video.video import Video, VideoFacts
from mtmd.kernels.checkpoint.settings import Settings

SIZES = 1000


@contextmanager
def reference(module: str) -> Iterator[Callable[..., tuple[int, int] | None]]:
    """What a reference scales (height, width) to, as a function; it gives None where the reference
    refuses. Its processor is made once: making one takes longer than a hundred sizes.
    """
    from transformers.image_utils import SizeDict

    with torchvision_here():
        result = import_module(f"transformers.models.{module}.video_processing_{module}")
    names = {
        "qwen2_vl": "Qwen2VLVideoProcessor",
        "qwen3_vl": "Qwen3VLVideoProcessor",
        "glm4v": "Glm4vVideoProcessor",
    }
    kind = getattr(result, names[module])
    processor = kind()
    usual = processor.max_video_tokens if hasattr(processor, "max_video_tokens") else None
    seen: list[tuple[int, int]] = []

    def theirs(
        size: tuple[int, int], frames: int, limits: tuple[int, int], **options: Any
    ) -> tuple[int, int] | None:
        share = options.pop("max_video_tokens", None)
        processor.max_video_tokens = usual if share is None else share
        seen.clear()
        try:
            processor.resize(
                SimpleNamespace(shape=(1, frames, 3, *size)),
                size=SizeDict(shortest_edge=limits[0], longest_edge=limits[1]),
                resample=3,
                factor=28,
                temporal_factor=2,
                **options,
            )
        except ValueError:
            return None
        return seen[0]

    base = kind.__mro__[1]
    resize = base.resize
    base.resize = lambda self, image, size, resample: seen.append((size.height, size.width))  # noqa: ARG005
    try:
        yield theirs
    finally:
        base.resize = resize


WAYS = {
    "each frame": ("qwen2_vl", lambda low, high, _: EachFrame(low, high), False, False),
    "each frame, a share": ("qwen2_vl", EachFrame, True, False),
    "all frames": ("qwen3_vl", lambda low, high, _: AllFrames(low, high), False, False),
    "all frames, a share": ("qwen3_vl", AllFrames, True, False),
    "all frames, even": (
        "glm4v",
        lambda low, high, _: AllFrames(low, high, even=True),
        False,
        True,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_sizes_are_the_references(way: str) -> None:
    module, make, shared, even = WAYS[way]
    rng, refused = random.Random(5), 0
    with reference(module) as theirs:
        for _ in range(SIZES):
            size = int(rng.lognormvariate(5.5, 1.2)) + 1, int(rng.lognormvariate(5.5, 1.2)) + 1
            frames = rng.randint(2, 60)
            low = rng.choice([28 * 28 * 2, 128 * 28 * 28, 112 * 112])
            high = low * rng.randint(2, 400)
            share = rng.randint(9, 3000)
            options = {"cap_pixels_per_frame": True, "max_video_tokens": share} if shared else {}
            # this reference samples an even number
            expected = theirs(size, frames + frames % 2 * even, (low, high), **options)
            limits: Limits = make(low, high, share)
            try:
                actual = limits.size(*size, frames, 28)
            except ImageError:
                refused += 1
                assert expected is None
                continue
            assert actual == expected, (size, frames, low, high, share)
    assert refused < SIZES // 10


def paired(**settings: Any) -> PairedFrames:
    return read_each_frame(
        Settings(settings, "test"),
        patch=14,
        merge=2,
        token="<v>",
        clock=lambda _, groups: tuple(range(groups)),
    )


def test_the_last_frame_fills_its_group() -> None:
    ours = paired(min_pixels=28 * 28, max_pixels=28 * 28 * 9)
    shape = ours.shape(56, 28, 5)
    assert (shape.size, shape.groups, shape.tokens, shape.all_tokens) == ((56, 28), 3, 2, 6)
    frames = [np.full((28, 56, 3), value, np.uint8) for value in (7, 9)]
    (both,) = ours.group(frames, shape).tiles
    (one,) = ours.group(frames[:1], shape).tiles
    assert both.shape == one.shape == (6, 28, 56) and both.dtype == np.uint8
    assert both[:3].max() == one[3:].min() == 7 and both[3:].min() == 9
    assert ours.pixels(both).dtype == np.float32
    facts = VideoFacts(5, 1.0, 5.0, 56, 28)
    video = Video((), tuple(range(5)), tuple(map(float, range(5))), facts)
    assert ours.prompt(video, shape) == "<v>" * 6
    assert [int(t) for t in ours.times(video, shape) or ()] == [0, 1, 2]


def test_a_budget_is_for_each_group() -> None:
    ours = paired()
    usual = ours.shape(1920, 1080, 8)
    assert ours.shape(1920, 1080, 8, Budget(min_tokens=9)) == usual, "the least is for pictures"
    for budget, maximum in ((Budget(max_tokens=20), 20), (Budget(detail="low"), 256)):
        small = ours.shape(1920, 1080, 8, budget)
        assert small.tokens <= maximum < usual.tokens and small.groups == 4
        reported = f"{small.size[0]} x {small.size[1]} to keep to {maximum} tokens each pair, "
        usually = f"{usual.size[0]} x {usual.size[1]} without that"
        assert small.notes == (f"frames scaled to {reported}{usually}",)


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"patch_size": 16}, "patch_size is 16, expected 14 as config.json says"),
        ({"temporal_patch_size": 1}, "temporal_patch_size is 1, expected 2"),
        ({"min_pixels": 9000, "max_pixels": 8000}, "9000 to 8000 pixels, expected limits that"),
        ({"size": {"shortest_edge": 4, "longest_edge": 700}}, "4 to 700 pixels"),
        ({"size": {"height": 28}}, "shortest_edge"),
        ({"resample": 0}, "resample is 0, expected one of 1, 2, 3"),
        ({"do_normalize": False}, "do_normalize false is not supported"),
        ({"fps": 0}, "fps is 0, expected a number above 0"),
        ({"cap_pixels_per_frame": "yes"}, "cap_pixels_per_frame is 'yes'"),
    ],
)
def test_settings_that_cannot_be_followed(settings: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        paired(**settings)


def test_frames_that_are_too_narrow() -> None:
    with pytest.raises(ImageError, match="3000 x 10 pixels"):
        paired().shape(3000, 10, 4)
