"""The batcher's decisions: who runs, how much of each, who gives way; and that everybody gets there
whatever comes.
"""

from __future__ import annotations

from random import Random

import pytest

from mtmd.llm.engine.batcher import Batcher, Step
from mtmd.llm.engine.pages import Pages
from mtmd.llm.engine.sequence import Sequence


def batcher(
    pages: int = 33, size: int = 4, slots: int = 4, tokens: int = 64, recurrent: bool = False
) -> Batcher:
    return Batcher(Pages(pages, size), slots, tokens, recurrent)


def run(subject: Batcher) -> Step:
    step = subject.step()
    subject.ran(step)
    return step


def counts(step: Step) -> list[int]:
    return [count for _, count in step.parts]


def test_decoding_goes_first_and_prompts_share_the_rest() -> None:
    subject = batcher(tokens=72)
    first = Sequence(3)
    subject.add(first)
    assert counts(run(subject)) == [3] and first.done == 3
    first.total += 1  # it has got its first token
    long, short = Sequence(90), Sequence(20)
    subject.add(long)
    subject.add(short)
    step = run(subject)
    assert step.parts == ((first, 1), (long, 35), (short, 20)) and step.admitted == (long, short)


def test_prompts_are_read_in_small_batches_while_somebody_decodes() -> None:
    subject = batcher(pages=400, tokens=512)
    first = Sequence(3)
    subject.add(first)
    run(subject)
    first.total += 1
    subject.add(Sequence(1000))
    assert counts(run(subject)) == [1, 127] and counts(run(subject)) == [512]


def test_a_small_share_is_not_cut_smaller() -> None:
    subject = batcher(tokens=40, slots=3)
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
    subject = batcher(tokens=10)
    item = Sequence(25, blocks)
    subject.add(item)
    assert [counts(run(subject))[0] for _ in expected] == expected and item.done == 25
    assert not any(
        start < sum(expected[:i]) < stop for i in range(len(expected)) for start, stop in blocks
    )


def test_a_batch_grows_for_one_block_beside_those_who_decode() -> None:
    subject = batcher(tokens=12)
    decoding, image, other = Sequence(1), Sequence(20, ((0, 20),)), Sequence(20, ((0, 20),))
    subject.add(decoding)
    assert run(subject).parts == ((decoding, 1),)
    decoding.total += 1
    subject.add(image)
    subject.add(other)
    assert run(subject).parts == ((decoding, 1), (image, 20))
    decoding.total += 1
    assert run(subject).parts == ((decoding, 1), (other, 20))


def test_equal_beginnings_are_read_once() -> None:
    keys = [b"a", b"b", b"c"]
    subject = batcher()
    first, second = Sequence(13, keys=keys), Sequence(12, keys=keys)
    subject.add(first)
    run(subject)
    subject.remove(first)
    subject.add(second)
    step = subject.step()
    assert counts(step) == [4] and second.done == 8, (
        "the last page has to be read for the logits of its last token"
    )


def test_recurrent_states_are_taken_up_at_snapshots_only() -> None:
    subject, keys = batcher(recurrent=True), [b"a", b"b", b"c"]
    first = Sequence(13, keys=keys)
    subject.add(first)
    assert first.snapshot_at == 12 and [counts(run(subject)) for _ in range(2)] == [[12], [1]]
    subject.remove(first)
    for snapshots, read in ((set(), 13), ({b"x"}, 13), ({b"b"}, 5), ({b"a", b"c"}, 1)):
        subject.snapshots = snapshots
        item = Sequence(13, keys=keys)
        subject.add(item)
        step = subject.step()
        assert item.left == read and counts(step)[0] <= read
        subject.remove(item)


def test_a_snapshot_without_its_pages_is_of_no_use() -> None:
    subject = batcher(recurrent=True)
    subject.snapshots = {b"a"}
    item = Sequence(9, keys=[b"a", b"b"])
    subject.add(item)
    subject.step()
    assert item.left == 9


