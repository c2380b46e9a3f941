"""Threads that answer requests: as many as there is work for, up to a limit. One is started where
none is free, and ends when nothing has come for a while.
"""

from __future__ import annotations

from typing import Any

from waitress.task import ThreadedTaskDispatcher

KEPT = 8
IDLE_S = 30.0


class Threads(ThreadedTaskDispatcher):  # type: ignore[misc]  # waitress has no types
    """`most`: at once. What comes beyond waits for its turn."""

    def __init__(self, most: int, idle_s: float = IDLE_S) -> None:
        super().__init__()
        self.most, self._idle_s = most, idle_s
        self._number = 0

    def add_task(self, task: Any) -> None:
        with self.lock:
            self.queue.append(task)
            self.queue_cv.notify()
            free = len(self.threads) - self.stop_count - self.active_count
            if len(self.queue) > free and len(self.threads) < self.most:
                self._number += 1
                self.threads.add(self._number)
                self.active_count += 1
                self.start_new_thread(self.handler_thread, self._number)

    def handler_thread(self, number: int) -> None:
        while (task := self._next(number)) is not None:
            task.service()

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
