"""Spans into batches, and which slots each token sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch

from mtmd.llm.batch import BatchShape
from mtmd.llm.engine.make_batch import make_batch
from mtmd.llm.engine.sequence import Sequence
from mtmd.llm.engine.spans import Span, cut, lay_out
from mtmd.llm.state import KV, PAGE, Cache, ConvWindow, KVType, MatrixState


def text(*tokens: int) -> Span:
    return Span(tokens)


def image(count: int, value: float = 1.0) -> Span:
    return Span((9,) * count, torch.full((count, 2), value), block=True)


def lengths(batches: list[list[Span]]) -> list[list[int]]:
    return [[len(s) for s in b] for b in batches]


@pytest.mark.parametrize(
    ("spans", "limit", "expected"),
    [
        ([text(*range(10))], 4, [[4], [4], [2]]),
        ([text(1, 2), image(3), text(4)], 8, [[2, 3, 1]]),
        (
            [text(1, 2), image(3), text(4)],
            4,
            [[2], [3, 1]],
        ),  # the image does not fit behind the text, and is not cut
        ([text(1, 2), image(9), text(4)], 4, [[2], [9], [1]]),  # a batch grows for an image
        ([image(4), image(4)], 4, [[4], [4]]),
        ([text(1)], 1, [[1]]),
    ],
)
def test_cut(spans: list[Span], limit: int, expected: list[list[int]]) -> None:
    batches = cut(spans, limit)
    assert lengths(batches) == expected
    assert [t for b in batches for s in b for t in s.tokens] == [t for s in spans for t in s.tokens]


def test_cut_keeps_embeddings_with_their_tokens() -> None:
    values = torch.arange(6.0).view(3, 2)
    first, second = cut([Span((1, 2, 3), values)], 2)
    assert first[0].embeddings is not None and second[0].embeddings is not None
    torch.testing.assert_close(torch.cat((first[0].embeddings, second[0].embeddings)), values)


def cache(sequences: int = 1) -> Cache:
    return Cache(
        [[KV(1, 2)], [ConvWindow(2, 3), MatrixState(2, 1, 3)]],
        sequences,
        1 + 2 * sequences,
        torch.float32,
        KVType("fp32"),
        lambda _: torch.device("cpu"),
    )


def running(slot: int = 0, length: int = 0, position: int = 0) -> Sequence:
    pages = [1 + 2 * slot, 2 + 2 * slot]
    return Sequence(length, done=length, pages=pages, slot=slot, position=position)


def test_batch_places_images_and_counts_slots_on() -> None:
    mine = running(length=10, position=10)
    batch = make_batch([(mine, [text(1, 2), image(3, 5.0), text(4), image(1, 7.0)])], cache())
    assert batch.tokens.tolist() == [1, 2, 0, 0, 0, 4, 0]
    assert batch.slots.tolist() == list(range(PAGE + 10, PAGE + 17))
    assert batch.positions.tolist() == [list(range(10, 17))] * 4
    assert batch.image_positions().tolist() == [2, 3, 4, 6]
    assert batch.image_rows()[:, 0].tolist() == [5.0, 5.0, 5.0, 7.0]
    assert batch.requested.tolist() == [6] and batch.pages.tolist() == [1]
    assert (mine.done, mine.position) == (10, 10), "it moves on when the batch has been run"


def test_slots_follow_the_pages() -> None:
    mine = Sequence(PAGE - 2, done=PAGE - 2, pages=[3, 1], slot=0, position=40)
    batch = make_batch([(mine, [text(1, 2, 3)])], cache(2))
    assert batch.slots.tolist() == [4 * PAGE - 2, 4 * PAGE - 1, PAGE]
    assert batch.pages.tolist() == [3, 1] and batch.positions[0].tolist() == [40, 41, 42]
    assert batch.bounds(None, True).tolist() == [[0, PAGE - 2], [0, PAGE - 1], [0, PAGE]]


def test_bounds() -> None:
    """Causal tokens see up to themselves, a picture's up to its end; a window cuts the past for
    all.
    """
    batch = make_batch([(running(), [text(1, 2), image(3), text(4)])], cache(), needs_logits=False)
    assert batch.bounds(None, True).tolist() == [[0, 0], [0, 1], [0, 4], [0, 4], [0, 4], [0, 5]]
    assert batch.bounds(2, True).tolist() == [[0, 0], [0, 1], [1, 4], [2, 4], [3, 4], [4, 5]]
    assert batch.bounds(2, False).tolist() == [[0, 0], [0, 1], [1, 2], [2, 3], [3, 4], [4, 5]]
    assert batch.requested.tolist() == []


def test_sequences_see_only_themselves() -> None:
    a, b = running(slot=1, length=3, position=5), running(slot=0)
    batch = make_batch([(a, [text(1, 2)]), (b, [image(2, 5.0), text(3)])], cache(2))
    assert batch.slots.tolist() == [
        3 * PAGE + 3,
        3 * PAGE + 4,
        PAGE,
        PAGE + 1,
        PAGE + 2,
    ] and batch.pages.tolist() == [3, 1]
    assert batch.positions[0].tolist() == [5, 6, 0, 1, 2]
    seen = [[0, 3], [0, 4], [PAGE, PAGE + 1], [PAGE, PAGE + 1], [PAGE, PAGE + 2]]
    assert batch.bounds(None, True).tolist() == batch.bounds(9, True).tolist() == seen
    assert batch.starts.tolist() == [0, 2, 5] and batch.sequence_slots.tolist() == [1, 0]
    assert batch.requested.tolist() == [1, 4] and batch.image_positions().tolist() == [2, 3]
    assert batch.shape == BatchShape(5, 2, 2, 2, 2)


def test_rows_that_only_fill_up() -> None:
    """They are a sequence of nobody's: their keys go to the scratch page, their state to the
    scratch slot, their logits come last.
    """
    mine = running()
    batch = make_batch([(mine, [text(*range(1, 8)), image(9, 5.0), text(3)])], cache())
    assert batch.shape == BatchShape(17, 9, 1, 1, 1).rounded() == BatchShape(18, 9, 2, 2, 1)
    assert (
        batch.slots[17:].tolist() == [0]
        and batch.starts.tolist() == [0, 17, 18]
        and batch.sequence_slots.tolist() == [0, 1]
    )
    assert batch.requested.tolist() == [16, 0] and batch.bounds(None, True)[17].tolist() == [0, 0]


@pytest.mark.parametrize("count", [*range(1, 70), 100, 511, 512, 1000, 4097])
def test_rounded_shapes_hold_what_they_are_for(count: int) -> None:
    for images in {0, 1, count // 2, count}:
        shape, result = (
            BatchShape(count, images, 3, 3, count),
            BatchShape(count, images, 3, 3, count).rounded(),
        )
        assert result.rounded() == result
        assert (result.tokens, result.images, result.pages) >= (
            count,
            images,
            count,
        ) and result.sequences >= 3 + (result.tokens > count)
        assert result.tokens - count >= result.images - images and result.tokens <= count * 1.27 + 1
        assert result.requested == result.sequences and shape.images <= result.images


def test_parts_of_prompts_that_run_as_machine_code_have_few_shapes() -> None:
    sizes = {BatchShape(count, 0, 1, 2, 3).rounded(in_place=True) for count in range(3, 17)}
    assert sorted({shape.tokens for shape in sizes}) == [4, 8, 16]
    assert all(shape.rounded(in_place=True) == shape for shape in sizes)
    answers = [BatchShape(count, 0, 1, count, 3).rounded(in_place=True) for count in range(1, 9)]
    assert [shape.tokens for shape in answers] == list(range(1, 9)), "every step of them counts"


def in_place(max_tokens: int, pages: Iterable[int], needs: str = "all") -> Iterator[BatchShape]:
    """Every batch that there can be, of up to so many tokens."""
    for tokens in range(1, max_tokens + 1):
        for sequences in range(1, min(tokens, 16) + 1):
            for images in {0, 1, tokens - sequences, tokens}:
                for requested in {"all": (sequences,), "any": (0, sequences, tokens)}[needs]:
                    for count in pages:
                        yield BatchShape(tokens, images, requested, sequences, count)


def test_shapes_of_a_cache_that_is_read_in_place_hold_what_they_are_for() -> None:
    for shape in in_place(40, (1, 9, 64, 65, 1000, 1025), "any"):
        result = shape.rounded(True)
        assert result.rounded(True) == result, shape
        assert result.tokens >= shape.tokens and result.pages >= shape.pages
        assert result.images in (0, result.tokens) and bool(result.images) == bool(shape.images)
        # Rows that fill up are of a sequence of nobody's.
        minimum = shape.sequences + (result.tokens > shape.tokens)
        assert minimum <= result.sequences <= result.tokens
        assert result.requested >= shape.requested and bool(result.requested) == bool(
            shape.requested
        )
        assert (
            result.requested <= result.tokens <= shape.tokens * (2 if shape.tokens <= 16 else 1.2)
        )


def test_there_are_few_shapes_of_a_cache_that_is_read_in_place() -> None:
    few = {shape.rounded(True) for shape in in_place(16, range(1, 1025, 9))}
    assert len(few) == 2 * (16 + 10 + 15), "answers, beside text, beside pictures; of two tables"
    large = {shape.rounded(True) for shape in in_place(128, (16,)) if shape.tokens > 16}
    assert len({s.tokens for s in large}) == 24 and len({s.sequences for s in large}) < 16
    one_by_one = {shape.rounded() for shape in in_place(16, range(1, 1025, 9))}
    assert len(one_by_one) > 50 * len(few), "where it is not"


def test_rows_of_a_picture_are_filled_up_by_its_last_one() -> None:
    stored = cache(2)
    stored.in_place = True
    parts = [(running(slot=1), [text(1)]), (running(), [text(2), image(2, 5.0), image(1, 7.0)])]
    batch = make_batch(parts, stored)
    assert batch.shape == BatchShape(8, 8, 4, 4, 64)
    assert batch.image_positions().tolist() == [2, 3, 4, 4, 4, 4, 4, 4]
    assert batch.image_rows()[:, 0].tolist() == [5.0, 5.0] + [7.0] * 6
    assert batch.starts.tolist() == [0, 1, 5, 5, 8]
    assert batch.sequence_slots.tolist() == [1, 0, 2, 2]
    assert batch.requested.tolist() == [0, 4, 0, 0] and batch.answers == 2
    assert batch.pages.tolist() == [3, 1, 2, 3, 4, *[0] * 59], "those that there are"


def grid(rows: int, columns: int) -> Span:
    return Span((9,) * (rows * columns), torch.zeros(rows * columns, 2), grid=(rows, columns))


def test_positions_of_a_grid() -> None:
    """Time stands still within a picture; what follows is one beyond the largest of its positions
    (arXiv:2409.12191).
    """
    located, after = lay_out([text(1, 2), grid(2, 3), text(3)], 4)
    assert [s.positions.tolist() for s in located if s.positions is not None] == [
        [[4, 5]] * 4,
        [[6] * 6, [6, 6, 6, 7, 7, 7], [6, 7, 8, 6, 7, 8], [6] * 6],
        [[9]] * 4,
    ]
    assert after == 10


def test_a_grid_keeps_its_positions_when_it_is_cut() -> None:
    located, _ = lay_out([text(1), grid(2, 3), text(3, 4)], 0)
    whole, mine = make_batch([(running(), located)], cache()), running()
    parts = []
    for part in cut(located, 2):
        parts.append(make_batch([(mine, part)], cache()))
        mine.done += sum(map(len, part))
    assert np.array_equal(np.concatenate([p.positions for p in parts], 1), whole.positions[:, :9])
    assert np.array_equal(np.concatenate([p.slots for p in parts]), whole.slots[:9])
    assert int(whole.positions[:, :9].max()) + 1 == 6 and mine.done == 9


def test_snapshots_hold_the_recurrent_states_of_one_slot() -> None:
    stored = cache(2)
    assert stored.recurrent and set(stored.tensors) == {"kv.0", "conv.1", "matrix.1"}
    for tensor in stored.tensors.values():
        tensor.fill_(1.0)
    taken = stored.snapshot(1)
    assert set(taken.states) == {"conv.1", "matrix.1"}
    stored.tensors["matrix.1"].fill_(2.0)
    stored.clear(0)
    assert (
        stored.tensors["matrix.1"][0].eq(0).all()
        and stored.tensors["matrix.1"][1].eq(2).all()
        and stored.tensors["kv.0"].eq(1).all()
    )
    stored.restore(1, taken)
    assert stored.tensors["matrix.1"][1].eq(1).all() and stored.tensors["matrix.1"][0].eq(0).all()
