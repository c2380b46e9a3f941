"""Many questions of one caller: so many at once as are batched well, answers in order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from threading import Event as Flag
from threading import Lock
from typing import TypeVar

from mtmd.events import Answer, Finished
from mtmd.service.ticket import Ticket

AHEAD = 2  # questions whose pictures are read and prepared while the others are answered
# times as many as are answered at once may have been begun: answers that came early wait for those
# before them
WAITING = 8
I = TypeVar("I")  # noqa: E741
R = TypeVar("R")


class Many:
    """`parallel` questions are answered at once."""

    def __init__(self, parallel: int):
        self.workers = parallel + AHEAD
        self._stopped = Flag()
        self._tickets: set[Ticket] = set()
        self._lock = Lock()

    def results(
        self, inputs: Iterable[I], work: Callable[[I], R], ordered: bool = True
    ) -> Generator[R, None, None]:
        """`work` on each input, on several threads, in their order or as they come. `inputs` are
        taken as they are needed. What `work` raises ends it all.

        Leaving the loop gives up those under way.
        """
        waiting = iter(inputs)
        begun: dict[Future[R], None] = {}  # in order
        pool = ThreadPoolExecutor(self.workers, "mtmd many")
        try:
            while True:
                for one in islice(waiting, WAITING * self.workers - len(begun)):
                    begun[pool.submit(work, one)] = None
                if not begun:
                    return
                done = (
                    [next(iter(begun))]
                    if ordered
                    else wait(begun, return_when=FIRST_COMPLETED).done
                )
                for future in done:
                    yield future.result()
                    del begun[future]
        finally:
            self._stop()
            pool.shutdown(cancel_futures=True)

    def finish(self, ticket: Ticket) -> Answer:
        """Wait for an answer; given up where nobody waits any more. For `work` to call."""
        with self._lock:
            self._tickets.add(ticket)
            if self._stopped.is_set():
                ticket.cancel()
        try:
            *_, last = ticket
        finally:
            with self._lock:
                self._tickets.discard(ticket)
        assert isinstance(last, Finished)
        return last.answer

    def _stop(self) -> None:
        with self._lock:
            self._stopped.set()
            for ticket in self._tickets:
                ticket.cancel()
