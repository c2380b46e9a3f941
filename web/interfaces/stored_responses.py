"""Responses that later requests may go on from. In memory, as long as the server lives: a client
that wants more sends the conversation itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from mtmd.web.answering.request import Turn
from mtmd.web.errors import ApiError

ROOM = 64 << 20  # bytes in all
LIFETIME_S = 24 * 3600.0
RECORD_BYTES = 4096  # counted for each response beside what was said and answered


@dataclass(frozen=True)
class StoredResponse:
    """`turns`: the conversation with its answer, without instructions; `body`: the response."""

    owner: str
    turns: tuple[Turn, ...]
    body: dict[str, Any]
    expires: float
    stored_bytes: int


class StoredResponses:
    """`room` bytes, of which each of the `owners` has an equal part; its oldest make room for new
    ones. Ids are good for their owner alone. Thread-safe.
    """

    def __init__(
        self,
        owners: Callable[[], int],
        room: int = ROOM,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._owners, self._room, self._clock = owners, room, clock
        self._lock, self._saved = threading.Lock(), dict[str, StoredResponse]()

    def add(self, owner: str, turns: tuple[Turn, ...], body: dict[str, Any]) -> bool:
        """False, and nothing is kept, for what is more than there is room for at all."""
        now, room = self._clock(), self._room // self._owners()
        stated = sum(turn.stored_bytes for turn in turns)
        saved = StoredResponse(
            owner, turns, body, now + LIFETIME_S, RECORD_BYTES + stated + len(to_json(body))
        )
        if saved.stored_bytes > room:
            return False
        with self._lock:
            self._expire(now)
            own = {id_: one for id_, one in self._saved.items() if one.owner == owner}
            stored = saved.stored_bytes + sum(one.stored_bytes for one in own.values())
            for id_, one in own.items():  # in the order they came
                if stored <= room:
                    break
                del self._saved[id_]
                stored -= one.stored_bytes
            self._saved[body["id"]] = saved
        return True

    @property
    def stored_bytes(self) -> int:
        """Return the held bytes of all owners' responses."""
        with self._lock:
            return sum(one.stored_bytes for one in self._saved.values())

    def get(self, owner: str, id_: str, param: str | None = None) -> StoredResponse:
        """Raises ApiError, the same for an id that is not there and for another owner's: 400 where
        it is a part of a request, `param`, otherwise 404.
        """
        with self._lock:
            self._expire(self._clock())
            saved = self._saved.get(id_)
        if saved is None or saved.owner != owner:
            raise ApiError(
                400 if param else 404,
                f"{param or 'id'}: there is no response of this id, or not any more; send the "
                "conversation itself",
                param=param,
                code="previous_response_not_found" if param else "response_not_found",
            )
        return saved

    def delete(self, owner: str, id_: str) -> None:
        self.get(owner, id_)
        with self._lock:
            self._saved.pop(id_, None)

    def _expire(self, now: float) -> None:
        for id_ in [id_ for id_, one in self._saved.items() if one.expires <= now]:
            del self._saved[id_]
