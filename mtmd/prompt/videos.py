"""Videos of a conversation: frames chosen as there is room for them, read once, and, for a family
that has no video of its own, shown as pictures with their times.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, TypeAlias

import numpy as np

from mtmd.clip.image.decode import Picture
from mtmd.clip.token_budget import Budget
from mtmd.clip.video.choose import Evenly, chosen
from mtmd.clip.video.footage import Footage
from mtmd.clip.video.video import Video, VideoFacts
from mtmd.kernels.resources.turns import aside
from mtmd.loaded.loaded_model import LoadedModel
from mtmd.prompt.bridge import Bridge, Prepared
from mtmd.prompt.video_input import Wanted
from mtmd.receipt import FrameReceipt, VideoReceipt

KEPT_BYTES = 128 << 20  # of frames, for the next question about the same video
KEPT_FACTS = 1024
TILE_BYTES = 512 << 20  # that the frames of one video may take when they are ready to be encoded
LONGEST_TIME = 86400.0  # seconds; the time that is longest to write
Choose: TypeAlias = Callable[[VideoFacts], tuple[list[int], tuple[str, ...]]]
"""Numbers of frames, and notes on that choice."""


@dataclass(frozen=True, eq=False)
class Read:
    """Frames of a video as pictures. `read_ms`: until they were there; `was_here`: they had been
    read for another question.
    """

    video: Video
    pictures: tuple[Picture, ...]
    notes: tuple[str, ...]
    read_ms: float
    was_here: bool


@dataclass(frozen=True, eq=False)
class Shown:
    """A video as a part of the prompt: `text`, in which the family's marker stands where each of
    `pictures` belongs.
    """

    text: str
    pictures: list[Prepared]
    receipt: VideoReceipt


# In the place of a video, to see what the rest of a prompt takes.
NOT_SHOWN = Shown("\n", [], VideoReceipt(0, 0, 0, "", (0, 0), (0, 0), (), 0, "", 0, False, "", ()))


class FrameCache:
    """Frames read lately, by what they were read from: `KEPT_BYTES` of their pixels, the latest
    always. Thread-safe.
    """

    def __init__(self, limit: int = KEPT_BYTES):
        self._limit, self._lock = limit, Lock()
        self._facts: OrderedDict[tuple[str, str], VideoFacts] = OrderedDict()
        self._read: OrderedDict[tuple[str, str, tuple[int, ...]], Read] = OrderedDict()

    def read(self, footage: Footage, choose: Choose, salt: str) -> Read:
        """The frames of a video that `choose` gives the numbers of, beside notes. What is kept is
        known to those of the same `salt`. Raises VideoError.
        """
        clock = time.perf_counter()
        place = salt, footage.sha256
        with self._lock:
            facts = self._facts.get(place)
            if facts is not None:
                indices, notes = choose(facts)
                found = self._read.get((*place, tuple(indices)))
                if found is not None:
                    self._read.move_to_end((*place, tuple(indices)))
                    ms = (time.perf_counter() - clock) * 1e3
                    return replace(found, notes=notes, read_ms=ms, was_here=True)
        told: list[tuple[list[int], tuple[str, ...]]] = []

        def wanted(facts: VideoFacts) -> Sequence[int]:
            told.append(choose(facts))
            self._know(place, facts)
            return told[0][0]

        with aside():  # mostly in another process, or in the decoder's own threads
            video = footage.video(wanted)
        indices, notes = told[0]
        pictures = tuple(Picture(f, (f.shape[1], f.shape[0])) for f in video.frames)
        read = Read(video, pictures, notes, (time.perf_counter() - clock) * 1e3, False)
        self._keep((*place, tuple(indices)), read)
        return read

    def _know(self, place: tuple[str, str], facts: VideoFacts) -> None:
        with self._lock:
            self._facts[place] = facts
            while len(self._facts) > KEPT_FACTS:
                self._facts.popitem(last=False)

    def _keep(self, key: tuple[str, str, tuple[int, ...]], read: Read) -> None:
        with self._lock:
            self._read[key] = read
            while len(self._read) > 1 and self._bytes() > self._limit:
                self._read.popitem(last=False)

    def _bytes(self) -> int:
        return sum(p.pixels.nbytes for read in self._read.values() for p in read.pictures)


class Videos:
    """Those of one loaded model."""

    def __init__(self, loaded: LoadedModel, bridge: Bridge):
        self._loaded, self._bridge = loaded, bridge
        self.cache = FrameCache()

    def show(
        self, videos: Sequence[Wanted], room: int, detail: str, anew: bool, salt: str
    ) -> list[Shown]:
        """All in `room` tokens together, if need be in fewer frames. Raises VideoError, OptionError
        for a request that a video cannot answer to, and what `Bridge.prepare` raises.
        """
        shown = []
        for index, wanted in enumerate(videos):
            shown.append(
                self._as_pictures(wanted, room // (len(videos) - index), detail, anew, salt)
            )
            room -= shown[-1].receipt.tokens
        return shown

    def _as_pictures(self, wanted: Wanted, room: int, detail: str, anew: bool, salt: str) -> Shown:
        encoder = self._bridge.encoder
        assert encoder is not None
        # Of a video the model sees many pictures, each with less in it that is new.
        budget = replace(self._loaded.limits, detail="low" if detail == "auto" else detail)

        def choose(facts: VideoFacts) -> tuple[list[int], tuple[str, ...]]:
            most, why = self._most(facts, budget, room, wanted.footage.limits.max_frames)
            return chosen(Evenly(), facts, wanted.request, most, why)

        read = self.cache.read(wanted.footage, choose, salt)
        prepared = self._bridge.prepare(read.pictures, budget, anew, salt)
        marker = encoder.family.marker
        text = "".join(f"{_said(t)}{marker}\n" for t in read.video.times)
        how = f"frames as pictures: {family_name(encoder.family)} has no video of its own"
        return Shown(text, prepared, receipt(wanted, read, prepared, how))

    def _most(self, facts: VideoFacts, budget: Budget, room: int, limit: int) -> tuple[int, str]:
        """How many frames there is room for, and why no more."""
        encoder, admission = self._bridge.encoder, self._bridge.admission
        assert encoder is not None
        blank = np.broadcast_to(np.zeros(3, np.uint8), (facts.height, facts.width, 3))
        prepare = admission.fit if admission else encoder.family.resolution.prepare
        plan = prepare(blank, budget)
        around = self._bridge.tokenizer.encode(_said(LONGEST_TIME) + "\n")
        each = plan.tokens + len(around) + 2  # what stands around a picture, in some families
        tile_bytes = sum(tile.nbytes for tile in plan.tiles)
        return min(
            (
                max(1, room // each),
                f"more do not fit the context of {self._loaded.runner.context:,} tokens",
            ),
            (
                max(1, TILE_BYTES // tile_bytes),
                f"more would take over {TILE_BYTES >> 20} MiB of memory",
            ),
            (limit, f"{limit:,} frames are the most of one video"),
        )


def receipt(wanted: Wanted, read: Read, prepared: Sequence[Prepared], how: str) -> VideoReceipt:
    """Of frames that are pictures by themselves."""
    facts, video = read.video.facts, read.video
    frames = tuple(
        FrameReceipt(index, seconds, one.receipt.sha256, one.receipt.tokens, one.receipt.cached)
        for index, seconds, one in zip(video.indices, video.times, prepared, strict=True)
    )
    notes = dict.fromkeys(
        [*read.notes, *facts.notes, *(n for p in prepared for n in p.receipt.notes)]
    )
    return VideoReceipt(
        seconds=facts.seconds,
        fps=facts.fps,
        frames_in_file=facts.frames,
        codec=facts.codec,
        original_size=(facts.width, facts.height),
        processed_size=prepared[0].receipt.processed_size,
        frames=frames,
        tokens=sum(one.receipt.tokens for one in prepared),
        sha256=wanted.footage.sha256,
        read_ms=read.read_ms,
        read_before=read.was_here,
        how=how,
        notes=tuple(notes),
    )


def _said(seconds: float) -> str:
    return f"Frame at {seconds:.1f} s: "


def family_name(family: object) -> str:
    """As its file is called."""
    return type(family).__module__.removeprefix("mtmd.clip.families.").partition(".")[0]


def with_videos(
    messages: Sequence[dict[str, Any]], pictures: Sequence[Prepared], shown: Sequence[Shown]
) -> tuple[list[dict[str, Any]], list[Prepared], list[int | None]]:
    """The conversation with its videos as text, in which markers stand; all pictures in the order
    of their markers; and of which video each is a frame.
    """
    left, videos = iter(pictures), iter(enumerate(shown))
    made: list[dict[str, Any]] = []
    order: list[Prepared] = []
    of_video: list[int | None] = []
    for message in messages:
        if isinstance(message["content"], str):
            made.append(message)
            continue
        parts: list[dict[str, Any]] = []
        for part in message["content"]:
            if part["type"] == "image":
                order.append(next(left))
                of_video.append(None)
            elif part["type"] == "video":
                index, video = next(videos)
                order += video.pictures
                of_video += [index] * len(video.pictures)
                part = {"type": "text", "text": video.text}
            if part["type"] == "text" and parts and parts[-1]["type"] == "text" and shown:
                part = {"type": "text", "text": parts.pop()["text"] + part["text"]}
            parts.append(part)
        made.append({**message, "content": parts})
    return made, order, of_video
