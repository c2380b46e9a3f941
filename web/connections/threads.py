"""Threads that answer requests: as many as there is work for, up to a limit of each kind of work.
One is started where none is free, and ends when nothing has come for a while.

Few do what is quick. With hundreds at it the interpreter's lock goes round among all of them before
the loop has it again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Mapping
from functools import partial
from typing import Any

from waitress.task import ThreadedTaskDispatcher

from mtmd.service.turns import ahead, step_back

KEPT = 4  # of a kind
IDLE_S = 30.0


class InTurn:
    """What waits for a thread: of each client in order, and of all clients in turn. With the names
    of a deque, which waitress uses.
    """

    def __init__(self) -> None:
        self._of: OrderedDict[str, deque[Any]] = OrderedDict()
        self._count = 0

    def append(self, task: Any) -> None:
        self._of.setdefault(task.client, deque()).append(task)
        self._count += 1

    def popleft(self) -> Any:
        client, tasks = self._of.popitem(last=False)
        task = tasks.popleft()
        if tasks:
            self._of[client] = tasks
        self._count -= 1
        return task

    def __len__(self) -> int:
        return self._count


class Threads(ThreadedTaskDispatcher):  # type: ignore[misc]  # waitress has no types
    """`most`: at once. What comes beyond waits for its turn. `behind`: they let other threads of
    the process go first, from their next task on.
    """

    def __init__(self, most: int, idle_s: float = IDLE_S) -> None:
        super().__init__()
        self.queue = InTurn()
        self.most, self._idle_s, self.behind = most, idle_s, False
        self._number, self._starting = 0, False

    def add_task(self, task: Any) -> None:
        with self.lock:
            self.queue.append(task)
            self.queue_cv.notify()
            self._start_one()

    def _start(self) -> None:
        self._number += 1
        self.threads.add(self._number)
        self.active_count += 1
        start = partial(self.start_new_thread, self.handler_thread, self._number)
        start() if self.behind else ahead(start)

    def _start_one(self) -> None:
        """Where too few are free. The next is started by the one that has just been: the loop does
        not wait for hundreds.
        """
        free = len(self.threads) - self.stop_count - self.active_count
        if len(self.queue) > free and len(self.threads) < self.most and not self._starting:
            self._starting = True
            self._start()

    def handler_thread(self, number: int) -> None:
        with self.lock:
            self._starting = False
            if self.queue:
                first = self.queue.popleft()
                self._start_one()
            else:
                first = None
        task = self._next(number) if first is None else first
        is_behind = False
        while task is not None:
            if self.behind and not is_behind:
                is_behind = True
                step_back()
            task.service()
            task = self._next(number)

    def _next(self, number: int) -> Any:
        """A task, or None where this thread is to end."""
        with self.lock:
            while not self.queue and not self.stop_count:
                self.active_count -= 1
                woken = self.queue_cv.wait(self._idle_s)
                self.active_count += 1
                idle = not woken and not self.queue and not self.stop_count
                if idle and len(self.threads) > KEPT:
                    return self._leave(number)
            if self.stop_count:
                self.stop_count -= 1
                return self._leave(number)
            return self.queue.popleft()

    def _leave(self, number: int) -> None:
        self.active_count -= 1
        self.threads.discard(number)
        self.thread_exit_cv.notify()


class Pools:
    """Threads for each kind of work; `most` of each at once."""

    def __init__(self, most: Mapping[Hashable, int]) -> None:
        self._pools = {kind: Threads(count) for kind, count in most.items()}

    def allow(self, most: Mapping[Hashable, int]) -> None:
        """More kinds of work. Those that are known stay as they are."""
        for kind, count in most.items():
            self._pools.setdefault(kind, Threads(count))

    def put_behind(self, kinds: Collection[Hashable]) -> None:
        """Threads of these kinds let those of all others go first."""
        for kind in kinds:
            self._pools[kind].behind = True

    def add_task(self, task: Any) -> None:
        """`task.work`: its kind; `task.client`: for whom it is."""
        self._pools[task.work].add_task(task)

    def shutdown(self, timeout: float) -> None:
        for pool in self._pools.values():
            pool.shutdown(timeout=timeout / len(self._pools))

    @property
    def threads(self) -> int:
        return sum(len(pool.threads) for pool in self._pools.values())

    @property
    def active_count(self) -> int:
        """Threads that are answering."""
        return sum(pool.active_count for pool in self._pools.values())
