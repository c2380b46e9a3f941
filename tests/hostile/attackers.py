"""Several processes that attack at once. They run where nobody else wants a core: elsewhere they
would take nothing of the server's.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from types import TracebackType

from attack import Account, attack
from attempts import Generator

MINIMUM = 19  # priority, where there is no class of processes for which nobody waits
LOOK_S = 5.0


class Attackers:
    """To be entered; leaving ends the processes."""

    def __init__(self, processes: int) -> None:
        self._number = processes
        self._pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_stand_back)

    def __enter__(self) -> Attackers:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def attack(
        self,
        where: tuple[str, int],
        generator: Generator,
        key: str,
        seed: int,
        *,
        count: int,
        seconds: float,
        at_once: int,
        first: int = 0,
        look: Callable[[], None] = lambda: None,
    ) -> Account:
        """As `attack`, the attempts shared out; `look` is called every few seconds."""
        each = [len(range(i, count, self._number)) for i in range(self._number)]
        begins = [first + sum(each[:i]) for i in range(self._number)]
        jobs = [
            self._pool.submit(
                attack,
                where,
                generator,
                key,
                seed,
                count=number,
                seconds=seconds,
                at_once=max(1, at_once // self._number),
                first=begin,
            )
            for number, begin in zip(each, begins, strict=True)
        ]
        return joined(_all_of(jobs, look))


def _stand_back() -> None:
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(MINIMUM)


def _all_of(jobs: list[Future[Account]], look: Callable[[], None]) -> list[Account]:
    left, due = set(jobs), time.monotonic()
    while left:
        _, left = wait(left, LOOK_S)
        if time.monotonic() >= due:
            look()
            due = time.monotonic() + LOOK_S
    return [job.result() for job in jobs]


def joined(accounts: list[Account]) -> Account:
    """One of all."""
    whole = Account()
    for account in accounts:
        whole.statuses += account.statuses
        whole.problems += account.problems
        whole.waited_ms += account.waited_ms
        whole.turned_away += account.turned_away
        whole.slowest_s = max(whole.slowest_s, account.slowest_s)
        for what, statuses in account.by_what.items():
            whole.by_what[what] += statuses
    return whole
