"""Many of one owner never delay another's one, and no slot stays empty while somebody waits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import pytest

from mtmd.base.fair_queue import REMEMBERED, Claim, FairQueue, FairShares, FairSlots


def test_who_has_had_least_is_first_and_who_comes_anew_saved_nothing() -> None:
    shares = FairShares()
    assert shares.order("aab") == ["a", "b"]
    shares.charge("a", 5)
    shares.charge("b", 3)
    assert shares.order("ab") == ["b", "a"]
    assert shares.order("abc") == ["c", "b", "a"], "c begins where b stands"
    shares.charge("c", 1)
    assert shares.order("abc") == ["b", "c", "a"]
    assert shares.order("a") == ["a"] and shares.order("ab") == ["b", "a"], "b is forgotten"
    shares.charge("b", 1)
    assert shares.order("ab") == ["a", "b"], "and has to begin where a stands"
    shares.charge("nobody", 1)
    assert shares.order([]) == []


@pytest.mark.parametrize("seed", range(10))
def test_those_who_always_want_some_have_equal_parts(seed: int) -> None:
    rng, shares, had = Random(seed), FairShares(), Counter[str]()
    for turn in range(2000):
        wanting = ["a", "b"] + ["c"] * (turn >= 1000) + ["d"] * (rng.random() < 0.3)
        rng.shuffle(wanting)
        first, amount = shares.order(wanting)[0], rng.randint(1, 9)
        shares.charge(first, amount)
        had[first] += amount
        if turn == 999:
            before = had.copy()
    assert abs(had["a"] - had["b"]) <= 9
    assert abs((had["a"] - before["a"]) - had["c"]) <= 18


def test_who_asks_for_one_thing_after_another_has_no_more_than_who_waits() -> None:
    """One owner has a long line, the others ask for the next when they have had one."""
    shares, had = FairShares(), Counter[str]()
    requesting = set("abcd")
    for _ in range(400):
        first = shares.order(sorted(requesting))[0]
        shares.charge(first, 1)
        had[first] += 1
        if first != "a":
            shares.order(sorted(requesting - {first}))  # it has left, and comes back
    assert had == dict.fromkeys("abcd", 100)


def test_who_was_alone_for_long_does_not_wait_for_one_who_comes() -> None:
    """Nor the other way round."""
    shares, had = FairShares(), Counter[str]()
    for _ in range(1000):
        assert shares.order("a") == ["a"]
        shares.charge("a", 1)
    for _ in range(100):
        first = shares.order("ab")[0]
        shares.charge(first, 1)
        had[first] += 1
    assert abs(had["a"] - had["b"]) <= 1


def test_ever_new_ones_do_not_keep_one_who_has_had_nothing_from_his_turn() -> None:
    shares = FairShares()
    shares.order(["waits"])
    for number in range(3):
        assert shares.order(["waits", str(number)])[0] == "waits", "in the order in which they came"


def test_no_more_is_known_of_those_who_left_than_has_to_be() -> None:
    shares = FairShares()
    for number in range(5000):
        owner = str(number)
        shares.order(["waits", owner])
        shares.charge(owner, 1)
    assert len(shares._amounts) <= REMEMBERED + 2
    assert shares.order([]) == [] and not shares._amounts


@dataclass(eq=False)
class Item:
    owner: str
    name: str = ""


def test_a_queue_serves_owners_in_turn_and_each_in_order() -> None:
    queue, items = FairQueue[Item](), [Item("aabca"[i], str(i)) for i in range(5)]
    for item in items:
        queue.append(item)
    assert len(queue) == 5 and queue.owners == 3 and items[0] in queue
    served = []
    while (item := queue.next()) is not None:
        queue.serve(item)
        served.append(item.name)
    assert served == ["0", "2", "3", "1", "4"] and not len(queue) and items[0] not in queue


def test_a_queue_prefers_the_owner_with_the_fewest_running_and_skips_full_ones() -> None:
    queue, first, second, other = FairQueue[Item](), Item("a"), Item("a"), Item("b")
    for item in (first, other):
        queue.append(item)
    queue.appendleft(second)
    assert list(queue) == [second, first, other]
    assert queue.next({"a": 1}) is other and queue.next({"a": 1, "b": 2}) is second
    assert queue.next(full={"a"}) is other and queue.next(full={"a", "b"}) is None
    queue.remove(second)
    assert queue.next() is first


@pytest.mark.parametrize("seed", range(5))
def test_slots_are_never_left_free_while_somebody_waits(seed: int) -> None:
    rng, slots = Random(seed), FairSlots(3, each=2)
    granted, waiting = list[Claim](), list[Claim]()
    for _ in range(500):
        if rng.random() < 0.5:
            waiting.append(slots.request(granted.append, rng.choice("abc")))
        elif granted and rng.random() < 0.7:
            slots.release(granted.pop(rng.randrange(len(granted))))
        elif waiting:
            claim = waiting.pop(rng.randrange(len(waiting)))
            assert slots.cancel(claim) != claim.is_granted
        waiting = [claim for claim in waiting if not claim.is_granted]
        used = Counter(claim.owner for claim in granted)
        assert slots.in_use == len(granted) <= 3 and max(used.values(), default=0) <= 2
        assert slots.waiting == len(waiting)
        assert len(granted) == 3 or all(used[claim.owner] == 2 for claim in waiting)


def test_a_slot_may_be_released_by_the_one_it_is_granted_to_at_once() -> None:
    slots, order = FairSlots(1), list[str]()

    def granted(claim: Claim) -> None:
        order.append(claim.owner)
        slots.release(claim)

    first = slots.request(lambda _: None)
    for owner in "aab":
        slots.request(granted, owner)
    slots.release(first)
    assert order == ["a", "b", "a"] and slots.in_use == slots.waiting == 0
