"""When there will be room."""

from __future__ import annotations

from mtmd.service.turnover import MAX_S, REMEMBERED, Turnover


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_who_is_turned_away_is_told_when_there_is_room_for_all_before_too():
    clock = Clock()
    turnover = Turnover(clock)
    for _ in range(2 * REMEMBERED):  # every half second
        clock.now += 0.5
        turnover.freed()
    assert [round(turnover.wait_s(), 3) for _ in range(4)] == [0.5, 1.0, 1.5, 2.0]
    clock.now += 1.0
    turnover.freed(2)
    assert round(turnover.wait_s(), 1) == 1.5  # two of the four have had their time


def test_what_is_larger_waits_longer():
    clock = Clock()
    turnover = Turnover(clock)
    clock.now += 10
    turnover.freed(1_000_000)
    assert turnover.wait_s(500_000) == 5.0 and turnover.wait_s(1_000_000) == 15.0


def test_where_nothing_has_become_free_it_takes_at_least_as_long_again():
    clock = Clock()
    turnover = Turnover(clock)
    assert turnover.wait_s() == 1.0
    clock.now += 30
    assert turnover.wait_s() == 30.0
    clock.now += 1e9
    assert turnover.wait_s() == MAX_S
    turnover.begin()
    assert turnover.wait_s() == 1.0
