"""The engine's process as a service: what the server asks of a `Service`, asked of that."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from mtmd.base.errors import DeviceError, LeftError, MtmdError
from mtmd.base.isolation.channel import ChannelClosed
from mtmd.base.tracebacks import traceback_text
from mtmd.base.turns import goes_first
from mtmd.base.wanted import LOOKED_S, is_gone, left, may_be_left
from mtmd.checkpoint.facts import CheckpointFacts
from mtmd.clip.image.decode import Picture
from mtmd.engine_process.outbox import Outbox
from mtmd.engine_process.process import Process
from mtmd.events import Finished
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.loaded.device_thread import AGAIN, CLOSED, TICK_S, Stall, again
from mtmd.prompt.conversation import Message, RawPrompt
from mtmd.prompt.load_image import load_isolated
from mtmd.service.latencies import Latencies
from mtmd.service.stats import ServiceStats, TokenCount
from mtmd.service.ticket import Ticket
from mtmd.service.turns import aside, for_whom

if TYPE_CHECKING:  # not in typing before Python 3.11
    import numpy as np
    from typing_extensions import Self

MEASURED_S = 1.0  # for its numbers; they are those of before where it takes longer
QUIET_S = 1.0  # at least, before it is given up: it says four times a second that it lives
OF_THIS_MOMENT_S = 0.02  # that they are
MORE_S = 5.0  # than it has to end what it does
log = logging.getLogger("mtmd.engine")
Reply = tuple[Any, "BaseException | None"]


class EngineClient:
    """As a `Service`, once `load` and `begin` have been called. `hang_s`: how long the process may
    give no sign of life; None for any time. To be left as a context: the process ends.

    Its end is a fault, as that of a device is. Pictures and videos in messages are `Picture`s and
    videos by their bytes, as a server has them.
    """

    load_image: Callable[..., Picture] = staticmethod(load_isolated)
    """How files become pictures: in this process's workers."""

    def __init__(self, *, hang_s: float | None = None) -> None:
        """Starts the process. Raises OptionError where the system has no such."""
        self._hang_s, self._ids = hang_s, itertools.count(1)
        self._lock = threading.Lock()
        self._replies: dict[int, SimpleQueue[Reply]] = {}
        self._tickets: dict[int, Ticket] = {}
        self._numbers: dict[Ticket, int] = {}
        self._beats, self._read, self._loaded = 0, (0, 0), False
        self._compiling: Callable[[int, int], None] = lambda *_: None
        self._measured, self._measured_until = (ServiceStats(), Latencies()), 0.0
        self._on_fault: list[Callable[[DeviceError], None]] = []
        self._ending = threading.Event()
        self._facts: dict[str, Any] = {}
        self._closed = False
        self.fault: DeviceError | None = None
        """Why nothing can be answered any more."""
        self._process = Process()
        self._outbox = Outbox(self._process.link, self._mute)
        """For what nobody waits for."""
        self._threads = [
            threading.Thread(target=run, name=f"mtmd engine {what}", daemon=True)
            for what, run in (("reader", self._listen), ("watch", self._watch))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    # Until it answers.

    def load(self, model: str | None, options: dict[str, Any], small_bytes: int) -> None:
        """As `mtmd.load`, there. `small_bytes`: of weights, below which one thread computes unless
        a number was asked for. Raises MtmdError.
        """
        level = logging.getLogger("mtmd").getEffectiveLevel()
        self._call("load", model, options, level, small_bytes)

    def weights_read(self) -> tuple[int, int]:
        """As `Model.weights_read`, a moment ago."""
        return self._read

    def warm_up(self, progress: Callable[[int, int], None]) -> WarmupReport:
        """As `Model.warm_up`."""
        self._compiling = progress
        report: WarmupReport = self._call("warm_up")
        return report

    def begin(self, *, queue: int, share_cache: bool) -> None:
        """It answers from now on: a service with these options, whose plans are made ahead."""
        self._facts = self._call("begin", queue, share_cache, self._hang_s)
        self._measured = self._facts["measures"]

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
    def sees(self) -> bool:
        sees: bool = self._facts["sees"]
        return sees

    @property
    def thinks(self) -> bool:
        thinks: bool = self._facts["thinks"]
        return thinks

    @property
    def chat_template(self) -> str:
        source: str = self._facts["chat_template"]
        return source

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
        return bool(self._tickets)

    def on_fault(self, tell: Callable[[DeviceError], None]) -> None:
        self._on_fault.append(tell)
        if self.fault is not None:
            tell(self.fault)

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
        tickets = [Ticket(self._give_up) for _ in range(number)]
        with self._lock:
            numbers = [next(self._ids) for _ in tickets]
            self._tickets.update(zip(numbers, tickets, strict=True))
            self._numbers.update(zip(tickets, numbers, strict=True))
        try:
            held = self._call("submit", messages, tenant, chosen, tickets=numbers)
        except BaseException:
            for one in numbers:
                self._over(one)
            raise
        for ticket, count in zip(tickets, held, strict=True):
            ticket.held = count
        return tickets

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

    def stats(self) -> ServiceStats:
        """Of this moment; of an earlier one where the process does not answer."""
        self._measure()
        return self._measured[0]

    @property
    def latencies(self) -> Latencies:
        """As `stats`."""
        self._measure()
        return self._measured[1]

    def read_rate(self, device: str) -> float | None:
        rate: float | None = self._call("read_rate", device)
        return rate

    def close(self, within_s: float | None = None) -> None:
        """End every request. A process that does not come to that `within_s` seconds and some more
        is given up: that is a fault.
        """
        if self._closed or not self._facts:
            return
        limit_s = None if within_s is None else within_s + MORE_S
        try:
            self._call("close", within_s, limit_s=limit_s)
            self._closed = True
        except Empty:
            self._fail(f"the engine's process has not ended what it does in {limit_s:.3g} s")
        except MtmdError:
            if self.fault is None:
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The process ends, and what is under way with it."""
        self._ending.set()
        if self.fault is None and self._facts:
            self._process.end()
        else:
            self._process.link.end()  # one that the system keeps would keep who listens to it
            self._process.kill()
        for thread in self._threads:
            thread.join()
        self._outbox.close()
        self._process.link.close()

    # Between the two.

    def _call(
        self, name: str, *arguments: Any, tickets: Sequence[int] = (), limit_s: float | None = None
    ) -> Any:
        """Raises what it raises there, DeviceError after a fault, LeftError where nobody waits for
        it any more, and Empty where it takes longer than `limit_s`.
        """
        reply: SimpleQueue[Reply] = SimpleQueue()
        with self._lock:
            if self.fault is not None:
                raise again(self.fault)
            if self._ending.is_set():
                raise MtmdError(CLOSED)
            number = next(self._ids)
            self._replies[number] = reply
        try:
            with aside():
                with suppress(ChannelClosed):  # whoever listens tells everybody
                    call = name, for_whom(), arguments, tickets
                    self._process.link.send([("call", number, call)])
                value, error = self._waited(reply, limit_s)
        except LeftError:
            self._outbox.put(("leave", number, tickets))
            raise
        finally:
            with self._lock:
                self._replies.pop(number, None)
        if error is not None:
            raise error
        return value

    def _waited(self, reply: SimpleQueue[Reply], limit_s: float | None) -> Reply:
        end = None if limit_s is None else time.monotonic() + limit_s
        gone, looks = is_gone(), LOOKED_S if may_be_left() else None
        while True:
            waits = [looks, None if end is None else max(0.0, end - time.monotonic())]
            try:
                return reply.get(timeout=min((w for w in waits if w is not None), default=None))
            except Empty:
                if end is not None and time.monotonic() >= end:
                    raise
                if gone():
                    raise left() from None

    def _measure(self) -> None:
        """Both come together: who asks for one and then for the other waits once."""
        if time.monotonic() < self._measured_until:
            return
        with suppress(MtmdError, Empty):  # they are those of before, then
            self._measured = self._call("measures", limit_s=MEASURED_S)
        self._measured_until = time.monotonic() + OF_THIS_MOMENT_S

    def _give_up(self, ticket: Ticket) -> None:
        number = self._numbers.get(ticket)
        if number is not None:
            self._outbox.put(("cancel", number, None))

    def _over(self, number: int) -> Ticket | None:
        """Nothing comes for it any more."""
        with self._lock:
            ticket = self._tickets.pop(number, None)
            if ticket is not None:
                del self._numbers[ticket]
        return ticket

    def _listen(self) -> None:
        try:
            while True:
                items = self._process.link.receive()
                self._beats += 1
                with goes_first():
                    for what, number, value in items:
                        self._take(what, number, value)
        except ChannelClosed:
            if self._ending.is_set():
                self._tell(lambda: MtmdError(CLOSED))
            else:
                self._fail(f"the engine's process has ended ({self._process.how_it_ended()})")
        except Exception as error:
            log.error("%s", traceback_text(error))
            self._fail(f"the engine's process said what cannot be read: {type(error).__name__}")

    def _mute(self, error: BaseException) -> None:
        log.error("%s", traceback_text(error))
        self._fail(f"the engine's process cannot be told any more: {type(error).__name__}")

    def _take(self, what: str, number: int, value: Any) -> None:
        if what == "event":
            is_last = isinstance(value, (Finished, BaseException))
            ticket = self._over(number) if is_last else self._tickets.get(number)
            if ticket is not None:
                ticket.put(value)
        elif what in ("reply", "error"):
            reply = self._replies.get(number)
            if reply is not None:
                reply.put((value, None) if what == "reply" else (None, value))
        elif what == "beat":
            self._read = value
        elif what == "compiling":
            self._compiling(*value)
        elif what == "log":
            name, text = value
            logging.getLogger(name).log(number, "%s", text)
        elif what == "fault":
            self._given_up(value)

    def _watch(self) -> None:
        """A look that comes late counts as one that came in time, as with a device's thread. Until
        its first sign of life it imports libraries, however long that takes.
        """
        stall, last = Stall(), time.monotonic()
        limit_s = max(self._hang_s or 0.0, QUIET_S)
        while self._hang_s is not None and not self._ending.wait(min(TICK_S, self._hang_s / 4)):
            now = time.monotonic()
            passed, last = min(now - last, 2 * TICK_S), now
            if self.fault is not None:
                return
            if stall.look(self._beats or None, passed) >= limit_s:
                self._fail(
                    f"the engine's process hangs: it has given no sign of life for {limit_s:.3g} s"
                )

    def _fail(self, message: str) -> None:
        """Nothing that it may yet do is waited for."""
        self._given_up(DeviceError(f"{message}; {AGAIN}"), is_left=True)

    def _given_up(self, fault: DeviceError, *, is_left: bool = False) -> None:
        with self._lock:
            if self.fault is not None:
                return
            self.fault = fault
        if is_left:
            log.error("%s", fault)
            # One that does not read keeps whoever sends to it.
            self._process.link.end()
        self._tell(lambda: again(fault))
        for tell in self._on_fault:
            tell(fault)

    def _tell(self, error: Callable[[], MtmdError]) -> None:
        """All who wait, as nothing comes any more; each has an error of his own."""
        with self._lock:
            replies, tickets = list(self._replies.values()), list(self._tickets.values())
            self._replies, self._tickets, self._numbers = {}, {}, {}
        for reply in replies:
            reply.put((None, error()))
        for ticket in tickets:
            ticket.put(error())
