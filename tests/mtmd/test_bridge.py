"""Pictures into spans, and the memory of encoded pictures: never a wrong hit, never one missed, whatever threads do."""
from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from mtmd.bridge import Bridge, Encoded
from mtmd.clip.image import Picture, open_picture
from mtmd.kernels.errors import PromptError
from mtmd.model import Model


def fresh(model: Model) -> Bridge:
    """A bridge of its own, with nothing in its cache."""
    assert model.encoder
    return Bridge(model.encoder, model.checkpoint.tokenizer, model.backends[0].device)


def noise(seed: int, height: int = 20, width: int = 30) -> Picture:
    return open_picture(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encode(bridge: Bridge, *pictures: Picture) -> list[Encoded]:
    encoding = bridge.encode(pictures)
    steps = list(encoding)
    assert steps == sorted(steps) and all(done <= total for done, total in steps)
    return encoding.found


def cached(found: list[Encoded]) -> list[bool]:
    return [e.receipt.cached for e in found]


def test_the_same_picture_is_encoded_once(demo: Model) -> None:
    bridge = fresh(demo)
    first = encode(bridge, noise(1))[0]
    again = encode(bridge, noise(1))[0]
    assert (first.receipt.cached, again.receipt.cached) == (False, True)
    assert again.embeddings is first.embeddings
    assert cached(encode(bridge, noise(2), noise(2), noise(1))) == [False, True, True]
    assert list(bridge.encode([noise(1), noise(2)])) == [], "nothing is left to encode"


def test_twenty_pictures_are_never_mixed_up(demo: Model) -> None:
    pictures = [noise(seed) for seed in range(20)]
    bridge = fresh(demo)
    together = encode(bridge, *pictures)
    assert cached(together) == [False] * 20
    order = np.random.default_rng(3).permutation(20)
    for index, found in zip(order, encode(bridge, *(pictures[i] for i in order)), strict=True):
        assert found.receipt.cached and found.embeddings is together[index].embeddings
        assert found.receipt.sha256 == pictures[index].sha256
        alone = encode(fresh(demo), pictures[index])[0].embeddings
        assert torch.allclose(found.embeddings, alone, rtol=1e-3, atol=1e-4)
        others = [t.embeddings for i, t in enumerate(together) if i != index]
        assert not any(torch.allclose(alone, other, rtol=1e-3, atol=1e-4) for other in others)


def test_equal_bytes_of_another_shape_are_another_picture(demo: Model) -> None:
    data = np.random.default_rng(5).integers(0, 256, 12 * 3, dtype=np.uint8)
    shapes = [(3, 4), (4, 3), (2, 6), (6, 2), (1, 12), (12, 1)]
    grey = [open_picture(np.full((*s, 3), 128, np.uint8)) for s in ((8, 8), (4, 16))]
    found = encode(fresh(demo), *(open_picture(data.reshape(*s, 3)) for s in shapes), *grey)
    assert cached(found) == [False] * 8
    assert [e.receipt.original_size for e in found] == [(w, h) for h, w in shapes] + [(8, 8), (16, 4)]
    assert len({e.receipt.sha256 for e in found}) == 8


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
    first, second = encode(fresh(demo), open_picture(plain), open_picture(clear))
    assert second.receipt.cached and second.receipt.sha256 == first.receipt.sha256
    assert first.receipt.notes == () and "white" in second.receipt.notes[0]


def test_the_oldest_go_when_there_is_too_much(demo: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = fresh(demo)
    one = encode(bridge, noise(0))[0].embeddings.nbytes
    monkeypatch.setattr("mtmd.bridge.CACHE_BYTES", 3 * one)
    encode(bridge, noise(1))
    encode(bridge, noise(2))
    assert cached(encode(bridge, noise(0))) == [True]  # and is now the newest
    encode(bridge, noise(3))
    assert cached(encode(bridge, noise(0))) == [True]
    assert cached(encode(bridge, noise(1))) == [False]
    monkeypatch.setattr("mtmd.bridge.CACHE_BYTES", 0)
    assert cached(encode(bridge, noise(7), noise(8), noise(9), noise(7))) == [False, False, False, True]


def test_threads_share_the_cache(demo: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = fresh(demo)
    entries = {f"{i}": (encode(bridge, noise(0))[0].plan, torch.zeros(8)) for i in range(50)}
    monkeypatch.setattr("mtmd.bridge.CACHE_BYTES", 20 * 32)
    failures: list[Exception] = []

    def work(seed: int) -> None:
        try:
            for key in np.random.default_rng(seed).integers(0, 50, 2000).astype(str):
                bridge.remember(key, entries[key])
                bridge.known(key)
        except Exception as error:  # RuntimeError: mutated during iteration
            failures.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_spans_stand_where_the_markers_are(demo: Model) -> None:
    bridge = fresh(demo)
    found = encode(bridge, noise(1), noise(2))
    family = bridge.encoder.family
    spans = bridge.spans(f"{family.marker}left{family.marker}", found)
    images = [s for s in spans if s.embeddings is not None]
    assert [s.embeddings is None for s in spans] == [True, False, True, False, True]
    image_token = demo.checkpoint.tokenizer.id(family.image_token)
    for span, picture in zip(images, found, strict=True):
        assert span.block == family.bidirectional and span.tokens == (image_token,) * picture.plan.tokens
        assert span.embeddings is not None and torch.equal(span.embeddings, picture.embeddings)
    assert [t for s in spans for t in s.tokens] == demo.checkpoint.tokenizer.encode(
        f"{found[0].plan.prompt}left{found[1].plan.prompt}")


WRONG: dict[str, tuple[str, int, str]] = {
    "no marker": ("hello", 1, "wrote 0 picture places for 1 pictures"),
    "a marker too many": ("{m}{m}", 1, "wrote 2 picture places for 1 pictures"),
    "a marker too few": ("{m}", 2, "wrote 1 picture places for 2 pictures"),
    "an image token of its own": ("hi{t}", 0, "image tokens for more than 0"),
    "an image token before": ("{t}{m}", 1, "do not stand together|more than 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_templates_that_do_not_fit(case: str, demo: Model) -> None:
    text, count, expected = WRONG[case]
    bridge = fresh(demo)
    family: Any = bridge.encoder.family
    with pytest.raises(PromptError, match=expected):
        bridge.spans(text.format(m=family.marker, t=family.image_token), encode(bridge, *map(noise, range(count))))
