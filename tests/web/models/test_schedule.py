"""Which model is loaded or unloaded next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtmd.web.models.schedule import (
    CLOSED_S,
    LATER_MAX_S,
    MAX_CLIENTS,
    QUIET_LOADS,
    QUIET_S,
    REMEMBERED_S,
    TURN_LOADS,
    TURN_S,
    Close,
    Load,
    Loads,
    Refuse,
    Reopen,
    Room,
    Standing,
    Unload,
    Wait,
    next_step,
)


def model(name, needs=4, **state):
    return Standing(name, needs={"cpu": needs}, **{"loaded": False, **state})


def loaded(name, needs=4, **state):
    return model(name, needs, **{"loaded": True, **state})


def room(total=10, free=None, maximum=None, unload_after_s=None):
    return Room(maximum, {"cpu": total}, {"cpu": total if free is None else free}, unload_after_s)


def test_nothing_is_loaded_for_nobody():
    assert next_step([model("a"), loaded("b")], room(), 0.0) == Wait(None)


def test_what_fits_is_loaded_beside_the_others_and_who_came_first_is_first():
    models = [loaded("a"), model("b", requested_at=2.0), model("c", requested_at=1.0)]
    assert next_step(models, room(free=6), 5.0) == Load("c")


def test_the_one_that_was_used_longest_ago_makes_room_and_no_more_than_needed():
    now = 1000.0
    models = [
        loaded("a", 4, used_at=300.0),
        loaded("b", 4, used_at=200.0),
        model("c", 4, requested_at=now),
    ]
    assert next_step(models, room(), now) == Unload("b")
    small_first = [
        loaded("a", 1, used_at=100.0),
        loaded("b", 8, used_at=200.0),
        model("c", 8, requested_at=now),
    ]
    assert next_step(small_first, room(), now) == Unload("b"), "a is not in the way"


def test_as_many_at_once_as_was_said():
    models = [loaded("a", 1, used_at=0.0), model("b", 1, requested_at=0.0)]
    assert next_step(models, room(maximum=1), 100.0) == Unload("a")
    assert next_step(models, room(maximum=2), 100.0) == Load("b")


@pytest.mark.parametrize("load_s", [0.1, 30.0])
def test_one_in_use_has_its_turn_and_then_lets_nobody_new_in(load_s):
    turn = max(TURN_S, TURN_LOADS * load_s)
    a = loaded("a", 8, in_use=True, loaded_at=100.0, used_at=100.0)
    b = model("b", 8, requested_at=101.0, load_s=load_s)
    assert isinstance(next_step([a, b], room(), 100.0 + turn - 0.01), Wait)
    assert next_step([a, b], room(), 100.0 + turn) == Close("a")
    closing = replace(a, closing=True, closed_at=100.0 + turn)
    assert isinstance(next_step([closing, b], room(), 100.0 + turn), Wait), "answers are written"
    ended = loaded("a", 8, loaded_at=100.0, used_at=100.0 + turn, closing=True)
    assert next_step([ended, b], room(), 100.0 + turn + QUIET_S) == Unload("a")


def test_one_that_is_not_used_gives_way_after_a_moment_and_not_at_every_pause():
    a = loaded("a", 8, loaded_at=100.0, used_at=102.0)
    b = model("b", 8, requested_at=102.1, load_s=8.0)
    quiet = 102.0 + QUIET_S + QUIET_LOADS * 8.0
    assert isinstance(next_step([a, b], room(), quiet - 0.01), Wait)
    assert next_step([a, b], room(), quiet) == Unload("a")


def test_two_that_do_not_fit_together_share_the_time_and_most_of_it_is_answers():
    """Both are asked for at every moment, each answer takes a second, each load four."""
    now, busy_until, loads, answering = 0.0, 0.0, 0, 0.0
    state = {"a": "loaded", "b": "unloaded"}
    since = {"a": 0.0, "b": 0.0}
    while now < 600:
        models = [
            Standing(
                name,
                state[name] != "unloaded",
                {"cpu": 8},
                requested_at=since[name] if state[name] == "unloaded" else None,
                in_use=state[name] != "unloaded" and busy_until > now,
                used_at=now,
                loaded_at=since[name],
                load_s=4.0,
                closing=state[name] == "closing",
                closed_at=now,
            )
            for name in state
        ]
        step = next_step(models, room(), now)
        if isinstance(step, Load):
            now, state[step.name], loads = now + 4.0, "loaded", loads + 1
            since[step.name] = now
        elif isinstance(step, Unload):
            state[step.name], since[step.name] = "unloaded", now
        elif isinstance(step, Close):
            state[step.name] = "closing"
        else:
            current = next(name for name in state if state[name] != "unloaded")
            if busy_until <= now and state[current] == "loaded":
                busy_until = now + 1.0
            answering, now = answering + (0.1 if busy_until > now else 0.0), now + 0.1
    assert loads >= 2 * 15, "each has many turns"
    assert answering / 600 > 0.6


def test_what_never_fits_is_refused_with_the_numbers():
    models = [loaded("a", 4, used_at=0.0), model("b", 12, requested_at=0.0)]
    assert next_step(models, room(), 100.0) == Refuse("b", "cpu", 12, 10)
    others = [model("b", 8, requested_at=0.0)]
    assert next_step(others, room(free=3), 100.0) == Refuse("b", "cpu", 8, 3), "others have it"


def test_who_left_again_is_let_back_in_when_nobody_waits():
    assert next_step([loaded("a", closing=True)], room(), 0.0) == Reopen("a")


def test_idle_ones_are_unloaded_and_those_in_use_are_looked_at_again():
    a, b = loaded("a", used_at=0.0), loaded("b", used_at=50.0)
    assert next_step([a, b], room(unload_after_s=60.0), 60.0) == Unload("a")
    assert next_step([b], room(unload_after_s=60.0), 107.0) == Wait(3.0)
    used = loaded("a", used_at=0.0, in_use=True)
    assert next_step([used], room(unload_after_s=60.0), 100.0) == Wait(5.0)


def test_what_somebody_wants_unloaded_goes_once_nobody_uses_it():
    used = loaded("a", in_use=True, to_unload=True, used_at=100.0)
    assert isinstance(next_step([used], room(), 100.0), Wait), "others are let in meanwhile"
    idle = replace(used, in_use=False)
    assert next_step([idle], room(), 100.0) == Unload("a"), "nobody else has used it"


@pytest.mark.parametrize("load_s", [0.1, 30.0])
def test_what_others_use_too_is_not_unloaded_for_one_before_a_pause_of_a_turn(load_s):
    """Else one client could have all others wait for a load between any two of their requests."""
    pause_s = max(TURN_S, TURN_LOADS * load_s)
    a = loaded("a", to_unload=True, shared=True, used_at=100.0, load_s=load_s)
    assert isinstance(next_step([a], room(), 100.0 + pause_s - 0.01), Wait)
    assert next_step([a], room(), 100.0 + pause_s) == Unload("a")


def test_one_endless_answer_does_not_close_its_model_to_all_others():
    """It is not ended: for half of the time others are let in beside it."""
    a = loaded("a", 8, in_use=True, loaded_at=100.0, closing=True, closed_at=200.0, waiting=2)
    b = model("b", 8, requested_at=101.0, clients=frozenset({"kim"}))
    assert isinstance(next_step([a, b], room(), 200.0 + CLOSED_S - 0.1), Wait)
    assert next_step([a, b], room(), 200.0 + CLOSED_S) == Reopen("a", in_vain=True)
    again = replace(a, closing=False, loaded_at=230.0, rest_s=CLOSED_S, patience_s=2 * CLOSED_S)
    assert isinstance(next_step([again, b], room(), 230.0 + CLOSED_S - 0.1), Wait)
    assert next_step([again, b], room(), 230.0 + CLOSED_S) == Close("a")
    longer = replace(again, closing=True, closed_at=260.0)
    assert isinstance(next_step([longer, b], room(), 260.0 + 2 * CLOSED_S - 0.1), Wait)
    own = replace(a, waiting=1)
    assert isinstance(next_step([own, b], room(), 300.0), Wait), "it is nobody's but the other's"


def test_one_that_need_not_leave_any_more_is_open_though_others_wait():
    """Who waited for it has left; who waits now needs another one's room, or its turn goes on."""
    used = loaded("a", 2, in_use=True, loaded_at=0.0, used_at=100.0, closing=True, closed_at=99.0)
    idle = loaded("b", 7, used_at=0.0)
    assert next_step([used, idle, model("c", 8, requested_at=1.0)], room(), 100.0) == Reopen("a")
    alone = replace(used, clients=frozenset("xyz"), loaded_at=99.0)
    assert next_step([alone, model("c", 9, requested_at=1.0)], room(), 100.0) == Reopen("a")


