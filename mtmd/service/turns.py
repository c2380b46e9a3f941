"""Describes what programs over a service share out among those they work for, as the service does
itself.
"""

from __future__ import annotations

from mtmd.base.cancellation import cancel_if, check_cancelled, is_gone, left, shielded
from mtmd.base.cores import usable_cores
from mtmd.base.errors import LeftError
from mtmd.base.priority import ahead, lower_thread_priority
from mtmd.base.turns import (
    Turns,
    acquire_turn,
    current_owner,
    prioritized,
    release_turn,
    set_owner,
    turn_released,
)

__all__ = [
    "LeftError",
    "Turns",
    "acquire_turn",
    "ahead",
    "cancel_if",
    "check_cancelled",
    "current_owner",
    "is_gone",
    "left",
    "lower_thread_priority",
    "prioritized",
    "release_turn",
    "set_owner",
    "shielded",
    "turn_released",
    "usable_cores",
]
