"""When ends of actors are too many."""

from __future__ import annotations

from mtmd.cluster.ends import Ends


def started(ends: Ends, *actors: int) -> None:
    for actor in actors:
        ends.started(actor)


def test_those_that_only_end_are_ten() -> None:
    ends = Ends()
    for actor in range(10):
        assert not ends.are_too_many
        started(ends, actor)
        ends.ended(actor, True)
    assert ends.are_too_many


def test_those_that_were_there_at_the_last_step_do_not_count() -> None:
    ends = Ends()
    started(ends, *range(64))
    ends.forward()
    for actor in range(64):
        ends.ended(actor, True)
    assert ends.count == 0
    started(ends, *range(100, 164))
    for n, actor in enumerate(range(100, 164)):  # nor all of them once
        assert ends.count == n and not ends.are_too_many
        ends.ended(actor, True)
    started(ends, *range(200, 264))
    for actor in range(200, 264):
        ends.ended(actor, True)
    assert ends.are_too_many
    ends.forward()
    assert not ends.are_too_many


def test_machines_that_go_away_count_little() -> None:
    ends = Ends()
    for actor in range(100):
        assert not ends.are_too_many
        started(ends, actor)
        ends.ended(actor, False)
    assert ends.are_too_many
