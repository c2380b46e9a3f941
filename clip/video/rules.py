"""Rules by which families choose frames of a video, each as a reference processor has it: the same
indices, from the number of frames, their rate and what was asked for.

Where a reference fails (a rate that comes to no frame, more frames than there are), as many frames
are taken as there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from mtmd.clip.video.choose import MAXIMUM
from mtmd.clip.video.video import VideoFacts

UNKNOWN_FPS = 24.0  # what the references take a video for that does not say


class Pick(Protocol):
    """A way to take frames of a clip of at least one frame, of a known rate."""

    def __call__(self, clip: VideoFacts, fps: float | None, maximum: int | None) -> Sequence[int]:
        """Indices in order, `fps` of them a second and at most `maximum` where those are asked for,
        else as the checkpoint says.
        """


@dataclass(frozen=True)
class FrameRule:
    """Rule by which a family takes frames."""

    pick: Pick

    def choose(
        self, clip: VideoFacts, fps: float | None = None, maximum: int | None = None
    ) -> list[int]:
        """Choose as `Rule.choose` does: indices in order and each once."""
        rate, frames = clip.fps or UNKNOWN_FPS, max(clip.frames, 1)
        clip = replace(clip, fps=rate, frames=frames, seconds=clip.seconds or frames / rate)
        picked = self.pick(clip, fps, maximum)
        if not isinstance(picked, range):  # all that there are, perhaps millions
            picked = sorted({int(i) for i in picked if 0 <= i < frames})
        return _thinned(picked or [0], min(MAXIMUM if maximum is None else maximum, frames))


def _thinned(indices: Sequence[int], maximum: int) -> list[int]:
    """Return at most `maximum` of them, evenly spaced."""
    if len(indices) <= maximum:
        return list(indices)
    return [indices[i * len(indices) // maximum] for i in range(maximum)]


@dataclass(frozen=True)
class WholeGroups:
    """Frames at a rate, in whole groups of `group` frames, between `minimum` and `maximum` of them,
    spread over the clip (transformers' Qwen2VLVideoProcessor).
    """

    fps: float
    minimum: int
    maximum: int
    group: int

    def __call__(self, clip: VideoFacts, fps: float | None, maximum: int | None) -> Sequence[int]:
        total, group = clip.frames, self.group
        high = min(self.maximum if maximum is None else maximum, total) // group * group
        wished = total / clip.fps * (self.fps if fps is None else fps)
        count = math.floor(min(max(wished, self.minimum), high, total) / group) * group
        return range(total) if not count else _steps(0, total, count)


@dataclass(frozen=True)
class AllWithin:
    """Frames at a rate, or without one all, between `minimum` and `maximum` of them, spread over
    the clip (transformers' Ernie4_5_VLMoeVideoProcessor).
    """

    fps: float | None
    minimum: int
    maximum: int

    def __call__(self, clip: VideoFacts, fps: float | None, maximum: int | None) -> Sequence[int]:
        total, rate = clip.frames, self.fps if fps is None else fps
        wished = total if rate is None else total / clip.fps * rate
        limit = self.maximum if maximum is None else maximum
        return _steps(0, total, min(max(wished, self.minimum), limit, total))


@dataclass(frozen=True)
class FirstToLast:
    """Frames at a rate, between `minimum` and `maximum` frames, the first and the last among them
    (transformers' Qwen3VLVideoProcessor).
    """

    fps: float
    minimum: int
    maximum: int

    def __call__(self, clip: VideoFacts, fps: float | None, maximum: int | None) -> Sequence[int]:
        total = clip.frames
        wished = int(total / clip.fps * (self.fps if fps is None else fps))
        count = min(max(wished, self.minimum), self.maximum if maximum is None else maximum, total)
        return [int(i) for i in np.linspace(0, total - 1, count).round()]


@dataclass(frozen=True)
class EveryInterval:
    """A frame each time an interval is over; of clips of more than `longest` seconds as many as of
    one that long (transformers' Glm4vVideoProcessor, which has the last one twice where they are
    odd: so has the family, when it groups them).
    """

    fps: float
    longest: float

    def __call__(self, clip: VideoFacts, fps: float | None, maximum: int | None) -> Sequence[int]:  # noqa: ARG002
        rate, last = self.fps if fps is None else fps, clip.frames - 1
        seconds = clip.seconds or round(last / clip.fps) + 1
        if seconds <= self.longest:
            count = max(math.floor(seconds * rate), 1)
            steps = _thinned(range(count), MAXIMUM)
            return [min(last, math.ceil(i * clip.fps / rate)) for i in steps]
        count = int(self.longest * rate)
        if count >= clip.frames:
            return range(clip.frames)
        times = np.linspace(0, seconds, min(count, MAXIMUM), endpoint=True)
        return [min(last, math.ceil(t * clip.fps)) for t in times]


@dataclass(frozen=True)
class ByLength:
    """Frames at a rate that the length of a clip decides: `rates` a second in clips of up to so
    many seconds, the last in those that are longer, and at most `maximum` of them (transformers'
    Glm46VVideoProcessor, which takes no other rate; one that is asked for is taken as by
    `EveryInterval`).
    """

    rates: tuple[tuple[float, float], ...]
    maximum: int

    def __call__(self, clip: VideoFacts, fps: float | None, maximum: int | None) -> Sequence[int]:
        longest = self.rates[-1][0]
        if fps is not None:
            return EveryInterval(fps, longest)(clip, fps, maximum)
        seconds = min(clip.seconds, longest)
        rate = next(rate for limit, rate in self.rates if seconds <= limit)
        count = min(int(seconds * rate), self.maximum)
        if clip.frames < count:
            return range(clip.frames)
        return _at_times(clip, rate, count, int(clip.seconds))


@dataclass(frozen=True)
class AtRate:
    """Frames at a rate, at most `maximum` of them (transformers' GlmgaVideoProcessor, which has the
    last one twice where they are odd: so has the family, when it groups them).
    """

    fps: float
    maximum: int

    def __call__(self, clip: VideoFacts, fps: float | None, maximum: int | None) -> Sequence[int]:
        rate = self.fps if fps is None else fps
        limit = self.maximum if maximum is None else maximum
        count = min(int(clip.seconds * rate), limit)
        if clip.frames < count:
            return range(clip.frames)
        return _at_times(clip, rate, count, clip.seconds - 1 / rate)


def _at_times(clip: VideoFacts, rate: float, count: int, end: float) -> list[int]:
    """Return the first frame of each step of 1 / `rate` seconds, up to `end` seconds; as many as
    `count`, evenly spaced between the ends of those, where they are not that many.
    """
    picked, time, each = list[int](), 0.0, 1 / clip.fps
    index = 0
    while index < clip.frames and len(picked) <= count:
        if index * each >= time:
            picked.append(index)
            time += 1 / rate
            if time >= end:
                break
            index = max(index, int(time / each) - 2)  # frames in between are before that time
        index += 1
    if len(picked) == count:
        return picked
    ends = (0, clip.frames - 1) if len(picked) > count else (picked[0], picked[-1])
    return [int(i) for i in np.linspace(*ends, count, dtype=int)]


@dataclass(frozen=True)
class EachSecond:
    """The first frame of each second; of clips with more than `maximum` of them as many frames,
    evenly spaced among those of each tenth of a second (transformers' MiniCPMV4_6VideoProcessor).
    """

    maximum: int

    def __call__(self, clip: VideoFacts, fps: float | None, maximum: int | None) -> Sequence[int]:
        rate, limit = fps or 1.0, self.maximum if maximum is None else maximum
        if clip.seconds * rate <= limit:
            return [int(i * clip.fps / rate) for i in range(math.ceil(clip.seconds * rate))]
        tenths = np.linspace(0, int(clip.seconds / 0.1) - 1, limit, dtype=int)
        times = (round(int(i) * 0.1, 1) for i in tenths)
        return [min(int(time * clip.fps), clip.frames - 1) for time in times]


@dataclass(frozen=True)
class SecondsOrMiddles:
    """The first frame of each whole step of frames at a rate; of clips with more than `maximum` of
    them, those in the middle of as many equal parts of them (the examples of MiniCPM-V 2.6 and 4).
    """

    fps: float
    maximum: int

    def __call__(self, clip: VideoFacts, fps: float | None, maximum: int | None) -> Sequence[int]:
        step = max(round(clip.fps / (self.fps if fps is None else fps)), 1)
        picked, limit = range(0, clip.frames, step), self.maximum if maximum is None else maximum
        if len(picked) <= limit:
            return list(picked)
        return [picked[i] for i in _middles(len(picked), limit)]


@dataclass(frozen=True)
class SpreadMiddles:
    """The middles of as many equal parts of a clip as a rate comes to, at most `maximum` (the
    example of MiniCPM-V 4.5, without frames that are put together).
    """

    fps: float
    maximum: int

    def __call__(self, clip: VideoFacts, fps: float | None, maximum: int | None) -> Sequence[int]:
        rate = min(self.fps if fps is None else fps, round(clip.fps) or 1)
        limit = self.maximum if maximum is None else maximum
        return _middles(clip.frames, max(min(round(rate * clip.seconds), limit, clip.frames), 1))


def _middles(total: int, count: int) -> list[int]:
    """Return the middle of each of `count` equal parts."""
    part = total / count
    return [int(i * part + part / 2) for i in range(count)]


@dataclass(frozen=True)
class WithoutEnds:
    """Frames at a rate, up to `maximum` frames; of clips that are long for those, without the first
    and the last `skip` seconds (transformers' SmolVLMVideoProcessor).
    """

    fps: float
    maximum: int
    skip: float = 1.0

    def __call__(self, clip: VideoFacts, fps: float | None, maximum: int | None) -> Sequence[int]:
        rate, maximum = (
            self.fps if fps is None else fps,
            self.maximum if maximum is None else maximum,
        )
        count = max(min(round(rate * clip.seconds), maximum), 1)
        start, end = 0, clip.frames - 1
        if clip.seconds - 2 * self.skip > maximum * rate:
            start = max(int(self.skip * clip.fps), 0)
            end = min(int(clip.frames - self.skip * clip.fps), end)
            if start >= end:
                start, end = 0, clip.frames - 1
        return [int(i) for i in np.linspace(start, end, count, dtype=int)]


@dataclass(frozen=True)
class Middles:
    """The middle of each of `count` equal parts; as many parts as a rate comes to, where one is
    asked for (transformers' InternVLVideoProcessor). `shift`: frames in place of half a part.
    """

    count: int
    shift: float | None = None

    def __call__(self, clip: VideoFacts, fps: float | None, maximum: int | None) -> Sequence[int]:
        total = clip.frames
        count = self.count if fps is None else int(total / clip.fps * fps)
        count = max(min(count, total, MAXIMUM if maximum is None else maximum), 1)
        return _steps(total / count / 2 if self.shift is None else self.shift, total, count)


@dataclass(frozen=True)
class Beginnings:
    """The first frame of each of `count` equal parts; as many parts as a rate comes to, where one
    is asked for (transformers' default_sample_indices_fn).
    """

    count: int

    def __call__(self, clip: VideoFacts, fps: float | None, maximum: int | None) -> Sequence[int]:
        total = clip.frames
        count = self.count if fps is None else int(total / clip.fps * fps)
        count = max(min(count, total, MAXIMUM if maximum is None else maximum), 1)
        return [i * total // count for i in range(count)]


def _steps(start: float, total: int, count: float) -> list[int]:
    """Return steps from `start` below `total`, by the `count`th part of it: in fp32, as the
    references do it.
    """
    return [int(i) for i in torch.arange(start, total, total / count).int()]
