"""Fetches pictures, videos and audio from the web for a request, without telling the client what
there is in our own network.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mtmd import ImageError
from mtmd.prompt.fetch_url import LIMIT_S, NOT_FETCHED, WORDS, Denied, fetched
from mtmd.web.errors import ApiError
from mtmd.web.intake.fetch_log import report_to_operator


class Fetcher:
    """`limit_s`: wall time for all media of one request together."""

    def __init__(self, limit_s: float = LIMIT_S, at_once: int = 16) -> None:
        self.limit_s, self._slots = limit_s, threading.BoundedSemaphore(at_once)

    def fetch(
        self, url: str, location: str, max_bytes: int, deadline: float, *, kind: str = "image"
    ) -> bytes:
        """The picture, video or audio, by `kind`, at `url`, of at most `max_bytes`, by `deadline`
        (of time.monotonic). `location` names the URL in messages.

        Raises ApiError and ImageError.
        """
        try:
            with self._location(deadline):
                return fetched(url, max_bytes, deadline, kind)
        except ImageError as error:
            code = f"invalid_{kind}"
            raise ApiError(400, f"{location}: {error}", param=location, code=code) from error
        except NOT_FETCHED as error:
            report_to_operator(location, url, error)
            raise ApiError(
                400,
                f"{location}: the {WORDS[kind]} could not be fetched: only public http and https "
                "addresses are asked, on "
                f"their usual ports, for at most {self.limit_s:g} s",
                param=location,
                code=f"{kind}_not_fetched",
            ) from error

    @contextmanager
    def _location(self, deadline: float) -> Iterator[None]:
        if not self._slots.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise Denied("too many at once")
        try:
            yield
        finally:
            self._slots.release()
