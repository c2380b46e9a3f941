"""The data folder: closed to others, its files on the disk under their names, and known to be in
use.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from mtmd.base.file_lock import lock
from mtmd.web.store.errors import StoreBusyError, store_errors

LOCK = "conversations.lock"
WAIT_S = 10.0  # for another that has the folder to itself, as for a recovery


def check_writable(folder: Path) -> None:
    """Raises StoreError for one that could not be used, as far as can be told without making it."""
    with store_errors("opened"):
        location = folder.absolute()
        while not location.exists():
            location = location.parent
        if not location.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "")
        if not os.access(location, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "")


def make_private(folder: Path) -> Path:
    """Made if it is not there, with 0700; one that is there keeps its mode, as it may be shared on
    purpose: what is put in it is closed by itself.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def private_file(path: Path, flags: int = os.O_CREAT | os.O_RDWR) -> BinaryIO:
    """Opened, made with 0600 where it is not there, whatever the umask; one that others may read
    is closed to them.
    """
    handle = os.open(path, flags | getattr(os, "O_BINARY", 0), 0o600)
    if os.name == "posix" and os.fstat(handle).st_mode & 0o077:
        with suppress(PermissionError):  # another user's, who chose its mode
            os.fchmod(handle, 0o600)
    return os.fdopen(handle, "r+b" if flags & os.O_RDWR else "wb")


def sync_folder(folder: Path) -> None:
    """Make new names themselves survive a power cut. Windows cannot open folders, and does not
    need it.
    """
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class FolderLock:
    """Held as long as the folder is used; the system lets go of it when the process ends, however
    it ends. `alone`: nobody else had the folder when it was taken.

    Until `share` is called nobody else gets it. Raises StoreBusyError where another does not let
    go, at once with `wait_s` 0.
    """

    def __init__(self, folder: Path, wait_s: float = WAIT_S) -> None:
        self._file = private_file(folder / LOCK)
        try:
            self.alone = self._take(wait_s)
        except BaseException:
            self._file.close()
            raise

    def _take(self, wait_s: float) -> bool:
        end = time.monotonic() + wait_s
        if lock(self._file) is not False:  # without locks, everybody is taken to be alone
            return True
        while lock(self._file, shared=True) is False:
            if time.monotonic() >= end:
                raise StoreBusyError(
                    "conversations: another program is using the data folder, "
                    "perhaps to recover or restore it; try again when it is done"
                )
            time.sleep(0.05)
        return False

    def share(self) -> None:
        lock(self._file, shared=True)

    def close(self) -> None:
        self._file.close()
