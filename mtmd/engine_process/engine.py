"""An engine's process: a model, the service over it, and a thread that reads the server's calls.

Each call is done by a thread of its own, as it would be in the server; answers go out as events of
numbered tickets. The process ends when the server does, or closes the link.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NoReturn

from mtmd.base.cancellation import cancel_if
from mtmd.base.errors import DualEncoderError, MtmdError
from mtmd.base.process_memory import resident_bytes
from mtmd.base.tracebacks import traceback_text
from mtmd.base.turns import Turns, acquire_turn, release_turn, set_owner
from mtmd.checkpoint.facts import facts_of
from mtmd.checkpoint.hub import is_demo, resolve_model
from mtmd.embedding.load_any import RETRIEVERS, Retriever, load_retriever
from mtmd.embedding.service import RetrievalService
from mtmd.engine_process.link import CAN_SEND_NOW, Link, LinkClosedError
from mtmd.engine_process.messages import (
    Abandon,
    Beat,
    Call,
    Cancel,
    Compiled,
    Failed,
    Logged,
    Reply,
    TicketEvent,
)
from mtmd.engine_process.outbox import Outbox
from mtmd.events import Event, Finished
from mtmd.kernels.backends import Backend, backends_for
from mtmd.kernels.plan.free_memory import free_bytes, look_again
from mtmd.kernels.resources.threads import ask_threads
from mtmd.loaded.interpreter import shared_promptly
from mtmd.loaded.predicted_memory import predicted_bytes
from mtmd.loading import load, load_alongside
from mtmd.model import Model
from mtmd.openmp import ONE_THREAD_BYTES
from mtmd.options.by_name import options
from mtmd.options.load import LoadOptions
from mtmd.service.service import Service
from mtmd.service.ticket import Ticket

BEAT_S = 0.25  # between two signs of life
COMPUTING = 2  # for threads that compute: as in the server, there is one interpreter
CALLS_AT_ONCE = 128  # the server has fewer threads that ask
ENDING_S = 5.0
SHORT = 1000  # tokens of prompt and answer, which are written in a tenth of a millisecond
FAILED = 1  # the exit code of an engine that can neither read nor write any more
log = logging.getLogger("mtmd.engine")


@dataclass
class _Pending:
    """A call under way; `gone` is set once nobody waits for it any more."""

    call: Call
    gone: threading.Event = field(default_factory=threading.Event)


class _ToServer(logging.Handler):
    """Sends what is logged here to the server."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.exc_info and record.exc_info[1]:
                text += f"\n{traceback_text(record.exc_info[1])}"
            self._outbox.put(Logged(record.levelno, record.name, text))
        except Exception:
            self.handleError(record)  # logging raises nothing


