"""A model in a process of its own, as the server uses it: a `Service`, or an `RetrievalService`,
whose process is started again where it fails.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from mtmd.base.errors import DeviceError, EngineError, MtmdError
from mtmd.checkpoint.facts import CheckpointFacts
from mtmd.clip.audio.instructions import Instructions
from mtmd.clip.image.decode import Picture
from mtmd.embedding.receipt import Embeddings, Ranking, TokenEmbeddings
from mtmd.engine_process.connection import Connection
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.loaded.device_thread import AGAIN, TICK_S, Stall, again
from mtmd.prompt.conversation import Message, RawPrompt
from mtmd.prompt.load_image import load_isolated
from mtmd.service.latencies import Latencies
from mtmd.service.stats import ServiceStats, TokenCount
from mtmd.service.ticket import Ticket

if TYPE_CHECKING:  # not in typing before Python 3.11
    import numpy as np
    from typing_extensions import Self

MEASURE_LIMIT_S = 1.0  # for statistics; earlier ones are shown where it takes longer
MEASURED_AGAIN_S = 0.02
SILENT_S = 15.0  # without a beat, of which there are four a second, a process that answers hangs
SILENT_MIN_S = 5.0  # whatever limit was chosen: a busy machine may let it wait for a core
MORE_S = 5.0  # for a process to end, beyond what its requests may take
DELAY_S, DELAY_MAX_S = 0.5, 60.0  # before it is started again: twice as long each time
STARTS_MAX = 8  # in a row that fail, or after which it lives shorter than this:
STEADY_S = 60.0
log = logging.getLogger("mtmd.engine")


class EngineClient:
    """Client of an engine's process: a `Service`, once `load` or `open`, and `begin` have been
    called. `hang_s`: how long the process may give no sign of life; None for any time. `restarts`:
    once it answers, a process that fails is started again, as often as `STARTS_MAX` says; without,
    its failure is a fault, as that of a device is. Leave it as a context to end the process.

    Pictures and videos in messages are `Picture`s and videos by their bytes, as a server has them.
    """

    load_image: Callable[..., Picture] = staticmethod(load_isolated)
    """Decodes picture files, in this process's workers."""

    def __init__(self, *, hang_s: float | None = None, restarts: bool = False) -> None:
        """Start the process."""
        self._hang_s, self._restarts = hang_s, restarts
        self._lock = threading.Lock()
        self._steps: list[tuple[str, tuple[Any, ...]]] = []
        """The calls that have made it ready, for the next process."""
        self._facts: dict[str, Any] = {}
        self._measured, self._measured_until = (ServiceStats(), Latencies()), 0.0
        self._on_fault: list[Callable[[DeviceError], None]] = []
        self._changed = threading.Event()
        """The process has failed, or is to end."""
        self._ending = self._closing = self._closed = False
        self._ready_at, self._start_s, self._opened_as = 0.0, 0.0, ""
        self._failed_starts = 0
        self.fault: DeviceError | None = None
        """Why nothing can be answered any more."""
        self.writes = True
        """Whether it writes answers; else it gives vectors or scores."""
        self.failure: str | None = None
        """Why it is being started again."""
        self._connection: Connection
        started: SimpleQueue[BaseException | None] = SimpleQueue()
        self._supervisor = threading.Thread(
            target=self._supervise, args=(started,), name="mtmd engine supervisor", daemon=True
        )
        self._supervisor.start()
        error = started.get()
        if error is not None:
            raise error

    @property
    def pid(self) -> int:
        """Return the pid of the engine's process."""
        return self._connection.process.pid

    # Until it answers.

    def load(self, model: str | None, options: Mapping[str, Any]) -> None:
        """Do what `mtmd.load` does, or `load_retriever` for a model that writes none; a very small
        model computes with one thread unless a number was asked for. Raises MtmdError.
        """
        self.writes = self._step("load", model, dict(options), _log_level())

    def open(self, model: str, options: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Open one of several models, without reading its weights. Returns the fields of
        `web.models.entry.Facts`. Raises MtmdError.
        """
        self._opened_as = name
        facts: dict[str, Any] = self._step("open", model, dict(options), name, _log_level())
        return facts

    def drop(self) -> None:
        """Forget the model that was opened."""
        self._steps.clear()
        self._start_s, self._opened_as = 0.0, ""
        self._call("drop")

    def memory(self, options: Mapping[str, Any], limit_s: float | None = None) -> dict[str, Any]:
        """Bytes by memory space: "limits" that `options` ask for, and what is "free" now. Raises
        MtmdError, and Empty after `limit_s`.
        """
        spaces: dict[str, Any] = self._call("memory", dict(options), limit_s=limit_s)
        return spaces

    def weights_read(self) -> tuple[int, int]:
        """Do what `Model.weights_read` does, a moment ago."""
        return self._connection.weights_read

    def warm_up(self, progress: Callable[[int, int], None] = lambda *_: None) -> WarmupReport:
        """Do what `Model.warm_up` does."""
        self._connection.compiling = progress
        report: WarmupReport = self._step("warm_up")
        return report

    def begin(self, *, queue: int, share_cache: bool) -> None:
        """Answer from now on, as a service with these options."""
        self._facts = self._step("begin", queue, share_cache, self._hang_s)
        self._measured = self._facts["measures"]
        self._ready_at = time.monotonic()

    # As a service.

    @property
    def name(self) -> str:
        name: str = self._facts["name"]
        return name

    @property
    def context(self) -> int:
        context: int = self._facts["context"]
        return context

    @property
    def capacity(self) -> int:
        capacity: int = self._facts["capacity"]
        return capacity

    @property
    def width(self) -> int | None:
        width: int | None = self._facts["width"]
        return width

    @property
    def gives(self) -> str:
        gives: str = self._facts["gives"]
        return gives

    @property
    def ranks(self) -> bool:
        ranks: bool = self._facts["ranks"]
        return ranks

    @property
    def sees(self) -> bool:
        sees: bool = self._facts["sees"]
        return sees

    @property
    def instructions(self) -> Instructions | None:
        """Return what it is told to transcribe audio; None where it takes none."""
        result: Instructions | None = self._facts["instructions"]
        return result

    @property
    def thinks(self) -> bool:
        thinks: bool = self._facts["thinks"]
        return thinks

    @property
    def chat_template(self) -> str:
        source: str = self._facts["chat_template"]
        return source

    @property
    def special_tokens(self) -> dict[str, str]:
        spellings: dict[str, str] = self._facts["special_tokens"]
        return spellings

    @property
    def checkpoint_facts(self) -> CheckpointFacts:
        facts: CheckpointFacts = self._facts["checkpoint"]
        return facts

    @property
    def warmup_report(self) -> WarmupReport:
        report: WarmupReport = self._call("warmup_report")
        return report

    @property
    def busy(self) -> bool:
        return self._connection.busy

    def on_fault(self, report: Callable[[DeviceError], None]) -> None:
        self._on_fault.append(report)
        if self.fault is not None:
            report(self.fault)

    def submit(
        self, messages: Sequence[Message] | RawPrompt, *, tenant: str = "", **chosen: Any
    ) -> Ticket:
        return self.submit_several(messages, 1, tenant=tenant, **chosen)[0]

    def submit_several(
        self,
        messages: Sequence[Message] | RawPrompt,
        number: int,
        *,
        tenant: str = "",
        **chosen: Any,
    ) -> list[Ticket]:
        return self._ready().submit(number, messages, tenant, chosen)

    def count(
        self, messages: Sequence[Message], detail: str = "auto", *, tenant: str = "", **chosen: Any
    ) -> TokenCount:
        counted: TokenCount = self._call("count", messages, detail, tenant, chosen)
        return counted

    def text_of(self, tokens: Sequence[int]) -> str:
        text: str = self._call("text_of", list(tokens))
        return text

    def tokens_of(self, text: str, *, special: bool = True, around: bool = False) -> list[int]:
        tokens: list[int] = self._call("tokens_of", text, special, around)
        return tokens

    def spelling_of(self, tokens: Sequence[int]) -> str:
        text: str = self._call("spelling_of", list(tokens))
        return text

    def rendered(self, messages: Sequence[Message], **chosen: Any) -> str:
        text: str = self._call("rendered", messages, chosen)
        return text

    def processed(self, sha256: str, tenant: str = "") -> tuple[np.ndarray, ...] | None:
        tiles: tuple[np.ndarray, ...] | None = self._call("processed", sha256, tenant)
        return tiles

    def embeddings(
        self,
        pictures: Sequence[Picture],
        texts: Sequence[str],
        *,
        normalize: bool = True,
        whole: bool = False,
    ) -> Embeddings | TokenEmbeddings:
        """Do what `RetrievalService.embeddings` does."""
        made: Embeddings | TokenEmbeddings = self._call(
            "embeddings", list(pictures), list(texts), normalize, whole
        )
        return made

    def rank(self, query: Any, documents: Sequence[Any], instruction: str | None = None) -> Ranking:
        """Do what `RetrievalService.rank` does."""
        made: Ranking = self._call("rank", query, list(documents), instruction)
        return made

    def stats(self) -> ServiceStats:
        """Return the stats of this moment; of an earlier one where the process does not answer."""
        self._measure()
        return self._measured[0]

    @property
    def latencies(self) -> Latencies:
        """Do what `stats` does."""
        self._measure()
        return self._measured[1]

    def read_rate(self, device: str) -> float | None:
        rate: float | None = self._call("read_rate", device)
        return rate

    def close(self, within_s: float | None = None) -> None:
        """End every request. A process that does not do that `within_s` seconds and some more is
        given up: that is a fault.
        """
        if self._closed or not self._facts:
            return
        limit_s = None if within_s is None else within_s + MORE_S
        self._closing = True
        connection = self._connection
        try:
            connection.call("close", within_s, limit_s=limit_s)
            self._closed = True
        except Empty:
            connection.fail(f"the model's process has not ended what it does in {limit_s:.3g} s")
            self._supervisor.join(TICK_S)
        except MtmdError:
            if connection.failure is None:
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, and what is under way with it."""
        self._ending = True
        self._changed.set()
        if self.failure is not None or not self._facts:  # it may import or load for long
            self._connection.kill()
        self._supervisor.join()

    # Calls.

    def _call(self, name: str, *arguments: Any, limit_s: float | None = None) -> Any:
        """Do what `Connection.call` does. Raises EngineError while it is started again."""
        return self._ready().call(name, *arguments, limit_s=limit_s)

    def _ready(self) -> Connection:
        if self.fault is not None:
            raise again(self.fault)
        if self.failure is not None:
            raise self._error_of(self.failure)
        return self._connection

    def _step(self, name: str, *arguments: Any) -> Any:
        began = time.monotonic()
        value = self._call(name, *arguments)
        self._steps.append((name, arguments))
        self._start_s += time.monotonic() - began
        return value

    def _measure(self) -> None:
        """Both come together: who asks for one and then for the other waits once."""
        if time.monotonic() < self._measured_until:
            return
        with suppress(MtmdError, Empty):  # earlier ones are shown, then
            self._measured = self._call("measures", limit_s=MEASURE_LIMIT_S)
        self._measured_until = time.monotonic() + MEASURED_AGAIN_S

    # Supervision.

    def _error_of(self, reason: str) -> MtmdError:
        if not self._may_restart():
            return DeviceError(f"{reason}; {AGAIN}")
        wait_s = math.ceil(self._delay_s() + self._start_s)
        return EngineError(f"{reason}; it is restarting; try again in {wait_s} s", wait_s)

    def _named(self, text: str) -> str:
        """Return a line of the log, which says of which model it is."""
        name = self._facts.get("name", self._opened_as)
        return f"{name}: {text}" if name else text

    def _may_restart(self) -> bool:
        is_due = self._restarts and bool(self._facts) and not (self._closing or self._ending)
        return is_due and self._failed_starts < STARTS_MAX

    def _delay_s(self) -> float:
        return float(min(DELAY_S * 2**self._failed_starts, DELAY_MAX_S))

    def _failed(self, reason: str) -> None:
        """Note a failure, on any thread."""
        log.error("%s", self._named(reason))
        fault = None
        with self._lock:
            if self._ending or self._may_restart():
                self.failure = reason
            else:
                self.fault = fault = DeviceError(f"{reason}; {AGAIN}")
        self._changed.set()
        if fault is not None:
            for report in self._on_fault:
                report(fault)

    def _supervise(self, started: SimpleQueue[BaseException | None]) -> None:
        """Start the process, watch it, and start another one where it fails. All of them are
        started by this thread, as Linux ends a process with the thread that has started it.
        """
        try:
            self._connection = Connection(self._error_of, self._failed)
        except BaseException as error:
            started.put(error)
            return
        started.put(None)
        while self._watch(self._connection):
            self._connection.end()
            if self.fault is not None:
                return
            if time.monotonic() - self._ready_at > STEADY_S:
                self._failed_starts = 0
            self._changed.clear()
            if self._ending or self._changed.wait(self._delay_s()):
                return
            self._failed_starts += 1
            self._start_again()
        self._connection.end()

    def _watch(self, connection: Connection) -> bool:
        """Return True once it has failed, False once this is to end. A look that comes late counts
        as one that came in time. Until its first beat the process imports libraries, for any time.
        """
        stall, last = Stall(), time.monotonic()
        while not self._ending and connection.failure is None:
            hang_s = self._hang_s
            self._changed.wait(TICK_S if hang_s is None else min(TICK_S, hang_s / 4))
            if hang_s is None:
                continue
            limit_s = max(min(hang_s, SILENT_S) if self._facts else hang_s, SILENT_MIN_S)
            now = time.monotonic()
            passed, last = min(now - last, 2 * TICK_S), now
            if stall.look(connection.beats or None, passed) >= limit_s:
                connection.fail(
                    f"the model's process hangs: it has not responded for {limit_s:.3g} s"
                )
        return not self._ending

    def _start_again(self) -> None:
        try:
            connection = Connection(self._error_of, self._failed)
        except OSError as error:  # no process, or no memory for one
            self._failed(f"no process can be started ({error.strerror})")
            return
        self._connection = connection
        threading.Thread(
            target=self._prepare, args=(connection,), name="mtmd engine start", daemon=True
        ).start()

    def _prepare(self, connection: Connection) -> None:
        """Make a new process ready, as the one before was."""
        begun = time.monotonic()
        try:
            for name, arguments in self._steps:
                value = connection.call(name, *arguments)
        except MtmdError as error:
            connection.fail(str(error))
            return
        with self._lock:
            self._facts, self._ready_at = value, time.monotonic()
            self._start_s = self._ready_at - begun
            self.failure = None
        log.warning(
            "%s", self._named(f"the model's process was started again in {self._start_s:.1f} s")
        )


def _log_level() -> int:
    return logging.getLogger("mtmd").getEffectiveLevel()
