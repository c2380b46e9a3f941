"""What programs over a service share out among those they work for, as the service does itself."""

from __future__ import annotations

from mtmd.base.cores import usable_cores
from mtmd.base.errors import LeftError
from mtmd.base.priority import ahead, step_back
from mtmd.base.turns import Turns, aside, for_whom, get_up, goes_first, sit_down, work_for
from mtmd.base.wanted import check_wanted, in_any_case, is_gone, left, wanted_unless

__all__ = [
    "LeftError",
    "Turns",
    "ahead",
    "aside",
    "check_wanted",
    "for_whom",
    "get_up",
    "goes_first",
    "in_any_case",
    "is_gone",
    "left",
    "sit_down",
    "step_back",
    "usable_cores",
    "wanted_unless",
    "work_for",
]
