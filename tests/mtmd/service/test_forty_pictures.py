"""That the model saw this picture: forty different ones asked about in one service, at once and
with cache hits, forty right answers.
"""

from __future__ import annotations

import random

import numpy as np
from world import describe, draw

from mtmd.events import Finished
from mtmd.loading import load
from mtmd.prompt.conversation import user_message


def test_forty_right_answers_twice() -> None:
    service = load(device="cpu", parallel=16).service
    drawn = [draw(random.Random(5_000_000 + n), text_share=0.0) for n in range(40)]
    for turn in (1, 2):
        order = random.Random(turn).sample(range(40), 40)
        # The second time as an array of the same pixels: another kind of source, the same picture.
        tickets = {
            n: service.submit(
                [
                    user_message(
                        np.asarray(drawn[n][0].convert("RGB")) if turn == 2 else drawn[n][0],
                        "Describe the image.",
                    )
                ]
            )
            for n in order
        }
        for n, ticket in tickets.items():
            *_, last = ticket
            assert isinstance(last, Finished)
            assert last.answer.text == describe(drawn[n][1])
            assert last.answer.receipt.images[0].cached == (turn == 2)
    assert service.stats().image_cache_hits == 40 and len({d[1] for d in drawn}) == 40
    service.close()


def test_the_same_pixels_in_another_size_or_mode_share_nothing_wrong() -> None:
    service = load(device="cpu").service
    image, facts = draw(random.Random(77_000_000), text_share=0.0)
    sha = set()
    for source in (image, image.resize((128, 128)), image.rotate(180), image.convert("L")):
        *_, last = service.submit([user_message(source, "Describe the image.")], max_tokens=40)
        assert isinstance(last, Finished)
        assert not last.answer.receipt.images[0].cached
        sha.add(last.answer.receipt.images[0].sha256)
    assert len(sha) == 4
    *_, again = service.submit([user_message(image, "Describe the image.")])
    assert (
        isinstance(again, Finished)
        and again.answer.receipt.images[0].cached
        and again.answer.text == describe(facts)
    )
    service.close()
