"""What is found out about memory beside plans: the most that fits, and the largest picture."""

from __future__ import annotations

import pytest
import torch

from mtmd.bench.shapes import random_checkpoint
from mtmd.clip.encoder import Encoder
from mtmd.clip.token_budget import Budget
from mtmd.kernels.backends import Reference
from mtmd.kernels.backends.target import Target
from mtmd.kernels.errors import ImageError
from mtmd.loaded.fitting.needed_memory import largest_picture, most_that_fit, smaller_picture


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    """Of a family whose pictures take as many tokens as they have patches, up to 16,384."""
    checkpoint = random_checkpoint("qwen3-vl-2b", "BF16")
    assert checkpoint.vision and checkpoint.vision_weights
    return Encoder(
        checkpoint.vision,
        checkpoint.vision_weights,
        [Target("cuda:80"), Reference()],
        dtype=torch.bfloat16,
    )


def test_the_largest_picture_is_as_asked_and_as_the_context_lets_it_be(encoder: Encoder) -> None:
    whole = largest_picture(encoder, Budget(), 1 << 20)
    assert whole.tokens == encoder.family.resolution.most_tokens() == 16384
    asked = largest_picture(encoder, Budget(), 8192, (640, 480))
    wide = largest_picture(encoder, Budget(), 8192, (1920, 1080))
    assert (asked.tokens, wide.tokens) == (300, 2040)
    assert largest_picture(encoder, Budget(None, 256), 8192).tokens <= 256
    assert 512 < largest_picture(encoder, Budget(), 1024).tokens < 1024
    smaller = smaller_picture(encoder, Budget(), 128)
    assert smaller is not None and 64 < smaller.tokens <= 128
    peaks = [
        max(encoder.plan(1, shape).compute_bytes["cuda:80"] for shape in picture.tiles)
        for picture in (smaller, asked, wide)
    ]
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]


def test_a_picture_that_the_context_cannot_hold(encoder: Encoder) -> None:
    with pytest.raises(ImageError, match="and the context holds 4"):
        largest_picture(encoder, Budget(), 4, (640, 480))


def test_the_most_that_fits_is_found_in_few_steps() -> None:
    for limit in (0, 1, 7, 99, 500, 1000):
        asked: list[int] = []

        def slack(n: int, limit: int = limit, asked: list[int] = asked) -> int:
            asked.append(n)
            return (limit - n) * 1000 + (n % 3)

        assert most_that_fit(slack, 1000, 8) == limit
        assert len(asked) <= 12, asked
