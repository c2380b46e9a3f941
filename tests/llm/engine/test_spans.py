"""Where spans stand: text, pictures on grids, clips whose parts share rows and columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtmd.llm.engine.make_batch import _Making
from mtmd.llm.engine.spans import Span, blocks, cut, identities, lay_out


def clip(*later: int | None, content: bytes = b"c") -> list[Span]:
    """Parts of a clip, 2 x 3 tokens each."""
    return [
        Span((9,) * 6, torch.zeros(6, 4), grid=(2, 3), later=part, content=content)
        for part in later
    ]


def positions(spans: list[Span]) -> list[list[list[int]]]:
    return [s.positions.tolist() for s in lay_out(spans, 0)[0] if s.positions is not None]


def test_parts_of_a_clip_begin_where_its_first_does() -> None:
    spans = [Span((1, 2)), *clip(None, 4, 8), Span((3,)), *clip(None, 1)]
    times = [row[0][0] for row in positions(spans)]
    assert times == [0, 2, 6, 10, 11, 12, 13]
    rows = [(row[1], row[2]) for row in positions(spans)]
    first = ([2, 2, 2, 3, 3, 3], [2, 3, 4, 2, 3, 4])
    assert rows[1:4] == [first] * 3
    assert rows[5:] == [([12, 12, 12, 13, 13, 13], [12, 13, 14, 12, 13, 14])] * 2
    assert lay_out(spans, 0)[1] == 15  # behind columns, which go further than time here


def test_a_clip_at_another_pace_is_another_prompt() -> None:
    slow, fast = clip(None, 4), clip(None, 2)
    first, second = list(identities(slow)), list(identities(fast))
    assert first[:6] == second[:6]
    assert not set(first[6:]) & set(second[6:])
    assert list(identities(lay_out(slow, 0)[0])) == first, "also when it is laid out"
    part = lay_out(slow, 0)[0][1].cut(2, 5)
    assert list(identities([part])) == first[8:11]


def test_pictures_stand_one_after_another() -> None:
    assert [row[0][0] for row in positions([*clip(None), *clip(None)])] == [0, 3]


def test_positions_have_the_type_of_indices_where_numpys_own_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """int32 it is on Windows before numpy 2, and torch puts no two types into one tensor."""
    arange = np.arange

    def on_windows(*limits: int, dtype: type = np.int32) -> np.ndarray:
        return arange(*limits, dtype=dtype)

    monkeypatch.setattr(np, "arange", on_windows)
    spans, _ = lay_out([Span((1, 2)), *clip(None, 4)], 0)
    assert {str(s.positions.dtype) for s in spans if s.positions is not None} == {"int64"}
    making = _Making(cache=None)  # type: ignore[arg-type]  # what is asked here needs none
    making.positions = [range(3), *(s.positions for s in spans if s.positions is not None)]
    assert making._all_positions().dtype == np.int64


def test_a_block_of_several_spans() -> None:
    """It is cut nowhere, and each of its tokens is known by all of it."""

    def prompt(*last: int) -> list[Span]:
        spans = [Span((1, 2, 3), block=True), Span((4, 5), block=True, joins=True)]
        return [*spans, Span(last, block=True, joins=True), Span((9,))]

    assert list(blocks(prompt(6))) == [(0, 6)]
    assert [sum(map(len, batch)) for batch in cut(prompt(6), 4)] == [6, 1]
    first, again, other = (list(identities(prompt(end))) for end in (6, 6, 7))
    assert first == again and len(set(first)) == 7
    assert set(first) & set(other) == {first[-1]}
