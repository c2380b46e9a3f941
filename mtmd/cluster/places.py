"""Files where they lie: in folders that every machine of a cluster has, and behind addresses such
as s3://bucket/folder, which fsspec reads and writes.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import quote, unquote_to_bytes

from mtmd.kernels.errors import ImageError, OptionError
from mtmd.kernels.text import one_line

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
# Stores in which an object is there whole or not at all: what is sent in pieces is put together at
# the end. Elsewhere a file is written under another name first.
WHOLE_OBJECTS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "r2")
STREAMED = ("http", "https")  # which need not say how long a file is
WRITING = "_writing-"
LOOKED_AT = 256 << 10  # bytes read at once where little of a file is wanted
REASON_CHARS = 200
T = TypeVar("T")


def is_address(word: str) -> bool:
    """Of another file system: file:// is a path."""
    return bool(ADDRESS.match(word)) and not word.startswith("file://")


def full_name(word: str) -> str:
    """The same from any working directory: an absolute path, or the address as it stands."""
    if is_address(word):
        return word
    if word.startswith("file://"):
        word = os.fsdecode(unquote_to_bytes(word.removeprefix("file://")))
    return os.path.abspath(word)  # noqa: PTH100  # resolves no links


def as_text(path: str) -> str:
    """What `full_name` makes `path` of again, as valid text: names of files need not be that."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return "file://" + quote(os.fsencode(path))
    return path


def file_system(address: str) -> tuple[Any, str]:
    """What reads and writes there, and the path in it. Raises OptionError where the library for
    this kind of address is not there, or it is of no kind that is known.
    """
    try:
        import fsspec
    except ImportError as error:
        raise OptionError(
            f"{address:.100}: addresses need fsspec; run `pip install 'mtmd[ray]'`"
        ) from error
    try:
        found = fsspec.core.url_to_fs(address)
    except ImportError as error:
        kind = address.partition("://")[0]
        raise OptionError(
            f"{address:.100}: {kind}:// needs another library ({one_line(error, REASON_CHARS)})"
        ) from error
    except ValueError as error:
        raise OptionError(
            f"{address:.100}: found an address that fsspec does not know "
            f"({one_line(error, REASON_CHARS)}), expected one such as s3://bucket/folder"
        ) from error
    return cast("tuple[Any, str]", found)


def expand(word: str, wanted: tuple[str, ...]) -> Iterator[str]:
    """The files that an address names, with `wanted` endings where it is a folder. Raises
    OptionError where there are none, or where they cannot be listed.
    """
    kind = word.partition("://")[0]
    if kind in STREAMED:  # no folders there
        yield word
        return
    fs, path = file_system(word)
    try:
        if glob.has_magic(path) and not fs.exists(path):
            found = sorted(p for p, facts in fs.glob(path, detail=True).items() if _is_file(facts))
        elif fs.isdir(path):
            found = sorted(p for p in fs.find(path) if _is_shown(p, path, wanted))
        else:
            found = [path]
    except Exception as error:  # each file system has its own
        raise OptionError(
            f"{word:.200}: cannot be listed ({one_line(error, REASON_CHARS)}), expected a file, a "
            "folder or a pattern; check the address and who may read it"
        ) from error
    if not found:
        raise OptionError(
            f"{word:.200}: found no file there, expected some ending in {', '.join(wanted)}"
        )
    named = word.rstrip("/")
    before = named.removesuffix(path) if named.endswith(path) else f"{kind}://"  # with a host
    yield from (f"{before}{p}" for p in found)


def _is_file(facts: dict[str, Any]) -> bool:
    return facts.get("type") == "file"


def _is_shown(path: str, folder: str, wanted: tuple[str, ...]) -> bool:
    inside = path[len(folder) :].strip("/").split("/")
    return path.lower().endswith(wanted) and not any(part.startswith(".") for part in inside)


def open_seekable(source: str) -> BinaryIO:
    """For libraries that look where they want. Raises OSError, or what its file system raises."""
    if not is_address(source):
        return Path(full_name(source)).open("rb")
    fs, path = file_system(source)
    return cast(BinaryIO, fs.open(path, "rb", block_size=LOOKED_AT))


def read_most(source: str, most: int) -> bytes:
    """A file, of which one byte more than `most` at most is read. Raises ImageError."""
    return _read(source, lambda fs, path: _whole(fs, path, source, most))


def read_range(source: str, start: int, count: int) -> bytes:
    """`count` bytes from `start` on. Raises ImageError, also where there are not so many."""
    data = _read(source, lambda fs, path: fs.cat_file(path, start, start + count))
    if len(data) != count:
        raise ImageError(
            f"{source}: found {len(data):,} of {count:,} bytes at {start:,}, expected the file as "
            "it was when it was listed; it has been cut since"
        )
    return data


def _whole(fs: Any, path: str, source: str, most: int) -> bytes:
    if source.partition("://")[0] in STREAMED:
        with fs.open(path, "rb", block_size=0) as file:
            chunks, left = [], most + 1
            while left > 0 and (chunk := file.read(min(left, 1 << 20))):
                chunks.append(chunk)
                left -= len(chunk)
            return b"".join(chunks)
    return bytes(fs.cat_file(path, 0, most + 1))


class _Here:
    """fsspec's call for paths, which need no fsspec."""

    @staticmethod
    def cat_file(path: str, start: int, end: int) -> bytes:
        with Path(path).open("rb") as file:
            file.seek(start)
            return file.read(end - start)


