from __future__ import annotations

import pytest

from mtmd import BusyError
from mtmd.web.intake.places import SHARED_S, Places


def test_one_alone_has_all_and_each_of_several_half():
    now = [0.0]
    places = Places("things", 4, clock=lambda: now[0])
    mine = [places.take("me") for _ in range(4)]
    with pytest.raises(BusyError, match="4 things"):
        places.take("me")
    with pytest.raises(BusyError, match="4 things"):
        places.take("you")
    mine.pop()()
    mine.pop()()
    with pytest.raises(BusyError, match="2 things for this client"):
        places.take("me")
    yours = [places.take("you"), places.take("you")]
    for give_back in yours:
        give_back()
    now[0] += SHARED_S
    assert places.take("me") and places.taken == 3


def test_a_place_is_given_back_once():
    places = Places("things", 2, each=1)
    give_back, other = places.take("a"), places.take("b")
    with pytest.raises(BusyError, match="1 things for this client"):
        places.take("a")
    give_back()
    give_back()
    assert places.taken == 1
    other()
    assert places.taken == 0


def test_who_is_turned_away_is_told_when_a_place_will_be_free():
    now = [0.0]
    places = Places("things", 2, clock=lambda: now[0])
    first = places.take("me")
    now[0] += 4
    places.take("me")
    first()  # one in four seconds
    places.take("me")
    told = []
    for _ in range(2):
        with pytest.raises(BusyError) as busy:
            places.take("me")
        told.append(busy.value.retry_after_s)
    assert told == [4.0, 8.0]
