"""Many questions of one caller: so many at once as are batched well, answers in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import islice
from threading import Condition, local
from typing import Any, TypeVar

from mtmd.base.fair_queue import Claim, FairSlots
from mtmd.events import Answer, Finished
from mtmd.service.prepare_ahead import PrepareAhead
from mtmd.service.ticket import Ticket

# times as many as are answered at once may have been begun: answers that came early wait for those
# before them
WAITING = 8
I = TypeVar("I")  # noqa: E741
R = TypeVar("R")


class Many:
    """`parallel` questions are answered at once, and the pictures of `ahead` more read and prepared
    meanwhile; what one measures, others may go on with. `slots`: of the service, shared with
    others who ask it many questions.
    """

    def __init__(
        self, parallel: int, ahead: PrepareAhead | None = None, slots: FairSlots | None = None
    ):
        self.ahead = ahead or PrepareAhead(parallel)
        self._parallel = parallel
        self._maximum = parallel + self.ahead.maximum
        self._slots = slots or FairSlots(self._maximum)
        self._maximum = min(self._maximum, self._slots.count or self._maximum)
        self._stopped = False
        self._tickets: set[Ticket] = set()
        self._changed = Condition()
        self._under_way = 0
        self._left: deque[tuple[Future[Any], Callable[[Claim], None]]] = deque()
        self._claims: dict[Future[Any], Claim] = {}
        self._stored: dict[object, int] = {}
        """Bytes of pictures under way."""
        self._waiting: deque[object] = deque()
        """For memory."""
        self._mine = local()

    @property
    def workers(self) -> int:
        """Questions under way at once, now."""
        return min(self._parallel + self.ahead.now, self._maximum)

    def results(
        self, inputs: Iterable[I], work: Callable[[I], R], ordered: bool = True
    ) -> Generator[R, None, None]:
        """`work` on each input, on several threads, in their order or as they come. They are begun
        in their order, and `inputs` are taken as they are needed. What `work` raises ends it all.

        Leaving the loop gives up those under way.
        """
        waiting = iter(inputs)
        begun: dict[Future[R], None] = {}  # in order
        pool = ThreadPoolExecutor(self._maximum, "mtmd many")
        try:
            while True:
                for one in islice(waiting, max(0, WAITING * self.workers - len(begun))):
                    future: Future[R] = Future()
                    begun[future] = None
                    begin = partial(self._begin, pool, future, partial(work, one))
                    with self._changed:
                        self._left.append((future, begin))
                    self._go_on()
                    if next(iter(begun)).done():  # taking more may last
                        break
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
            pool.shutdown()

    def _go_on(self) -> None:
        """Request slots for as many of those left as may be under way."""
        with self._changed:
            while self._left and not self._stopped and self._under_way < self.workers:
                future, begin = self._left.popleft()
                if not self._under_way:
                    self.ahead.begin()
                self._under_way += 1
                self._claims[future] = self._slots.request(begin)

    def _begin(
        self, pool: ThreadPoolExecutor, future: Future[R], work: Callable[[], R], claim: Claim
    ) -> None:
        """Start the work, with a slot."""
        try:
            pool.submit(self._run, future, work, claim)
        except RuntimeError:  # it has just been closed
            future.cancel()
            self._slots.release(claim)

    def _run(self, future: Future[R], work: Callable[[], R], claim: Claim) -> None:
        self._mine.since, self._mine.future = self.ahead.clock(), future
        try:
            if self._stopped:
                raise CancelledError
            result = work()
        except BaseException as error:
            self._end(future, claim)
            future.set_exception(error)
        else:
            self._end(future, claim)
            future.set_result(result)
        finally:
            del future, work  # an error's traceback would hold them, and they it

    def _end(self, future: Future[Any], claim: Claim) -> None:
        with self._changed:
            self._under_way -= 1
            self._claims.pop(future, None)
            self._stored.pop(future, None)
            self._changed.notify_all()
        self._slots.release(claim)
        self._go_on()

    def make_room(self, stored: int | None) -> None:
        """Wait until a picture that will take so many bytes, None for as many as the largest lately
        did, fits beside those under way; as many as are answered at once always do. For `work` to
        call before it is decoded.
        """
        if self.ahead.requested is not None:
            return
        future = self._mine.future
        with self._changed:
            stored = self.ahead.largest if stored is None else stored
            self._waiting.append(future)
            self._changed.wait_for(lambda: self._stopped or self._fits(future, stored))
            self._waiting.remove(future)
            self._stored[future] = stored
            self._changed.notify_all()
            if self._stopped:
                raise CancelledError

    def _fits(self, future: object, stored: int) -> bool:
        if self._waiting[0] is not future:
            return False
        return (
            len(self._stored) < self._parallel
            or sum(self._stored.values()) + stored <= self.ahead.room
        )

    def finish(self, ticket: Ticket) -> Answer:
        """Wait for an answer; given up where nobody waits any more. For `work` to call, of what is
        prepared by then.
        """
        with self._changed:
            self.ahead.prepared(self._mine.since, ticket.stored)
            if self._mine.future in self._stored:
                self._stored[self._mine.future] = ticket.stored
                self._changed.notify_all()
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
            for future, _ in self._left:
                future.cancel()
            self._left.clear()
            for future, claim in list(self._claims.items()):
                if self._slots.cancel(claim):
                    future.cancel()
            for ticket in self._tickets:
                ticket.cancel()
