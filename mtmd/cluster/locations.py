"""Files where they lie: in folders that every machine of a cluster has, and behind addresses such
as s3://bucket/folder, which fsspec reads and writes.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import quote, unquote_to_bytes

from mtmd.base.errors import ImageError, OptionError
from mtmd.base.files import open_regular
from mtmd.base.text import one_line
from mtmd.prompt.data_url import read_data_url
from mtmd.prompt.url_kinds import is_data_url, url_identity

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
# Stores in which an object is there whole or not at all: what is sent in pieces is put together at
# the end.
WHOLE_OBJECTS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "r2")
STREAMED = ("http", "https")  # which need not say how long a file is
LOOKED_AT = 256 << 10  # bytes read at once where little of a file is wanted
REASON_CHARS = 200
DIGEST_CHARS = 16
DIGESTS = ("ETag", "etag", "md5Hash", "content_md5")
TIMES = ("mtime", "LastModified", "last_modified", "updated")
IN_TEXT = re.compile(r"(https?)?://[^\s'\"<>]+")
T = TypeVar("T")


def is_address(word: str) -> bool:
    """Return whether a word is an address of another file system: file:// is a path."""
    return bool(ADDRESS.match(word)) and not word.startswith("file://")


def full_name(word: str) -> str:
    """The same from any working directory: an absolute path, or the address or data URL as it
    stands.
    """
    if is_address(word) or is_data_url(word):
        return word
    if word.startswith("file://"):
        word = os.fsdecode(unquote_to_bytes(word.removeprefix("file://")))
    return os.path.abspath(word)  # noqa: PTH100  # resolves no links


def absolute(name: Any) -> Any:
    """Return a path as it is from any folder, and the name of a model on the hub as it stands."""
    path = Path(name).expanduser() if isinstance(name, str) else None
    return str(path.resolve()) if path is not None and path.exists() else name


