"""Choice of a video's frames: what the user requests, the model's rule between, and what there is
room for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mtmd.base.errors import OptionError
from mtmd.clip.video.frame_request import FrameRequest
from mtmd.clip.video.video import Part, VideoFacts

MAXIMUM = 1 << 14
"""Frames that a rule is asked for, however many a file says it has; no context holds them."""
ROUNDED_S = 0.6e-3  # files may round times to milliseconds


class Rule(Protocol):
    """Rule by which a model's processor chooses."""

    def choose(
        self, clip: VideoFacts, fps: float | None = None, maximum: int | None = None
    ) -> list[int]:
        """Numbers of frames, ascending: `fps` of them a second and `maximum` at most where those
        are asked for, else as the model has it; `MAXIMUM` in any case.
        """


@dataclass(frozen=True)
class Evenly:
    """`fps` frames a second, from the first on; where these are more than `maximum`, so many spread
    over the whole.
    """

    fps: float = 1.0
    maximum: int = 32

    def choose(
        self, clip: VideoFacts, fps: float | None = None, maximum: int | None = None
    ) -> list[int]:
        if maximum is None:
            maximum = self.maximum if fps is None else MAXIMUM
        step = clip.fps / min(fps or self.fps, clip.fps)
        count = max(1, int((clip.frames - 1) / step + 1e-6) + 1)
        if count > maximum:
            return _spread(clip.frames, maximum)
        return list(dict.fromkeys(min(clip.frames - 1, round(i * step)) for i in range(count)))


def part_between(
    facts: VideoFacts, times: NDArray[Any] | None, start: float | None, end: float | None
) -> Part:
    """The frames that begin from `start` to `end` seconds, each None for no limit; where none does,
    the one that is shown at `start`. `times`: when each begins, None where that is by the average
    rate. Raises OptionError where the video ends before, or begins after.
    """
    if times is None or len(times) != facts.frames:
        times = None
    begins = 0.0 if times is None else float(times[0])
    if start is None and end is None:
        return Part(0, begins, facts.frames, facts.fps, facts.seconds)
    ends = begins + facts.seconds
    if start is not None and start > 0 and start >= ends:
        raise OptionError(
            f"start: found {start:g} s, expected less than the video has, {ends:.1f} s"
        )
    rounded = min(ROUNDED_S, 0.25 / facts.fps)
    low = begins if start is None else max(start, begins)
    high = ends if end is None else min(end, ends)
    if high < begins - rounded:
        raise OptionError(f"end: found {high:g} s, expected no less than {begins:.1f} s, the start")
    if times is None:
        first = math.ceil((low - rounded) * facts.fps)
        behind = math.floor((high + rounded) * facts.fps) + 1
    else:
        first = int(np.searchsorted(times, low - rounded, "left"))
        behind = int(np.searchsorted(times, high + rounded, "right"))
    first, behind = max(first, 0), min(behind, facts.frames)
    if first >= behind:
        first = min(max(first - 1, 0), facts.frames - 1)
        behind = first + 1
    frames = behind - first
    seconds, at = frames / facts.fps, first / facts.fps
    if times is not None:
        at = float(times[first])
        separate = (ends if behind == facts.frames else float(times[behind])) - at
        if abs(separate - seconds) * facts.fps > 0.3:  # more than even rates vary by rounding
            return Part(first, at, frames, frames / separate, separate)
    return Part(first, at, frames, facts.fps, seconds)


def chosen(
    rule: Rule, facts: VideoFacts, part: Part, request: FrameRequest, maximum: int, why: str
) -> tuple[list[int], tuple[str, ...]]:
    """Numbers of frames of `part`, ascending, `maximum` at most, and a note where that left some
    out, which says `why`.
    """
    clip = replace(facts, frames=part.frames, fps=part.fps, seconds=part.seconds)
    requested = None if request.max_frames is None else min(request.max_frames, MAXIMUM)
    indices = _taken(rule, clip, request.fps, requested)
    notes: tuple[str, ...] = ()
    if len(indices) > maximum:
        more = " or more" if len(indices) >= MAXIMUM else ""
        notes = (f"{maximum} of {len(indices)}{more} frames: {why}",)
        indices = _taken(rule, clip, request.fps, maximum)
        indices = [indices[i] for i in _spread(len(indices), min(maximum, len(indices)))]
    return [part.first + i for i in indices], notes


def _taken(rule: Rule, clip: VideoFacts, fps: float | None, maximum: int | None) -> list[int]:
    last = clip.frames - 1
    return sorted({min(max(int(i), 0), last) for i in rule.choose(clip, fps, maximum)})


def _spread(count: int, maximum: int) -> list[int]:
    """`maximum` of so many, from the first to the last."""
    locations: Sequence[float] = np.linspace(0, count - 1, maximum).tolist()
    return sorted({round(location) for location in locations})
