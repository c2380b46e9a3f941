"""An answer that ends in a loop is noticed, one that only has a row of the same is not."""

from __future__ import annotations

import random

import pytest

from mtmd.llm.tokenizer.repetition import LOOK_EACH, MINIMUM, RepetitionFinder


def after(tokens: list[int]) -> RepetitionFinder:
    finder = RepetitionFinder()
    for token in tokens:
        finder.push(token)
    return finder


def words(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5000) for _ in range(count)]


@pytest.mark.parametrize("period", [1, 2, 7, 12, 31, 60, 400])
@pytest.mark.parametrize("before", [0, 5, 131, 5000])
def test_a_loop_is_noticed(period: int, before: int) -> None:
    begun, loop = words(before), [10_000 + n for n in range(period)]
    times = -(-max(MINIMUM, 4 * period) // period) + -(-LOOK_EACH // period)
    result = after(begun + loop * times)
    assert (result.result, result.period, result.repeated) == (True, period, period * times)


@pytest.mark.parametrize(
    "tokens",
    [
        words(6000),
        [*words(50), *[7] * 60, *words(50)],  # a row of dashes
        [*words(9), *[7] * 90],
        (words(60) * 3)[:-1],  # a verse that comes three times
        [n // 2 if n % 2 else 3 for n in range(2000)],  # a list that counts
    ],
    ids=["a text", "dashes", "dashes at the end", "a verse", "counting"],
)
def test_others_are_not(tokens: list[int]) -> None:
    assert not after(tokens).result


def test_one_that_ends_by_itself_is_none() -> None:
    finder = after([1, 2, 3, 4] * 40)
    assert finder.result
    finder.push(9)
    assert (finder.result, finder.period, finder.repeated) == (False, 0, 0)
