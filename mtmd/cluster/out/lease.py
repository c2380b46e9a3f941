"""One command at a time writes to a folder: which, and whether it still lives.

A command has a claim, a file with the next number, which a file system or store lets one create,
and next to it a beat, a file whose name changes every BEAT_S: in a small folder of their own, which
is listed at once whatever lies beside it. A command that was killed leaves both. Whether one lives
is known at once on its own machine, where that is Linux; elsewhere its beat is looked at until it
changes, or LEASE_S have passed, so that no clocks are compared.

Numbers begin anew where all have given back, so each claim holds a word that no other has. A claim
is lost only where another one, or none, is seen in a folder that is there.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from mtmd.base.errors import DeviceError, OptionError
from mtmd.base.text import one_line
from mtmd.cluster.out.folder import Folder
from mtmd.cluster.places import told_reason

LEASE = "_lease"  # stays, empty: who was stopped and wakes can tell that it lost its claim
BEAT_S = 10.0
LEASE_S = 60.0  # without a beat, after which a command is taken for dead
LOOK_S = 2.0
_CLAIM = re.compile(r"(\d{6})\.json")
log = logging.getLogger("mtmd.cluster")


class Lease:
    """Of `folder`, from `with` to its end. Raises OptionError where another command has it, and
    DeviceError where the folder cannot be written. `tell`: gets a line where that takes a while.
    """

    def __init__(
        self,
        folder: Folder,
        tell: Callable[[str], None] = lambda _: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        lives: Callable[[Mapping[str, Any]], bool | None] | None = None,
    ) -> None:
        self.folder, self._own = folder, folder.inside(LEASE)
        self._tell, self._clock, self._sleep = tell, clock, sleep
        self._lives = lives or is_running
        self._number = self._beats = 0
        self._word, self._beat = uuid.uuid4().hex, ""
        self._lost = ""
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Lease:
        self.take()
        self._thread = threading.Thread(target=self._run, name="mtmd lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        self.give_back()

    def take(self) -> None:
        try:
            self._own.make()
            me = json.dumps(this_process() | {"word": self._word}).encode()
            while True:
                there = _last(self._own.names())
                if there:
                    self._check_over(there)
                # Some stores write over what is there: of two, the later one has it.
                if self._own.write(_claim(there + 1), me) and self._has(there + 1):
                    break
            self._number = there + 1
            self._remove(lambda number: number < self._number)
            self._own.sweep()
            self.beat()
        except OSError as error:
            raise DeviceError(
                f"out {self.folder.name}: cannot be written ({told_reason(error)})"
            ) from error

    def beat(self) -> None:
        """Raises OSError, as where the folder is out of reach. `check` tells what is lost."""
        if self._lost:
            return
        before, beat = self._beat, f"{self._number:06}-{self._word}-{self._beats:09}"
        self._own.write(beat, b"")
        self._beat, self._beats = beat, self._beats + 1
        if before:
            self._own.remove(before)
        names = self._own.names()
        if beat not in names:
            raise FileNotFoundError("the folder is out of reach")
        if _last(names) > self._number:
            self._lose("another command goes on there by now")
        elif _claim(self._number) not in names:
            self._lose("its claim is gone: another command went on there, or it was removed")
        elif not self._has(self._number):
            self._lose("another command goes on there by now")

    def _lose(self, why: str) -> None:
        self._lost = why
        self._own.remove(self._beat)

    def _has(self, number: int) -> bool:
        """Raises OSError."""
        owner = self._owner(number)
        return owner is not None and owner.get("word") == self._word

    def check(self) -> None:
        """Raises DeviceError where this command was taken for dead and another one goes on."""
        if self._lost:
            raise DeviceError(
                f"out {self.folder.name}: {self._lost}; expected this one to be alone there. One "
                f"that gives no sign of life for {LEASE_S:.0f} s is followed: was it stopped, or "
                "the folder out of reach? No row is lost, --resume goes on"
            )

    def give_back(self) -> None:
        if not self._number or self._lost:
            return
        self._own.remove(self._beat)
        with suppress(OSError):  # who comes next looks for its beat, in vain
            if self._has(self._number):
                self._own.remove(_claim(self._number))

    def _run(self) -> None:
        while not self._end.wait(BEAT_S) and not self._lost:
            try:
                self.beat()
            except OSError as error:  # it may be back before anybody takes this for dead
                log.warning("%s: no sign of life written (%s)", self.folder.name, error)

    def _check_over(self, number: int) -> None:
        """Raises OptionError where the command that has this claim lives."""
        owner = self._owner(number)
        if owner is None:
            return
        who = f"process {owner.get('process', '?')} on {owner.get('host', '?')}"
        who = one_line(str(who), 120)
        lives = self._lives(owner)
        if lives is None:
            self._tell(
                f"{self.folder.name}: {who} has begun to write there; whether it goes on is known "
                f"in at most {LEASE_S:.0f} s"
            )
            lives = self._beats_on(number)
        if lives:
            raise OptionError(
                f"out {self.folder.name}: found another command at work there ({who}), expected "
                "none: rows of two would be answered twice; wait until it ends, end it, or name "
                "another folder"
            )
        log.warning("%s: %s has ended without saying so; going on", self.folder.name, who)

    def _owner(self, number: int) -> dict[str, Any] | None:
        """Who has made a claim, None where it is gone."""
        try:
            return dict(json.loads(self._own.read(_claim(number))))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, RecursionError):
            return {}

    def _beats_on(self, number: int) -> bool:
        first = self._of(number)
        end = self._clock() + LEASE_S
        while self._clock() < end:
            self._sleep(LOOK_S)
            now = self._of(number)
            if _claim(number) not in now:
                return False
            if now != first:
                return True
        return False

    def _of(self, number: int) -> set[str]:
        return {name for name in self._own.names() if name.startswith(f"{number:06}")}

    def _remove(self, which: Callable[[int], bool]) -> None:
        for name in self._own.names():
            if name[:6].isdecimal() and which(int(name[:6])):
                self._own.remove(name)


def this_process() -> dict[str, Any]:
    """Enough to tell, on this machine, whether it still lives; there are others of its number, on
    other machines, in containers and later.
    """
    return {
        "host": socket.gethostname(),
        "numbers": _numbers(),
        "process": os.getpid(),
        "began": _began(os.getpid()),
    }


def is_running(owner: Mapping[str, Any]) -> bool | None:
    """None where that cannot be told from here."""
    here, process = _numbers(), owner.get("process")
    if here is None or owner.get("numbers") != here or not isinstance(process, int):
        return None
    began = _began(process)
    return began is not None and began == owner.get("began")


def _numbers() -> str | None:
    """Where processes have numbers of their own: since which start of which system, in which
    container. None where that is not known.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return None


def _began(process: int) -> str | None:
    """When, in ticks since the system's start; None where there is none."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]  # a dead one that nobody has asked for
    return None


def _claim(number: int) -> str:
    return f"{number:06}.json"


def _last(names: set[str]) -> int:
    found = (match for name in names if (match := _CLAIM.fullmatch(name)))
    return max((int(match[1]) for match in found), default=0)
