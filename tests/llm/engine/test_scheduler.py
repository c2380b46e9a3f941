"""The scheduler's decisions: who runs, how much of each, who gives way; and that everybody gets there
whatever comes.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from mtmd.llm.engine.pages import Pages
from mtmd.llm.engine.scheduler import Scheduler, Step
from mtmd.llm.engine.sequence import Sequence, Token


def scheduler(
    pages: int = 33, size: int = 4, slots: int = 4, tokens: int = 64, recurrent: bool = False
) -> Scheduler:
    return Scheduler(Pages(pages, size), slots, tokens, set() if recurrent else None)


def run(subject: Scheduler) -> Step:
    step = subject.schedule()
    subject.advance(step)
    return step


def counts(step: Step) -> list[int]:
    return [count for _, count in step.parts]


def test_decoding_goes_first_and_prompts_share_the_rest() -> None:
    subject = scheduler(tokens=72)
    first = Sequence(3)
    subject.add(first)
    assert counts(run(subject)) == [3] and first.done == 3
    first.append(Token(0))  # it has got its first token
    long, short = Sequence(90), Sequence(20)
    subject.add(long)
    subject.add(short)
    step = run(subject)
    assert step.parts == ((first, 1), (long, 35), (short, 20)) and step.admitted == (long, short)


def test_prompts_are_read_in_small_batches_while_somebody_decodes() -> None:
    subject = scheduler(pages=400, tokens=512)
    first = Sequence(3)
    subject.add(first)
    run(subject)
    first.append(Token(0))
    subject.add(Sequence(1000))
    assert counts(run(subject)) == [1, 127] and counts(run(subject)) == [512]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [((20, 28), [16, 16, 16]), ((49,), [49]), ((30, 30), [60]), ((7,), [7])],
)
def test_short_prompts_are_read_a_few_rows_at_a_time_if_nobody_decodes(
    lengths: tuple[int, ...], expected: list[int]
) -> None:
    """Where a cache is read in place: that is as fast, up to three such batches."""
    subject = scheduler(pages=400, tokens=512)
    subject.in_place_rows = 16
    for length in lengths:
        subject.add(Sequence(length))
    assert [sum(counts(run(subject))) for _ in expected] == expected


def test_many_who_decode_leave_room_for_prompts() -> None:
    for decoding in range(1, 40):
        subject = scheduler(pages=400, tokens=512, slots=50)
        first = [Sequence(1) for _ in range(decoding)]
        for sequence in first:
            subject.add(sequence)
        run(subject)
        for sequence in first:
            sequence.append(Token(0))
        subject.mixed_rows = subject.in_place_rows = 16
        subject.add(Sequence(1000))
        step = run(subject)
        assert step.rows == (16 if decoding <= 12 else decoding + 16)
        assert step.is_split == (decoding > 12)


@pytest.mark.parametrize(
    ("rows", "expected", "is_split"),
    [(16, [1, 15], False), (17, [1, 16], True), (40, [1, 39], True)],
)
def test_what_is_more_than_a_few_rows_is_two_batches(
    rows: int, expected: list[int], is_split: bool
) -> None:
    """Where a cache is read in place: prompts by themselves."""
    subject = scheduler(pages=400, tokens=512)
    subject.mixed_rows, subject.in_place_rows = rows, 16
    first, prompt = Sequence(3), Sequence(1000)
    subject.add(first)
    assert run(subject).batches() == (Step(((first, 3),), (first,), ()),)
    first.append(Token(0))
    subject.add(prompt)
    step = subject.schedule()
    assert counts(step) == expected and step.is_split is is_split
    if is_split:
        prompts, answers = step.batches()
        assert prompts == Step(((prompt, expected[1]),), (prompt,), ())
        assert answers == Step(((first, 1),), (), ())
    else:
        assert step.batches() == (step,)
    subject.remove(first)
    assert counts(subject.schedule()) == [512] and not subject.schedule().is_split, "nobody waits"


def test_prompts_of_one_token_beside_answers_are_one_batch_with_them() -> None:
    """They wait for their next token as soon as they are let in: a batch of prompts would have no
    parts.
    """
    subject = scheduler(pages=400, tokens=512, slots=40)
    subject.mixed_rows, subject.in_place_rows = 40, 16
    first = Sequence(3)
    subject.add(first)
    run(subject)
    first.append(Token(0))
    prompts = [Sequence(1) for _ in range(20)]
    for prompt in prompts:
        subject.add(prompt)
    step = subject.schedule()
    assert counts(step) == [1] * 21 and step.batches() == (step,)
    subject.advance(step)
    for sequence in (first, *prompts):
        sequence.append(Token(0))
    subject.add(Sequence(1000))
    step = subject.schedule()
    assert all(batch.parts for batch in step.batches()) and len(step.batches()) == 2


def test_a_small_share_is_not_cut_smaller() -> None:
    subject = scheduler(tokens=40, slots=3)
    items = [Sequence(30) for _ in range(3)]
    for item in items:
        subject.add(item)
    assert counts(run(subject)) == [30, 10]  # shares of 13 would keep all three waiting


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ((), [10, 10, 5]),
        (((8, 14),), [8, 10, 7]),  # it does not fit behind what comes before it
        (((0, 16),), [16, 9]),  # a batch grows for it
        (((3, 25),), [3, 22]),
        (((2, 9), (9, 16), (16, 25)), [9, 7, 9]),
    ],
)
def test_blocks_are_not_cut(blocks: tuple[tuple[int, int], ...], expected: list[int]) -> None:
    subject = scheduler(tokens=10)
    item = Sequence(25, blocks)
    subject.add(item)
    assert [counts(run(subject))[0] for _ in expected] == expected and item.done == 25
    assert not any(
        start < sum(expected[:i]) < stop for i in range(len(expected)) for start, stop in blocks
    )


def test_a_batch_grows_for_one_block_beside_those_who_decode() -> None:
    subject = scheduler(tokens=12)
    decoding, image, other = Sequence(1), Sequence(20, ((0, 20),)), Sequence(20, ((0, 20),))
    subject.add(decoding)
    assert run(subject).parts == ((decoding, 1),)
    decoding.append(Token(0))
    subject.add(image)
    subject.add(other)
    assert run(subject).parts == ((decoding, 1), (image, 20))
    decoding.append(Token(0))
    assert run(subject).parts == ((decoding, 1), (other, 20))


def test_equal_beginnings_are_read_once() -> None:
    keys = [b"a", b"b", b"c"]
    subject = scheduler()
    first, second = Sequence(13, keys=keys), Sequence(12, keys=keys)
    subject.add(first)
    run(subject)
    subject.remove(first)
    subject.add(second)
    step = subject.schedule()
    assert counts(step) == [4] and second.done == 8, (
        "the last page has to be read for the logits of its last token"
    )


def test_recurrent_states_are_taken_up_at_snapshots_only() -> None:
    subject, keys = scheduler(recurrent=True), [b"a", b"b", b"c"]
    first = Sequence(13, keys=keys)
    subject.add(first)
    assert first.snapshot_at == 12 and [counts(run(subject)) for _ in range(2)] == [[12], [1]]
    subject.remove(first)
    for snapshots, read in ((set(), 13), ({b"x"}, 13), ({b"b"}, 5), ({b"a", b"c"}, 1)):
        subject.snapshots = snapshots
        item = Sequence(13, keys=keys)
        subject.add(item)
        step = subject.schedule()
        assert item.left == read and counts(step)[0] <= read
        subject.remove(item)


def test_a_snapshot_without_its_pages_is_of_no_use() -> None:
    subject = scheduler(recurrent=True)
    subject.snapshots = {b"a"}
    item = Sequence(9, keys=[b"a", b"b"])
    subject.add(item)
    subject.schedule()
    assert item.left == 9


def test_restarting_reads_all_again() -> None:
    subject = scheduler(size=4)
    item = Sequence(9)
    subject.add(item)
    run(subject)
    slot = item.slot
    subject.restart(item)
    assert (item.done, item.slot, len(item.pages), subject.pages.stored) == (0, slot, 3, 3)
    assert counts(run(subject)) == [9]


def test_the_youngest_gives_way_and_comes_back() -> None:
    subject = scheduler(pages=6, size=2)  # five pages in use: ten tokens
    old, young = Sequence(4), Sequence(4)
    subject.add(old)
    subject.add(young)
    run(subject)
    seen = set()
    for _ in range(12):
        for item in (old, young):
            if item.done == item.total and item.total < 8:
                item.append(Token(0))
        step = run(subject)
        seen |= set(step.preempted)
        if old.done == 8:
            subject.remove(old)
            old.done += 1
    assert seen == {young} and young.done == 8


def test_nobody_overtakes_one_who_waits_for_memory() -> None:
    subject = scheduler(pages=6, size=4)
    running, large, small = Sequence(9), Sequence(16), Sequence(1)
    subject.add(running)
    run(subject)
    subject.add(large)
    subject.add(small)
    assert run(subject).admitted == ()
    subject.remove(running)
    assert run(subject).admitted == (large, small)


def test_removing_one_who_waits() -> None:
    subject = scheduler(slots=1)
    first, second = Sequence(3), Sequence(3)
    subject.add(first)
    subject.add(second)
    run(subject)
    subject.remove(second)
    subject.remove(first)
    assert run(subject).parts == () and subject.pages.stored == 0


def test_a_snapshot_behind_a_page_that_is_gone_is_of_no_use() -> None:
    subject, keys = scheduler(recurrent=True), [b"a", b"b", b"c"]
    pages = subject.pages
    mine = pages.take(3)
    for page, key in zip(mine, keys, strict=True):
        pages.register(page, key)
    for page in (mine[1], mine[0], mine[2]):
        pages.release([page])
    pages.release(pages.take(pages.available - 2))  # the page let go first is needed for others
    assert [pages.knows(key) for key in keys] == [True, False, True]
    subject.snapshots, item = {b"c"}, Sequence(13, keys=keys)
    subject.add(item)
    subject.schedule()
    assert item.done == 0, "there is no snapshot at the end of the pages found"


def test_an_old_reader_and_a_young_decoder_do_not_wait_for_each_other() -> None:
    """The young one has grown into the room that was meant for the other's prompt; when none is
    left, it gives way.
    """
    subject = scheduler(pages=52)
    old, young = Sequence(200), Sequence(4)
    subject.add(old)
    subject.add(young)
    preempted: set[Sequence] = set()
    for _ in range(60):
        step = run(subject)
        preempted |= set(step.preempted)
        if young.done == young.total:
            young.append(Token(0))
    assert old.done == 200 and preempted == {young}


def play(rng: Random, subject: Scheduler, maximum: int, count: int = 40) -> None:
    """Random sequences come, share beginnings and go; raises AssertionError where one is run
    wrongly, or the last does not get there.
    """
    size, room, goals, finished, made = (
        subject.pages.size,
        (subject.pages.count - 1) * subject.pages.size,
        {},
        0,
        0,
    )
    for _ in range(6000):
        if len(goals) < 6 and rng.random() < 0.3 and made < count:
            total, beginning, made = rng.randint(1, maximum), rng.randint(0, 2), made + 1
            start = rng.randint(0, total - 1)
            item = Sequence(
                total,
                ((start, rng.randint(start + 1, total)),) if rng.random() < 0.5 else (),
                [b"%d" % i + b"-%d" % beginning * (i > 1) for i in range(total // size)],
                owner=rng.choice("aaab"),
            )
            goals[item] = min(total + rng.randint(1, 30), room)
            subject.add(item)
        if (unfair := subject.unfair_slot()) is not None:
            subject.preempt(unfair)
        step = subject.schedule()
        assert step.parts or not goals, "nobody goes on"
        for item in step.admitted:
            assert (
                subject.snapshots is None
                or not item.done
                or item.keys[item.done // size - 1] in subject.snapshots
            )
        assert (
            len({id(item) for item, _ in step.parts})
            == len({item.slot for item, _ in step.parts})
            == len(step.parts)
        )
        for item, tokens in step.parts:
            assert 0 < tokens <= item.left and len(item.pages) * size >= item.done + tokens
            assert item.done == 0 or not any(
                start < item.done + tokens < stop for start, stop in item.blocks
            )
        subject.advance(step)
        for item, _ in step.parts:
            if subject.snapshots is not None and item.done == item.snapshot_at:
                subject.snapshots.add(item.keys[item.done // size - 1])
                subject.snapshots -= set(
                    rng.sample(sorted(subject.snapshots), max(len(subject.snapshots) - 4, 0))
                )
            if item.done == item.total:
                if item.total >= goals[item] or rng.random() < 0.02:
                    subject.remove(item)
                    del goals[item]
                    finished += 1
                else:
                    item.append(Token(0))
        if finished == count:
            break
    assert finished == count and subject.pages.stored == 0


@pytest.mark.parametrize("seed", range(40))
def test_everybody_gets_there(seed: int) -> None:
    """Under little memory, down to that of one sequence: each is read in order, none twice at once,
    all pages come back.
    """
    rng = Random(seed)
    subject = scheduler(
        pages=rng.randint(6, 30),
        size=rng.choice((1, 2, 4)),
        slots=rng.randint(1, 5),
        tokens=rng.choice((3, 8, 40)),
        recurrent=rng.random() < 0.5,
    )
    play(rng, subject, maximum=(subject.pages.count - 1) * subject.pages.size - 1)


# several owners


def take_locations(subject: Scheduler, owner: str, count: int, total: int = 5) -> list[Sequence]:
    items = [Sequence(total, owner=owner) for _ in range(count)]
    for item in items:
        subject.add(item)
    return items


def turn(subject: Scheduler) -> Step:
    """One step as the engine takes it: who decodes gets a token."""
    if (unfair := subject.unfair_slot()) is not None:
        subject.preempt(unfair)
    step = run(subject)
    for item, _ in step.parts:
        item.total += item.done == item.total
    return step


def locations(subject: Scheduler) -> list[str]:
    return sorted(sequence.owner for sequence in subject.running)


def test_one_alone_has_everything_and_gives_up_half_when_another_comes() -> None:
    subject = scheduler(pages=400)
    many = take_locations(subject, "a", 9)
    for _ in range(3):
        turn(subject)
    assert locations(subject) == list("aaaa") and subject.unfair_slot() is None
    take_locations(subject, "b", 1)
    assert turn(subject).admitted[0].owner == "b" and locations(subject) == list("aaab")
    assert many[3] not in subject.running and next(iter(subject.waiting)) is many[3], "the youngest"
    take_locations(subject, "b", 5)
    for _ in range(3):
        turn(subject)
    assert locations(subject) == list("aabb")
    for item in [s for s in (*subject.running, *subject.waiting) if s.owner == "b"]:
        subject.remove(item)
    assert [s is many[2] for s in turn(subject).admitted] == [True, False], "taken up where it was"
    assert locations(subject) == list("aaaa")


def test_more_owners_than_places_have_them_in_turn() -> None:
    subject = scheduler(pages=400, slots=2)
    for owner in "abcde":
        take_locations(subject, owner, 4)
    seen = []
    for _ in range(10):
        step = turn(subject)
        seen += [s.owner for s in step.admitted]
        assert subject.unfair_slot() is None, "nobody has two"
        for item in list(subject.running):
            subject.remove(item)
    assert seen == list("abcde") * 4


def test_what_is_read_of_prompts_is_shared_out_by_owner() -> None:
    subject = scheduler(pages=4000, tokens=120, slots=5)
    many, one = take_locations(subject, "a", 3, 1000), take_locations(subject, "b", 1, 1000)
    for _ in range(12):
        run(subject)
    assert one[0].done == 720 and sum(item.done for item in many) == 720
    subject.remove(one[0])
    assert sum(counts(run(subject))) == 120, "and nothing is left unused"


def test_of_a_room_too_small_for_all_each_owner_has_some_in_turn() -> None:
    subject = scheduler(pages=4000, tokens=40, slots=4)
    items = [take_locations(subject, owner, 1, 1000)[0] for owner in "abcd"]
    for _ in range(16):
        run(subject)
    assert max(i.done for i in items) - min(i.done for i in items) <= 40
    assert sum(i.done for i in items) == 16 * 40


@pytest.mark.parametrize("seed", range(20))
def test_a_flood_of_one_owner_keeps_nobody_waiting(seed: int) -> None:
    """Whatever comes, no place is free while somebody waits, no owner has two more places than one
    who waits has, after a step for each place; and who asks now and then is let in at once.
    """
    rng = Random(seed)
    slots = rng.randint(2, 6)
    subject = scheduler(pages=4000, slots=slots, tokens=rng.choice((16, 64, 512)))
    ends: dict[Sequence, int] = {}
    waited = Counter[str]()
    quiet = 0
    for number in range(400):
        came = False
        for owner, maximum in (("flood", 30), ("other", 4), ("rare", 1)):
            have = sum(s.owner == owner for s in ends)
            if have < maximum and rng.random() < (1.0 if owner == "flood" else 0.1):
                item = Sequence(rng.randint(1, 200), owner=owner)
                ends[item], came = number + rng.randint(5, 60), True
                subject.add(item)
        turn(subject)
        assert len(subject.running) == min(slots, len(ends)), "a place is free, and somebody waits"
        running = Counter(s.owner for s in subject.running)
        quiet = 0 if came else quiet + 1
        if quiet > slots:
            for owner in {s.owner for s in subject.waiting}:
                assert max(running.values()) < running[owner] + 2
        for owner in ("other", "rare"):
            waits = not running[owner] and any(s.owner == owner for s in subject.waiting)
            waited[owner] = waited[owner] + 1 if waits else 0
        if slots >= 3:
            assert max(waited.values()) <= 2
        for item in [s for s, end in ends.items() if end <= number]:
            subject.remove(item)
            del ends[item]


def test_of_a_sequence_that_made_way_nothing_is_read_twice_while_there_is_room() -> None:
    subject = scheduler(pages=400, size=4)
    keys = [b"%d" % i for i in range(10)]
    (first,) = take_locations(subject, "a", 1)
    second = Sequence(40, keys=keys, owner="a")
    subject.add(second)
    take_locations(subject, "a", 2)
    turn(subject)
    subject.preempt(second)
    assert second.done == 0
    turn(subject)
    assert second in subject.running and second.done == 41 - 1 and first in subject.running
