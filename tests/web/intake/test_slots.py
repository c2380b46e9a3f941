from __future__ import annotations

import pytest

from mtmd import BusyError
from mtmd.web.intake.slots import SHARED_S, Locations


def test_one_alone_has_all_and_each_of_several_half():
    now = [0.0]
    locations = Locations("things", 4, clock=lambda: now[0])
    mine = [locations.take("me") for _ in range(4)]
    with pytest.raises(BusyError, match="4 things"):
        locations.take("me")
    with pytest.raises(BusyError, match="4 things"):
        locations.take("you")
    mine.pop()()
    mine.pop()()
    with pytest.raises(BusyError, match="2 things for this client"):
        locations.take("me")
    yours = [locations.take("you"), locations.take("you")]
    for give_back in yours:
        give_back()
    now[0] += SHARED_S
    assert locations.take("me") and locations.taken == 3


def test_a_place_is_given_back_once():
    locations = Locations("things", 2, each=1)
    give_back, other = locations.take("a"), locations.take("b")
    with pytest.raises(BusyError, match="1 things for this client"):
        locations.take("a")
    give_back()
    give_back()
    assert locations.taken == 1
    other()
    assert locations.taken == 0


def test_who_is_turned_away_is_told_when_a_place_will_be_free():
    now = [0.0]
    locations = Locations("things", 2, clock=lambda: now[0])
    first = locations.take("me")
    now[0] += 4
    locations.take("me")
    first()  # one in four seconds
    locations.take("me")
    reported = []
    for _ in range(2):
        with pytest.raises(BusyError) as busy:
            locations.take("me")
        reported.append(busy.value.retry_after_s)
    assert reported == [4.0, 8.0]
