"""Requests a minute of one user of a server, counted, and the surplus refused."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from mtmd.web.errors import ApiError


class RateLimit:
    """A bucket for each key that fills at `per_minute` / 60 tokens a second, and holds a tenth of a
    minute's, at least 10 but no more than a minute's.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute, self._rate, self._clock = per_minute, per_minute / 60, clock
        self._maximum = min(float(per_minute), max(10.0, per_minute / 10))
        self._buckets: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def check(self, name: str) -> None:
        """Count a request. Raises ApiError where it is one too many."""
        if wait := math.ceil(self.take(name)):
            raise ApiError(
                429,
                f"more than {self._per_minute} requests a minute with this key; wait {wait} s",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(wait)},
            )

    def take(self, name: str) -> float:
        """0 where the request may pass, otherwise how many seconds to wait."""
        if not self._rate:
            return 0.0
        with self._lock:
            now = self._clock()
            tokens, then = self._buckets.get(name, (self._maximum, now))
            tokens = min(self._maximum, tokens + (now - then) * self._rate)
            self._buckets[name] = (max(tokens - 1, 0.0) if tokens >= 1 else tokens, now)
            return 0.0 if tokens >= 1 else (1 - tokens) / self._rate