def test_restarting_reads_all_again() -> None:
    subject = batcher(size=4)
    item = Sequence(9)
    subject.add(item)
    run(subject)
    slot = item.slot
    subject.restart(item)
    assert (item.done, item.slot, len(item.pages), subject.pages.held) == (0, slot, 3, 3)
    assert counts(run(subject)) == [9]


def test_the_youngest_gives_way_and_comes_back() -> None:
    subject = batcher(pages=6, size=2)  # five pages in use: ten tokens
    old, young = Sequence(4), Sequence(4)
    subject.add(old)
    subject.add(young)
    run(subject)
    seen = set()
    for _ in range(12):
        for item in (old, young):
            if item.done == item.total and item.total < 8:
                item.total += 1
        step = run(subject)
        seen |= set(step.preempted)
        if old.done == 8:
            subject.remove(old)
            old.done += 1
    assert seen == {young} and young.done == 8


def test_nobody_overtakes_one_who_waits_for_memory() -> None:
    subject = batcher(pages=6, size=4)
    running, large, small = Sequence(9), Sequence(16), Sequence(1)
    subject.add(running)
    run(subject)
    subject.add(large)
    subject.add(small)
    assert run(subject).admitted == ()
    subject.remove(running)
    assert run(subject).admitted == (large, small)


def test_removing_one_who_waits() -> None:
    subject = batcher(slots=1)
    first, second = Sequence(3), Sequence(3)
    subject.add(first)
    subject.add(second)
    run(subject)
    subject.remove(second)
    subject.remove(first)
    assert run(subject).parts == () and subject.pages.held == 0


def test_a_snapshot_behind_a_page_that_is_gone_is_of_no_use() -> None:
    subject, keys = batcher(recurrent=True), [b"a", b"b", b"c"]
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
    subject.step()
    assert item.done == 0, "there is no snapshot at the end of the pages found"


def test_an_old_reader_and_a_young_decoder_do_not_wait_for_each_other() -> None:
    """The young one has grown into the room that was meant for the other's prompt; when none is
    left, it gives way.
    """
    subject = batcher(pages=52)
    old, young = Sequence(200), Sequence(4)
    subject.add(old)
    subject.add(young)
    preempted: set[Sequence] = set()
    for _ in range(60):
        step = run(subject)
        preempted |= set(step.preempted)
        young.total += young.done == young.total
    assert old.done == 200 and preempted == {young}


def play(rng: Random, subject: Batcher, most: int, count: int = 40) -> None:
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
            total, beginning, made = rng.randint(1, most), rng.randint(0, 2), made + 1
            start = rng.randint(0, total - 1)
            item = Sequence(
                total,
                ((start, rng.randint(start + 1, total)),) if rng.random() < 0.5 else (),
                [b"%d" % i + b"-%d" % beginning * (i > 1) for i in range(total // size)],
            )
            goals[item] = min(total + rng.randint(1, 30), room)
            subject.add(item)
        step = subject.step()
        assert step.parts or not goals, "nobody goes on"
        for item in step.admitted:
            assert (
                not subject.recurrent
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
        subject.ran(step)
        for item, _ in step.parts:
            if subject.recurrent and item.done == item.snapshot_at:
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
                    item.total += 1
        if finished == count:
            break
    assert finished == count and subject.pages.held == 0


@pytest.mark.parametrize("seed", range(40))
def test_everybody_gets_there(seed: int) -> None:
    """Under little memory, down to that of one sequence: each is read in order, none twice at once,
    all pages come back.
    """
    rng = Random(seed)
    subject = batcher(
        pages=rng.randint(6, 30),
        size=rng.choice((1, 2, 4)),
        slots=rng.randint(1, 5),
        tokens=rng.choice((3, 8, 40)),
        recurrent=rng.random() < 0.5,
    )
    play(rng, subject, most=(subject.pages.count - 1) * subject.pages.size - 1)
