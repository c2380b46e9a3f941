"""What the engine's process has to say, gathered: the tokens of one step of sixteen answers are one
message. Whoever has something to say never waits for the socket.
"""

from __future__ import annotations

import os
import sys
import time
from queue import SimpleQueue
from threading import Thread
from typing import Any, NoReturn

from mtmd.apart.link import Link
from mtmd.kernels.isolation.channel import ChannelClosed
from mtmd.process.tracebacks import traceback_text

GATHERED_S = 0.0003  # how long one waits for those that are said with it
FAILED = 1  # the exit code of an engine that can hear or tell nothing any more


class Outbox:
    """`put` from any thread: (what it is, the number that it is about, a value)."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._items: SimpleQueue[tuple[str, int, Any]] = SimpleQueue()
        self.put = self._items.put
        self._thread = Thread(target=self._send, name="mtmd outbox", daemon=True)
        self._thread.start()

    def _send(self) -> None:
        try:
            while True:
                items = [self._items.get()]
                time.sleep(GATHERED_S)
                while not self._items.empty():
                    items.append(self._items.get())
                self._link.send(items)
        except ChannelClosed:
            return  # the server has gone, which the thread that listens to it sees, too
        except BaseException as error:
            end_by(error)


def end_by(error: BaseException) -> NoReturn:
    """The engine's process, at once: where it can hear or tell nothing any more, the server knows
    by its end.
    """
    try:
        print(f"mtmd engine: {traceback_text(error)}", file=sys.stderr, flush=True)
    finally:  # nobody may read that, either
        os._exit(FAILED)