def _read(source: str, work: Callable[[Any, str], bytes]) -> bytes:
    try:
        here = None if is_address(source) else full_name(source)
        return work(*(file_system(source) if here is None else (_Here(), here)))
    except ImageError:
        raise
    except OptionError as error:
        if isinstance(error.__cause__, ImportError):  # no other address would fare better
            raise
        raise ImageError(str(error)) from error
    except FileNotFoundError:
        raise ImageError(
            f"{source}: found no such file, expected a picture; it was there when it was listed, "
            "or a table names it"
        ) from None
    except Exception as error:  # each file system has its own
        reason = one_line(error, REASON_CHARS) or type(error).__name__
        raise ImageError(f"{source}: cannot be read ({reason}), expected a picture") from error


class Folder:
    """Where rows are put together, for every machine to reach. What is written is there whole or
    not at all, and stays as it was written first.
    """

    def __init__(self, name: str):
        self.name = full_name(name)
        self._remote = file_system(self.name) if is_address(self.name) else None

    def names(self) -> set[str]:
        """Of the files right in it."""
        if self._remote is None:
            here = Path(self.name)
            return {p.name for p in here.iterdir() if p.is_file()} if here.is_dir() else set()
        fs, path = self._remote
        with suppress(FileNotFoundError):
            fs.invalidate_cache()
            found = fs.ls(path, detail=True)
            return {e["name"].rstrip("/").rpartition("/")[2] for e in found if _is_file(e)}
        return set()

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError, or what its file system raises."""
        if self._remote is None:
            return (Path(self.name) / name).read_bytes()
        fs, path = self._remote
        return bytes(fs.cat_file(f"{path.rstrip('/')}/{name}"))

    def make(self) -> None:
        """Raises OSError."""
        if self._remote is None:
            Path(self.name).mkdir(parents=True, exist_ok=True)
        else:
            fs, path = self._remote
            fs.makedirs(path, exist_ok=True)

    def write(self, name: str, data: bytes) -> None:
        """Whole, or not at all; nothing where the name is taken. Raises OSError."""
        if self._remote is None:
            self._write_here(Path(self.name) / name, data)
            return
        fs, path = self._remote
        place = f"{path.rstrip('/')}/{name}"
        if fs.exists(place):
            return
        if self.name.partition("://")[0] in WHOLE_OBJECTS:
            fs.pipe_file(place, data)
            return
        made = f"{path.rstrip('/')}/{_new_name(name)}"
        try:
            fs.pipe_file(made, data)
            fs.mv(made, place)
        except BaseException:
            with suppress(Exception):
                fs.rm(made)
            raise

    def _write_here(self, place: Path, data: bytes) -> None:
        made = place.with_name(_new_name(place.name))
        try:
            with made.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(made, place)  # fails where the name is taken, unlike a renaming
            except FileExistsError:
                return
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                if not place.exists():  # a file system without links
                    made.replace(place)
            _sync(place.parent)
        finally:
            with suppress(OSError):
                made.unlink()

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
        """Take away what processes left that were killed while they wrote. Nobody writes now."""
        for name in self.names():
            if name.startswith(WRITING):
                self.remove(name)


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
