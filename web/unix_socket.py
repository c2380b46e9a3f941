"""A socket in the file system in place of host and port: who may open the file may connect."""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mtmd import OptionError
from mtmd.base.file_lock import lock

BACKLOG = 1024
WAIT_S = 10.0  # for another server that begins beside this one


class UnixSocket(socket.socket):
    """Listening at `path` from the start: whoever asks whether a server is there is told so. The
    file goes when the socket is closed, unless another has taken its place.
    """

    def __init__(self, path: Path, mode: int) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self.path, self._file, self._process = path, (0, 0), os.getpid()
        try:
            self.bind(str(path))
            self._file = _identity(path)
            path.chmod(mode)  # nobody can connect before `listen`
            self.listen(BACKLOG)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        mine, self._file = self._file, (0, 0)
        if mine != (0, 0) and os.getpid() == self._process:
            with suppress(FileNotFoundError):
                if _identity(self.path) == mine:
                    self.path.unlink()
        super().close()


def bind_unix(path: Path, mode: int) -> UnixSocket:
    """The file of a server that has ended is replaced. Raises OptionError where a server answers
    there, the file is no socket, or the path cannot be had.
    """
    try:
        with _alone_in(path.parent):
            _make_room(path)
            return UnixSocket(path, mode)
    except OSError as error:  # of a path that is too long Python says so without a number
        raise _refused(path, error.strerror or str(error)) from error


def _make_room(path: Path) -> None:
    try:
        result = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(result.st_mode):
        raise _refused(path, "a file is there that is no socket")
    if _is_live(path):
        raise _refused(path, "another server is there")
    path.unlink()


def _is_live(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        number = probe.connect_ex(str(path))
    if number not in (0, errno.ECONNREFUSED, errno.EAGAIN):
        raise OSError(number, os.strerror(number))
    return number != errno.ECONNREFUSED


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two servers that begin at once do not take each other's file for one that was left; where the
    file system has no locks, that is not ruled out.
    """
    descriptor, end = os.open(folder, os.O_RDONLY), time.monotonic() + WAIT_S
    try:
        while lock(descriptor) is False:  # whoever may read the folder may have it locked
            if time.monotonic() >= end:
                raise BlockingIOError(errno.EAGAIN, "another program has its folder locked")
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _identity(path: Path) -> tuple[int, int]:
    result = path.lstat()
    return result.st_dev, result.st_ino


def _refused(path: Path, why: str) -> OptionError:
    return OptionError(
        f"host {f'unix:{path}'!r:.200}: cannot be listened on: {why}; choose another path"
    )
