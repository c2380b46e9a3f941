"""A real `mtmd serve` with the demo model, an attacker's key and a neighbour's, and who watches it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from processes import children, descendants
from watcher import open_files, resident_bytes

ATTACKER, NEIGHBOUR = "attacker-" + "a" * 20, "neighbour-" + "n" * 20
SUPPORT = Path(__file__).parents[1] / "support"
END_S = 60.0
# that come and go: threads, workers; SQLite keeps a descriptor of each reader that was closed while
# others were open: 9 of its file and 5 of its log after 600 attempts and after 2,000
FEW_FILES = 16 + 8


class Served:
    """`problems`: what should not be, found while it ran and when it ended."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log
        split = urlsplit(url)
        self.host, self.port = split.hostname or "", split.port or 0
        self.files = open_files(process.pid)
        self.problems: list[str] = []

    def resident_mib(self) -> int:
        """Of the server and of its engine's process, where it has one: what they share twice."""
        return sum(map(resident_bytes, [self.process.pid, *self.engines()])) >> 20

    def engines(self) -> list[int]:
        """The engine's process, where it has one."""
        return engines_of(self.process.pid)

    def stored_mib(self) -> dict[str, float]:
        """What the server says that it holds, where that is something."""
        request = Request(f"{self.url}/metrics", headers={"Authorization": f"Bearer {NEIGHBOUR}"})
        with urlopen(request, timeout=END_S) as response:
            text = response.read().decode()
        result = re.findall(r'^mtmd_(?:held|(\w+))_bytes(?:\{what="([^"]+)"\})? (\S+)$', text, re.M)
        sizes = {name or what: round(float(value) / 2**20, 1) for name, what, value in result}
        return {name: size for name, size in sizes.items() if size}

    def settled_files(self, within_s: float = 70.0) -> int:
        """Open files, once connections that nobody uses have been closed."""
        end = time.monotonic() + within_s
        while (result := open_files(self.process.pid)) > self.files + FEW_FILES:
            if time.monotonic() > end:
                self.problems.append(f"{result} open files, {self.files} at the start")
                break
            time.sleep(0.2)
        return result


def engines_of(server: int) -> list[int]:
    """Children of a server in which an engine runs."""
    return [pid for pid in children(server) if b"mtmd.engine_process.boot" in _command_of(pid)]


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


@contextmanager
def served(*arguments: str, program: Sequence[str] = ("-m", "mtmd")) -> Iterator[Served]:
    """Ends it as a supervisor would; it has to end well, with all its workers. `program`: for
    Python, in place of the command.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys, log = folder / "keys.txt", folder / "log.txt"
        keys.write_text(f"attacker:{ATTACKER}\nneighbour:{NEIGHBOUR}\n")
        command = [sys.executable, *program, "serve", "--port", "0", "--rate-limit", "0"]
        command += ["--api-key-file", str(keys), "--data", str(folder / "data"), *arguments]
        with log.open("w") as errors:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder
            )
        made = set[int]()
        try:
            url = None
            assert process.stdout
            while url is None:
                line = process.stdout.readline()
                assert line, log.read_text()
                url = re.search(r"^serving at (http://[^\s,]+)", line)
            server = Served(process, url[1], log)
            yield server
            made |= set(descendants(process.pid))
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=END_S)
            except subprocess.TimeoutExpired:
                server.problems.append(f"not ended {END_S:g} s after SIGTERM")
            if process.returncode:
                server.problems.append(f"exit code {process.returncode}: {log.read_text()[-2000:]}")
            server.problems += _reported(log.read_text())
            if left := _left(made):
                server.problems.append(f"processes left behind: {left}")
        finally:
            for pid in {*made, process.pid}:
                if pid != process.pid and Path(f"/proc/{pid}").exists():
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            process.kill()
            process.communicate()


def _reported(log: str) -> list[str]:
    """Errors in the log, each kind once."""
    lines = [line for line in log.splitlines() if " ERROR " in line or line.startswith("Fatal")]
    return sorted({re.sub(r"\d+", "N", line)[:300] for line in lines})


def _left(pids: set[int]) -> list[int]:
    end = time.monotonic() + 10
    while left := [p for p in pids if descendants(p)]:
        if time.monotonic() > end:
            return left
        time.sleep(0.05)
    return []


class Watched:
    """The watcher of a server, told of phases as they begin."""

    def __init__(self, server: Served, chats: int) -> None:
        program = Path(__file__).with_name("watcher.py")
        arguments = [server.url, str(server.process.pid), NEIGHBOUR, str(chats)]
        self._process = subprocess.Popen(
            [sys.executable, str(program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(SUPPORT)},
        )

    def begin(self, phase: str) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(phase + "\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def end(self) -> dict[str, dict[str, Any]]:
        """Findings by phase."""
        out, _ = self._process.communicate(timeout=120)
        result: dict[str, dict[str, Any]] = json.loads(out)
        return result

    def close(self) -> None:
        self._process.kill()
        with self._process:
            pass
