"""Names of the replicas that are ready, as the router of this process was last told by Ray."""

from __future__ import annotations

names: tuple[str, ...] = ()
