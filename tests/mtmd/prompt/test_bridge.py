"""Pictures into spans, and those encoded before: never a wrong hit, never one missed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtmd.base.errors import PromptError
from mtmd.clip.image.decode import Picture, open_picture
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.token_budget import Budget
from mtmd.model import Model
from mtmd.prompt.bridge import Bridge, Prepared
from mtmd.prompt.pieces import Part, pieces_of
from mtmd.service.encode_queue import EncodeQueue


def fresh(model: Model) -> Bridge:
    """A bridge of its own, with nothing in its cache."""
    return Bridge(model.encoder, model.checkpoint.tokenizer)


def noise(seed: int, height: int = 20, width: int = 30) -> Picture:
    return open_picture(
        np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    )


def encode(bridge: Bridge, *pictures: Picture) -> list[tuple[Prepared, Tensor]]:
    """Pictures prepared and encoded, through the queue."""
    queue, prepared = EncodeQueue(bridge), bridge.prepare(pictures)
    jobs = {p: queue.add(p) for p in prepared if p.embeddings is None}
    while queue.busy:
        queue.step(None)
    result = [p.embeddings if p.embeddings is not None else jobs[p].embeddings for p in prepared]
    assert all(f is not None for f in result)
    return list(zip(prepared, result, strict=True))  # type: ignore[arg-type]


def cached(result: list[tuple[Prepared, Tensor]]) -> list[bool]:
    return [p.receipt.cached for p, _ in result]


def test_the_same_picture_is_encoded_once(demo: Model) -> None:
    bridge = fresh(demo)
    ((first, values),) = encode(bridge, noise(1))
    ((again, same),) = encode(bridge, noise(1))
    assert (first.receipt.cached, again.receipt.cached) == (False, True)
    assert same is values and again.plan.tiles == ()
    assert cached(encode(bridge, noise(2), noise(2), noise(1))) == [False, True, True]
    assert cached([(p, values) for p in bridge.prepare([noise(1)], anew=True)]) == [False]
    assert bridge.prepare([noise(1)], Budget(detail="low"))[0].embeddings is None, (
        "another budget is another encoding"
    )


def test_twenty_pictures_are_never_mixed_up(demo: Model) -> None:
    pictures = [noise(seed) for seed in range(20)]
    bridge = fresh(demo)
    together = encode(bridge, *pictures)
    assert cached(together) == [False] * 20
    order = np.random.default_rng(3).permutation(20)
    for index, result in zip(order, encode(bridge, *(pictures[i] for i in order)), strict=True):
        assert result[0].receipt.cached and result[1] is together[index][1]
        assert result[0].receipt.sha256 == pictures[index].sha256
        alone = encode(fresh(demo), pictures[index])[0][1]
        assert torch.allclose(result[1], alone, rtol=1e-3, atol=1e-4)
        others = [values for i, (_, values) in enumerate(together) if i != index]
        assert not any(torch.allclose(alone, other, rtol=1e-3, atol=1e-4) for other in others)


def test_equal_bytes_of_another_shape_are_another_picture(demo: Model) -> None:
    data = np.random.default_rng(5).integers(0, 256, 12 * 3, dtype=np.uint8)
    shapes = [(3, 4), (4, 3), (2, 6), (6, 2), (1, 12), (12, 1)]
    grey = [open_picture(np.full((*s, 3), 128, np.uint8)) for s in ((8, 8), (4, 16))]
    result = encode(fresh(demo), *(open_picture(data.reshape(*s, 3)) for s in shapes), *grey)
    assert cached(result) == [False] * 8
    assert [p.receipt.original_size for p, _ in result] == [(w, h) for h, w in shapes] + [
        (8, 8),
        (16, 4),
    ]
    assert len({p.receipt.sha256 for p, _ in result}) == 8


def test_a_picture_cannot_change_behind_its_digest() -> None:
    own = np.zeros((4, 4, 3), np.uint8)
    picture = open_picture(own)
    assert len(picture.sha256) == 64
    with pytest.raises(ValueError, match="read-only"):
        picture.pixels[0] = 1
    own[0] = 1
    assert not picture.pixels.any()


def test_a_hit_keeps_the_notes_of_its_own_picture(demo: Model) -> None:
    plain = np.full((5, 5, 3), 255, np.uint8)
    clear = np.zeros((5, 5, 4), np.uint8)  # wholly transparent, laid on white: the same pixels
    first, second = (p for p, _ in encode(fresh(demo), open_picture(plain), open_picture(clear)))
    assert second.receipt.cached and second.receipt.sha256 == first.receipt.sha256
    assert first.receipt.notes == () and "white" in second.receipt.notes[0]


def test_the_oldest_go_when_there_is_too_much(demo: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = fresh(demo)
    one = encode(bridge, noise(0))[0][1].nbytes
    monkeypatch.setattr("mtmd.prompt.bridge.CACHE_BYTES", 3 * one)
    encode(bridge, noise(1))
    encode(bridge, noise(2))
    assert cached(encode(bridge, noise(0))) == [True]  # and is now the newest
    encode(bridge, noise(3))
    assert cached(encode(bridge, noise(0))) == [True]
    assert cached(encode(bridge, noise(1))) == [False]
    monkeypatch.setattr("mtmd.prompt.bridge.CACHE_BYTES", 0)
    assert cached(encode(bridge, noise(7), noise(8), noise(9), noise(7))) == [
        False,
        False,
        False,
        True,
    ]


def test_spans_stand_where_the_markers_are(demo: Model) -> None:
    bridge = fresh(demo)
    prepared, values = zip(*encode(bridge, noise(1), noise(2)), strict=True)
    assert bridge.encoder
    family = bridge.encoder.family
    spans = bridge.spans(
        bridge.read(f"{family.marker}left{family.marker}", prepared), prepared, values
    )
    images = [s for s in spans if s.embeddings is not None]
    assert [s.embeddings is None for s in spans] == [True, False, True, False, True]
    image_token = demo.checkpoint.tokenizer.id(family.image_token)
    for span, picture, expected in zip(images, prepared, values, strict=True):
        assert (
            span.block == family.bidirectional
            and span.tokens == (image_token,) * picture.plan.tokens
        )
        assert span.embeddings is not None and torch.equal(span.embeddings, expected)
    assert images[0].content != images[1].content and all(len(s.content) == 16 for s in images)
    assert [t for s in spans for t in s.tokens] == demo.checkpoint.tokenizer.encode(
        f"{family.prompt(prepared[0].plan)}left{family.prompt(prepared[1].plan)}"
    )


def plan(tokens: int, *grids: tuple[int, int]) -> ImagePlan:
    return ImagePlan((), ((1, 1),), tokens, grids=grids)


IMAGE = 9
RUNS: dict[
    str, tuple[list[ImagePlan], list[int], list[tuple[int | None, int, int]]]
] = {  # picture, start, tokens of each piece
    "one run": ([plan(3)], [1, 9, 9, 9, 2], [(None, 0, 1), (0, 0, 3), (None, 0, 1)]),
    "text between tiles": ([plan(4)], [9, 9, 5, 9, 9], [(0, 0, 2), (None, 0, 1), (0, 2, 2)]),
    "two pictures side by side": (
        [plan(2), plan(1)],
        [9, 9, 9, 4],
        [(0, 0, 2), (1, 0, 1), (None, 0, 1)],
    ),
    "grids": (
        [plan(5, (2, 2), (1, 1)), plan(2, (1, 2))],
        [9, 9, 9, 9, 7, 9, 9, 9],
        [(0, 0, 4), (None, 0, 1), (0, 4, 1), (1, 0, 2)],
    ),
}


@pytest.mark.parametrize("case", RUNS)
def test_runs_of_image_tokens(case: str) -> None:
    plans, tokens, expected = RUNS[case]
    actual = pieces_of(tokens, {IMAGE}, [Part(i, plan) for i, plan in enumerate(plans)])
    assert [(p.picture, p.start, len(p.tokens)) for p in actual] == expected
    assert [t for p in actual for t in p.tokens] == tokens
    assert [p.grid for p in actual if p.picture is not None] == (
        [g for pl in plans for g in pl.grids]
        or [None] * len([p for p in actual if p.picture is not None])
    )


WRONG: dict[str, tuple[str, int, str]] = {
    "no marker": ("hello", 1, "wrote 0 picture places for 1 pictures"),
    "a marker too many": ("{m}{m}", 1, "wrote 2 picture places for 1 pictures"),
    "a marker too few": ("{m}", 2, "wrote 1 picture places for 2 pictures"),
    "an image token of its own": ("hi{t}", 0, "image tokens for more than 0"),
    "an image token before": ("{t}{m}", 1, "more than 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_templates_that_do_not_fit(case: str, demo: Model) -> None:
    text, count, expected = WRONG[case]
    bridge = fresh(demo)
    assert bridge.encoder
    family: Any = bridge.encoder.family
    with pytest.raises(PromptError, match=expected):
        bridge.read(
            text.format(m=family.marker, t=family.image_token),
            bridge.prepare([noise(i) for i in range(count)]),
        )


@pytest.mark.parametrize(
    ("plans", "tokens", "reported"),
    [
        (
            [plan(4, (2, 2))],
            [9, 9, 5, 9, 9],
            "2 x 2 image tokens of a picture do not stand together",
        ),
        ([plan(4)], [9, 9, 9], "fewer image tokens than its 1 pictures take"),
        ([plan(1)], [9, 9], "image tokens for more than 1 pictures"),
    ],
)
def test_image_tokens_that_do_not_fit(
    plans: list[ImagePlan], tokens: list[int], reported: str
) -> None:
    with pytest.raises(PromptError, match=reported):
        pieces_of(tokens, {IMAGE}, [Part(i, plan) for i, plan in enumerate(plans)])


def test_a_picture_that_comes_again_does_not_wait_for_one_that_is_over(demo: Model) -> None:
    """It was prepared while the first was being encoded, and asked for when that was done."""
    queue = EncodeQueue(fresh(demo))
    (prepared,) = queue.bridge.prepare([noise(1)])
    first = queue.add(prepared)
    queue.step(None)
    again = queue.add(prepared)
    assert again.is_over and again.embeddings is first.embeddings and not queue.busy
    queue.bridge.cache._entries.clear()
    third = queue.add(prepared)
    queue.leave(first)  # of the same name, and not the same
    assert queue.busy and queue.step(None) == [third] and third.is_over


def test_a_picture_given_up_while_it_is_encoded_may_come_again(demo: Model) -> None:
    queue = EncodeQueue(fresh(demo))
    one, other = queue.bridge.prepare([noise(1), noise(2)])
    first, second = queue.add(one), queue.add(other)
    queue.step(0.0)  # both are in a batch that has begun
    queue.leave(first)
    again = queue.add(one)
    for _ in range(2):
        queue.step(None)
    assert second.is_over and again.is_over and not queue.busy
    assert again.embeddings is not None and first.embeddings is not None
    torch.testing.assert_close(again.embeddings, first.embeddings)


def test_many_pictures_of_one_client_stand_before_nobody_elses_one(
    demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtmd.service.encode_queue.BATCH", 2)
    queue = EncodeQueue(fresh(demo))
    prepared = queue.bridge.prepare([noise(seed) for seed in range(7)])
    many = [queue.add(each, "a") for each in prepared[:5]]
    own, both = queue.add(prepared[5], "b"), queue.add(prepared[6], "a")
    assert queue.add(prepared[6], "c") is both, "as with --share-cache"
    batches = []
    while queue.busy:
        batches.append(queue.step(None))
    assert [set(batch) for batch in batches] == [
        {many[0], own},
        {both, many[1]},
        {many[2], many[3]},
        {many[4]},
    ]
