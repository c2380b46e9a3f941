"""The one file that a worker reads: by its descriptor, with no other that it could open."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class FileAt(io.RawIOBase):
    """A file by its descriptor, which others may read at the same time."""

    def __init__(self, fd: int, size: int):
        super().__init__()
        self._fd, self._size, self._at = fd, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        view = memoryview(room).cast("B")
        left = max(0, min(len(view), self._size - self._at))
        data = os.pread(self._fd, left, self._at)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at


@contextmanager
def no_more_files() -> Iterator[None]:
    """Nothing can be opened meanwhile, no file and no socket: there is no descriptor for it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
