"""Files of others, opened; the user's cache, found and written."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """A regular file, open for reading bytes. Raises OSError, also for a pipe or device, which one
    could wait for without end.
    """
    file = open(path, "rb", opener=_open)  # noqa: SIM115  # Path.open has no opener
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def cache_folder(name: str) -> Path | None:
    """Return where what was made of a kind can be kept: in the user's cache, else a folder of the
    user's own under the system's for temporary files; None where neither can be written.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    candidates = []
    with suppress(RuntimeError):  # no home at all
        candidates.append((Path(home) if home else Path.home() / ".cache") / "mtmd" / name)
    user = getattr(os, "getuid", lambda: "user")()
    candidates.append(Path(tempfile.gettempdir()) / f"mtmd-{name}-{user}")
    for folder in candidates:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if _is_own(folder) and os.access(folder, os.W_OK):
                return folder
    return None


def _is_own(folder: Path) -> bool:
    """Nobody else may put there what this process would run, or go by."""
    if not hasattr(os, "getuid"):
        return True
    about = folder.stat()
    return about.st_uid == os.getuid() and not about.st_mode & 0o022


def write_atomically(file: Path, content: bytes) -> None:
    """Whole or not at all, for a cache: where there is no room nothing is written, which costs the
    next start some time and nothing else.
    """
    with suppress(OSError):
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f"{file.stem}.")
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(content)
            Path(name).replace(file)
        except OSError:
            with suppress(OSError):
                Path(name).unlink()
            raise


def remove_oldest(folder: Path, pattern: str, limit: int) -> None:
    """Keep at most `limit` files of a cache: of more, the half that was used last stays. What
    cannot be removed stays as well.
    """
    files = []
    for file in folder.glob(pattern):
        with suppress(OSError):  # another process has removed it
            files.append((file.stat().st_mtime, file))
    if len(files) > limit:
        for _, file in sorted(files, reverse=True)[limit // 2 :]:
            with suppress(OSError):
                file.unlink()
