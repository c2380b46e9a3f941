"""Frames made smaller so that as many as were chosen fit, before any of them is left out: as the
authors of models that take frames of any size do it.
"""

from __future__ import annotations

from dataclasses import replace

from mtmd.base.errors import OptionError
from mtmd.clip.token_budget import Budget
from mtmd.clip.video.family import VideoFamily

MINIMUM = 128  # tokens of a group; smaller ones say little
# Steps, so that a question of a few more words finds what was encoded for the last one.
STEPS = tuple(sorted({MINIMUM * part << k for k in range(12) for part in (2, 3)} | {MINIMUM}))


def fitting(
    family: VideoFamily, size: tuple[int, int], frames: int, budget: Budget, room: int
) -> Budget:
    """The budget with which so many frames of `size`, (width, height) in px, take no more than
    `room` image tokens, if need be with the smallest groups; the same where those are small enough,
    and for a family whose frames have one size.
    """
    usual = family.shape(*size, frames, budget)
    maximum = max((step for step in STEPS if step <= room // usual.groups), default=MINIMUM)
    if usual.all_tokens <= room or maximum >= usual.tokens:
        return budget
    smaller = replace(budget, max_tokens=maximum)
    try:
        family.shape(*size, frames, smaller)
    except OptionError:
        return budget
    return smaller
