"""Models that are not here yet, fetched on a thread of their own: meanwhile others are loaded."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from mtmd.checkpoint.collection import Source
from mtmd.web.models.entry import Entry, Loader
from mtmd.web.models.progress import Read


class Fetches:
    """One after another, in the order in which they were asked for. `done` gets each with where it
    is now, or why it could not be fetched, on the thread that fetches.
    """

    def __init__(
        self, loader: Loader, done: Callable[[Entry, Source | BaseException], None]
    ) -> None:
        self._loader, self._done = loader, done
        self._lock, self._waiting = threading.Lock(), deque[Entry]()
        self._thread: threading.Thread | None = None

    def add(self, entry: Entry) -> None:
        """Its `progress` is told how far it is."""
        with self._lock:
            self._waiting.append(entry)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mtmd fetching", daemon=True)
                self._thread.start()

    @property
    def under_way(self) -> bool:
        return self._thread is not None

    def end(self) -> None:
        """Nothing more is begun; what is being fetched goes on where it was when it is asked for
        again.
        """
        with self._lock:
            self._waiting.clear()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                entry = self._waiting.popleft()
            found: Source | BaseException
            try:
                found = self._loader.fetch(entry.source, partial(_tell, entry))
            except BaseException as error:
                found = error
            self._done(entry, found)
            del found  # an error holds on to what was under way


def _tell(entry: Entry, read: Read) -> None:
    if entry.progress is not None:
        entry.progress.fetching(read)
