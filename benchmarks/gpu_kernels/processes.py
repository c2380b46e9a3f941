"""The process of a part, as the script sees it: lines of JSON as they come, and what became of it.

A process that dies, or takes the device down, is started again after the row it was at.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO

from gpu_kernels.rows import DEVICE_GONE, FAILED, Line

STARTS = 4  # of one part: of those that follow the first each has lost a row
GRACE_S = 5  # a part that does not look at the clock is ended so much later
SAVED = 20  # last lines of the standard error
START_S = 3  # less time is not enough to start again


def part_lines(
    part: str, command: Sequence[str], environment: Mapping[str, str], seconds: float
) -> Iterator[Line]:
    """Each a dictionary with the part's name. Every way to end too early is a line with a
    `failure`.
    """
    until, after = time.monotonic() + seconds, None
    for number in range(STARTS):
        left = until - time.monotonic()
        if number and left < START_S:
            yield {"part": part, "no_time_for": [f"all after {after}"]}
            return
        run = _Run(part)
        more: list[str] = ["--after", after] if after is not None else []
        yield from run.lines([*command, *more, "--seconds", f"{left:.1f}"], environment, left)
        if run.wrong is None:
            return
        yield {"part": part, **run.wrong}
        if run.timed_out or run.at is None or run.at == after:
            return
        after = run.at
    yield {"part": part, "failure": f"it was ended {STARTS} times; what follows was not run"}


class _Run:
    """One process. at: the row it was making last. wrong: how it ended, if not as it should have;
    a row that failed is no such thing.
    """

    def __init__(self, part: str):
        self.part = part
        self.at: str | None = None
        self.wrong: Line | None = None
        self.timed_out = False
        self._failed = self._ended = self._made = False
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
        self.wrong = self._judged(process.wait(), seconds)

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
            self.at, self._made = line["begins"], False
        self._made = self._made or line.get("row") == self.at
        self._failed = self._failed or "failure" in line
        self._ended = self._ended or "ends" in line or "no_time_for" in line
        yield line

    def _judged(self, code: int, seconds: float) -> Line | None:
        if self.timed_out:
            text = f"it was ended after {seconds + GRACE_S:.0f} s"
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
        try:
            process.wait(seconds + GRACE_S)
        except subprocess.TimeoutExpired:
            self.timed_out = True
        kill_all(process)


def kill_all(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """What is left of a process that leads a session of its own, and of all that it has started.
    Its number stays theirs as long as one of them runs.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Its exit code; None where it was ended as it took longer."""
    try:
        return process.wait(max(seconds, 0))
    except subprocess.TimeoutExpired:
        kill_all(process)
        return None
