"""Who asked for something may leave before it is done."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mtmd.base.errors import LeftError
from mtmd.base.turns import Turns
from mtmd.base.wanted import check_wanted, in_any_case, may_be_left, wanted_unless


@pytest.fixture(autouse=True)
def nobody() -> Iterator[None]:
    yield
    wanted_unless(None)


def test_work_goes_on_until_who_asked_has_left() -> None:
    left: list[int] = []
    check_wanted()
    wanted_unless(lambda: bool(left))
    check_wanted()
    left.append(1)
    with pytest.raises(LeftError):
        check_wanted()
    with in_any_case():
        assert not may_be_left()
        check_wanted()
    with pytest.raises(LeftError):
        check_wanted()


def test_another_thread_works_for_nobody_who_could_leave() -> None:
    wanted_unless(lambda: True)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(may_be_left()))
    thread.start()
    thread.join()
    assert found == [False]


def test_who_leaves_leaves_the_line_too() -> None:
    turns = Turns(1)
    with turns.one():
        looks = iter([False, True])
        wanted_unless(lambda: next(looks))
        with pytest.raises(LeftError):
            turns.take()
        assert (turns.waiting, turns.at_work) == (0, 1)
    wanted_unless(None)
    with turns.one():
        assert turns.at_work == 1
