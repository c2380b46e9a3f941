"""The replica that a request goes to: the one that went before it with the same picture or the same
beginning, as long as that one is not busier than others. Plain Python; knows nothing of Ray.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

LOAD_FACTOR = 1.25  # of the average: consistent hashing with bounded loads (arXiv 1608.01350)


@dataclass(frozen=True)
class Route:
    """`key`: requests of one key go together; "" goes to the least busy. `only`: the name of the
    replica that has what the request names. `firmly`: to the first of its key, however busy.
    `avoid`: replicas that were lost with this request.
    """

    key: str = ""
    only: str = ""
    firmly: bool = False
    avoid: tuple[str, ...] = ()


def ranked(key: str, names: list[str]) -> list[str]:
    """Return names by rendezvous hashing (Thaler and Ravishankar, 1998): where a name comes or
    goes, only the keys that it has, or had, move. The order is the same in every process.
    """
    return sorted(names, key=lambda name: sha256(f"{key}\0{name}".encode()).digest())


def order(route: Route, loads: Mapping[str, int], slack: int, maximum: int) -> list[str]:
    """Return the names in `loads`, the preferred first. `loads`: requests that each has. One is too
    busy for what it knows to be worth it with more than its part of all, and `slack` more than the
    least busy; with `maximum` it gets no further, unless it alone can answer.
    """
    names = [name for name in loads if name not in route.avoid] or list(loads)
    if route.only in names:
        return [route.only]
    slots = ranked(route.key, names)
    if route.firmly:
        return slots[:1]
    free = sorted((n for n in slots if loads[n] < maximum), key=lambda name: loads[name])
    if not route.key:
        return free
    has = [loads[name] for name in names]
    bound = max(math.ceil(LOAD_FACTOR * (sum(has) + 1) / len(has)), min(has) + slack)
    near = [name for name in slots if loads[name] < min(bound, maximum)]
    return near + [name for name in free if name not in near]
