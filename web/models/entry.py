"""One model of several: what is known of it, who uses it, who waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from operator import itemgetter
from typing import Any, Protocol

from mtmd.checkpoint.collection import Source
from mtmd.checkpoint.facts import CheckpointFacts
from mtmd.service.latencies import Latencies
from mtmd.service.stats import ServiceStats
from mtmd.web.models.choice import FETCHING, LOADED, LOADING, UNLOADED, UNLOADING, Listed
from mtmd.web.models.presets import NONE, Preset
from mtmd.web.models.progress import Loading, Read
from mtmd.web.models.schedule import CLOSED_MAX_S, CLOSED_S, Standing
from mtmd.web.served_model import ServedModel

READ_BYTES_PER_S = 500e6  # of files, for a model that was not loaded yet
START_S = 1.0
USING_S = 60.0  # a client that has asked within so long counts as one that uses the model
CLIENTS_KNOWN = 1024
OF_THE_MOMENT = frozenset(  # fields of ServiceStats
    (
        "slots",
        "running",
        "waiting",
        "clients_waiting",
        "encoding",
        "pages",
        "pages_used",
        "image_cache_bytes",
        "processed_bytes",
        "video_cache_bytes",
        "engine_bytes",
    )
)


@dataclass(frozen=True)
class Facts:
    """Describes what is known of a model once it was opened. `needs`: bytes of memory, by space."""

    needs: Mapping[str, int]
    context: int
    sees: bool
    hears: bool = False
    checkpoint: CheckpointFacts | None = None


class Opened(Protocol):
    """A model that was opened, its weights not read yet."""

    facts: Facts

    def weights_read(self) -> tuple[int, int]:
        """Bytes that have been read, and all."""

    def start(self, aliases: tuple[str, ...], preset: Preset) -> ServedModel:
        """Read the weights, warm up, and answer. Raises MtmdError."""

    def close(self) -> None:
        """Answers under way are ended, and its memory is given back."""


class Loader(Protocol):
    def fetch(self, source: Source, report: Callable[[Read], None]) -> Source:
        """One that is not here yet, once it is. `report` gets what reads how far that is: bytes
        that have come, and all that are missing. Raises MtmdError.
        """

    def open(self, source: Source, preset: Preset) -> Opened:
        """One that is here; nothing is fetched. Raises MtmdError."""

    def free(self) -> Mapping[str, int]:
        """Bytes of memory that can be taken right now, by space, as far as they are known."""

    def surveyed(self) -> None:
        """No model is left of which nothing is known."""

    def close(self) -> None:
        """The server ends: nothing is opened any more."""


@dataclass(eq=False)
class Waiter:
    """Somebody who waits until a model is loaded, for a client, then until the answer is begun.
    `error`: it will not be. `leave` gives the place among those who wait back. `seen`: when it was
    last asked whether it is there, by `time.monotonic`.
    """

    came: float
    client: str = ""
    error: Exception | None = None
    let_in: bool = False
    is_gone: Callable[[], bool] = lambda: False
    leave: Callable[[], None] = lambda: None
    seen: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        return self.let_in or self.error is not None

    def refuse(self, error: Exception) -> None:
        self.error, self.let_in = error, False
        self.leave()


@dataclass(eq=False)
class Entry:
    """Under its registry's lock. `users`: requests that have chosen it, or may, and are not
    prepared yet, after which its service knows of them; `may_choose`: those who may. `used_by`:
    clients since it was loaded, and when each asked last. `past`: what earlier services of it have
    counted. `requested`: by a client that does not wait for it; `to_unload`: likewise.
    """

    source: Source
    preset: Preset = NONE
    facts: Facts | None = None
    state: str = UNLOADED
    opened: Opened | None = None
    served: ServedModel | None = None
    progress: Loading | None = None
    reason: str = ""
    failed_at: float = 0.0
    since: float = field(default_factory=time.time)
    users: int = 0
    waiters: list[Waiter] = field(default_factory=list)
    may_choose: list[Waiter] = field(default_factory=list)
    requested_at: float | None = None
    requested_by: str = ""
    to_unload: bool = False
    to_unload_by: str = ""
    used_by: dict[str, float] = field(default_factory=dict)
    used_at: float = 0.0
    loaded_at: float = 0.0
    closed_at: float = 0.0
    patience_s: float = CLOSED_S
    rest_s: float = 0.0
    took_s: float | None = None
    loads: int = 0
    failures: int = 0
    load_seconds: float = 0.0
    past: ServiceStats = field(default_factory=ServiceStats)
    past_latencies: Latencies = field(default_factory=Latencies)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.preset.aliases)

    @property
    def is_loaded(self) -> bool:
        return self.state in (LOADED, UNLOADING)

    @property
    def in_use(self) -> bool:
        return bool(self.users or (self.served and self.served.service.busy))

    @property
    def needs(self) -> Mapping[str, int]:
        """Predicted; of one that was not opened yet, what its files have."""
        if self.facts is not None:
            return self.facts.needs
        return {} if self.source.bytes is None else {"cpu": self.source.bytes}

    @property
    def load_s(self) -> float:
        if self.took_s is not None:
            return self.took_s
        return START_S + (self.source.bytes or 0) / READ_BYTES_PER_S

    def requesting(self) -> dict[str, float]:
        """Clients who wait for it, or want it loaded, and when each came first."""
        came = [(w.client, w.came) for w in self.waiters if not w.is_over]
        came += [] if self.requested_at is None else [(self.requested_by, self.requested_at)]
        return dict(sorted(came, key=itemgetter(1), reverse=True))

    def let_in(self, waiter: Waiter, now: float) -> None:
        waiter.let_in, client = True, waiter.client
        waiter.leave()
        self.may_choose.append(waiter)
        self.users += 1
        self.used_at = now
        self.used_by.pop(client, None)
        self.used_by[client] = now
        if len(self.used_by) > CLIENTS_KNOWN:
            del self.used_by[next(iter(self.used_by))]

    def begin_turn(self, now: float, *, in_vain: bool = False) -> None:
        """`in_vain`: it was closed before, and its answers took too long."""
        self.loaded_at = now
        self.rest_s = self.patience_s if in_vain else 0.0
        self.patience_s = min(2 * self.patience_s, CLOSED_MAX_S) if in_vain else CLOSED_S

    def standing(self, now: float, later_s: Mapping[str, float]) -> Standing:
        """`later_s`: as `schedule.Loads` has it."""
        requesting = self.requesting() if self.state not in (LOADED, LOADING, FETCHING) else {}
        requested = [at + later_s.get(client, 0.0) for client, at in requesting.items()]
        using = (client for client, at in self.used_by.items() if now - at < USING_S)
        return Standing(
            self.name,
            self.is_loaded,
            self.needs,
            requested_at=min(requested, default=None),
            in_use=self.in_use,
            used_at=self.used_at,
            loaded_at=self.loaded_at,
            load_s=self.load_s,
            closing=self.state == UNLOADING,
            closed_at=self.closed_at,
            patience_s=self.patience_s,
            rest_s=self.rest_s,
            to_unload=self.to_unload,
            shared=self.to_unload and any(c != self.to_unload_by for c in self.used_by),
            clients=frozenset(using if self.is_loaded else requesting),
            waiting=len(requesting),
            later_s=later_s,
        )

    def listed(self, room: str, default: bool) -> Listed:
        """`room`: as `schedule.room_for`, where it is known what the model takes."""
        facts, progress = self.facts, self.progress
        reported: dict[str, Any] = progress.asdict() if progress else {"stage": "", "progress": 0.0}
        is_here = self.is_loaded or self.state == LOADING
        shown = {FETCHING: LOADING, LOADED: UNLOADING if self.to_unload else LOADED}
        return Listed(
            self.name,
            self.names,
            self.since,
            state=shown.get(self.state, self.state),
            kind=self.source.kind,
            file_bytes=self.source.bytes,
            needs_bytes=facts.needs if facts else {},
            context=facts.context if facts else None,
            sees=facts.sees if facts else None,
            hears=facts.hears if facts else None,
            stage=reported["stage"],
            progress=reported["progress"],
            reason=self.reason,
            room="" if facts is None or is_here else room,
            in_use=self.in_use,
            default=default,
            preset=self.preset.asdict(),
            checkpoint=facts.checkpoint if facts else None,
        )

    def stats(self) -> ServiceStats:
        """Since the server began, whichever service has counted it."""
        served = self.served
        if served is None:
            return self.past
        now: dict[str, Any] = vars(served.service.stats())
        names = [f.name for f in fields(ServiceStats) if f.name not in OF_THE_MOMENT]
        return ServiceStats(**now | {n: now[n] + getattr(self.past, n) for n in names})

    def latencies(self) -> Latencies:
        """Do what `stats` does."""
        past, served = self.past_latencies, self.served
        return past if served is None else past + served.service.latencies

    def end_service(self) -> None:
        """Keep the numbers of the service, which ends."""
        past = ServiceStats(**vars(self.stats()) | dict.fromkeys(OF_THE_MOMENT, 0))
        self.past, self.past_latencies, self.served = past, self.latencies(), None
