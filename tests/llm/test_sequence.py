"""Spans into batches, and which slots each token sees."""
from __future__ import annotations

import pytest
import torch

from mtmd.llm.sequence import Span, cut, make_batch


def text(*tokens: int) -> Span:
    return Span(tokens)


def image(count: int, value: float = 1.0) -> Span:
    return Span((9,) * count, torch.full((count, 2), value), block=True)


def lengths(batches: list[list[Span]]) -> list[list[int]]:
    return [[len(s) for s in b] for b in batches]


@pytest.mark.parametrize(("spans", "limit", "expected"), [
    ([text(*range(10))], 4, [[4], [4], [2]]),
    ([text(1, 2), image(3), text(4)], 8, [[2, 3, 1]]),
    ([text(1, 2), image(3), text(4)], 4, [[2], [3, 1]]),  # the image does not fit behind the text, and is not cut
    ([text(1, 2), image(9), text(4)], 4, [[2], [9], [1]]),  # a batch grows for an image
    ([image(4), image(4)], 4, [[4], [4]]),
    ([text(1)], 1, [[1]]),
])
def test_cut(spans: list[Span], limit: int, expected: list[list[int]]) -> None:
    batches = cut(spans, limit)
    assert lengths(batches) == expected
    assert [t for b in batches for s in b for t in s.tokens] == [t for s in spans for t in s.tokens]


def test_cut_keeps_embeddings_with_their_tokens() -> None:
    values = torch.arange(6.0).view(3, 2)
    first, second = cut([Span((1, 2, 3), values)], 2)
    assert first[0].embeddings is not None and second[0].embeddings is not None
    torch.testing.assert_close(torch.cat((first[0].embeddings, second[0].embeddings)), values)


def test_batch_places_images_and_counts_slots_on() -> None:
    batch = make_batch([text(1, 2), image(3, 5.0), text(4), image(1, 7.0)], 10, [], wants_logits=True)
    assert batch.tokens.tolist() == [1, 2, 9, 9, 9, 4, 9]
    assert batch.slots.tolist() == batch.positions.tolist() == list(range(10, 17))
    assert batch.image_places().tolist() == [2, 3, 4, 6]
    assert batch.image_rows()[:, 0].tolist() == [5.0, 5.0, 5.0, 7.0]
    assert batch.wanted.tolist() == [6]


def test_bounds() -> None:
    """Causal tokens see up to themselves, a picture's up to its end; a window cuts the past for all."""
    batch = make_batch([text(1, 2), image(3), text(4)], 0, [], wants_logits=False)
    assert batch.bounds(None).tolist() == [[0, 0], [0, 1], [0, 4], [0, 4], [0, 4], [0, 5]]
    assert batch.bounds(2).tolist() == [[0, 0], [0, 1], [1, 4], [2, 4], [3, 4], [4, 5]]
    assert batch.wanted.tolist() == []
