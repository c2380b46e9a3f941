"""Numbers as num2words writes them."""

from __future__ import annotations

import pytest

from mtmd.clip.video.number_words import in_words


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (1, "one"),
        (13, "thirteen"),
        (20, "twenty"),
        (64, "sixty-four"),
        (100, "one hundred"),
        (101, "one hundred and one"),
        (768, "seven hundred and sixty-eight"),
        (1000, "one thousand"),
        (1001, "one thousand and one"),
        (1100, "one thousand, one hundred"),
        (16384, "sixteen thousand, three hundred and eighty-four"),
    ],
)
def test_words(number: int, words: str) -> None:
    assert in_words(number) == words