def as_text(path: str) -> str:
    """Return `path` as valid text, of which `full_name` makes it again: names need not be valid."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return "file://" + quote(os.fsencode(path))
    return path


def without_secrets(address: str) -> str:
    """An address that may be shown: without a user and a password before its host, and, of the web,
    without what stands behind its "?", as signatures do. Paths as they are.
    """
    return "::".join(map(_without_secrets, address.split("::"))) if is_address(address) else address


def _without_secrets(address: str) -> str:
    kind, mark, rest = address.partition("://")
    is_web = kind.lower() in STREAMED
    if is_web:
        rest = rest.partition("#")[0].partition("?")[0]
    host, slash, path = rest.partition("/")
    user, _, own = host.rpartition("@")
    if is_web or ":" in user:  # abfs://container@account has neither
        host = own
    return f"{kind}{mark}{host}{slash}{path}"


def reason_text(error: BaseException, source: str = "") -> str:
    """Return what a library says of a failure, with addresses in it without secrets."""
    text = one_line(error)
    if source:
        text = text.replace(source, without_secrets(source))

    text = IN_TEXT.sub(lambda match: _without_secrets(match[0]), text)
    return text[:REASON_CHARS] or type(error).__name__


def identity(source: str) -> str:
    """A name of its own for a path or an address, in which nothing is secret: where something was
    left out, the first digits of the SHA-256 of the whole stand behind it. Of a data URL these
    alone.
    """
    if is_data_url(source):
        return url_identity(source)
    open_ = without_secrets(source)
    if open_ == source:
        return source
    return f"{open_}?{hashlib.sha256(source.encode()).hexdigest()[:DIGEST_CHARS]}"


def path_in(source: str) -> str:
    """Return the part of `source` whose ending says what it is: of an address of the web, without
    its query; "" for a data URL.
    """
    if is_data_url(source):
        return ""
    kind = source.partition("://")[0].lower()
    return without_secrets(source) if kind in STREAMED and "://" in source else source


def named_by(table: str, value: str, anywhere: bool) -> str:
    """The file that `table`, a path or an address, calls `value`. Unless `anywhere`, it has to lie
    below the table's folder, or behind an address of its kind, and host, where it has one: what a
    table names is read with the rights and keys of whoever runs the command. A data URL is there
    already. Raises ImageError.
    """
    if is_data_url(value):
        return value
    is_web = table.partition("://")[0].lower() in STREAMED
    folder = (table.partition("?")[0] if is_web else table).rpartition("/")[0]
    is_whole = is_address(value) or value.startswith(("/", "file://"))
    source = value if is_whole else f"{folder}/{value}"
    if anywhere or _may_name(table, folder, value, source):
        return source
    raise ImageError(
        f"{without_secrets(value):.200}: found in a table, outside of its folder; expected a path "
        "below that, or an address of its kind; --trust-tables reads any file and address that "
        "tables name"
    )


def _may_name(table: str, folder: str, value: str, source: str) -> bool:
    if not is_address(table):
        below = f"{full_name(folder or '/').rstrip('/')}/"
        return not is_address(source) and full_name(source).startswith(below)
    if not is_address(source) or "::" in source:
        return False
    if source != value:
        return posixpath.normpath(value).split("/")[0] != ".."
    (own, own_host), (kind, host) = (
        (address.partition("://")[0].lower(), address.partition("://")[2].partition("/")[0])
        for address in (table, value)
    )
    return kind == own and (kind in WHOLE_OBJECTS or host == own_host)


def stamp_of(source: str) -> str:
    """Return what changes when a file does: its size, and its time or digest; "" where nothing is
    known. Raises OSError, or what its file system raises.
    """
    if not is_address(source):
        facts = Path(full_name(source)).stat()
        return f"{facts.st_size} {facts.st_mtime_ns}"
    fs, path = file_system(source)
    with suppress(Exception):  # some keep no lists
        fs.invalidate_cache(path)
    result = fs.info(path)
    names = ("size", *DIGESTS, *TIMES)
    known = {name: str(result[name]) for name in names if result.get(name) is not None}
    return json.dumps(known) if known else ""


def renames(fs: Any) -> bool:
    """Return whether a file there gets another name in one step: else it is copied."""
    import fsspec

    return type(fs).mv is not fsspec.AbstractFileSystem.mv


def local_file_system() -> Any:
    import fsspec

    return fsspec.filesystem("file")


def file_system(address: str) -> tuple[Any, str]:
    """Return what reads and writes there, and the path in it. Raises OptionError where the library
    for this kind of address is not there, or it is of no kind that is known.
    """
    try:
        import fsspec
    except ImportError as error:
        raise OptionError(
            f"{without_secrets(address):.100}: addresses need fsspec; run `pip install 'mtmd[ray]'`"
        ) from error
    try:
        result = fsspec.core.url_to_fs(address)
    except ImportError as error:
        kind = address.partition("://")[0]
        raise OptionError(
            f"{without_secrets(address):.100}: {kind}:// needs another library "
            f"({reason_text(error, address)})"
        ) from error
    except ValueError as error:
        raise OptionError(
            f"{without_secrets(address):.100}: found an address that fsspec does not know "
            f"({reason_text(error, address)}), expected one such as s3://bucket/folder"
        ) from error
    return cast("tuple[Any, str]", result)


def expand(word: str, requested: tuple[str, ...]) -> Iterator[str]:
    """The files that an address names, with `requested` endings where it is a folder. Raises
    OptionError where there are none, or where they cannot be listed.
    """
    kind = word.partition("://")[0]
    if kind in STREAMED:  # no folders there
        yield word
        return
    fs, path = file_system(word)
    try:
        if glob.has_magic(path) and not fs.exists(path):
            result = sorted(p for p, facts in fs.glob(path, detail=True).items() if _is_file(facts))
        elif fs.isdir(path):
            result = sorted(p for p in fs.find(path) if _is_shown(p, path, requested))
        else:
            result = [path]
    except Exception as error:  # each file system has its own
        raise OptionError(
            f"{without_secrets(word):.200}: cannot be listed ({reason_text(error, word)}), "
            "expected a file, a folder or a pattern; check the address and who may read it"
        ) from error
    if not result:
        raise OptionError(
            f"{without_secrets(word):.200}: found no file there, expected some ending in "
            f"{', '.join(requested)}"
        )
    named = word.rstrip("/")
    before = named.removesuffix(path) if named.endswith(path) else f"{kind}://"  # with a host
    yield from (f"{before}{p}" for p in result)


def _is_file(facts: dict[str, Any]) -> bool:
    return facts.get("type") == "file"


def _is_shown(path: str, folder: str, requested: tuple[str, ...]) -> bool:
    inside = path[len(folder) :].strip("/").split("/")
    return path.lower().endswith(requested) and not any(part.startswith(".") for part in inside)


def open_seekable(source: str) -> BinaryIO:
    """Open a file for libraries that read at any position. Raises OSError, or what its file system
    raises.
    """
    if not is_address(source):
        return open_regular(Path(full_name(source)))
    fs, path = file_system(source)
    return cast(BinaryIO, fs.open(path, "rb", block_size=LOOKED_AT))


def read_limited(source: str, maximum: int) -> bytes:
    """A file, of which one byte more than `maximum` at most is read, or what a data URL holds.
    Raises ImageError.
    """
    if is_data_url(source):
        return read_data_url(source, maximum, url_identity(source))
    return _read(source, lambda fs, path: _whole(fs, path, source, maximum))


def read_range(source: str, start: int, count: int) -> bytes:
    """`count` bytes from `start` on. Raises ImageError, also where there are not so many."""
    data = _read(source, lambda fs, path: fs.cat_file(path, start, start + count))
    if len(data) != count:
        raise ImageError(
            f"{without_secrets(source)}: found {len(data):,} of {count:,} bytes at {start:,}, "
            "expected the file as it was when it was listed; it has been cut since"
        )
    return data


def _whole(fs: Any, path: str, source: str, maximum: int) -> bytes:
    if source.partition("://")[0] in STREAMED:
        with fs.open(path, "rb", block_size=0) as file:
            chunks, left = [], maximum + 1
            while left > 0 and (chunk := file.read(min(left, 1 << 20))):
                chunks.append(chunk)
                left -= len(chunk)
            return b"".join(chunks)
    return bytes(fs.cat_file(path, 0, maximum + 1))


class _Here:
    """fsspec's call for paths, which need no fsspec."""

    @staticmethod
    def cat_file(path: str, start: int, end: int) -> bytes:
        with open_regular(Path(path)) as file:
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
            f"{without_secrets(source)}: found no such file, expected a picture; it was there when "
            "it was listed, or a table names it"
        ) from None
    except Exception as error:  # each file system has its own
        raise ImageError(
            f"{without_secrets(source)}: cannot be read ({reason_text(error, source)}), expected a "
            "picture"
        ) from error
