"""Pictures as files named by the SHA-256 of their bytes; or, where nothing is to be kept, in
memory.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mtmd.prompt.audio_input import audio_type, is_audio_data
from mtmd.prompt.load_image import picture_format
from mtmd.prompt.video_input import video_type
from mtmd.web.native_threads import waiting
from mtmd.web.store.folder import private_file, sync_folder

UNFINISHED = ".part"  # ends the name of a file that is being written
WHOLE = re.compile(r"[0-9a-f]{64}")
SHOWN_BY_BROWSERS = (
    "image/jpeg",
    "image/png",
    "image/webp",
    "image/gif",
    "image/bmp",
    "image/avif",
)


def media_type(data: bytes) -> str:
    """Return the media type of a file that decodes as a picture, a video or audio."""
    if is_audio_data(data[:64]):
        return audio_type(data) or "application/octet-stream"
    kind = picture_format(data)
    return f"image/{kind.lower()}" if kind else video_type(data) or "application/octet-stream"


class ImageFiles:
    """`folder` None keeps them in memory."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self._stored = folder, dict[str, bytes]()
        if folder:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if os.name == "posix" and folder.stat().st_mode & 0o077:
                folder.chmod(0o700)

    @staticmethod
    def name_of(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    def has(self, name: str) -> bool:
        return (self.folder / name).exists() if self.folder else name in self._stored

    def put(self, data: bytes) -> str:
        """Store a picture and return its name. When this returns the file is on the disk, whole,
        under its name: a crash leaves all or nothing. Raises OSError.
        """
        return waiting(self._put, data)

    def _put(self, data: bytes) -> str:
        name = self.name_of(data)
        if self.folder is None:
            self._stored[name] = data
        elif not self._is_there(name, data):
            unfinished = self.folder / f"{name}.{os.getpid()}.{time.monotonic_ns()}{UNFINISHED}"
            try:
                with private_file(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                unfinished.replace(self.folder / name)
            except OSError:
                with suppress(OSError):
                    unfinished.unlink()
                raise
            sync_folder(self.folder)
        return name

    def _is_there(self, name: str, data: bytes) -> bool:
        """Whole: a file that a failing disk cut off is written again."""
        assert self.folder is not None
        try:
            return (self.folder / name).read_bytes() == data
        except OSError:
            return False

    def get(self, name: str) -> bytes | None:
        if self.folder is None:
            return self._stored.get(name)
        try:
            return waiting((self.folder / name).read_bytes)
        except FileNotFoundError:
            return None

    def delete(self, name: str) -> None:
        if self.folder is None:
            self._stored.pop(name, None)
        else:
            (self.folder / name).unlink(missing_ok=True)

    def sync(self) -> None:
        """Sync the disk: what was deleted stays deleted after a power cut."""
        if self.folder:
            sync_folder(self.folder)

    def names(self) -> Iterator[str]:
        """Yield the names of whole pictures."""
        return iter(list(self._stored)) if self.folder is None else names_in(self.folder)

    def unfinished(self, older_than_s: float) -> list[str]:
        """Files that a crash cut off, written so long ago that nobody can be at work on them any
        more. None of them was ever acknowledged.
        """
        if self.folder is None:
            return []
        names = []
        for path in self.folder.glob(f"*{UNFINISHED}"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - older_than_s:
                    names.append(path.name)
        return names


def names_in(folder: Path) -> Iterator[str]:
    """Return the names of whole pictures; none where there is no folder."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        yield from (e.name for e in entries if WHOLE.fullmatch(e.name))


def digest(path: Path) -> str:
    """SHA-256 of a file, a piece of it in memory at a time."""
    result = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            result.update(piece)
    return result.hexdigest()
