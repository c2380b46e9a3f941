"""Describes what programs over a service share out among those they work for, as the service does
itself.
"""

from __future__ import annotations

from mtmd.base.cancellation import cancel_if, check_cancelled, in_any_case, is_gone, left
from mtmd.base.cores import usable_cores
from mtmd.base.errors import LeftError
from mtmd.base.priority import ahead, step_back
from mtmd.base.turns import Turns, for_whom, get_up, goes_first, moved, sit_down, work_for

__all__ = [
    "LeftError",
    "Turns",
    "ahead",
    "cancel_if",
    "check_cancelled",
    "for_whom",
    "get_up",
    "goes_first",
    "in_any_case",
    "is_gone",
    "left",
    "moved",
    "sit_down",
    "step_back",
    "usable_cores",
    "work_for",
]
