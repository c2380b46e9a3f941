"""Fetches pictures and videos from the web for a request, without telling the client what there is
in our own network.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mtmd import ImageError
from mtmd.prompt.fetch_url import LIMIT_S, NOT_FETCHED, Denied, fetched
from mtmd.web.errors import ApiError
from mtmd.web.intake.fetch_log import report_to_operator


class Fetcher:
    """`limit_s`: wall time for all pictures and videos of one request together."""

    def __init__(self, limit_s: float = LIMIT_S, at_once: int = 16) -> None:
        self.limit_s, self._slots = limit_s, threading.BoundedSemaphore(at_once)

    def fetch(
        self, url: str, location: str, max_bytes: int, deadline: float, *, video: bool = False
    ) -> bytes:
        """The picture, or `video`, at `url`, of at most `max_bytes`, by `deadline` (of
        time.monotonic). `location` names the URL in messages.

        Raises ApiError and ImageError.
        """
        what = "video" if video else "picture"
        try:
            with self._location(deadline):
                return fetched(url, max_bytes, deadline, video)
        except ImageError as error:
            code = "invalid_video" if video else "invalid_image"
            raise ApiError(400, f"{location}: {error}", param=location, code=code) from error
        except NOT_FETCHED as error:
            report_to_operator(location, url, error)
            raise ApiError(
                400,
                f"{location}: the {what} could not be fetched: only public http and https "
                "addresses are asked, on "
                f"their usual ports, for at most {self.limit_s:g} s",
                param=location,
                code="video_not_fetched" if video else "image_not_fetched",
            ) from error

    @contextmanager
    def _location(self, deadline: float) -> Iterator[None]:
        if not self._slots.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise Denied("too many at once")
        try:
            yield
        finally:
            self._slots.release()
