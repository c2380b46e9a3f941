"""The engine's process: a model, the service over it, and a thread that listens to the server's.

Whatever is asked for is a call by its name, in a thread of its own as it would be in the server;
answers go out as events of numbered tickets. It ends when the server's process does, or says so by
closing the link.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from mtmd.base.errors import MtmdError
from mtmd.base.isolation.channel import ChannelClosed
from mtmd.base.process_memory import resident_bytes
from mtmd.base.tracebacks import traceback_text
from mtmd.engine_process.link import Link
from mtmd.engine_process.outbox import Outbox
from mtmd.events import Event, Finished
from mtmd.loaded.interpreter import shared_out_promptly
from mtmd.service.service import Service
from mtmd.service.ticket import Ticket
from mtmd.service.turns import Turns, get_up, sit_down, step_back, wanted_unless, work_for

BEAT_S = 0.25  # between two signs of life
SEATS = 2  # for threads that compute: as in the server, there is one interpreter
CALLS_AT_ONCE = 128  # the server has fewer threads that ask
ENDING_S = 5.0
FAILED = 1  # the exit code of an engine that can hear or tell nothing any more
log = logging.getLogger("mtmd.engine")


class Servable(Protocol):
    """What the engine's process loads; a `Model` is one."""

    loaded: Any
    prompts: Any
    warmup_report: Any

    def weights_read(self) -> tuple[int, int]: ...

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> Any: ...


Loader = Callable[[str | None, dict[str, Any]], Servable]


@dataclass
class _Call:
    """One under way. `tickets`: the numbers of those that it is to make."""

    name: str
    owner: str
    tickets: Sequence[int]
    gone: threading.Event = field(default_factory=threading.Event)
    """Set once nobody waits for it any more."""


