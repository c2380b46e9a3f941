"""How an application lets go of the thread that serves it while it has nothing to send: what it
and the connection below it say to each other, through the WSGI environment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flask import Response

CAN_WAIT = "mtmd.can_wait"  # in the environment where the connection knows how to
WAITS = "mtmd.waits"  # a `Waits`, put there by the application
BEAT_S = 10.0  # after so long without news it is asked again all the same


class Waits:
    """Of one request. The pieces of its response are b"" where there is nothing now; whoever sends
    them goes away then, and comes back when it is woken.

    `response`: once it is set, before the first piece that is not empty, its status and headers
    take the place of those that were given when nothing was known of the answer.
    """

    response: Response | None = None
    _wake: Callable[[], None] | None = None

    def on_news(self, wake: Callable[[], None] | None) -> None:
        """Who sends is to ask for pieces after this: what came before wakes nobody. None: nothing
        more is sent.
        """
        self._wake = wake

    def news(self) -> None:
        """There may be another piece. From any thread; costs little."""
        wake = self._wake
        if wake is not None:
            wake()
