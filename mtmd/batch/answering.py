"""One prompt about many pictures, through the service's batches."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from threading import Event as Flag
from threading import Lock

from mtmd.batch.inputs import Input
from mtmd.batch.output import Row
from mtmd.config import AnswerOptions
from mtmd.events import Answer, Finished
from mtmd.kernels.errors import MtmdError, OptionError
from mtmd.prompt.conversation import user_message
from mtmd.prompt.load_image import read_picture
from mtmd.service.service import Service, Ticket

AHEAD = 2  # pictures being read and prepared while the others are answered
# times as many as are answered at once may have been begun: rows that came early wait for those
# before them
WAITING = 8


class Batch:
    """`parallel` pictures are answered at once."""

    def __init__(self, service: Service, prompt: str, settings: AnswerOptions, parallel: int):
        self.service, self.prompt, self.settings = service, prompt, settings
        self.workers = parallel + AHEAD
        self._stopped = Flag()
        self._tickets: set[Ticket] = set()
        self._lock = Lock()

    def rows(self, inputs: Iterable[Input], ordered: bool = True) -> Generator[Row, None, None]:
        """A row for each picture, in their order or as they come. A picture that cannot be answered
        is a row with its error.

        Leaving the loop gives up those under way. Raises OptionError for what would fail for every
        picture.
        """
        waiting = iter(inputs)
        begun: dict[Future[Row], None] = {}  # in order
        pool = ThreadPoolExecutor(self.workers, "mtmd batch")
        try:
            while True:
                for one in islice(waiting, WAITING * self.workers - len(begun)):
                    begun[pool.submit(self._answer, one)] = None
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

    def _stop(self) -> None:
        with self._lock:
            self._stopped.set()
            for ticket in self._tickets:
                ticket.cancel()

    def _answer(self, one: Input) -> Row:
        digest = None
        try:
            data = read_picture(one.path)
            digest = hashlib.sha256(data).hexdigest()
            picture = self.service.load_image(data, unnamed=one.name)
            message = user_message(picture, self.prompt)  # type: ignore[arg-type]  # a Picture will do
            return _answered(
                one, digest, self._finish(self.service.submit_checked([message], self.settings))
            )
        except OptionError:
            raise
        except MtmdError as error:
            return Row(one.name, digest, error=str(error))

    def _finish(self, ticket: Ticket) -> Answer:
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


def _answered(one: Input, digest: str, answer: Answer) -> Row:
    took = answer.receipt
    return Row(
        one.name,
        digest,
        answer.text,
        None,
        took.finish,
        took.prompt_tokens,
        took.image_tokens,
        took.output_tokens,
        *(
            round(ms, 2)
            for ms in (
                took.queued_ms,
                took.preprocess_ms,
                took.encode_ms,
                took.prefill_ms,
                took.decode_ms,
            )
        ),
    )
