"""Made once, whoever asks; nobody waits for what another wants."""

from __future__ import annotations

import threading

import pytest

from mtmd.base.made_once import MadeOnce


def test_it_is_made_once_and_the_last_ones_are_kept() -> None:
    made: list[int] = []
    squares = MadeOnce(lambda n: (made.append(n), n * n)[1], maximum=2)
    assert [squares(n) for n in (3, 3, 4, 3, 5, 3)] == [9, 9, 16, 9, 25, 9] and made == [3, 4, 5]
    assert squares.saved(4) is None and squares.saved(3) == 9 and squares.begun == 3
    assert squares(4) == 16 and squares.begun == 4
    squares.cache_clear()
    assert squares.saved(4) is None


def test_who_asks_for_what_is_being_made_waits_and_nobody_else() -> None:
    may, begun, made = threading.Event(), threading.Event(), []

    def make(n: int) -> int:
        if n == 1:
            begun.set()
            assert may.wait(60)
        made.append(n)
        return n

    numbers, result = MadeOnce(make, maximum=8), list[int]()
    threads = [threading.Thread(target=lambda: result.append(numbers(1))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    assert numbers(2) == 2 and numbers.saved(1) is None and not result
    may.set()
    for thread in threads:
        thread.join(60)
    assert result == [1, 1, 1] and sorted(made) == [1, 2]


def test_what_fails_is_tried_again_by_the_next() -> None:
    tries: list[int] = []

    def make(n: int) -> int:
        tries.append(n)
        if len(tries) == 1:
            raise ValueError("not yet")
        return n

    numbers = MadeOnce(make, maximum=8)
    with pytest.raises(ValueError, match="not yet"):
        numbers(1)
    assert numbers.saved(1) is None and numbers(1) == 1 and numbers.begun == 2