@pytest.mark.parametrize("in_use", [True, False])
def test_a_turn_is_longer_for_many_clients_than_for_one_up_to_a_point(in_use):
    one = loaded("a", 8, in_use=in_use, loaded_at=100.0, used_at=100.0)
    b = model("b", 8, requested_at=100.0)
    short_s = TURN_S if in_use else QUIET_S + QUIET_LOADS

    def leaves(clients, waiting, now):
        users = frozenset(f"user {n}" for n in range(clients))
        others = frozenset(f"other {n}" for n in range(waiting))
        models = [replace(one, clients=users), replace(b, clients=others)]
        return not isinstance(next_step(models, room(), now), Wait)

    assert leaves(1, 1, 100.0 + short_s) and not leaves(3, 1, 100.0 + 2.99 * short_s)
    assert leaves(3, 1, 100.0 + 3 * short_s) and leaves(3, 3, 100.0 + short_s)
    assert leaves(100, 1, 100.0 + MAX_CLIENTS * short_s), "one client is not kept waiting for ever"


def test_a_turn_is_longer_beside_one_client_for_whom_much_was_loaded():
    later_s = {"kim": 60.0, "lee": 10.0, "ann": 20.0}
    one = loaded("a", 8, in_use=True, loaded_at=100.0, used_at=100.0, later_s=later_s)
    b = model("b", 8, requested_at=100.0, later_s=later_s, clients=frozenset({"kim"}))
    others = replace(one, clients=frozenset({"lee", "ann"}))
    assert isinstance(next_step([others, b], room(), 100.0 + 60.0 - 15.0 - 0.1), Wait)
    assert next_step([others, b], room(), 100.0 + 60.0 - 15.0) == Close("a")
    own = replace(one, clients=frozenset({"kim"}))
    assert next_step([own, b], room(), 100.0 + TURN_S) == Close("a"), "they change their mind"
    even = replace(b, later_s={}), replace(others, later_s={})
    assert next_step([*even], room(), 100.0 + 2 * TURN_S) == Close("a")


def test_one_that_nobody_uses_gives_way_as_soon_to_a_client_for_whom_much_was_loaded():
    later_s = {"kim": 90.0}
    idle = loaded("a", 8, loaded_at=98.0, used_at=100.0, clients=frozenset({"lee"}))
    b = model("b", 8, requested_at=101.0, clients=frozenset({"kim"}))
    models = [replace(idle, later_s=later_s), replace(b, later_s=later_s)]
    assert next_step(models, room(), 100.0 + QUIET_S + QUIET_LOADS) == Unload("a")


def test_a_client_for_whom_much_was_loaded_counts_as_one_who_came_later():
    loads = Loads()
    loads.add({"kim"}, 10.0, 1000.0)
    loads.add({"lee", "ann"}, 10.0, 1000.0)
    assert loads.later_s(1001.0) == {"kim": 30.0, "lee": 15.0, "ann": 15.0}
    loads.add({"kim"}, 500.0, 1001.0)
    assert loads.later_s(1002.0)["kim"] == LATER_MAX_S, "and not for ever"
    assert loads.later_s(1002.0 + REMEMBERED_S) == {}
