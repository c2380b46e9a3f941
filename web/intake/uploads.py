"""Files that clients upload once and then refer to by an id that the server made. They live as long
as the server does, at most.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mtmd.web.errors import ApiError

LIFETIME_S = 24 * 3600.0  # after the last use
RECORD_BYTES = 4096  # counted for each file beside its own
PREFIX = "file-"


@dataclass
class Upload:
    """`data`: the file's bytes. `created` and `expires`: seconds since 1970."""

    id: str
    owner: str
    name: str
    purpose: str
    data: bytes
    created: float
    expires: float


class Uploads:
    """In memory, `room` bytes, of which each of the `owners` has an equal part. Ids are random,
    with `tag` in them, and good for their owner alone. Thread-safe.
    """

    def __init__(
        self,
        room: int,
        clock: Callable[[], float] = time.time,
        owners: Callable[[], int] = lambda: 1,
        tag: str = "",
    ) -> None:
        self._room, self._clock, self._owners = room, clock, owners
        self._prefix = f"{PREFIX}{tag}-" if tag else PREFIX
        self._lock = threading.Lock()
        self._files: dict[str, Upload] = {}

    def add(self, owner: str, name: str, purpose: str, data: bytes) -> Upload:
        """Raises ApiError (413) when the owner's room is full."""
        now, room = self._clock(), self._room // self._owners()
        with self._lock:
            self._expire(now)
            held = sum(len(f.data) + RECORD_BYTES for f in self._files.values() if f.owner == owner)
            if held + len(data) + RECORD_BYTES > room:
                raise ApiError(
                    413,
                    f"file: {len(data):,} bytes beside the {held:,} already here are more than "
                    f"{room:,}; "
                    "delete files that are not needed any more",
                    param="file",
                    code="storage_full",
                )
            upload = Upload(
                self._prefix + secrets.token_hex(16),
                owner,
                name,
                purpose,
                data,
                now,
                now + LIFETIME_S,
            )
            self._files[upload.id] = upload
            return upload

    @property
    def held_bytes(self) -> int:
        """Of all owners' files."""
        with self._lock:
            return sum(len(file.data) + RECORD_BYTES for file in self._files.values())

    def get(self, owner: str, id_: str) -> Upload:
        """Raises ApiError (404), the same for an id that is not there and for another owner's."""
        now = self._clock()
        with self._lock:
            self._expire(now)
            upload = self._files.get(id_)
            if upload is None or upload.owner != owner:
                raise ApiError(
                    404,
                    "there is no file of this id; upload it first",
                    param="file_id",
                    code="file_not_found",
                )
            upload.expires = now + LIFETIME_S
            return upload

    def all_of(self, owner: str) -> list[Upload]:
        with self._lock:
            self._expire(self._clock())
            return [f for f in self._files.values() if f.owner == owner]

    def delete(self, owner: str, id_: str) -> None:
        upload = self.get(owner, id_)
        with self._lock:
            self._files.pop(upload.id, None)

    def _expire(self, now: float) -> None:
        for id_ in [id_ for id_, f in self._files.items() if f.expires <= now]:
            del self._files[id_]
