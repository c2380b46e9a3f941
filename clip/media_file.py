"""A file of a video or of audio, by its path or its bytes, that another process may read."""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

_HASHED_BYTES = 1 << 22
_DIGESTS = 1024
_digests: dict[tuple[int, ...], str] = {}
"""Of files as they were: a film is not read through for every question about it."""


class MediaFile:
    """Thread-safe. Raises OSError where there is no file of that path."""

    def __init__(self, source: str | os.PathLike[str] | bytes):
        self.source = source
        self.bytes = len(source) if isinstance(source, bytes) else Path(source).stat().st_size

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the content."""
        if isinstance(self.source, bytes):
            return hashlib.sha256(self.source).hexdigest()
        with self.opened() as file:
            reported = os.fstat(file.fileno())
            key = (
                reported.st_dev,
                reported.st_ino,
                reported.st_size,
                reported.st_mtime_ns,
                reported.st_ctime_ns,
            )
            if key not in _digests:
                digest = hashlib.sha256()
                while data := file.read(_HASHED_BYTES):
                    digest.update(data)
                if len(_digests) >= _DIGESTS:
                    _digests.clear()
                _digests[key] = digest.hexdigest()
            return _digests[key]

    def opened(self) -> BinaryIO:
        source = self.source
        return io.BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb")

    @contextmanager
    def with_descriptor(self) -> Iterator[BinaryIO]:
        """The file, or, where it lies in memory, a copy that another process can read."""
        if not isinstance(self.source, bytes):
            with self.opened() as file:
                yield file
            return
        copied: Any = (
            os.fdopen(os.memfd_create("media"), "w+b")
            if hasattr(os, "memfd_create")
            else tempfile.TemporaryFile()  # noqa: SIM115  # closed below
        )
        with copied:
            copied.write(self.source)
            copied.flush()
            yield copied
