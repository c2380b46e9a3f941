"""Request of a user for frames of a video."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtmd.base.errors import OptionError
from mtmd.base.options import FLAG, Kind, check_options, option, ranged, whole

FPS_MIN, FPS_MAX = 1e-6, 240.0


def seconds(text: str) -> float:
    """Return the number in "90", "90s", "1:30" or "1:02:30". Raises ValueError."""
    total = 0.0
    for part in text.removesuffix("s").split(":"):
        if not part or not set(part) <= set("0123456789."):
            raise ValueError
        total = total * 60 + float(part)
    return total


def _time(name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise OptionError(f"{name}: found {value:g}, expected seconds from the beginning")
    return value


@dataclass(frozen=True)
class FrameRequest:
    """Selection of the frames that are seen, and whether their sound is heard; None leaves it to
    the model's own rule. Checked by `check_request`.
    """

    fps: float | None = option(
        None,
        ranged(FPS_MIN, FPS_MAX, f"at least {FPS_MIN:g} and at most {FPS_MAX:g}"),
        "frames a second that the model sees",
        default="the model's own",
    )
    max_frames: int | None = option(
        None,
        whole(1),
        "max frames of one video",
        default="the model's own, and what fits its context",
    )
    start: float | None = option(
        None,
        Kind(_time, parse=seconds, metavar="TIME"),
        "leave out what is before: seconds, or as 1:30 or 1:02:30",
        flag="--from",
        dest="start",
    )
    end: float | None = option(
        None,
        Kind(_time, parse=seconds, metavar="TIME"),
        "leave out what is after",
        flag="--to",
        dest="end",
    )
    no_sound: bool = option(
        False, FLAG, "leave out the sound of videos, which some models hear with the frames"
    )


def check_request(request: FrameRequest) -> None:
    """Raises OptionError for one that no video can answer to."""
    check_options(request)
    if request.start is not None and request.end is not None and request.end < request.start:
        raise OptionError(
            f"end: found {request.end:g} s, expected no less than start, {request.start:g} s"
        )
