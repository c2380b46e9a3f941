"""Describes which model is loaded or unloaded next, for those who wait: the rule alone. Clock,
memory and what is going on are passed to it.

The request that has waited longest is next; a client for whom models were loaded lately counts as
one who came later. A model that was loaded has a turn in which it makes room for nobody while it is
used, the longer the more the next one costs to load, the more clients use it for each that waits,
and the more was loaded for who waits: so that models which do not fit together share the time as
their clients would, and most of it is spent on answers. One that nobody uses gives way sooner,
though not in every short pause. Where its last answers take too long to wait for, and more clients
wait for it than for the next one, they are let in again for as long. What somebody wants unloaded
goes once nobody uses it, and who asks for it after that keeps it; where others have used it, not
before a pause of a turn.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

TURN_S, TURN_LOADS = 5.0, 2.0  # a turn: so long, or as long as so many loads of the next model
QUIET_S, QUIET_LOADS = 0.5, 0.25  # without use, after which one gives way before its turn is over
MAX_CLIENTS = 4.0  # for so many users of a model for each who waits a turn is longer, and no more
LATER_LOADS, LATER_MAX_S = 3.0, 120.0  # so much later came who has had a second of loading
REMEMBERED_S = 300.0  # loads
CLOSED_S, CLOSED_MAX_S = 30.0, 480.0  # for its last answers; twice as long each time in vain
LOOK_S = 0.1  # until it is looked again whether answers have ended
Bytes: TypeAlias = Mapping[str, int]  # by memory space


@dataclass(frozen=True)
class Standing:
    """One model. `needs`: predicted. `requested_at`: when the first of those who wait for it came,
    None where nobody does; later, where much was loaded for them. `in_use`: answers are under way,
    or begun. `used_at`: when it was last in use; `loaded_at`; `load_s`: how long it takes to load,
    as far as is known. `closing`: nobody new is let in. `to_unload`: somebody has asked for that;
    `shared`: others than they have used it. `clients`: who uses it, or, where it is not loaded,
    waits for it; `waiting`: how many clients do while nobody is let in. `later_s`: as of `Loads`.
    """

    name: str
    loaded: bool
    needs: Bytes
    requested_at: float | None = None
    in_use: bool = False
    used_at: float = 0.0
    loaded_at: float = 0.0
    load_s: float = 1.0
    closing: bool = False
    closed_at: float = 0.0
    patience_s: float = CLOSED_S
    rest_s: float = 0.0
    to_unload: bool = False
    shared: bool = False
    clients: frozenset[str] = frozenset()
    waiting: int = 0
    later_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Room:
    """`maximum` models at once, None for as many as fit; `limits` for all of them together; `free`
    right now. Of a space that is not in them nothing is known. `unload_after_s` without use, None
    for never.
    """

    maximum: int | None
    limits: Bytes
    free: Bytes
    unload_after_s: float | None = None


@dataclass(frozen=True)
class Load:
    name: str


@dataclass(frozen=True)
class Unload:
    name: str


@dataclass(frozen=True)
class Close:
    """Let nobody new in."""

    name: str


@dataclass(frozen=True)
class Reopen:
    """`in_vain`: its answers took too long."""

    name: str
    in_vain: bool = False


@dataclass(frozen=True)
class Refuse:
    """Refusal of a model that does not fit, whatever is unloaded: of a memory `space` it needs so
    much, and there is so much.
    """

    name: str
    space: str
    needs: int
    there: int


@dataclass(frozen=True)
class Wait:
    """Nothing to do for so long, None until somebody comes."""

    seconds: float | None


Step: TypeAlias = Load | Unload | Close | Reopen | Refuse | Wait


class Loads:
    """Record of for whom models were loaded lately, and how long that took."""

    def __init__(self) -> None:
        self._loads: deque[tuple[float, str, float]] = deque(maxlen=4096)

    def add(self, clients: Collection[str], seconds: float, now: float) -> None:
        """One load, shared by all who waited for it."""
        self._loads.extend((now, client, seconds / len(clients)) for client in clients)

    def later_s(self, now: float) -> dict[str, float]:
        """Return how much later each client counts as having come, 0 for those left out."""
        while self._loads and now - self._loads[0][0] > REMEMBERED_S:
            self._loads.popleft()
        had: defaultdict[str, float] = defaultdict(float)
        for _, client, seconds in self._loads:
            had[client] += seconds
        return {client: min(LATER_LOADS * s, LATER_MAX_S) for client, s in had.items()}


def next_step(models: Sequence[Standing], room: Room, now: float) -> Step:
    loaded = [m for m in models if m.loaded]
    for model in loaded:
        pause_s = max(TURN_S, TURN_LOADS * model.load_s) if model.shared else 0.0
        if model.to_unload and not model.in_use and model.used_at + pause_s <= now:
            return Unload(model.name)
    waited_for = [m for m in models if not m.loaded and m.requested_at is not None]
    if waited_for:
        step = _for(min(waited_for, key=lambda m: m.requested_at or 0.0), loaded, room, now)
    else:
        step = _for_nobody(loaded, room, now)
    is_unloading = any(m.to_unload for m in loaded)
    return Wait(LOOK_S) if isinstance(step, Wait) and is_unloading else step


def fits(model: Standing, alongside: Iterable[Standing], room: Room) -> bool:
    """Return whether it can be loaded now, with nothing unloaded."""
    others = list(alongside)
    if room.maximum is not None and len(others) >= room.maximum:
        return False
    return _shortage(model, others, room, []) is None


def room_for(model: Standing, loaded: Sequence[Standing], room: Room) -> str:
    """Return whether one that is not in memory "fits", would once others leave ("swap"), or is "too
    large".
    """
    if fits(model, loaded, room):
        return "fits"
    left = {
        space: count + sum(m.needs.get(space, 0) for m in loaded)
        for space, count in room.free.items()
    }
    return "swap" if fits(model, [], Room(room.maximum, room.limits, left)) else "too large"


def _for(first: Standing, loaded: Sequence[Standing], room: Room, now: float) -> Step:
    if fits(first, loaded, room):
        return Load(first.name)
    leaving = _who_leaves(first, loaded, room)
    if isinstance(leaving, Refuse):
        return leaving
    wait_s = max(_may_leave_at(m, first) for m in leaving) - now
    for model in loaded:
        if model.closing and (wait_s > 0 or model not in leaving):
            return Reopen(model.name)
    if wait_s > 0:
        return Wait(min(wait_s, LOOK_S))
    for model in leaving:
        if not model.in_use:
            return Unload(model.name)
    for model in leaving:
        many_wait = model.waiting > len(first.clients)
        if model.closing and many_wait and model.closed_at + model.patience_s <= now:
            return Reopen(model.name, in_vain=True)
    for model in leaving:
        if not model.closing:
            return Close(model.name)
    return Wait(LOOK_S)


def _for_nobody(loaded: Sequence[Standing], room: Room, now: float) -> Step:
    for model in loaded:
        if model.closing:
            return Reopen(model.name)
    if room.unload_after_s is None or not loaded:
        return Wait(None)
    ends = {m.name: m.used_at + room.unload_after_s for m in loaded if not m.in_use}
    for name, end in ends.items():
        if end <= now:
            return Unload(name)
    # Those in use end some time, of which nobody tells.
    look_s = min(5.0, max(LOOK_S, room.unload_after_s / 10))
    return Wait(min([look_s, *(end - now for end in ends.values())]))


def _who_leaves(
    first: Standing, loaded: Sequence[Standing], room: Room
) -> Sequence[Standing] | Refuse:
    """No more than make room: who is leaving already, then who is not in use, then the others, each
    time who was used or loaded longest ago.
    """

    def order(m: Standing) -> tuple[bool, bool, float]:
        return not m.closing, m.in_use, m.loaded_at if m.in_use else m.used_at

    leaving: list[Standing] = []
    for model in sorted(loaded, key=order):
        leaving.append(model)
        if _fits_without(first, loaded, leaving, room):
            break
    else:
        space = _shortage(first, [], room, leaving)
        assert space is not None
        return space
    for model in leaving[:-1]:
        rest = [m for m in leaving if m is not model]
        if _fits_without(first, loaded, rest, room):
            leaving = rest
    return leaving


def _fits_without(
    first: Standing, loaded: Sequence[Standing], leaving: Sequence[Standing], room: Room
) -> bool:
    staying = [m for m in loaded if m not in leaving]
    if room.maximum is not None and len(staying) >= room.maximum:
        return False
    return _shortage(first, staying, room, leaving) is None


def _shortage(
    first: Standing, staying: Sequence[Standing], room: Room, leaving: Sequence[Standing]
) -> Refuse | None:
    """The memory that lacks, of the limits and of what is free once those who leave have left."""
    for space, needs in first.needs.items():
        taken = sum(m.needs.get(space, 0) for m in staying)
        given_back = sum(m.needs.get(space, 0) for m in leaving)
        limit, free = room.limits.get(space), room.free.get(space)
        there = [
            *([] if limit is None else [limit - taken]),
            *([] if free is None else [free + given_back]),
        ]
        if there and needs > min(there):
            return Refuse(first.name, space, needs, max(0, min(there)))
    return None


def _may_leave_at(model: Standing, first: Standing) -> float:
    """The others who use it count: for as many as there are for each who waits, up to a point, it
    stays longer, and, while it is in use, for as long as those who wait have had more than they on
    the average.
    """
    others = model.clients - first.clients
    times = min(max(1.0, len(others) / max(1, len(first.clients))), MAX_CLIENTS)
    turn_s = times * max(TURN_S, TURN_LOADS * first.load_s)
    end = model.loaded_at + max(turn_s, model.rest_s)
    if not model.in_use:
        return min(end, model.used_at + times * (QUIET_S + QUIET_LOADS * first.load_s))
    if not others or not first.clients:
        return end
    theirs = sum(model.later_s.get(client, 0.0) for client in others) / len(others)
    more = min(first.later_s.get(client, 0.0) for client in first.clients) - theirs
    return max(end, model.loaded_at + more)
