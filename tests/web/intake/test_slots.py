from __future__ import annotations

import pytest

from mtmd import BusyError
from mtmd.web.intake.slots import SHARED_S, Slots


def test_one_alone_has_all_and_each_of_several_half():
    now = [0.0]
    slots = Slots("things", 4, clock=lambda: now[0])
    mine = [slots.take("me") for _ in range(4)]
    with pytest.raises(BusyError, match="4 things"):
        slots.take("me")
    with pytest.raises(BusyError, match="4 things"):
        slots.take("you")
    mine.pop()()
    mine.pop()()
    with pytest.raises(BusyError, match="2 things for this client"):
        slots.take("me")
    yours = [slots.take("you"), slots.take("you")]
    for give_back in yours:
        give_back()
    now[0] += SHARED_S
    assert slots.take("me") and slots.taken == 3


def test_a_place_is_given_back_once():
    slots = Slots("things", 2, each=1)
    give_back, other = slots.take("a"), slots.take("b")
    with pytest.raises(BusyError, match="1 things for this client"):
        slots.take("a")
    give_back()
    give_back()
    assert slots.taken == 1
    other()
    assert slots.taken == 0


def test_who_is_turned_away_is_told_when_a_place_will_be_free():
    now = [0.0]
    slots = Slots("things", 2, clock=lambda: now[0])
    first = slots.take("me")
    now[0] += 4
    slots.take("me")
    first()  # one in four seconds
    slots.take("me")
    reported = []
    for _ in range(2):
        with pytest.raises(BusyError) as busy:
            slots.take("me")
        reported.append(busy.value.retry_after_s)
    assert reported == [4.0, 8.0]
