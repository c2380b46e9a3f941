"""A folder into which many machines put files, on a file system that all of them have, or behind an
address.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mtmd.base.errors import MtmdError
from mtmd.cluster.places import (
    DIGESTS,
    TIMES,
    WHOLE_OBJECTS,
    file_system,
    full_name,
    is_address,
    renames,
    stamp_of,
    told_reason,
)

WRITING = "_writing-"
TRIES = 4  # of one file: another command that ends sweeps what is being written
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP)


class Folder:
    """Where rows are put together, for every machine to reach. What is written is there whole or
    not at all, and stays as it was written first. Its methods raise OSError, whatever the file
    system raises.
    """

    def __init__(self, name: str):
        self.name = full_name(name)
        self._remote = file_system(self.name) if is_address(self.name) else None

    def inside(self, name: str) -> Folder:
        """A folder in it, whose files are no files of this one."""
        return Folder(f"{self.name.rstrip('/')}/{name}")

    def names(self) -> set[str]:
        """Of the files right in it."""
        with self._told():
            if self._remote is None:
                with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.name) as here:
                    return {entry.name for entry in here if entry.is_file()}
                return set()
            fs, path = self._remote
            with suppress(FileNotFoundError):
                fs.invalidate_cache()
                found = [e for e in fs.ls(path, detail=True) if e.get("type") == "file"]
                return {e["name"].rstrip("/").rpartition("/")[2] for e in found}
            return set()

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError where it is not there."""
        with self._told():
            if self._remote is None:
                return (Path(self.name) / name).read_bytes()
            fs, path = self._remote
            return bytes(fs.cat_file(f"{path.rstrip('/')}/{name}"))

    def stamp(self, name: str) -> str:
        """What changes when a file becomes another one; "" where nothing tells. Raises OSError."""
        with self._told():
            if self._remote is None:
                facts = (Path(self.name) / name).stat()
                return f"{facts.st_size} {facts.st_mtime_ns} {facts.st_ino}"
            found = stamp_of(f"{self.name.rstrip('/')}/{name}")
            return found if found and {*DIGESTS, *TIMES} & json.loads(found).keys() else ""

    def make(self) -> None:
        with self._told():
            if self._remote is None:
                Path(self.name).mkdir(parents=True, exist_ok=True)
            else:
                fs, path = self._remote
                fs.makedirs(path, exist_ok=True)

    def write(self, name: str, data: bytes) -> bool:
        """Whole, or not at all. Whether it was written: not where the name is taken."""
        with self._told():
            for _ in range(TRIES - 1):
                with suppress(FileNotFoundError):
                    return self._write(name, data)
            return self._write(name, data)

    def _write(self, name: str, data: bytes) -> bool:
        if self._remote is None:
            return _write_here(Path(self.name) / name, data)
        fs, path = self._remote
        place = f"{path.rstrip('/')}/{name}"
        if self.name.partition("://")[0] in WHOLE_OBJECTS or not renames(fs):
            return _create(fs, place, data)
        return _write_beside(fs, f"{path.rstrip('/')}/{_new_name(name)}", place, data)

    def remove(self, name: str) -> None:
        """Raises nothing where it is gone, or stays."""
        with suppress(Exception):  # each file system has its own
            if self._remote is None:
                (Path(self.name) / name).unlink()
            else:
                fs, path = self._remote
                fs.rm(f"{path.rstrip('/')}/{name}")

    def remove_empty(self) -> None:
        """Itself, where nothing is in it. Object stores have no folders."""
        with suppress(OSError):
            if self._remote is None:
                Path(self.name).rmdir()

    def sweep(self) -> None:
        """Take away what processes left that were killed while they wrote. Who writes now, for
        another command, does it once more.
        """
        for name in self.names():
            if name.startswith(WRITING):
                self.remove(name)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (OSError, MtmdError):
            raise
        except Exception as error:  # each file system has its own
            raise OSError(f"{type(error).__name__}: {told_reason(error, self.name)}") from error


def _create(fs: Any, place: str, data: bytes) -> bool:
    """In one request that says that nothing may be there: S3's If-None-Match, for one, which some
    stores of its kind pass over: of these, one who looks before writes over nothing that is old.
    """
    if fs.exists(place):
        return False
    try:
        fs.pipe_file(place, data, mode="create")
    except FileExistsError:
        return False
    except Exception:  # each store has its own word for what is there already
        fs.invalidate_cache()
        if fs.exists(place):
            return False
        raise
    return True


def _write_beside(fs: Any, made: str, place: str, data: bytes) -> bool:
    """Under another name first, where a file is there before it is whole."""
    if fs.exists(place):
        return False
    try:
        fs.pipe_file(made, data)
        fs.mv(made, place)
    except BaseException:
        with suppress(Exception):
            fs.rm(made)
        raise
    return True


def _write_here(place: Path, data: bytes) -> bool:
    made = place.with_name(_new_name(place.name))
    try:
        with made.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(made, place)  # fails where the name is taken, unlike a renaming
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if place.exists():
                return False
            made.replace(place)  # a file system without links
        _sync(place.parent)
        return True
    finally:
        with suppress(OSError):
            made.unlink()


def _new_name(name: str) -> str:
    return f"{WRITING}{uuid.uuid4().hex}-{name}"


def _sync(folder: Path) -> None:
    """A name outlives a loss of power only once its folder is written."""
    with suppress(OSError):  # where folders cannot be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