class _ToServer(logging.Handler):
    """What is logged here is written by the server, in the form that was chosen for it."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.exc_info and record.exc_info[1]:
                text += f"\n{traceback_text(record.exc_info[1])}"
            self._outbox.put(("log", record.levelno, (record.name, text)))
        except Exception:
            self.handleError(record)  # who logs is not to fail by it


class EngineProcess:
    """`load` gives the model of a name and its options."""

    def __init__(self, link: Link, load: Loader) -> None:
        self._link, self._load_model = link, load
        self._outbox = Outbox(link, end_by)
        self._model: Servable | None = None
        self._service: Service | None = None
        self._tickets: dict[int, Ticket] = {}
        self._under_way: dict[int, _Call] = {}
        self._desk = Turns(SEATS, each=1)
        self._ending = ExitStack()
        self._over = threading.Event()
        self._first: dict[str, Callable[..., Any]] = {
            "load": self._load,
            "warm_up": self._warm_up,
            "warmup_report": lambda: self.model.warmup_report,
            "begin": self._begin,
            "measures": self._measures,
            "read_rate": lambda device: self.service.read_rate(device),
            "close": lambda within_s: self.service.close(within_s),
        }
        """Those that take no seat: the server does without while it waits for them."""
        self._calls: dict[str, Callable[..., Any]] = {
            "count": self._count,
            "text_of": lambda *args: self.service.text_of(*args),
            "tokens_of": lambda *args: self.service.tokens_of(
                args[0], special=args[1], around=args[2]
            ),
            "spelling_of": lambda *args: self.service.spelling_of(*args),
            "rendered": lambda messages, chosen: self.service.rendered(messages, **chosen),
            "processed": lambda *args: self.service.processed(*args),
        }

    @property
    def model(self) -> Servable:
        assert self._model is not None  # the server loads first
        return self._model

    @property
    def service(self) -> Service:
        assert self._service is not None
        return self._service

    def run(self) -> None:
        """Until the server has gone."""
        logger = logging.getLogger("mtmd")
        logger.addHandler(_ToServer(self._outbox))
        threading.Thread(target=self._beat, name="mtmd heartbeat", daemon=True).start()
        with ThreadPoolExecutor(CALLS_AT_ONCE, "mtmd call") as pool:
            try:
                while True:
                    for what, number, value in self._link.receive():
                        if what == "call":
                            name, owner, arguments, tickets = value
                            call = self._under_way[number] = _Call(name, owner, tickets)
                            pool.submit(self._do, number, call, arguments)
                        elif what == "leave":
                            self._leave(number, value)
                        elif what == "cancel":
                            self._cancel(number)
            except ChannelClosed:
                self._over.set()
                self._end()
            except BaseException as error:  # no memory for a picture, say
                end_by(error)

    def _end(self) -> None:
        """Of a server that has ended, or has closed the service before."""
        for call in list(self._under_way.values()):
            call.gone.set()
        if self._service is not None:
            self._service.close(ENDING_S)
        if self._service is not None and self._service.fault is not None:
            os._exit(1)  # whatever hangs in the device would not let the interpreter end
        self._ending.close()
        if self._model is not None:
            self._model.loaded.close()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            read = (0, 0) if self._model is None else self._model.weights_read()
            self._outbox.put(("beat", 0, read))

    def _do(self, number: int, call: _Call, arguments: Sequence[Any]) -> None:
        """A call, on a thread of its own."""
        try:
            if call.name in self._first:
                result = self._first[call.name](*arguments)
            else:
                result = self._seated(call, arguments)
            self._outbox.put(("reply", number, result))
        except BaseException as error:
            self._outbox.put(("error", number, _as_told(error)))
        finally:
            del self._under_way[number]
            if call.gone.is_set():
                for ticket in call.tickets:
                    self._cancel(ticket)

    def _seated(self, call: _Call, arguments: Sequence[Any]) -> Any:
        step_back()
        work_for(call.owner)
        wanted_unless(call.gone.is_set)
        sit_down(self._desk)
        try:
            if call.name == "submit":
                return self._submit(call.tickets, *arguments)
            return self._calls[call.name](*arguments)
        finally:
            get_up()
            wanted_unless(None)
            work_for("")

    def _leave(self, number: int, tickets: Sequence[int]) -> None:
        """Nobody waits for this call any more, which may be done: those are the tickets that it is
        to make, or has made.
        """
        if (call := self._under_way.get(number)) is not None:
            call.gone.set()
        for ticket in tickets:
            self._cancel(ticket)

    def _cancel(self, number: int) -> None:
        ticket = self._tickets.get(number)
        if ticket is not None:
            ticket.cancel()

    def _load(
        self, name: str | None, options: dict[str, Any], log_level: int, small_bytes: int
    ) -> None:
        from mtmd.kernels.resources.threads import ask_threads

        logging.getLogger("mtmd").setLevel(log_level)
        model = self._load_model(name, options)
        if options.get("threads") is None and model.loaded.checkpoint.weight_bytes < small_bytes:
            ask_threads(1, "as the model is very small")
        model.loaded.start_workers()
        self._model = model

    def _warm_up(self) -> Any:
        return self.model.warm_up(
            lambda done, total: self._outbox.put(("compiling", 0, (done, total)))
        )

    def _begin(self, queue: int, share_cache: bool, hang_s: float | None) -> dict[str, Any]:
        """The service, and what does not change of it."""
        service = self._service = Service(
            self.model,
            queue=queue,
            share_cache=share_cache,
            hang_s=hang_s,
            gathered=self._outbox.gathered,
        )
        service.on_fault(lambda fault: self._outbox.put(("fault", 0, _as_told(fault))))
        service.plan_ahead()
        self._ending.enter_context(shared_out_promptly())
        return {
            "name": service.name,
            "context": service.context,
            "capacity": service.capacity,
            "sees": service.sees,
            "thinks": service.thinks,
            "chat_template": service.chat_template,
            "checkpoint": service.checkpoint_facts,
            "measures": self._measures(),
        }

    def _measures(self) -> Any:
        stats = self.service.stats()
        stats.engine_bytes, stats.engine_cpu_seconds = resident_bytes() or 0, time.process_time()
        return stats, self.service.latencies

    def _submit(
        self, numbers: Sequence[int], messages: Any, tenant: str, chosen: dict[str, Any]
    ) -> list[int]:
        """Bytes that are held for each ticket."""
        tickets = (
            [self.service.submit(messages, tenant=tenant, **chosen)]
            if len(numbers) == 1
            else self.service.submit_several(messages, len(numbers), tenant=tenant, **chosen)
        )
        for number, ticket in zip(numbers, tickets, strict=True):
            self._tickets[number] = ticket
            ticket.redirect(self._sink(number))
        return [ticket.held for ticket in tickets]

    def _sink(self, number: int) -> Callable[[Event | BaseException], None]:
        tickets, put = self._tickets, self._outbox.put

        def sink(event: Event | BaseException) -> None:
            is_last = isinstance(event, (Finished, BaseException))
            if is_last:
                tickets.pop(number, None)
                event = _as_told(event) if isinstance(event, BaseException) else event
            put(("event", number, event), is_long=is_last)

        return sink

    def _count(self, messages: Any, detail: str, tenant: str, chosen: dict[str, Any]) -> Any:
        return self.service.count(messages, detail, tenant=tenant, **chosen)


def end_by(error: BaseException) -> NoReturn:
    """The engine's process, at once: where it can hear or tell nothing any more, the server knows
    by its end.
    """
    try:
        print(f"mtmd engine: {traceback_text(error)}", file=sys.stderr, flush=True)
    finally:  # nobody may read that, either
        os._exit(FAILED)


def _as_told(error: BaseException) -> MtmdError:
    """What is not raised on purpose is told in the log alone."""
    if isinstance(error, MtmdError):
        return error
    log.error("a call has failed\n%s", traceback_text(error))
    return MtmdError(f"internal error: {type(error).__name__}")
