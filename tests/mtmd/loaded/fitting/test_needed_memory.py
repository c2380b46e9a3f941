"""What is found out about memory beside plans: the most that fits, and the largest picture."""

from __future__ import annotations

import pytest
import torch

from mtmd.base.errors import ImageError
from mtmd.bench.shapes import random_checkpoint
from mtmd.clip.encoder import Encoder
from mtmd.clip.token_budget import Budget
from mtmd.kernels.backends import Reference
from mtmd.kernels.backends.target import Target
from mtmd.loaded.fitting.needed_memory import (
    largest_picture,
    longest_that_fits,
    max_that_fit,
    smaller_picture,
)
from mtmd.loaded.fitting.pictures import Pictures


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
    assert whole.tokens == encoder.family.resolution.max_tokens() == 16384
    requested = largest_picture(encoder, Budget(), 8192, (640, 480))
    wide = largest_picture(encoder, Budget(), 8192, (1920, 1080))
    assert (requested.tokens, wide.tokens) == (300, 2040)
    assert largest_picture(encoder, Budget(None, 256), 8192).tokens <= 256
    assert 512 < largest_picture(encoder, Budget(), 1024).tokens < 1024
    smaller = smaller_picture(encoder, Budget(), 128)
    assert smaller is not None and 64 < smaller.tokens <= 128
    peaks = [
        max(encoder.plan(1, shape).compute_bytes["cuda:80"] for shape in picture.tiles)
        for picture in (smaller, requested, wide)
    ]
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]


def test_a_picture_that_the_context_cannot_hold(encoder: Encoder) -> None:
    with pytest.raises(ImageError, match="and the context holds 4"):
        largest_picture(encoder, Budget(), 4, (640, 480))


def test_the_most_that_fits_is_found_in_few_steps() -> None:
    for limit in (0, 1, 7, 99, 500, 1000):
        requested: list[int] = []

        def slack(n: int, limit: int = limit, queried: list[int] = requested) -> int:
            queried.append(n)
            return (limit - n) * 1000 + (n % 3)

        assert max_that_fit(slack, 1000, 8) == limit
        assert len(requested) <= 12, requested


@pytest.mark.parametrize(
    ("limit", "maximum", "minimum", "expected"),
    [
        (5000, 8192, 1, 4096),
        (9000, 8000, 1, 8000),  # the model's own, no multiple of a step
        (8191, 8192, 1, 7168),
        (1000, 8192, 1, 992),
        (64, 8192, 1, 64),
        (31, 8192, 1, 0),
        (699, 700, 1, 672),
        (700, 700, 1, 700),
        (1500, 8192, 1100, 1472),  # a picture that 1,024 do not hold
        (1090, 8192, 1100, 0),
        (5, 20, 1, 0),
    ],
)
def test_the_longest_context_is_looked_for_more_closely_where_little_fits(
    limit: int, maximum: int, minimum: int, expected: int
) -> None:
    for own in (16, 1024, 2048, 1 << 20):
        requested: list[int] = []

        def slack(context: int, queried: list[int] = requested) -> int:
            queried.append(context)
            return (limit - context) * 1000

        assert longest_that_fits(slack, maximum, own, minimum) == expected
        assert all(minimum <= context <= maximum for context in requested)


def test_a_shorter_context_holds_smaller_pictures(encoder: Encoder) -> None:
    pictures = Pictures(encoder, Budget(), 8192, None)
    assert pictures.own is not None and pictures.min_context == 64
    tokens = [result.tokens for n in (64, 1024, 8192, 20000, 30000) if (result := pictures.at(n))]
    assert tokens == sorted(tokens) and tokens[1] < 1024 < tokens[2] == pictures.own.tokens
    assert tokens[-2:] == [16384, 16384]
    requested = Pictures(encoder, Budget(), 8192, (640, 480))
    assert requested.own == requested.at(400) and requested.min_context == 301
    assert Pictures(None, Budget(), 8192, None).min_context == 1
