"""Models that are not here yet, fetched on a thread of their own: meanwhile others are loaded."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from mtmd import MtmdError
from mtmd.checkpoint.collection import Source
from mtmd.web.models.entry import Entry, Loader
from mtmd.web.models.progress import Loading, Read

LOOKED_S = 0.5  # between two looks at how far a fetch is
log = logging.getLogger("mtmd.models")


class Fetches:
    """One after another, in the order in which they were asked for. `done` gets each with where it
    is now, or why it could not be fetched, on the thread that fetches; where none can be started,
    on the one that asks.
    """

    def __init__(
        self, loader: Loader, done: Callable[[Entry, Source | BaseException], None]
    ) -> None:
        self._loader, self._done = loader, done
        self._lock, self._waiting = threading.Lock(), deque[tuple[Entry, Loading]]()
        self._thread: threading.Thread | None = None

    def add(self, entry: Entry, progress: Loading) -> None:
        """`progress` is told how far it is."""
        with self._lock:
            problem = None
            if self._thread is None:
                problem = self._start()
                progress.fetching()
            if problem is None:
                self._waiting.append((entry, progress))
        if problem is not None:
            self._done(entry, problem)

    def _start(self) -> MtmdError | None:
        """Start a thread, which waits for the lock."""
        thread = threading.Thread(target=self._run, name="mtmd fetching", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            return MtmdError(f"it cannot be fetched now ({error}); try again a little later")
        self._thread = thread
        return None

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
                entry, progress = self._waiting.popleft()
            result = self._fetch(entry.source, progress)
            self._done(entry, result)
            del result  # an error holds on to what was under way

    def _fetch(self, source: Source, progress: Loading) -> Source | BaseException:
        ended = threading.Event()
        progress.fetching()

        def report(read: Read) -> None:
            """Read on a thread of its own: the disk that is looked at may hang, and who asks how
            far it is must not.
            """
            try:
                threading.Thread(
                    target=_look, args=(progress, read, ended), name="mtmd fetched", daemon=True
                ).start()
            except RuntimeError as error:
                log.warning(
                    "%s: the progress of its download cannot be read (%s)", source.name, error
                )

        try:
            return self._loader.fetch(source, report)
        except BaseException as error:
            return error
        finally:
            ended.set()


def _look(progress: Loading, read: Read, ended: threading.Event) -> None:
    while True:
        progress.come(*read())
        if ended.wait(LOOKED_S):
            return
