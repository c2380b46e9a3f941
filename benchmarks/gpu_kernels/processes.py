"""The process of a part, as the script sees it: lines of JSON as they come, and what became of it.

A process that dies, takes the device down, or is at one row for too long, is started again after
that row.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, ClassVar

from gpu_kernels.rows import DEVICE_GONE, FAILED, Line

GRACE_S = 5  # a part that does not look at the clock is ended so much later
SAVED = 20  # last lines of the standard error
START_S = 3  # less time is not enough to start again
LOOK_S = 0.1  # how often a process is looked at
NO_END = float("inf")


def part_lines(
    part: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    seconds: float,
    row_seconds: float = NO_END,
) -> Iterator[Line]:
    """Each a dictionary with the part's name. Every way to end too early is a line with a
    `failure`. row_seconds: for one row, after which the process is ended.
    """
    until, after = time.monotonic() + seconds, None
    while True:
        left = until - time.monotonic()
        if after is not None and left < START_S:
            yield {"part": part, "no_time_for": [f"all after {after}"]}
            return
        run = _Run(part, row_seconds)
        more: list[str] = ["--after", after] if after is not None else []
        yield from run.lines([*command, *more, "--seconds", f"{left:.1f}"], environment, left)
        if run.wrong is None:
            return
        yield {"part": part, **run.wrong}
        if run.timed_out or run.at is None or run.at == after:
            return
        after = run.at  # another row each time: it ends


def merged(sources: Sequence[Iterator[Line]]) -> Iterator[Line]:
    """Lines of several parts that run at once, as they come."""
    lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()

    def forward(source: Iterator[Line]) -> None:
        try:
            for line in source:
                lines.put(line)
        finally:
            lines.put(None)

    threads = [threading.Thread(target=forward, args=(s,), daemon=True) for s in sources]
    for thread in threads:
        thread.start()
    left = len(threads)
    try:
        while left:
            line = lines.get()
            if line is None:
                left -= 1
            else:
                yield line
    finally:
        if left:
            _Run.end_all()


class _Run:
    """One process. at: the row it was making last. wrong: how it ended, if not as it should have;
    a row that failed is no such thing.
    """

    running: ClassVar[set[subprocess.Popen[str]]] = set()
    over: ClassVar[bool] = False  # the script ends, and no process is to be left

    def __init__(self, part: str, row_seconds: float = NO_END):
        self.part, self._row_seconds = part, row_seconds
        self.at: str | None = None
        self.wrong: Line | None = None
        self.timed_out = False
        self._failed = self._ended = self._made = self._stuck = False
        self._begun: float | None = None  # the row that it is making
        self._errors: deque[str] = deque(maxlen=SAVED)

    def lines(
        self, command: Sequence[str], environment: Mapping[str, str], seconds: float
    ) -> Iterator[Line]:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=dict(environment),
            start_new_session=True,
        )
        assert process.stdout is not None and process.stderr is not None
        self.running.add(process)
        if self.over:  # meanwhile
            kill_all(process)
        errors = threading.Thread(target=self._forward, args=(process.stderr,), daemon=True)
        errors.start()
        watch = threading.Thread(target=self._watch, args=(process, seconds), daemon=True)
        watch.start()
        try:
            for text in process.stdout:
                yield from self._read(text)
        except BaseException:
            kill_all(process)
            raise
        finally:
            watch.join()
            process.stdout.close()
            errors.join(timeout=5)
            self.running.discard(process)
        self.timed_out |= self.over
        self.wrong = self._judged(process.poll(), seconds)

    @classmethod
    def end_all(cls) -> None:
        cls.over = True
        for process in list(cls.running):
            kill_all(process)

    def _read(self, text: str) -> Iterator[Line]:
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict) or line.get("part") != self.part:
            if text.strip():
                print(text.rstrip("\n"), file=sys.stderr, flush=True)
                yield {"part": self.part, "said": text.rstrip("\n")}
            return
        if "begins" in line:
            self.at, self._made, self._begun = line["begins"], False, time.monotonic()
        elif line.get("row") == self.at:
            self._begun = None
        self._made = self._made or line.get("row") == self.at
        self._failed = self._failed or "failure" in line
        self._ended = self._ended or "ends" in line or "no_time_for" in line
        yield line

    def _judged(self, code: int | None, seconds: float) -> Line | None:
        if self.timed_out:
            text = f"it was ended after {seconds + GRACE_S:.0f} s"
        elif self._stuck:
            text = f"it was not made in {self._row_seconds:.0f} s"
        elif code == DEVICE_GONE:
            return {"note": "the device was of no use any more: started again after that row"}
        elif code not in (0, FAILED) or (code == FAILED and not self._failed):
            text = f"its process did not end as it should (exit code {code})"
        elif not self._ended:
            text = f"its process ended before its last row (exit code {code})"
        else:
            return None
        where = {"row": self.at} if self.at is not None and not self._made else {}
        last = next((error for error in reversed(self._errors) if error.strip()), None)
        text += f": {last.strip():.200}" if last else ""
        return {**where, "failure": text, "stderr": "\n".join(self._errors)}

    def _forward(self, errors: IO[str]) -> None:
        with errors:
            for text in errors:
                self._errors.append(text.rstrip("\n"))
                print(text, end="", file=sys.stderr, flush=True)

    def _watch(self, process: subprocess.Popen[str], seconds: float) -> None:
        """What a process has left running is ended with it: it may hold the pipe open."""
        until = time.monotonic() + seconds + GRACE_S
        while process.poll() is None and not (self.timed_out or self._stuck):
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
            now, begun = time.monotonic(), self._begun
            self.timed_out = now > until
            self._stuck = begun is not None and now - begun > self._row_seconds
        kill_all(process)


def kill_all(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """What is left of a process that leads a session of its own, and of all that it has started.
    Its number stays theirs as long as one of them runs.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # of a device that hangs the driver may not let go
        process.wait(GRACE_S)


def ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Its exit code; None where it was ended as it took longer."""
    try:
        return process.wait(max(seconds, 0))
    except subprocess.TimeoutExpired:
        kill_all(process)
        return None
