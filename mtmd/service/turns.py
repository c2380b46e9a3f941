"""What programs over a service share out among those they work for, as the service does itself."""

from __future__ import annotations

from mtmd.kernels.resources.priority import ahead, step_back
from mtmd.kernels.resources.turns import Turns, aside, for_whom, get_up, sit_down, work_for

__all__ = ["Turns", "ahead", "aside", "for_whom", "get_up", "sit_down", "step_back", "work_for"]
