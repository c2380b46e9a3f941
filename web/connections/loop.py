"""Waits for many connections at once. waitress's own loop asks every connection at every turn what
it waits for; here one that does nothing costs nothing, so thousands may stand idle.
"""

from __future__ import annotations

import selectors
from typing import Any

from waitress import wasyncore


class Sockets(dict[int, Any]):
    """What is open, by file number: waitress adds and removes, and the loop follows."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = selectors.DefaultSelector()
        self._masks: dict[int, int] = {}
        self._lively: set[int] = set()

    def __setitem__(self, number: int, dispatcher: Any) -> None:
        super().__setitem__(number, dispatcher)
        self._lively.add(number)

    def __delitem__(self, number: int) -> None:
        super().__delitem__(number)
        self._lively.discard(number)
        self._wait_for(number, 0)

    def look_at(self, number: int) -> None:
        """Ask this one again, before the next wait, what it waits for."""
        self._lively.add(number)

    def wait(self, timeout_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Until something has come, which is to be handled."""
        for number in tuple(self._lively):
            dispatcher = self.get(number)
            if dispatcher is None:  # closed by what another one was asked
                continue
            # Forgotten first, and then asked: a thread may write, or end an answer, while it is
            # asked what it waits for.
            self._lively.discard(number)
            quiet = _is_quiet(dispatcher)
            waits_for = _mask(dispatcher)
            if number not in self:
                continue
            self._wait_for(number, waits_for)
            if not quiet:
                self._lively.add(number)
        return self._selector.select(timeout_s)

    def handle(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        for key, mask in ready:
            for event, handle in (
                (selectors.EVENT_READ, wasyncore.read),
                (selectors.EVENT_WRITE, wasyncore.write),
            ):
                dispatcher = self.get(key.fd)
                if mask & event and dispatcher is not None:
                    self._lively.add(key.fd)
                    handle(dispatcher)

    def close(self) -> None:
        self._selector.close()

    def _wait_for(self, number: int, mask: int) -> None:
        before = self._masks.pop(number, 0)
        if mask:
            self._masks[number] = mask
        if mask and before and mask != before:
            self._selector.modify(number, mask)
        elif mask and not before:
            self._selector.register(number, mask)
        elif before and not mask:
            self._selector.unregister(number)


def _mask(dispatcher: Any) -> int:
    mask = selectors.EVENT_READ if dispatcher.readable() else 0
    if not getattr(dispatcher, "accepting", False) and dispatcher.writable():
        mask |= selectors.EVENT_WRITE
    return mask


def _is_quiet(dispatcher: Any) -> bool:
    """Whether nothing but its own socket can change what it waits for. Never the socket that
    listens, nor waitress's trigger.
    """
    quiet: bool = getattr(dispatcher, "is_quiet", False)
    return quiet