class EngineProcess:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._outbox = Outbox(link, end_by, sends_now=CAN_SEND_NOW)
        self._model: Model | Retriever | None = None
        self._service: Service | RetrievalService | None = None
        self._tickets: dict[int, Ticket] = {}
        self._pending: dict[int, _Pending] = {}
        self._backends: list[Backend] = []
        self._queue = Turns(COMPUTING, each=1)
        self._ending = ExitStack()
        self._over = threading.Event()
        self._first: dict[str, Callable[..., Any]] = {
            "load": self._load,
            "open": self._open,
            "drop": self._drop,
            "memory": self._memory,
            "warm_up": self._warm_up,
            "warmup_report": lambda: self.model.warmup_report,
            "begin": self._begin,
            "measures": self._measures,
            "read_rate": lambda device: self.service.read_rate(device),
            "close": self._close,
        }
        """Calls that take no turn: the server does without while it waits for them."""
        self._calls: dict[str, Callable[..., Any]] = {
            "count": self._count,
            "text_of": lambda *args: self.service.text_of(*args),
            "tokens_of": lambda *args: self.service.tokens_of(
                args[0], special=args[1], around=args[2]
            ),
            "spelling_of": lambda *args: self.service.spelling_of(*args),
            "rendered": lambda messages, chosen: self.service.rendered(messages, **chosen),
            "processed": lambda *args: self.service.processed(*args),
            "embeddings": lambda *args: self.service.embeddings(
                args[0], args[1], normalize=args[2], whole=args[3]
            ),
            "rank": lambda *args: self.service.rank(*args),
        }

    @property
    def model(self) -> Any:
        assert self._model is not None  # the server loads first
        return self._model

    @property
    def service(self) -> Any:
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
                    for record in self._link.receive():
                        if isinstance(record, Call):
                            pending = self._pending[record.number] = _Pending(record)
                            pool.submit(self._do, pending)
                        elif isinstance(record, Abandon):
                            self._abandon(record)
                        elif isinstance(record, Cancel):
                            self._cancel(record.ticket)
            except LinkClosedError:
                self._over.set()
                self._end()
            except BaseException as error:  # no memory for a picture, say
                end_by(error)

    def _end(self) -> None:
        """After the server has ended, or has closed the link."""
        for pending in list(self._pending.values()):
            pending.gone.set()
        if self._service is not None:
            self._service.close(ENDING_S)
        if self._service is not None and self._service.fault is not None:
            os._exit(1)  # whatever hangs in the device would not let the interpreter end
        self._ending.close()
        if isinstance(self._model, Model):
            self._model.loaded.close()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            read = (0, 0) if (model := self._model) is None else model.weights_read()
            self._outbox.put(Beat(read))

    def _do(self, pending: _Pending) -> None:
        """A call, on a thread of its own."""
        call = pending.call
        try:
            if call.name in self._first:
                result = self._first[call.name](*call.arguments)
            else:
                result = self._in_turn(pending)
            self._outbox.put(Reply(call.number, result))
        except BaseException as error:
            self._outbox.put(Reply(call.number, error=_public(error)))
        finally:
            del self._pending[call.number]
            if pending.gone.is_set():
                for ticket in call.tickets:
                    self._cancel(ticket)

    def _in_turn(self, pending: _Pending) -> Any:
        call = pending.call
        set_owner(call.owner)
        cancel_if(pending.gone.is_set)
        acquire_turn(self._queue)
        try:
            if call.name == "submit":
                return self._submit(call.tickets, *call.arguments)
            return self._calls[call.name](*call.arguments)
        finally:
            release_turn()
            cancel_if(None)
            set_owner("")

    def _abandon(self, record: Abandon) -> None:
        """The call may be done: then its tickets exist."""
        if (pending := self._pending.get(record.number)) is not None:
            pending.gone.set()
        for ticket in record.tickets:
            self._cancel(ticket)

    def _cancel(self, number: int) -> None:
        ticket = self._tickets.get(number)
        if ticket is not None:
            ticket.cancel()

    def _load(self, name: str | None, chosen: dict[str, Any], log_level: int) -> bool:
        """Returns whether it writes answers; else it gives vectors or scores."""
        logging.getLogger("mtmd").setLevel(log_level)
        progress = sys.stderr.isatty()
        try:
            model: Model | Retriever = load(name, progress=progress, **chosen)
        except DualEncoderError as kind:
            assert name is not None  # the demo model is none
            model = load_retriever(name, kind, chosen, progress=progress)
        self._take(model, chosen)
        return isinstance(model, Model)

    def _take(self, model: Model | Retriever, chosen: dict[str, Any]) -> None:
        if chosen.get("threads") is None and model.checkpoint.weight_bytes < ONE_THREAD_BYTES:
            ask_threads(1, "as the model is very small")
        if isinstance(model, Model):
            model.loaded.start_workers()
        self._model = model

    def _open(self, path: str, chosen: dict[str, Any], name: str, log_level: int) -> dict[str, Any]:
        """One of several models, its weights not read yet."""
        logging.getLogger("mtmd").setLevel(log_level)
        if not is_demo(path):
            files = resolve_model(path, fetch=False)
            path = str(files.path)
            if files.projector and not chosen.get("mmproj"):
                chosen = chosen | {"mmproj": str(files.projector)}
        if chosen.get("threads") is None:
            ask_threads(None)
        model = load_alongside(path, **chosen)
        needs = predicted_bytes(model.loaded)
        if limits := self._memory(chosen)["limits"]:
            # Its own limit is what it is predicted to take, so that all keep that of all.
            ((space, limit),) = limits.items()
            own = min(needs.get(space, 0), limit)
            model = load_alongside(path, **chosen | {"memory_limit": own})
        model.loaded.name = name
        self._take(model, chosen)
        model.weights_read()  # plans are made for it, once
        return {
            "needs": needs,
            "context": model.runner.context,
            "sees": model.encoder is not None,
            "hears": model.loaded.audio_encoder is not None,
            "checkpoint": facts_of(model.checkpoint),
        }

    def _drop(self) -> None:
        model, self._model = self._model, None
        if isinstance(model, Model):
            model.loaded.close()
        del model
        gc.collect()  # models and their caches refer to each other in circles

    def _memory(self, chosen: dict[str, Any]) -> dict[str, dict[str, int]]:
        """Bytes by memory space, as far as they are known."""
        settings = options(LoadOptions, chosen)
        if not self._backends:
            self._backends = backends_for(settings.device, settings.refuse)
        limit = settings.memory_limit
        limits = {self._backends[0].space: limit} if isinstance(limit, int) else {}
        look_again()
        free = {backend.space: free_bytes(backend) for backend in self._backends}
        return {"limits": limits, "free": {s: n for s, n in free.items() if n is not None}}

    def _warm_up(self) -> Any:
        if isinstance(self.model, RETRIEVERS):
            return self.model.warm_up()
        return self.model.warm_up(lambda done, total: self._outbox.put(Compiled(done, total)))

    def _begin(self, queue: int, share_cache: bool, hang_s: float | None) -> dict[str, Any]:
        """Start the service; return what does not change of it."""
        writes = isinstance(self.model, Model)
        if isinstance(self.model, RETRIEVERS):
            self._service = RetrievalService(self.model)
        else:
            service = self._service = Service(
                self.model,
                queue=queue,
                share_cache=share_cache,
                hang_s=hang_s,
                gathered=self._outbox.gathered,
            )
            service.plan_ahead()
        self.service.on_fault(lambda fault: self._outbox.put(Failed(_public(fault))))
        self._ending.enter_context(shared_promptly())
        names = ["capacity", "thinks", "special_tokens"] if writes else ["width", "gives", "ranks"]
        names += ["name", "context", "sees", "instructions", "chat_template"]
        return {name: getattr(self.service, name) for name in names} | {
            "checkpoint": self.service.checkpoint_facts,
            "measures": self._measures(),
        }

    def _close(self, within_s: float | None) -> None:
        if self._service is not None:  # else it is being started again
            self.service.close(within_s)

    def _measures(self) -> Any:
        stats = self.service.stats()
        stats.engine_bytes, stats.engine_cpu_seconds = resident_bytes() or 0, time.process_time()
        return stats, self.service.latencies

    def _submit(
        self, numbers: Sequence[int], messages: Any, tenant: str, chosen: dict[str, Any]
    ) -> list[int]:
        """Return the bytes that are held for each ticket."""
        tickets = (
            [self.service.submit(messages, tenant=tenant, **chosen)]
            if len(numbers) == 1
            else self.service.submit_several(messages, len(numbers), tenant=tenant, **chosen)
        )
        for number, ticket in zip(numbers, tickets, strict=True):
            self._tickets[number] = ticket
            ticket.redirect(self._sink(number))
        return [ticket.stored for ticket in tickets]

    def _sink(self, number: int) -> Callable[[Event | BaseException], None]:
        tickets, put = self._tickets, self._outbox.put

        def sink(event: Event | BaseException) -> None:
            is_last = isinstance(event, (Finished, BaseException))
            if is_last:
                tickets.pop(number, None)
                event = _public(event) if isinstance(event, BaseException) else event
            put(TicketEvent(number, event), is_long=is_last and _is_long(event))

        return sink

    def _count(self, messages: Any, detail: str, tenant: str, chosen: dict[str, Any]) -> Any:
        return self.service.count(messages, detail, tenant=tenant, **chosen)


def _is_long(event: Event | BaseException) -> bool:
    """Return whether the end of an answer takes long to write."""
    if not isinstance(event, Finished):
        return False
    answer = event.answer
    count = len(answer.prompt_token_ids) + len(answer.output_token_ids)
    return count > SHORT or bool(answer.logprobs or answer.prompt_logprobs)


def end_by(error: BaseException) -> NoReturn:
    """End the process at once, as it can neither read nor write any more; the server notices."""
    try:
        print(f"mtmd engine: {traceback_text(error)}", file=sys.stderr, flush=True)
    finally:  # nobody may read that, either
        os._exit(FAILED)


def _public(error: BaseException) -> MtmdError:
    """An error as clients see it: one that is not raised on purpose is in the log alone."""
    if isinstance(error, MtmdError):
        return error
    log.error("a call has failed\n%s", traceback_text(error))
    return MtmdError(f"internal error: {type(error).__name__}")
