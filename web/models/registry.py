"""Several models behind one server: which are in memory, who waits for which. One thread loads and
unloads, as `schedule.py` says; requests choose a model on their own threads, and wait there until
it is loaded.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from flask import Flask, g

from mtmd import DeviceError, MtmdError
from mtmd.base.cancellation import is_gone, left
from mtmd.base.tracebacks import traceback_text
from mtmd.base.turns import current_owner
from mtmd.checkpoint.collection import MAXIMUM, Source
from mtmd.checkpoint.hub import DEMO, DEMO_NAME, NotInCacheError
from mtmd.web.errors import ApiError
from mtmd.web.intake.slots import Slots
from mtmd.web.models.choice import (
    FAILED,
    FETCHING,
    LOADED,
    LOADING,
    UNLOADED,
    UNLOADING,
    Claim,
    Listed,
)
from mtmd.web.models.entry import Entry, Facts, Loader, Opened, Waiter
from mtmd.web.models.fetching import Fetches
from mtmd.web.models.progress import WAITS, Loading
from mtmd.web.models.refusals import (
    busy,
    ending,
    fetching,
    not_here,
    not_loaded,
    reason_for,
    reason_of,
    refuse_waiters,
    too_large,
)
from mtmd.web.models.schedule import (
    Close,
    Load,
    Loads,
    Refuse,
    Reopen,
    Room,
    Standing,
    Step,
    Unload,
    Wait,
    fits,
    next_step,
    room_for,
)
from mtmd.web.served_model import ServedModel
from mtmd.web.telemetry.metrics import Life, Measured

if TYPE_CHECKING:
    import numpy as np

MAX_WAITING = 32  # requests that wait for models to be loaded, each on a thread
LONGEST_WAIT_S = 900.0
GONE_EVERY_S = 1.0  # looks whether who waits is still there
UNASKED_S = 60.0  # after which nobody is taken to come for a model that was claimed
TRIED_AGAIN_S = 30.0  # after which a model that could not be loaded is tried again
ENDING_S = 20.0  # for a load under way, when the server ends
AGAIN_S = 1.0  # after an error that nobody has foreseen
SPARE = 16  # a part in so many of what is free at the start is left to others
_CHOSEN = "chosen_models"
log = logging.getLogger("mtmd.models")


class _Claim:
    def __init__(self, registry: Registry, entry: Entry, waiter: Waiter) -> None:
        self.entry = entry
        self._registry, self._waiter = registry, waiter
        self._last = waiter.seen + LONGEST_WAIT_S

    @property
    def how_far(self) -> float | None:
        progress = self.entry.progress
        return None if progress is None else progress.progress

    @property
    def stage(self) -> tuple[str, float | None]:
        progress = self.entry.progress
        if progress is None:
            return "", None
        share = progress.share
        return progress.stage, None if share is None else round(share, 2)

    def wait(self, seconds: float = math.inf) -> bool:
        waiter = self._waiter
        if not waiter.is_over:
            until = time.monotonic() + seconds
            if not self._registry.wait(self.entry, waiter, until, self._last):
                return False
        if waiter.error is not None:
            raise waiter.error
        return True

    def keep(self) -> None:
        """Keep it in use until `Registry.give_back`. Raises what `wait` would."""
        self._registry.keep(self.entry, self._waiter)

    def chosen(self) -> ServedModel:
        self.keep()
        g.setdefault(_CHOSEN, []).append(self.entry)
        return self._served()

    @contextmanager
    def using(self) -> Iterator[ServedModel]:
        self.keep()
        try:
            yield self._served()
        finally:
            self._registry.give_back(self.entry)

    def _served(self) -> ServedModel:
        served = self.entry.served
        if served is None:  # the server has ended meanwhile
            raise ending()
        return served

    def give_back(self) -> None:
        self._registry.forget(self.entry, self._waiter)


class Registry:
    """`maximum` models at once, None for as many as fit. `limits`: bytes of memory for all of them,
    by space, None for what is free now but a part. `unload_after_s`: without use, None for never.
    `ends_on_fault`: a fault of one model is one of the server; without, that model is unloaded, and
    loaded again for the next request. `default`: the name of the model for requests that name none;
    without it they go to the one of those in memory that was used last, or the first. `any_name`:
    the default, or the first, stands for every name that is not here, too. `new_entry` makes what
    `add` adds.
    """

    many = True

    def __init__(
        self,
        entries: Sequence[Entry],
        loader: Loader,
        *,
        slots: int,
        maximum: int | None = None,
        limits: Mapping[str, int] | None = None,
        unload_after_s: float | None = None,
        default: str | None = None,
        any_name: bool = False,
        ends_on_fault: bool = False,
        new_entry: Callable[[Source], Entry] = Entry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._by_name = {name: entry for entry in entries for name in entry.names}
        if DEMO in self._by_name:
            self._by_name.setdefault(DEMO_NAME, self._by_name[DEMO])
        self._loader, self._clock, self._new_entry = loader, clock, new_entry
        self._maximum, self._unload_after_s = maximum, unload_after_s
        self._limits = dict(limits or {})
        for space, free in loader.free().items():
            self._limits.setdefault(space, free - free // SPARE)
        self.slots, self._any_name = slots, any_name
        self._chosen = default is not None
        self._default = entries[0] if default is None else self._by_name[default]
        self._changed, self._closing = threading.Condition(), threading.Lock()
        self._slots = Slots("requests wait until their model is in memory", MAX_WAITING)
        self._loads, self._fetches = Loads(), Fetches(loader, self._fetched)
        self._to_survey = [entry for entry in entries if entry.source.is_here]
        self._ending, self._ends_on_fault = False, ends_on_fault
        self._lost: list[tuple[Entry, DeviceError]] = []
        """Models whose engines have failed for good."""
        self._thread: threading.Thread | None = None
        self._report: list[Callable[[DeviceError], None]] = []
        self.fault: DeviceError | None = None

    # what requests ask

    def register(self, app: Flask) -> None:
        """Register hooks, so that what a request has chosen is let go of at its end: its answers
        are the service's then.
        """

        @app.teardown_request
        def _give_back(_: BaseException | None) -> None:
            for entry in g.pop(_CHOSEN, ()):
                self.give_back(entry)

    def choose(self, name: str | None) -> ServedModel:
        """Choose the model for the request that is being answered: it stays in memory until that is
        done. Raises ApiError, BusyError, DeviceError, LeftError.
        """
        return self._waited_for(name, current_owner()).chosen()

    def take(self, name: str | None, client: str = "") -> Entry:
        """A model that is in memory, and stays there until `give_back`. `client`: for whom; places
        to wait are shared out among clients. Raises ApiError, BusyError, DeviceError, LeftError.
        """
        claim = self._waited_for(name, client)
        claim.keep()
        return claim.entry

    def _waited_for(self, name: str | None, client: str) -> _Claim:
        claim = self._claim(name, client)
        try:
            claim.wait()
        except BaseException:
            claim.give_back()
            raise
        return claim

    def claim(self, name: str | None) -> Claim:
        return self._claim(name, current_owner())

    def _claim(self, name: str | None, client: str) -> _Claim:
        with self._changed:
            if self.fault is not None:
                raise DeviceError(str(self.fault))
            if self._ending:
                raise ending()
            self._without_gone()
            entry, now = self._find(name), self._clock()
            waiter = Waiter(now, client, is_gone=is_gone())
            if entry.state == LOADED:
                entry.let_in(waiter, now)
                entry.to_unload = False
                return _Claim(self, entry, waiter)
            self._check_failed(entry, now)
            if not entry.source.is_here:
                self._fetch(entry, client)
                self._check_failed(entry, now)
                raise fetching(entry)
            waiter.leave = self._slots.take(client)
            entry.waiters.append(waiter)
            self._changed.notify_all()
        return _Claim(self, entry, waiter)

    def wait(self, entry: Entry, waiter: Waiter, until: float, last: float) -> bool:
        """Return whether it is over before `until`; at `last` it is. Both by `time.monotonic`."""
        while True:
            with self._changed:
                left_s = max(0.0, min(GONE_EVERY_S, until - time.monotonic()))
                self._changed.wait_for(lambda: waiter.is_over, left_s)
                waiter.seen = now = time.monotonic()
                if not waiter.is_over and now > last:
                    self._end(entry, waiter, busy(entry))
                self._without_gone()
                if waiter.is_over:
                    return True
                if now >= until:
                    return False

    def keep(self, entry: Entry, waiter: Waiter) -> None:
        with self._changed:
            if waiter.error is not None:
                raise waiter.error
            entry.may_choose.remove(waiter)

    def forget(self, entry: Entry, waiter: Waiter) -> None:
        """Forget a request that does not wait any more, or does not choose what it has waited
        for.
        """
        with self._changed:
            self._end(entry, waiter, left())

    def _without_gone(self) -> None:
        """Claims end of those who have left, and of whom nobody has asked for long whether it is
        there: whoever holds their responses may be late, or never come.
        """
        now = time.monotonic()
        for entry in self._entries.values():
            for waiter in [*entry.waiters, *entry.may_choose]:
                if waiter.is_gone():
                    self._end(entry, waiter, left())
                elif now - waiter.seen > UNASKED_S:
                    self._end(entry, waiter, busy(entry))

    def _end(self, entry: Entry, waiter: Waiter, error: Exception) -> None:
        """End a claim, unless it has ended."""
        if waiter in entry.waiters:
            entry.waiters.remove(waiter)
        elif waiter in entry.may_choose:
            entry.may_choose.remove(waiter)
            entry.users -= 1
            entry.used_at = self._clock()
        else:
            return
        waiter.refuse(error)
        self._changed.notify_all()

    def give_back(self, entry: Entry) -> None:
        with self._changed:
            entry.users -= 1
            entry.used_at = self._clock()
            self._changed.notify_all()

    def _check_failed(self, entry: Entry, now: float) -> None:
        """Refuse what could not be loaded a moment ago: it is not tried for every request anew."""
        if entry.state == FAILED and now - entry.failed_at < TRIED_AGAIN_S:
            raise not_loaded(entry)

    def at_hand(self, name: str | None = None) -> ServedModel | None:
        """Return it without waiting, and without keeping it: None where it is not in memory.
        Without a name the one of those in memory that was used last.
        """
        with self._changed:
            entry = self._used_last() if name is None else self._find(name)
            return None if entry is None else entry.served

    def find(self, name: str | None) -> Listed:
        room = self._room()
        with self._changed:
            return self._listed([self._find(name)], room)[0]

    def listed(self) -> list[Listed]:
        room = self._room()
        with self._changed:
            return self._listed(self._entries.values(), room)

    def room(self) -> dict[str, dict[str, int]]:
        """Return the room by memory space: the bytes for all models, what those in memory are
        predicted to take of them, and what is free.
        """
        free = self._loader.free()
        with self._changed:
            loaded = [e for e in self._entries.values() if e.opened is not None]
            return {
                space: {
                    "limit": limit,
                    "taken": sum(e.needs.get(space, 0) for e in loaded),
                    "free": free.get(space, 0),
                }
                for space, limit in self._limits.items()
            }

    def add(self, source: Source) -> None:
        """Have one model more, and load it as `load` does. Raises ApiError."""
        with self._changed:
            if source.name not in self._by_name:
                if len(self._entries) >= MAXIMUM:
                    raise ApiError(400, f"found {MAXIMUM} models, the maximum", code="not_added")
                entry = self._new_entry(source)  # new mappings: others may be reading these
                self._entries = {**self._entries, entry.name: entry}
                self._by_name = dict.fromkeys(entry.names, entry) | self._by_name
        self.load(source.name)

    def load(self, name: str) -> None:
        """Have it loaded, and fetched before where it is not here, without waiting for that; also
        one that could not be a moment ago. Raises ApiError.
        """
        with self._changed:
            entry = self._find(name)
            if entry.state == FAILED:
                entry.state = UNLOADED
            if not entry.source.is_here:
                self._fetch(entry, current_owner())
            elif entry.state not in (LOADED, LOADING):
                self._request(entry, current_owner())
            entry.to_unload = False
            self._changed.notify_all()

    def _request(self, entry: Entry, client: str) -> None:
        if entry.requested_at is None:
            entry.requested_at, entry.requested_by = self._clock(), client

    def _fetch(self, entry: Entry, client: str) -> None:
        """Fetch a model, which is loaded then. Requests for it meanwhile do not wait: that may take
        long, and others need the places.
        """
        self._request(entry, client)
        if entry.state != FETCHING and not self._ending:
            entry.state, entry.reason = FETCHING, ""
            entry.progress = Loading(self._clock, WAITS)
            self._fetches.add(entry, entry.progress)

    def _fetched(self, entry: Entry, result: Source | BaseException) -> None:
        with self._changed:
            if entry.state != FETCHING:  # an internal error came between; it is asked for again
                return
            if isinstance(result, BaseException):
                self._failed(entry, self._problem(entry, result))
                return
            entry.source, entry.state, entry.progress = result, UNLOADED, None
            if entry.requested_at is not None:
                entry.requested_at = self._clock()
            self._changed.notify_all()
        log.info("%s fetched, %d bytes", entry.name, result.bytes)

    def unload(self, name: str, within_s: float = 0.0) -> bool:
        """Have it unloaded once nobody uses it; who asks for it after this keeps it. Of one that
        other clients have used too, and would have to be loaded for again, that is a pause of a
        turn. Wait `within_s` for its process to end, unless somebody uses it. Raises ApiError.
        """
        with self._changed:
            entry, client = self._find(name), current_owner()
            if entry.requested_by == client:
                entry.requested_at = None
            entry.to_unload = entry.is_loaded or entry.state == LOADING
            entry.to_unload_by = client
            self._changed.notify_all()
            self._changed.wait_for(lambda: entry.in_use or not entry.to_unload, within_s)
        return True

    def loading(self) -> dict[str, Any] | None:
        """Return how far the one is that is being loaded, or, where none is, fetched. Without the
        lock, and without a look at the disk: the loop of connections asks.
        """
        under_way = ((e.state == FETCHING, e.progress) for e in self._entries.values())
        result = [(fetched, p.waits, p) for fetched, p in under_way if p is not None]
        return min(result, key=itemgetter(0, 1))[2].asdict() if result else None

    @property
    def fetching(self) -> bool:
        """Return whether anything is being fetched, also after the end."""
        return self._fetches.under_way

    def failures(self) -> dict[str, str]:
        """Return it without the lock, as `loading`."""
        services = {e.name: e.served.service for e in self._entries.values() if e.served}
        return {name: s.failure for name, s in services.items() if s.failure is not None}

    def measured(self) -> list[Measured]:
        with self._changed:
            entries = [e for e in self._entries.values() if e.loads]
        return [Measured({"model": e.name}, e.stats(), e.latencies()) for e in entries]

    def lives(self) -> dict[str, Life]:
        with self._changed:
            self._without_gone()
            return {
                e.name: Life(e.is_loaded, e.loads, e.failures, e.load_seconds, len(e.waiters))
                for e in self._entries.values()
            }

    def processed(self, sha256: str, tenant: str) -> tuple[np.ndarray, ...] | None:
        with self._changed:
            served = [e.served for e in self._entries.values() if e.served is not None]
        result = (s.service.processed(sha256, tenant) for s in served)
        return next((tiles for tiles in result if tiles is not None), None)

    @property
    def busy(self) -> bool:
        """Return whether anything is being answered, or waits for a model."""
        with self._changed:
            self._without_gone()
            return bool(self._slots.taken) or any(e.in_use for e in self._entries.values())

    def on_fault(self, report: Callable[[DeviceError], None]) -> None:
        """`report` is called, on any thread, once there is one; at once where there is."""
        with self._changed:
            self._report.append(report)
            fault = self.fault
        if fault is not None:
            report(fault)

    # the thread that loads and unloads

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="mtmd models", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all answers, those first: a load under way may take long. Nothing is loaded any
        more.
        """
        with self._changed:
            self._ending = True
            self._fetches.end()
            for entry in self._entries.values():
                refuse_waiters(entry, ending)
            services = [e.served.service for e in self._entries.values() if e.served is not None]
            self._changed.notify_all()
        # Beside each other: a device may be in a long step.
        ends = [threading.Thread(target=s.close, args=(ENDING_S,), daemon=True) for s in services]
        for end in ends:
            end.start()
        for end in ends:
            end.join()
        with self._closing:
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(ENDING_S)  # a load that takes longer is not waited for
            for entry in self._entries.values():
                if entry.opened is not None:
                    self._unload(entry)
            self._loader.close()

    def _run(self) -> None:
        """Run to the end, whatever goes wrong on the way: no other thread loads anything. What a
        library in Rust panics with is no Exception.
        """
        while True:
            step: Step | None = None
            try:
                room = self._room()
                with self._changed:
                    if self._ending or self.fault is not None:
                        return
                    lost, self._lost = self._lost, []
                for entry, error in lost:
                    self._give_up(entry, error)
                with self._changed:
                    step = self._next_step(room)
                    if isinstance(step, Wait) and not self._to_survey:
                        if not self._lost:
                            self._changed.wait(step.seconds)
                        continue
                self._do(step)
            except BaseException as error:
                self._unforeseen(step, error)

    def _unforeseen(self, step: Step | None, error: BaseException) -> None:
        """Report an unforeseen error to those who wait for the model of this step, and, where no
        step was found, everybody who waits.
        """
        log.error("models: an internal error\n%s", traceback_text(error))
        if step is not None and not isinstance(step, Wait):
            self._give_up(self._entries[step.name], error)
            return
        with self._changed:
            for entry in self._entries.values():
                if entry.waiters or entry.requested_at is not None:
                    self._failed(entry, reason_for(entry, error))
            self._changed.wait_for(lambda: self._ending, AGAIN_S)

    def _give_up(self, entry: Entry, error: BaseException) -> None:
        """Give a model up. Its memory is not counted any more, so it has to be given back first, as
        far as it can be.
        """
        with self._changed:
            opened, entry.served = entry.opened, None
            entry.state = UNLOADING  # nobody is let in
        if opened is not None:
            _try_to_close(opened)
        with self._changed:
            entry.opened = None
            self._failed(entry, reason_for(entry, error))

    def _do(self, step: Step) -> None:
        """Do what has been decided."""
        if isinstance(step, Wait):
            if self._to_survey:
                seen = self._to_survey.pop(0)
                if seen.facts is None and seen.state == UNLOADED:
                    self._survey(seen)
                if not self._to_survey:
                    self._loader.surveyed()
            return
        if isinstance(step, (Unload, Close)) and (unknown := self._unknown()) is not None:
            self._survey(unknown)  # nobody makes room for one that cannot be loaded anyway
            return
        entry = self._entries[step.name]
        if isinstance(step, Load):
            self._load(entry)
        elif isinstance(step, Unload):
            with self._changed:
                if entry.in_use:  # somebody came in between
                    return
                entry.state = UNLOADING
            self._unload(entry)
        else:
            with self._changed:
                if isinstance(step, Close):
                    entry.state, entry.closed_at = UNLOADING, self._clock()
                elif isinstance(step, Reopen):
                    entry.state, entry.requested_at = LOADED, None
                    if step.in_vain:
                        entry.begin_turn(self._clock(), in_vain=True)
                    self._let_in_all(entry)
                elif isinstance(step, Refuse):
                    reason = too_large(step)
                    log.error("%s cannot be loaded: %s", entry.name, reason)
                    self._failed(entry, reason)

    def _next_step(self, room: Room) -> Step:
        self._without_gone()
        now = self._clock()
        for entry in self._entries.values():
            if entry.is_loaded and entry.in_use:
                entry.used_at = now
        later_s = self._loads.later_s(now)
        standings = [entry.standing(now, later_s) for entry in self._entries.values()]
        return next_step(standings, room, now)

    def _loaded(self) -> list[Standing]:
        now = self._clock()
        return [e.standing(now, {}) for e in self._entries.values() if e.is_loaded]

    def _room(self) -> Room:
        """Not to be asked for while others wait for the lock: a driver may take its time."""
        return Room(self._maximum, self._limits, self._loader.free(), self._unload_after_s)

    def _unknown(self) -> Entry | None:
        """One that is waited for, and was not opened yet."""
        with self._changed:
            waiting = (e for e in self._entries.values() if e.requesting())
            return next((e for e in waiting if e.facts is None and e.source.is_here), None)

    def _survey(self, entry: Entry) -> None:
        """Find out what a model would take, which is known once it was opened; nothing of it is
        read.
        """
        try:
            opened = self._loader.open(entry.source, entry.preset)
            facts: Facts | None = opened.facts
            opened.close()
            problem = ""
        except BaseException as error:
            facts, problem = None, self._problem(entry, error)
        with self._changed:
            if facts is not None:
                entry.facts = facts
            elif entry.requesting():
                self._failed(entry, problem)
            elif entry.state == UNLOADED:
                entry.state, entry.reason, entry.failed_at = FAILED, problem, -TRIED_AGAIN_S

    def _load(self, entry: Entry) -> None:
        with self._changed:
            entry.state, entry.progress, entry.reason = LOADING, Loading(self._clock), ""
            self._changed.notify_all()
            clients = set(entry.requesting())
        began, problem = self._clock(), ""
        opened: Opened | None = None
        served: ServedModel | None = None
        try:
            opened = self._loader.open(entry.source, entry.preset)
            if not self._may_go_on(entry, opened):
                return
            entry.progress.warming(opened.weights_read)
            served = opened.start(entry.preset.aliases, entry.preset)
            entry.opened = opened  # whatever goes wrong from here on, it is known and closed
        except BaseException as error:
            problem = self._problem(entry, error)
        if served is None:  # after the exception is gone, which holds on to the model
            if opened is not None:
                _try_to_close(opened)
            with self._changed:
                now = self._clock()
                self._loads.add(clients, now - began, now)
                self._failed(entry, problem)
            return
        served.service.on_fault(partial(self._on_fault, entry))
        with self._changed:
            now = self._clock()
            entry.served, entry.progress = served, None
            entry.state, entry.requested_at = LOADED, None
            entry.used_at = now
            entry.begin_turn(now)
            entry.took_s = now - began
            entry.loads += 1
            entry.load_seconds += entry.took_s
            entry.used_by.clear()
            self._loads.add({*clients, *entry.requesting()}, entry.took_s, now)
            self._let_in_all(entry)
            self._changed.notify_all()
        log.info("%s loaded in %.1f s", entry.name, entry.took_s)

    def _problem(self, entry: Entry, error: BaseException) -> str:
        """Return the problem for clients, in one line, without the place where its files lie. The
        log has all of it, and of a mistake of ours the traceback.
        """
        if isinstance(error, NotInCacheError):  # it was removed; the next time it is fetched
            entry.source = replace(entry.source, bytes=None)
        reason = reason_of(error)
        if isinstance(error, (MtmdError, OSError, MemoryError)):
            log.error("%s cannot be loaded: %s", entry.name, reason)
        else:
            log.error("%s cannot be loaded\n%s", entry.name, traceback_text(error))
        return reason_for(entry, error)

    def _may_go_on(self, entry: Entry, opened: Opened) -> bool:
        """Return what it takes may be known only now, and be more than was thought: then others
        make room first.
        """
        room = self._room()
        with self._changed:
            known, entry.facts = entry.needs, opened.facts
            this = entry.standing(self._clock(), {})
            if known == entry.needs or fits(this, self._loaded(), room):
                return True
            entry.state, entry.progress, entry.to_unload = UNLOADED, None, False
        opened.close()
        return False

    def _let_in_all(self, entry: Entry) -> None:
        self._without_gone()
        for waiter in entry.waiters:
            entry.let_in(waiter, self._clock())
        entry.waiters.clear()
        self._changed.notify_all()

    def _unload(self, entry: Entry) -> None:
        opened = entry.opened
        assert opened is not None
        with self._changed:
            entry.end_service()
        opened.close()
        with self._changed:
            entry.opened, entry.state, entry.to_unload = None, UNLOADED, False
            self._changed.notify_all()
        log.info("%s unloaded", entry.name)

    def _failed(self, entry: Entry, reason: str) -> None:
        """Report a failure to those who wait for it, and nobody else."""
        entry.state, entry.reason, entry.progress = FAILED, reason, None
        entry.failed_at, entry.requested_at, entry.to_unload = self._clock(), None, False
        entry.failures += 1
        refuse_waiters(entry, partial(not_loaded, entry))
        self._changed.notify_all()

    def _on_fault(self, entry: Entry, fault: DeviceError) -> None:
        """Note, from any thread, that the process of one model has failed for good."""
        with self._changed:
            if self.fault is not None or entry.served is None:
                return
            if not self._ends_on_fault:
                entry.end_service()
                entry.state = UNLOADING  # nobody is let in
                self._lost.append((entry, fault))
                self._changed.notify_all()
                return
            self.fault = fault
            for entry in self._entries.values():
                refuse_waiters(entry, lambda: DeviceError(str(fault)))
            self._changed.notify_all()
            reported = list(self._report)
        for report in reported:
            report(fault)

    # names

    def _find(self, name: str | None) -> Entry:
        """Raises ApiError."""
        if name is None:
            return self._default if self._chosen else self._used_last() or self._usual()
        result = self._by_name.get(name) or self._with_adapter(name)
        if result is None and self._any_name:
            return self._usual()
        if result is None:
            raise not_here(name, self._by_name, list(self._entries))
        return result

    def _with_adapter(self, name: str) -> Entry | None:
        """Return the model of an adapter; those of models that were never opened are not known."""
        opened = ((e, e.facts.checkpoint) for e in self._entries.values() if e.facts is not None)
        return next(
            (e for e, facts in opened if facts and name in {one.name for one in facts.adapters}),
            None,
        )

    def _used_last(self) -> Entry | None:
        loaded = [e for e in self._entries.values() if e.served is not None]
        return max(loaded, key=lambda e: e.used_at, default=None)

    def _usual(self) -> Entry:
        """The default; where nobody has chosen one, and the first cannot be loaded, the next."""
        if self._chosen:
            return self._default
        able = [e for e in self._entries.values() if e.state != FAILED]
        return self._default if self._default in able or not able else able[0]

    def _listed(self, entries: Iterable[Entry], room: Room) -> list[Listed]:
        alongside, now = self._loaded(), self._clock()
        return [
            e.listed(room_for(e.standing(now, {}), alongside, room), e is self._default)
            for e in entries
        ]


def _try_to_close(opened: Opened) -> None:
    """After another error, which is the one to be told."""
    try:
        opened.close()
    except BaseException as error:
        log.error("models: one that has failed could not be closed\n%s", traceback_text(error))
