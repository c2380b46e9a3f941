"""What may come next, read from what stands there: against looking through all of the text."""

from __future__ import annotations

from random import Random

from mtmd.llm.engine.lookup import LONGEST, PICTURE, Lookup


def feed(prompt: list[int], answer: list[int]) -> Lookup:
    subject = Lookup(prompt)
    for token in answer:
        subject.push(token)
    return subject


def test_what_followed_the_last_tokens_is_expected_again() -> None:
    subject = feed([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3])
    assert subject.expected(4) == (4, 5, 6, 7) and subject.matched == 3
    subject.push(4)
    assert subject.expected(2) == (5, 6) and subject.matched == 4


def test_the_latest_occurrence_counts_and_three_tokens_more_than_two() -> None:
    assert feed([1, 2, 7, 1, 2, 8], [5, 1, 2]).expected(1) == (8,)
    assert feed([9, 1, 2, 7, 0, 1, 2, 8], [5, 9, 1, 2]).expected(1) == (7,)


def test_a_new_text_expects_nothing() -> None:
    subject = feed(list(range(50)), [60, 70, 80])
    assert subject.expected(5) == () and subject.chances(5) == []
    assert Lookup([]).expected(3) == () and Lookup([4]).expected(3) == ()


def test_a_loop_goes_round_however_short_it_is() -> None:
    assert feed([9], [5, 5, 5]).expected(6) == (5,) * 6
    assert feed([9], [1, 2, 3, 1, 2, 3, 1]).expected(5) == (2, 3, 1, 2, 3)


def test_behind_a_token_that_was_replaced_the_copy_goes_on() -> None:
    subject = feed([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 40])
    assert subject.expected(3) == (5, 6, 7) and subject.matched == 0
    subject.push(50)  # a second one in a row is another text
    assert subject.expected(3) == ()


def test_pictures_are_never_expected() -> None:
    prompt = [1, 2, 3, PICTURE, PICTURE, 4, 1, 2, 9]
    assert feed(prompt, [6, 1, 2]).expected(3) == (9, 6, 1)
    assert feed([1, 2, 3, PICTURE, PICTURE, 4], [1, 2]).expected(3) == (3,)
    assert feed([1, 2, PICTURE, PICTURE, 4], [1, 2]).expected(3) == ()


def test_chances_follow_what_is_seen() -> None:
    subject = feed(list(range(100)), list(range(60)))
    chances = subject.chances(3)
    assert chances == sorted(chances, reverse=True) and chances[2] > 0.8
    bad = Lookup([1, 2, 3, 1, 2, 4] * 8)
    for token in range(100, 130):  # two known tokens, then a new one, over and over
        for t in (1, 2, token):
            bad.push(t)
    bad.push(1)
    bad.push(2)
    assert bad.source is not None and bad.chances(1)[0] < 0.1


def test_the_index_is_what_a_search_finds() -> None:
    rng = Random(3)
    for _ in range(60):
        text = [rng.randint(0, 4) for _ in range(rng.randint(0, 12))]
        subject = Lookup(text)
        for _ in range(40):
            token, expected = rng.randint(0, 4), subject.expected(1)
            subject.push(token)
            text.append(token)
            actual = subject.expected(1)
            if expected == (token,):
                continue  # the copy goes on where it was
            at = _latest(text, 3) or _latest(text, 2)
            if at is None:
                assert subject.matched == 0
            else:
                assert actual == (text[at],) and 2 <= subject.matched <= LONGEST
                n = subject.matched
                assert text[at - n : at] == text[len(text) - n :]


def _latest(text: list[int], size: int) -> int | None:
    """What follows the latest earlier occurrence of the last `size` tokens."""
    if len(text) < size:
        return None
    tail = text[-size:]
    locations = [i for i in range(size, len(text)) if text[i - size : i] == tail]
    return locations[-1] if locations else None
