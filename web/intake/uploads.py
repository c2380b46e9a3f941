"""Files that clients upload once and then refer to by an id that the server made. They live as long
as the server does, at most.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mtmd.web.errors import ApiError
from mtmd.web.intake.spool import BLOCK, Piece, Spool

LIFETIME_S = 24 * 3600.0  # after the last use
RECORD_BYTES = BLOCK  # counted for each file beside its own: what the end of its last block takes
PREFIX = "file-"


@dataclass
class Upload:
    """`piece`: where its bytes are. `created` and `expires`: seconds since 1970."""

    id: str
    owner: str
    name: str
    purpose: str
    piece: Piece
    created: float
    expires: float

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.piece.size


class Uploads:
    """Uploads in a temporary file, `room` bytes, of which each of the `owners` has an equal part.
    Ids are random, with `tag` in them, and good for their owner alone. Thread-safe.
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
        self._files: OrderedDict[str, Upload] = OrderedDict()  # the one used longest ago first
        self._stored: Counter[str] = Counter()  # bytes of them, by their owner
        self._coming: Counter[str] = Counter()  # bytes that are being written, by their owner
        self._spool = Spool()

    def add(self, owner: str, name: str, purpose: str, data: bytes) -> Upload:
        """Raises ApiError: 413 when the owner's room is full, 507 when the disk is."""
        with self._reserved(owner, len(data) + RECORD_BYTES) as written:
            piece = self._written(data)
            now = self._clock()
            upload = Upload(
                self._prefix + secrets.token_hex(16),
                owner,
                name,
                purpose,
                piece,
                now,
                now + LIFETIME_S,
            )
            written.append(upload)
            return upload

    @contextmanager
    def _reserved(self, owner: str, count: int) -> Iterator[list[Upload]]:
        """Reserve so much of the owner's room, before it is taken by what is put into the list.
        Raises ApiError.
        """
        written: list[Upload] = []
        with self._current():
            self._check_room(owner, count)
            self._coming[owner] += count
        try:
            yield written
        finally:
            with self._lock:
                for upload in written:
                    self._files[upload.id] = upload
                    self._stored[owner] += upload.size + RECORD_BYTES
                self._coming[owner] -= count
                self._coming += Counter()  # drops who has none

    def _written(self, data: bytes) -> Piece:
        """Raises ApiError."""
        try:
            return self._spool.write(data)
        except OSError as error:
            why = os.strerror(error.errno or errno.EIO)  # Python's own words may name folders
            raise ApiError(
                507,
                f"file: it could not be written ({why}); try again later",
                param="file",
                code="storage_full",
            ) from error

    def _check_room(self, owner: str, count: int) -> None:
        room = self._room // self._owners()
        stored = self._stored[owner] + self._coming[owner]
        if stored + count > room:
            count -= RECORD_BYTES
            raise ApiError(
                413,
                f"file: {count:,} bytes beside the {stored:,} already here are more than {room:,}; "
                "delete files that you no longer need",
                param="file",
                code="storage_full",
            )

    def get(self, owner: str, id_: str) -> Upload:
        """Raises ApiError (404), the same for an id that is not there and for another owner's."""
        with self._current():
            upload = self._files.get(id_)
            if upload is None or upload.owner != owner:
                raise _no_file()
            upload.expires = self._clock() + LIFETIME_S
            self._files.move_to_end(id_)
            return upload

    def read(self, upload: Upload) -> bytes:
        """The file's bytes. Raises ApiError (404) where it has been deleted since."""
        data = self._spool.read(upload.piece)
        if data is None:
            raise _no_file()
        return data

    def all_of(self, owner: str) -> list[Upload]:
        with self._current():
            mine = [f for f in self._files.values() if f.owner == owner]
        return sorted(mine, key=lambda f: f.created)

    def delete(self, owner: str, id_: str) -> None:
        upload = self.get(owner, id_)
        with self._lock:
            self._forget(upload.id)
        self._spool.let_go(upload.piece)  # which may wait for the disk

    def _forget(self, id_: str) -> None:
        """Under the lock. What is gone already, by another thread, counts no more."""
        upload = self._files.pop(id_, None)
        if upload is not None:
            self._stored[upload.owner] -= upload.size + RECORD_BYTES
            if not self._stored[upload.owner]:
                del self._stored[upload.owner]

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Under the lock, without those whose time is over."""
        over: list[Upload] = []
        try:
            with self._lock:
                now = self._clock()
                while self._files and (oldest := next(iter(self._files.values()))).expires <= now:
                    self._forget(oldest.id)
                    over.append(oldest)
                yield
        finally:
            for upload in over:
                self._spool.let_go(upload.piece)  # which may wait for the disk


def _no_file() -> ApiError:
    return ApiError(
        404, "there is no file of this id; upload it first", param="file_id", code="file_not_found"
    )
