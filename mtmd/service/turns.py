"""What programs over a service share out among those they work for, as the service does itself."""

from __future__ import annotations

from mtmd.kernels.turns import Turns, for_whom, work_for

__all__ = ["Turns", "for_whom", "work_for"]
