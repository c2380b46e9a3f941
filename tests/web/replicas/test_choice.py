"""Which replica a request goes to."""

from __future__ import annotations

from collections import Counter

from mtmd.web.replicas.choice import Route, order, ranked

NAMES = ["a", "b", "c", "d"]


def test_keys_are_spread_evenly_and_only_those_of_a_name_move_when_it_goes():
    keys = [f"picture {n}" for n in range(2000)]
    first = {key: ranked(key, NAMES)[0] for key in keys}
    assert all(400 < count < 600 for count in Counter(first.values()).values())
    without = {key: ranked(key, ["a", "b", "d"])[0] for key in keys}
    assert {key for key in keys if first[key] != without[key]} == {
        key for key in keys if first[key] == "c"
    }


def test_the_order_does_not_depend_on_that_of_the_names():
    assert ranked("key", NAMES) == ranked("key", NAMES[::-1])


def test_a_key_stays_where_it_is_until_that_one_is_busier_by_more_than_the_slack():
    best, *others = ranked("key", NAMES)
    loads = dict.fromkeys(NAMES, 0)
    for load in range(4):
        assert order(Route("key"), loads | {best: load}, slack=4, maximum=32)[0] == best
    spilt = order(Route("key"), loads | {best: 4}, slack=4, maximum=32)
    assert spilt == [*others, best], "to the next of its key, and back where nobody has room"


def test_load_is_bounded_by_the_average():
    best, second, *_ = ranked("key", NAMES)
    loads = dict.fromkeys(NAMES, 20)
    assert order(Route("key"), loads | {best: 25}, slack=1, maximum=32)[0] == best
    assert order(Route("key"), loads | {best: 28}, slack=1, maximum=32)[0] == second


def test_many_requests_of_one_key_go_everywhere():
    """By the bound each has at most its part and a quarter more, as far as the slack allows."""
    loads = dict.fromkeys(NAMES, 0)
    for _ in range(100):
        loads[order(Route("one key"), loads, slack=4, maximum=64)[0]] += 1
    assert max(loads.values()) <= 1.25 * 101 / 4 + 1


def test_without_a_key_the_least_busy_is_first():
    assert order(Route(), {"a": 3, "b": 0, "c": 2}, slack=4, maximum=32) == ["b", "c", "a"]


def test_who_is_full_gets_nothing_but_what_it_alone_can_answer():
    loads = {"a": 32, "b": 31}
    for key in ("x", "y", "z", ""):
        assert order(Route(key), loads, slack=4, maximum=32) == ["b"]
    assert order(Route("x"), {"a": 32, "b": 32}, slack=4, maximum=32) == []
    assert order(Route("x", only="a"), loads, slack=4, maximum=32) == ["a"]
    home = ranked("anna", ["a", "b"])[0]
    assert order(Route("anna", firmly=True), {"a": 40, "b": 40}, slack=4, maximum=32) == [home]


def test_a_name_that_is_not_there_binds_nothing():
    assert order(Route("x", only="gone"), {"a": 0, "b": 0}, slack=4, maximum=32) == ranked(
        "x", ["a", "b"]
    )


def test_a_replica_that_was_lost_with_a_request_does_not_get_it_again():
    best, second = ranked("x", ["a", "b"])
    loads = {"a": 0, "b": 0}
    assert order(Route("x", avoid=(best,)), loads, slack=4, maximum=32) == [second]
    assert order(Route("x", avoid=("a", "b")), loads, slack=4, maximum=32) == [best, second]
