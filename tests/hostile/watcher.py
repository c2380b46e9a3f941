"""What a server's others see while it is attacked: its health every 50 ms, neighbours who chat, and
the memory, processes and files that it takes. A process of its own, so that the attacker's work is
not in its way.

    PYTHONPATH=tests/support python tests/hostile/watcher.py URL PID KEY CHATS < phases

A line of the standard input begins the phase of that name; at its end the findings are written, as
JSON, by phase.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from processes import descendants

POLL_S, SAMPLE_S, RETRY_S = 0.05, 0.25, 0.2
ANSWER_TOKENS = 48
LIMIT_S = 60.0
SLOWEST = 5  # answers of /health that are told one by one


class Findings:
    """Of one phase."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.health_ms: list[float] = []
        self.slowest: list[tuple[float, float]] = []
        self.health: Counter[str] = Counter()
        self.gaps_ms: list[float] = []
        self.first_ms: list[float] = []
        self.chats: Counter[str] = Counter()
        self.memory = self.server = self.processes = self.files = 0

    def report(self) -> dict[str, Any]:
        return {
            "health": dict(self.health),
            "health_ms": percentiles(self.health_ms),
            "slowest_health": [
                {"ms": round(ms, 1), "at_s": round(at - self.began, 1)} for ms, at in self.slowest
            ],
            "over_250_ms": sum(ms > 250 for ms in self.health_ms),
            "token_gap_ms": percentiles(self.gaps_ms),
            "first_token_ms": percentiles(self.first_ms),
            "chats": dict(self.chats),
            "peak_memory_mib": self.memory >> 20,
            "peak_server_mib": self.server >> 20,
            "peak_processes": self.processes,
            "peak_files": self.files,
        }


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    locations = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    last = len(ordered) - 1
    return {k: round(ordered[round(p * last)], 1) for k, p in locations.items()} if ordered else {}


class Watcher:
    def __init__(self, url: str, pid: int, key: str, chats: int) -> None:
        split = urlsplit(url)
        self.host, self.port, self.pid, self.key = split.hostname or "", split.port or 0, pid, key
        self.result: dict[str, Findings] = defaultdict(Findings)
        self.phase, self.ended = "start", threading.Event()
        work: list[Callable[[], None]] = [self.poll, self.sample, *[self.chat] * chats]
        self.threads = [threading.Thread(target=w, daemon=True) for w in work]

    @property
    def now(self) -> Findings:
        return self.result[self.phase]

    def poll(self) -> None:
        request = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        due = time.monotonic()
        while not self.ended.wait(max(0.0, due - time.monotonic())):
            due = max(due + POLL_S, time.monotonic())
            result, start, stated = self.now, time.monotonic(), b""
            try:
                with socket.create_connection((self.host, self.port), timeout=LIMIT_S) as sock:
                    sock.sendall(request)
                    while piece := sock.recv(4096):
                        stated += piece
            except OSError:
                stated = b""
            result.health_ms.append(1e3 * (time.monotonic() - start))
            result.slowest = sorted([*result.slowest, (result.health_ms[-1], start)])[-SLOWEST:]
            result.health[stated[9:12].decode("latin-1") or "unanswered"] += 1

    def chat(self) -> None:
        body = {
            "messages": [{"role": "user", "content": "Go on for long."}],
            "stream": True,
            "min_tokens": ANSWER_TOKENS,
            "max_tokens": ANSWER_TOKENS,
        }
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        while not self.ended.is_set():
            result = self.now
            link = http.client.HTTPConnection(self.host, self.port, timeout=LIMIT_S)
            try:
                last = time.monotonic()
                link.request("POST", "/v1/chat/completions", json.dumps(body), headers)
                response = link.getresponse()
                result.chats[str(response.status)] += 1
                if response.status != 200:
                    response.read()
                    self.ended.wait(RETRY_S)
                    continue
                begun = whole = False
                for line in response:
                    if not line.startswith(b"data: "):
                        continue
                    whole = line.startswith(b"data: [DONE]")
                    if whole or not has_text(line):
                        continue
                    now = time.monotonic()
                    (result.gaps_ms if begun else result.first_ms).append(1e3 * (now - last))
                    last, begun = now, True
                if not whole:
                    result.chats["cut off"] += 1
            except (OSError, http.client.HTTPException) as error:
                if not self.ended.is_set():
                    result.chats[type(error).__name__] += 1
                    self.ended.wait(RETRY_S)
            finally:
                link.close()

    def sample(self) -> None:
        while not self.ended.wait(SAMPLE_S):
            result, pids = self.now, descendants(self.pid)
            taken = {pid: own_bytes(pid) for pid in pids}
            with suppress(OSError):
                taken[self.pid] = resident_bytes(self.pid)
            result.memory = max(result.memory, sum(taken.values()))
            result.server = max(result.server, taken.get(self.pid, 0))
            result.processes = max(result.processes, len(pids))
            result.files = max(result.files, open_files(self.pid))

    def run(self) -> dict[str, Any]:
        for thread in self.threads:
            thread.start()
        for line in sys.stdin:
            self.phase = line.strip()
            print("began", self.phase, flush=True)
        self.ended.set()
        for thread in self.threads[:2]:
            thread.join()
        return {name: result.report() for name, result in list(self.result.items())}


def has_text(line: bytes) -> bool:
    """Whether an event brings a part of the answer: the first says only who speaks."""
    choices = json.loads(line[len(b"data: ") :]).get("choices") or [{}]
    return bool(choices[0].get("delta", {}).get("content"))


def own_bytes(pid: int) -> int:
    """What a process takes, without what lies in files or is shared, 0 of one that has ended. What
    it has from the one that it was forked from counts in both. smaps_rollup would tell that, and
    takes 10 ms of a core for the server, whose memory map is locked meanwhile.
    """
    with suppress(OSError):
        return resident_bytes(pid) - _pages(pid)[2]
    return 0


def resident_bytes(pid: int) -> int:
    return _pages(pid)[1]


def _pages(pid: int) -> list[int]:
    """Bytes: of addresses, resident, and of these in files or shared."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return [int(field) * os.sysconf("SC_PAGE_SIZE") for field in fields[:3]]


def open_files(pid: int) -> int:
    with suppress(OSError):
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return 0


if __name__ == "__main__":
    url, pid, key, chats = sys.argv[1:]
    print(json.dumps(Watcher(url, int(pid), key, int(chats)).run()))
