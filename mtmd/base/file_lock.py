"""Locks on files, which the system holds for a process as long as that lives, however it ends."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import BinaryIO

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


def lock(file: BinaryIO | int, *, shared: bool = False, byte: int = 0) -> bool | None:
    """Return it without waiting: whether it was had, None where the file system has no locks. It
    goes with the file. One that is held already becomes what is asked for. `file`: open, or its
    descriptor, which may be a folder's where not on Windows.

    Windows locks one `byte`, which others cannot read then, and has no shared locks: who asks for
    one is told that it was had.
    """
    if sys.platform == "win32":
        assert not isinstance(file, int)
        file.seek(byte)
        with suppress(OSError):
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            return True
        return shared
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the second of SMB
        return False
    except OSError:
        return None
    return True
