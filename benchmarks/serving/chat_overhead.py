"""What a chat over HTTP takes above the engine's own time: streams of the demo model, one after
another over one connection.

    .venv/bin/python benchmarks/serving/chat_overhead.py
    .venv/bin/python benchmarks/serving/chat_overhead.py --python ../before/.venv/bin/python

With `--python` the servers of several checkouts take turns, so that a busy machine hurts all. The
engine's own time is read from the receipt: reading the prompt, waiting for a slot, the prompt's
forward and the answer's.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from statistics import median, quantiles

ROUNDS = 20
WARM = 20
_PORT = re.compile(r"serving at http://127\.0\.0\.1:(\d+)")
PROMPT = "How many shapes are there?"


@dataclass
class Server:
    """The server of one checkout. Times are in milliseconds, one for each stream."""

    name: str
    connection: HTTPConnection
    first: list[float] = field(default_factory=list)
    above_first: list[float] = field(default_factory=list)
    above_whole: list[float] = field(default_factory=list)

    def ask(self, tokens: int) -> tuple[float, float, dict[str, float]]:
        """Return milliseconds to the first text and to the end, and the receipt."""
        body = {
            "model": "demo model",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, first, receipt = time.perf_counter(), 0.0, {}
        self.connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        reply = self.connection.getresponse()
        while line := reply.readline():
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if not first and chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                first = time.perf_counter()
            if chunk.get("usage"):
                receipt = chunk["usage"]["mtmd_receipt"]
        return (first - began) * 1e3, (time.perf_counter() - began) * 1e3, receipt

    def measure(self, count: int, tokens: int) -> None:
        for _ in range(count):
            first, whole, receipt = self.ask(tokens)
            before = receipt["preprocess_ms"] + receipt["queued_ms"] + receipt["prefill_ms"]
            self.first.append(first)
            self.above_first.append(first - before)
            self.above_whole.append(whole - before - receipt["decode_ms"])

    def __str__(self) -> str:
        def text(times: list[float]) -> str:
            return f"{median(times):6.2f} ({quantiles(times, n=10)[0]:.2f})"

        return (
            f"{self.name}: time to first token {text(self.first)} ms, above the engine's own "
            f"{text(self.above_first)}; the whole stream above the engine's own "
            f"{text(self.above_whole)}"
        )


@contextmanager
def serve(python: str) -> Iterator[Server]:
    command = [python, "-I", "-m", "mtmd", "serve", "--port", "0", "--no-history"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            lines = (_PORT.search(line) for line in process.stdout)
            port = next(int(match[1]) for match in lines if match)
            yield Server(python, HTTPConnection("127.0.0.1", port))
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", action="append", help="of another checkout, too")
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=8)
    args = parser.parse_args()
    with ExitStack() as stack:
        pythons = [*(args.python or ()), sys.executable]
        servers = [stack.enter_context(serve(python)) for python in pythons]
        for server in servers:
            for _ in range(WARM):
                server.ask(args.tokens)
        for _ in range(ROUNDS):
            for server in servers:
                server.measure(max(1, args.streams // ROUNDS), args.tokens)
        print(f"milliseconds, median (p10) of {len(servers[0].first)} streams")
        for server in servers:
            print(server)


if __name__ == "__main__":
    main()
