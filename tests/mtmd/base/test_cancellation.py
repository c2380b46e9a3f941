"""Who asked for something may leave before it is done."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mtmd.base.cancellation import cancel_if, check_cancelled, may_be_left, shielded
from mtmd.base.errors import LeftError
from mtmd.base.turns import Turns


@pytest.fixture(autouse=True)
def nobody() -> Iterator[None]:
    yield
    cancel_if(None)


def test_work_goes_on_until_who_asked_has_left() -> None:
    left: list[int] = []
    check_cancelled()
    cancel_if(lambda: bool(left))
    check_cancelled()
    left.append(1)
    with pytest.raises(LeftError):
        check_cancelled()
    with shielded():
        assert not may_be_left()
        check_cancelled()
    with pytest.raises(LeftError):
        check_cancelled()


def test_another_thread_works_for_nobody_who_could_leave() -> None:
    cancel_if(lambda: True)
    result: list[bool] = []
    thread = threading.Thread(target=lambda: result.append(may_be_left()))
    thread.start()
    thread.join()
    assert result == [False]


def test_who_leaves_leaves_the_line_too() -> None:
    turns = Turns(1)
    with turns.one():
        looks = iter([False, True])
        cancel_if(lambda: next(looks))
        with pytest.raises(LeftError):
            turns.take()
        assert (turns.waiting, turns.at_work) == (0, 1)
    cancel_if(None)
    with turns.one():
        assert turns.at_work == 1
