"""API keys: where they come from, whose they are, and how one in a request is found.

A key that has a name belongs to whoever goes by it, however many keys that are: a new one can be
handed out before the old one is taken back. Of keys only digests are held.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtmd import OptionError
from mtmd.base.text import plural

MIN_CHARS = 16  # shorter keys are guessed
MAX_KEYS = 1000  # every one is compared for every request
FILE_BYTES = 1 << 20
ANYBODY = "anybody"  # the owner where no keys are
MAKE_ONE = "`python -c 'import secrets; print(secrets.token_urlsafe(24))'` makes one"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_UNNAMED = "key-"  # begins the owners of keys without a name
LOOK_S = 1.0  # between two looks at a file: so long a key that was taken back may still be good
_SETTLED_S = 2.0  # a file changed later than this before it was read may change again unseen
log = logging.getLogger("mtmd.web")


@dataclass(frozen=True)
class Caller:
    """`owner`: whose uploads, pictures, history and caches these are; `name` is for the log and the
    metrics. Neither gives a key away to those who see it.
    """

    owner: str
    name: str


@dataclass(frozen=True)
class NamedKey:
    """`name` None for a key that has none."""

    name: str | None
    key: str

    def __repr__(self) -> str:
        return f"NamedKey({self.name!r}, ...)"


def authorization(header: str, api_key: str) -> str:
    """The Authorization header of a request, or what its X-Api-Key stands for where it has none."""
    return header or (f"Bearer {api_key}" if api_key else "")


def check_key(key: str, where: str) -> None:
    """Raises OptionError, which never has the key in it."""
    if len(key) < MIN_CHARS:
        raise OptionError(
            f"{where}: found a key of {len(key)} characters, expected at least {MIN_CHARS}; "
            f"{MAKE_ONE}"
        )
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise OptionError(
            f"{where}: found a key with other characters than printable ASCII without spaces; "
            f"{MAKE_ONE}"
        )


def parse_keys(lines: Iterable[str], where: str) -> tuple[NamedKey, ...]:
    """NAME:KEY or KEY on each line; empty ones and those that begin with # are left out. Raises
    OptionError that names the line.
    """
    keys = []
    for number, line in enumerate(lines, 1):
        entry, location = line.strip(), f"{where}, entry {number}"
        if not entry or entry.startswith("#"):
            continue
        name, colon, key = entry.partition(":")
        if colon and (not _NAME.fullmatch(name) or name.startswith(_UNNAMED)):
            raise OptionError(
                f"{location}: expected NAME:KEY with a name of letters, digits, '.', '_' and '-', "
                f"at most 64 of them, that does not begin with {_UNNAMED!r}"
            )
        check_key(key if colon else entry, location)
        keys.append(NamedKey(name, key) if colon else NamedKey(None, entry))
    if len(keys) > MAX_KEYS:
        raise OptionError(f"{where}: found {len(keys)} keys, expected at most {MAX_KEYS}")
    return tuple(keys)


class Keys:
    """The keys of a server. `plain` and `named` stay as they are; those in `file` are read again
    `LOOK_S` after it has changed at the latest. `clock`: as time.time. Thread-safe. Raises
    OptionError.
    """

    def __init__(
        self,
        plain: Sequence[str] = (),
        named: Sequence[NamedKey] = (),
        file: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for key in plain:
            check_key(key, "api-key")
        self._given = (*(NamedKey(None, key) for key in plain), *named)
        self._file, self._clock, self._lock = file, clock, threading.Lock()
        self.needed = bool(self._given or file)
        """Whether nobody is let in without one."""
        self._read: tuple[NamedKey, ...] = ()
        self._mark: tuple[int, ...] | None = None
        self._settled, self._reported, self._looked_at = True, "", clock()
        self._callers: dict[bytes, Caller] = {}
        if file is None:
            self._callers = _callers(self._given, alone=len(self._given) == 1)
        else:
            self._load(file)

    def find(self, header: str) -> Caller | None:
        """Return whose bearer token stands in an Authorization header, None for nobody's. Every key
        is compared, in constant time.
        """
        self._refresh()
        scheme, _, token = header.partition(" ")
        given, result = _digest(token.strip()), None
        for digest, caller in self._callers.items():
            if hmac.compare_digest(digest, given):
                result = caller
        return result if scheme.lower() == "bearer" else None

    @property
    def owners(self) -> int:
        """Return how many different ones there are, at least 1."""
        return max(1, len({caller.owner for caller in self._callers.values()}))

    def _refresh(self) -> None:
        """Read the file if it has changed. What is wrong with it then is logged, once, and the keys
        stay that there were.
        """
        now = self._clock()
        if self._file is None or 0 <= now - self._looked_at < LOOK_S:  # it may be set back
            return
        self._looked_at = now
        try:
            if _mark(self._file.stat()) == self._mark and self._settled:
                return
            with self._lock:
                before, count = self._callers, len(self._callers)
                self._load(self._file)
            self._reported = ""
            if self._callers != before:
                log.warning(
                    "api-key-file: changed: %s before, %d now",
                    plural(count, "key"),
                    len(self._callers),
                )
        except (OSError, OptionError) as error:
            reason = f"api-key-file: {error.strerror}" if isinstance(error, OSError) else str(error)
            if reason != self._reported:
                log.error("%s; the earlier keys (%d) stay valid", reason, len(self._callers))
            self._reported = reason

    def _load(self, file: Path) -> None:
        """Raises OptionError, and OSError where the file has gone between two looks."""
        now, data, status = self._clock(), *_contents(file)
        # Noted first: a file that is wrong is not read again before it has changed.
        self._mark, self._settled = _mark(status), status.st_mtime < now - _SETTLED_S
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise OptionError("api-key-file: found bytes that are not UTF-8 text") from error
        result = parse_keys(text.splitlines(), "api-key-file")
        if not result:
            raise OptionError(
                "api-key-file: found no keys, expected at least one NAME:KEY on a line of its own"
            )
        self._callers = _callers((*self._given, *result), alone=False)


def _contents(file: Path) -> tuple[bytes, os.stat_result]:
    try:
        # A pipe would wait for ever, and could be read but once.
        with open(os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as opened:  # noqa: PTH123  # flags
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OptionError("api-key-file: found something else than a regular file")
            data = opened.read(FILE_BYTES + 1)
    except OSError as error:
        raise OptionError(
            f"api-key-file: it cannot be read ({error.strerror}); expected a file with NAME:KEY on "
            "each line"
        ) from error
    if len(data) > FILE_BYTES:
        raise OptionError(f"api-key-file: found more than {FILE_BYTES:,} bytes")
    return data, status


def _mark(status: os.stat_result) -> tuple[int, ...]:
    """Another one where a file has changed: written to, or another put in its place."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _callers(keys: Sequence[NamedKey], *, alone: bool) -> dict[bytes, Caller]:
    """`alone`: a single key without a name is for a single person, who sees what was there before
    there was a key, and may change it.
    """
    callers: dict[bytes, Caller] = {}
    unnamed = 0
    for one in keys:
        digest = _digest(one.key)
        unnamed += one.name is None
        caller = (
            Caller(one.name, one.name)
            if one.name is not None
            else Caller(
                ANYBODY if alone else f"{_UNNAMED}{digest.hex()[:32]}", f"{_UNNAMED}{unnamed}"
            )
        )
        known = callers.setdefault(digest, caller)
        if known.owner != caller.owner:
            raise OptionError(
                f"the same key is given as {known.name!r} and as {caller.name!r}; expected one "
                "name for each"
            )
    return callers


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
