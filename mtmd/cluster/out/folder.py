"""A folder into which many machines put files, on a file system that all of them have, or behind an
address.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from mtmd.base.errors import MtmdError
from mtmd.cluster.locations import (
    WHOLE_OBJECTS,
    file_system,
    full_name,
    is_address,
    local_file_system,
    reason_text,
    renames,
)

WRITING = "_writing-"


class Folder:
    """A folder that every machine reaches. What is written there is whole, and stays as it was
    written first. Methods raise OSError, whatever the file system raises.
    """

    def __init__(self, name: str):
        self.name = full_name(name)
        self._is_local = not is_address(self.name)
        if self._is_local:
            self._fs, self._path = local_file_system(), self.name
        else:
            self._fs, path = file_system(self.name)
            self._path = path.rstrip("/")

    def names(self) -> set[str]:
        """Return the names of the files directly in it."""
        with self._as_os_error(), suppress(FileNotFoundError, NotADirectoryError):
            self._fs.invalidate_cache()
            entries = self._fs.ls(self._path, detail=True)
            files = (e["name"].rstrip("/") for e in entries if e.get("type") == "file")
            return {name.rpartition("/")[2] for name in files}
        return set()

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError where it is not there."""
        with self._as_os_error():
            return bytes(self._fs.cat_file(self._file(name)))

    def make(self) -> None:
        with self._as_os_error():
            self._fs.makedirs(self._path, exist_ok=True)

    def write(self, name: str, data: bytes) -> bool:
        """Write a file whole, or not at all. Return whether it was written: not where the name is
        taken.
        """
        with self._as_os_error():
            if self._fs.exists(self._file(name)):
                return False
            if self.name.partition("://")[0] in WHOLE_OBJECTS or not renames(self._fs):
                return _create(self._fs, self._file(name), data)
            made = self._file(f"{WRITING}{uuid.uuid4().hex}-{name}")
            try:
                with self._fs.open(made, "wb") as file:
                    file.write(data)
                    if self._is_local:
                        file.flush()
                        os.fsync(file.fileno())
                self._fs.mv(made, self._file(name))
            except BaseException:
                with suppress(Exception):
                    self._fs.rm(made)
                raise
            return True

    def remove(self, name: str) -> None:
        """Remove a file. Raises nothing, also where it stays."""
        with suppress(Exception):  # each file system has its own
            self._fs.rm(self._file(name))

    def remove_empty(self) -> None:
        """Remove the folder where it is empty. Object stores have no folders."""
        if self._is_local:
            with suppress(OSError):
                self._fs.rmdir(self._path)

    def sweep(self) -> None:
        """Remove what processes left that were killed while they wrote."""
        for name in self.names():
            if name.startswith(WRITING):
                self.remove(name)

    def _file(self, name: str) -> str:
        return f"{self._path}/{name}"

    @contextmanager
    def _as_os_error(self) -> Iterator[None]:
        try:
            yield
        except (OSError, MtmdError):
            raise
        except Exception as error:  # each file system has its own
            raise OSError(f"{type(error).__name__}: {reason_text(error, self.name)}") from error


def _create(fs: Any, target: str, data: bytes) -> bool:
    """Write in one request that says that nothing may be there, as S3's If-None-Match. A store that
    passes over it has been looked at before, so that only what came at the same time is lost.
    """
    try:
        fs.pipe_file(target, data, mode="create")
    except FileExistsError:
        return False
    except Exception:  # each store has its own word for what is there already
        fs.invalidate_cache()
        if fs.exists(target):
            return False
        raise
    return True
