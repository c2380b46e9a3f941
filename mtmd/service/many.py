"""Many questions of one caller: so many at once as are batched well, answers in order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from itertools import islice
from threading import Condition, local
from typing import TypeVar

from mtmd.events import Answer, Finished
from mtmd.service.measures.prepare_ahead import PrepareAhead
from mtmd.service.ticket import Ticket

# times as many as are answered at once may have been begun: answers that came early wait for those
# before them
WAITING = 8
I = TypeVar("I")  # noqa: E741
R = TypeVar("R")


class Many:
    """`parallel` questions are answered at once, and the pictures of `ahead` more read and prepared
    meanwhile; what one measures, others may go on with. `capacity`: so many the service takes.
    """

    def __init__(
        self, parallel: int, ahead: PrepareAhead | None = None, capacity: int | None = None
    ):
        self.ahead = ahead or PrepareAhead(parallel)
        self._parallel = parallel
        self._most = parallel + self.ahead.most
        if capacity is not None:
            self._most = min(self._most, max(parallel, capacity))
        self._stopped = False
        self._tickets: set[Ticket] = set()
        self._changed = Condition()
        self._under_way = 0
        self._mine = local()

    @property
    def workers(self) -> int:
        """Questions under way at once, now."""
        return min(self._parallel + self.ahead.now, self._most)

    def results(
        self, inputs: Iterable[I], work: Callable[[I], R], ordered: bool = True
    ) -> Generator[R, None, None]:
        """`work` on each input, on several threads, in their order or as they come. `inputs` are
        taken as they are needed. What `work` raises ends it all.

        Leaving the loop gives up those under way.
        """
        waiting = iter(inputs)
        begun: dict[Future[R], None] = {}  # in order
        pool = ThreadPoolExecutor(self._most, "mtmd many")
        try:
            while True:
                for one in islice(waiting, max(0, WAITING * self.workers - len(begun))):
                    begun[pool.submit(self._one, work, one)] = None
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

    def _one(self, work: Callable[[I], R], one: I) -> R:
        """Once there is a place for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._under_way < self.workers)
            if self._stopped:
                raise CancelledError
            self._under_way += 1
        self._mine.since = self.ahead.clock()
        try:
            return work(one)
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def finish(self, ticket: Ticket) -> Answer:
        """Wait for an answer; given up where nobody waits any more. For `work` to call, of what is
        prepared by then.
        """
        with self._changed:
            self.ahead.prepared(self._mine.since, ticket.held)
            self._tickets.add(ticket)
            if self._stopped:
                ticket.cancel()
        try:
            *_, last = ticket
        finally:
            with self._changed:
                self._tickets.discard(ticket)
        assert isinstance(last, Finished)
        with self._changed:
            self.ahead.answered()
        return last.answer

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            for ticket in self._tickets:
                ticket.cancel()
