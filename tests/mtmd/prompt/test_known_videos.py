"""What is kept of videos from before: how much, and of which."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.token_budget import DEFAULT_BUDGET
from mtmd.clip.video.video import Part, VideoFacts
from mtmd.prompt import known_videos
from mtmd.prompt.bridge import Prepared
from mtmd.prompt.known_videos import Known, KnownVideos
from mtmd.receipt import ImageReceipt

FACTS, PART = VideoFacts(9000, 30.0, 300.0, 96, 64), Part(0, 0.0, 9000, 30.0, 300.0)
ALL = None, None


def known(frames: int, seed: int = 0, side: int = 0, order: int = 0, pooled: bool = False) -> Known:
    """One of frames that are each different; `side`: of their tiles, `order`: of their tokens,
    `pooled` each from four.
    """
    prepared = []
    for number in range(frames):
        sha256 = f"{seed * 10_000 + number:064x}"
        tiles = (np.zeros((3, side, side), np.uint8),) if side else ()
        plan = ImagePlan(
            tiles,
            ((96 + number, 64 + number),),
            256 + number,
            grids=((16 + number, 16 + number),),
            order=np.zeros((order, 4) if pooled else order, np.int64) if order else None,
            weights=np.zeros((order, 4), np.float32) if pooled else None,
        )
        receipt = ImageReceipt(
            (960 + number, 640 + number), (960, 640 + number), 1, 256, sha256, False, ()
        )
        prepared.append(Prepared((sha256, DEFAULT_BUDGET, ""), plan, receipt))
    indices = tuple(range(1000 + seed, 1000 + seed + frames))
    return Known(FACTS, indices, tuple(i / 30 for i in indices), tuple(prepared), None)


def put(videos: KnownVideos, name: str, one: Known) -> None:
    videos.put(("", name), ALL, (FACTS, PART), name, one)


@pytest.mark.parametrize("order, pooled", [(0, False), (256, False), (256, True)])
def test_what_is_noted_of_a_video_is_about_what_it_takes(order, pooled):
    gc.collect()  # what the interpreter has at hand from before would not be counted
    tracemalloc.start()
    one = known(256, order=order, pooled=pooled)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.5 * one.noted_bytes < taken <= one.noted_bytes


def test_what_is_noted_is_bounded_and_the_least_recently_used_goes(monkeypatch):
    monkeypatch.setattr(known_videos, "NOTED_BYTES", 5 * known(64).noted_bytes)
    videos = KnownVideos()
    for number in range(5):
        put(videos, str(number), known(64, number))
    assert videos.get("0") is not None
    put(videos, "5", known(64, 5))
    assert [n for n in "012345" if videos.get(n)] == ["0", "2", "3", "4", "5"]
    put(videos, "long", known(1024))  # more than all together: it stays alone
    assert videos.get("long") is not None and not any(videos.get(n) for n in "012345")


def test_what_files_say_is_kept_while_it_is_used(monkeypatch):
    monkeypatch.setattr(known_videos, "SAVED", 3)
    videos = KnownVideos()
    for name in "abcd":
        put(videos, name, known(1))
        assert videos.met(("", "a"), ALL) == (FACTS, PART)
    assert videos.met(("", "b"), ALL) is None and videos.met(("", "a"), (1.0, None)) is None
    assert [n for n in "abcd" if videos.get(n)] == ["b", "c", "d"]


def test_the_latest_tiles_are_kept(monkeypatch):
    monkeypatch.setattr(known_videos, "SAVED_TILE_BYTES", known(4, side=8).tile_bytes)
    videos = KnownVideos()
    put(videos, "a", known(4, side=8, order=16, pooled=True))
    assert videos.get("a").prepared[0].plan.tiles
    put(videos, "b", known(4, side=8, order=16, pooled=True))
    before, latest = videos.get("a").prepared[0].plan, videos.get("b").prepared[0].plan
    assert before.tiles == () and before.order is None and before.weights is None
    assert latest.tiles and len(latest.order) == len(latest.weights) == 16


def test_what_is_held_is_told():
    videos = KnownVideos()
    assert videos.stored_bytes == 0
    one, two = known(4, side=8), known(2, 1)
    put(videos, "a", one)
    put(videos, "b", two)
    assert videos.stored_bytes == one.tile_bytes + one.noted_bytes + two.noted_bytes
    put(videos, "a", two)
    assert videos.stored_bytes == 2 * two.noted_bytes
