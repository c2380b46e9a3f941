"""Pages: held, shared, known by their contents, given to others when nobody holds them."""

from __future__ import annotations

from random import Random

import pytest

from mtmd.llm.engine.pages import SCRATCH, Pages, page_keys


def test_pages_are_taken_in_order_and_given_back() -> None:
    pages = Pages(6, 4)
    first = pages.take(3)
    assert (
        first == [1, 2, 3] and SCRATCH not in first and pages.available == 2 and pages.stored == 3
    )
    pages.release(first[1:])
    assert pages.take(2) == [2, 3] and pages.available == 2
    with pytest.raises(IndexError, match="3 pages wanted, 2 available"):
        pages.take(3)


def test_known_pages_are_found_again_and_shared() -> None:
    pages = Pages(6, 4)
    mine = pages.take(3)
    for page, key in zip(mine, (b"a", b"b", b"c"), strict=True):
        pages.register(page, key)
    assert pages.find([b"a", b"b", b"x"]) == mine[:2]
    pages.release(mine)
    assert (
        pages.stored == 2 and pages.available == 3
    )  # two are still held by the second, one is only remembered
    pages.release(mine[:2])
    assert pages.find([b"a", b"b", b"c"]) == mine and pages.available == 2


def test_a_key_that_does_not_lead_is_not_found() -> None:
    pages = Pages(6, 4)
    mine = pages.take(2)
    pages.register(mine[1], b"b")
    assert pages.find([b"a", b"b"]) == []


def test_the_oldest_contents_go_first_and_beginnings_last() -> None:
    pages = Pages(5, 4)
    mine = pages.take(4)
    for page, key in zip(mine, (b"a", b"b", b"c", b"d"), strict=True):
        pages.register(page, key)
    pages.release(mine)
    taken = pages.take(2)
    assert sorted(taken) == [3, 4] and pages.find([b"a", b"b", b"c"]) == [1, 2]


def test_what_is_held_is_not_given_to_others() -> None:
    pages = Pages(4, 2)
    mine = pages.take(1)
    pages.register(mine[0], b"a")
    other = pages.find([b"a"])
    pages.release(mine)
    assert set(pages.take(2)).isdisjoint(other) and pages.available == 0
    pages.release(other)
    assert pages.take(1) == other and pages.find([b"a"]) == []


def test_twice_the_same_contents() -> None:
    """Two sequences read the same prompt at once: the first page known stays, the other is only a
    page.
    """
    pages = Pages(5, 2)
    one, two = pages.take(1), pages.take(1)
    pages.register(one[0], b"a")
    pages.register(two[0], b"a")
    pages.release([*one, *two])
    assert pages.find([b"a"]) == one and pages.available == 3


def test_a_page_of_nobody_cannot_be_known() -> None:
    with pytest.raises(ValueError, match="not in use"):
        Pages(3, 2).register(1, b"a")


@pytest.mark.parametrize("seed", range(20))
def test_pages_add_up_whatever_happens(seed: int) -> None:
    rng, pages, stored = Random(seed), Pages(17, 2), []
    for step in range(400):
        chance = rng.random()
        if chance < 0.4 and pages.available:
            stored.append(pages.take(rng.randint(1, min(4, pages.available))))
        elif chance < 0.6 and stored:
            chosen = rng.choice(stored)
            for page in chosen:
                pages.register(page, b"%d" % rng.randint(0, step))
        elif chance < 0.75:
            result = pages.find([b"%d" % rng.randint(0, step) for _ in range(2)])
            stored += [result] if result else []
        elif stored:
            pages.release(stored.pop(rng.randrange(len(stored))))
        distinct = {page for group in stored for page in group}
        assert (
            pages.stored == len(distinct)
            and pages.available == 16 - len(distinct)
            and SCRATCH not in distinct
        )
    for group in stored:
        pages.release(group)
    assert pages.available == 16 and sorted(pages.take(16)) == list(range(1, 17))


def test_keys_tell_everything_up_to_the_end_of_a_page() -> None:
    tokens = [b"%d" % i for i in range(10)]
    keys = page_keys(tokens, 4)
    assert (
        len(keys) == 2 and page_keys(tokens[:8], 4) == keys and page_keys(tokens[:7], 4) == keys[:1]
    )
    assert page_keys([b"x", *tokens[1:]], 4)[1] != keys[1], "the second page depends on the first"
    assert page_keys([b"ab", b"c"], 2) != page_keys([b"a", b"bc"], 2), (
        "where one token ends and the next begins counts"
    )


def test_equal_tokens_of_another_salt_are_others():
    tokens = [b"t%d" % i for i in range(8)]
    assert page_keys(tokens, 4, b"") == page_keys(tokens, 4)
    assert not set(page_keys(tokens, 4, b"a")) & set(page_keys(tokens, 4, b"b"))
    assert page_keys(tokens, 4, b"a") == page_keys(tokens, 4, b"a")
