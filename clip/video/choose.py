"""Which frames of a video are taken: what the user asked for, the model's rule between, and what
there is room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from mtmd.clip.video.video import FrameRequest, VideoFacts
from mtmd.kernels.errors import OptionError

MOST_FPS = 240.0


class Rule(Protocol):
    """How a model's processor chooses."""

    def choose(self, facts: VideoFacts, request: FrameRequest) -> list[int]:
        """Numbers of frames, ascending."""


@dataclass(frozen=True)
class Evenly:
    """`fps` frames a second, from the first on; where these are more than `most`, so many spread
    over the whole.
    """

    fps: float = 1.0
    most: int = 32

    def choose(self, facts: VideoFacts, request: FrameRequest) -> list[int]:
        fps = min(request.fps or self.fps, facts.fps)
        most = request.max_frames or (self.most if request.fps is None else facts.frames)
        step = facts.fps / fps
        count = max(1, int((facts.frames - 1) / step + 1e-6) + 1)
        if count > most:
            return _spread(facts.frames, most)
        return list(dict.fromkeys(min(facts.frames - 1, round(i * step)) for i in range(count)))


def check_request(request: FrameRequest) -> None:
    """Raises OptionError for one that no video can answer to."""
    if request.fps is not None and not 0 < request.fps <= MOST_FPS:
        raise OptionError(f"fps: found {request.fps:g}, expected more than 0, {MOST_FPS:g} at most")
    if request.max_frames is not None and request.max_frames < 1:
        raise OptionError(f"max_frames: found {request.max_frames}, expected at least 1")
    for name, value in (("start", request.start), ("end", request.end)):
        if value is not None and not 0 <= value < float("inf"):
            raise OptionError(f"{name}: found {value:g}, expected seconds from the beginning")
    if request.start is not None and request.end is not None and request.end < request.start:
        raise OptionError(
            f"end: found {request.end:g} s, expected no less than start, {request.start:g} s"
        )


def chosen(
    rule: Rule, facts: VideoFacts, request: FrameRequest, most: int, why: str
) -> tuple[list[int], tuple[str, ...]]:
    """Numbers of frames, ascending, `most` at most, and a note where that left some out, which says
    `why`. Raises OptionError where the video ends before what was asked for.
    """
    first, last = _between(facts, request)
    part = replace(facts, frames=last - first, seconds=(last - first) / facts.fps)
    wanted = replace(request, start=None, end=None)
    indices = _taken(rule, part, wanted)
    notes: tuple[str, ...] = ()
    if len(indices) > most:
        notes = (f"{most} of {len(indices)} frames: {why}",)
        indices = _taken(rule, part, replace(wanted, max_frames=most))
        indices = [indices[i] for i in _spread(len(indices), min(most, len(indices)))]
    return [first + i for i in indices], notes


def _taken(rule: Rule, facts: VideoFacts, request: FrameRequest) -> list[int]:
    last = facts.frames - 1
    return sorted({min(max(int(i), 0), last) for i in rule.choose(facts, request)})


def _between(facts: VideoFacts, request: FrameRequest) -> tuple[int, int]:
    """The first frame asked for, and the one after the last."""
    start = request.start or 0.0
    if start > 0 and start >= facts.seconds:
        raise OptionError(
            f"start: found {start:g} s, expected less than the video has, {facts.seconds:.1f} s"
        )
    first = min(facts.frames - 1, int(np.ceil(start * facts.fps - 1e-3)))
    end = facts.frames
    if request.end is not None:
        end = min(end, int(request.end * facts.fps + 1e-3) + 1)
    return first, max(end, first + 1)


def _spread(count: int, most: int) -> list[int]:
    """`most` of so many, from the first to the last."""
    places: Sequence[float] = np.linspace(0, count - 1, most).tolist()
    return sorted({round(place) for place in places})
