"""One command at a time writes to a file of rows. The system holds its lock for as long as the
process lives, however that ends, so one that was killed is in nobody's way.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mtmd.base.errors import OptionError
from mtmd.base.file_lock import lock
from mtmd.base.text import one_line

ENDING = ".lock"
OWNER_BYTES = 1000


@contextmanager
def output_lock(out: Path) -> Iterator[str]:
    """Lock `out` for this process only; yields what there is to report of that, "" for nothing.
    Raises OptionError where another process has it, or no lock of ours can be made.
    """
    try:
        location = out.resolve()  # through whatever link it is reached
    except (OSError, RuntimeError) as error:
        raise OptionError(f"out {out}: found links in a circle, expected a file") from error
    path = location.with_name(location.name + ENDING)
    try:
        file, locks = _locked(path, out)
    except OSError as error:
        raise OptionError(
            f"out {out}: {path.name} cannot be written beside it "
            f"({error.strerror or type(error).__name__}), expected a folder that may be written"
        ) from error
    with file:
        before = _owner(file)
        note = f"{out}: {before} has ended without saying so; going on" if before else ""
        if not locks:
            note = f"{out}: this file system has no locks; see that no other command writes there"
        try:
            file.seek(0)
            file.truncate()
            file.write(json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode())
            yield note
        finally:
            with suppress(OSError):  # what stays of it is in nobody's way
                if sys.platform == "win32":  # an open file stays there
                    file.truncate(0)
                else:
                    path.unlink(missing_ok=True)


def _locked(path: Path, out: Path) -> tuple[BinaryIO, bool]:
    """The file, and whether its system has locks. Raises OSError, and OptionError."""
    flags = os.O_CREAT | os.O_RDWR
    if sys.platform != "win32":  # of a link, its target would be written over; a pipe has no places
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        file = os.fdopen(os.open(path, flags, 0o644), "r+b", buffering=0)
        try:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "it is there, and no regular file")
            has = lock(file, byte=OWNER_BYTES)  # what is locked on Windows cannot be read
            if has is False:
                raise OptionError(
                    f"out {out}: found another `mtmd batch` running there "
                    f"({_owner(file) or 'which has just begun'}), expected "
                    "none: pictures would be answered twice; wait until it "
                    "ends, stop it, or name another file"
                )
            with suppress(FileNotFoundError):  # the one before has removed it, and ended
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    _check_ours(file, path, out)
                    return file, has is not None
        except BaseException:
            file.close()
            raise
        file.close()


def _check_ours(file: BinaryIO, path: Path, out: Path) -> None:
    """Raises OptionError for a file of somebody else, which would be written over and removed. One
    that a machine without power has left may be empty, or zeros.
    """
    file.seek(0)
    data = file.read(OWNER_BYTES + 1).strip(b"\0")
    if data and not (len(data) <= OWNER_BYTES and _read(data)):
        raise OptionError(
            f"out {out}: found a file {path.name} beside it that is no lock of `mtmd batch`, "
            "expected none; move it, or name another file"
        )


def _owner(file: BinaryIO) -> str:
    """Return who has written there last, "" for nobody, or where it cannot be told."""
    try:
        file.seek(0)
        owner = _read(file.read(OWNER_BYTES))
    except OSError:  # SMB's locks hold off readers
        return ""
    if not owner:
        return ""
    return one_line(f"process {owner['process']} on {owner['host']}", 120)


def _read(data: bytes) -> dict[str, object]:
    """Empty where `output_lock` has not written it."""
    with suppress(ValueError, RecursionError):
        result = json.loads(data)
        if isinstance(result, dict) and result.keys() == {"process", "host"}:
            return result
    return {}
