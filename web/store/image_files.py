"""Pictures as files named by the SHA-256 of their bytes; or, where nothing is to be kept, in
memory.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

from mtmd.prompt.load_image import picture_format

SHOWN_BY_BROWSERS = ("image/jpeg", "image/png", "image/webp", "image/gif", "image/bmp")


def media_type(data: bytes) -> str:
    """Of a file that decodes as a picture."""
    kind = picture_format(data)
    return f"image/{kind.lower()}" if kind else "application/octet-stream"


class ImageFiles:
    """`folder` None keeps them in memory."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self._held = folder, dict[str, bytes]()
        if folder:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def put(self, data: bytes) -> str:
        """Its SHA-256. When this returns the file is on the disk, whole, under its name: a crash
        leaves all or nothing. Raises OSError.
        """
        name = hashlib.sha256(data).hexdigest()
        if self.folder is None:
            self._held[name] = data
        elif not (path := self.folder / name).exists():
            unfinished = self.folder / f"{name}.{os.getpid()}.{time.monotonic_ns()}.part"
            try:
                with unfinished.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                unfinished.replace(path)
            except OSError:
                with suppress(OSError):
                    unfinished.unlink()
                raise
            _sync_folder(self.folder)
        return name

    def get(self, name: str) -> bytes | None:
        if self.folder is None:
            return self._held.get(name)
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def delete(self, name: str) -> None:
        if self.folder is None:
            self._held.pop(name, None)
        else:
            (self.folder / name).unlink(missing_ok=True)

    def older_than(self, seconds: float) -> list[str]:
        """Names of files, unfinished ones too, that were written so long ago that nobody can be at
        work on them any more.
        """
        if self.folder is None:
            return []
        names = []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - seconds:
                    names.append(path.name)
        return names


def _sync_folder(folder: Path) -> None:
    """Make the new name itself survive a power cut. Windows cannot open folders, and does not need
    it.
    """
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
