"""What many clients at once are told by a server with its usual options, and what becomes of their
answers when it is asked to end: the demo model, streams with a picture.

    python benchmarks/load.py                   500 at once, a drain, five minutes of 200
    python benchmarks/load.py --seconds 0       without the last

Clients and server share the machine: on two cores the numbers are of both together.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

from serve import COUNT, DESCRIBE, EXAMPLES, Reply, ask, body, picture, resident

IMAGES = [picture(path) for path in sorted(EXAMPLES.glob("*.png"))]


@contextmanager
def served(*options: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "mtmd", "serve", "--port", "0", "--no-history", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if match := re.search(r"serving at http://127\.0\.0\.1:(\d+)", line):
                break
        try:
            yield int(match[1]), process  # type: ignore[index]
        finally:
            process.kill()


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def mib(count: float) -> str:
    return f"{count / (1 << 20):.0f} MiB"


async def warm(port: int) -> None:
    await asyncio.gather(*(ask(port, body(DESCRIBE, image)) for image in IMAGES * 4))


async def timed(port: int, number: int) -> tuple[Reply, float, float]:
    """The answer, seconds to its first text, and to its end."""
    start = time.perf_counter()
    reply = await ask(port, body(DESCRIBE, IMAGES[number % len(IMAGES)]))
    first = reply.times[0] - start if reply.times else float("nan")
    return reply, first, time.perf_counter() - start


async def burst(port: int, pid: int, clients: int) -> None:
    await warm(port)
    before, maximum = (resident(pid), threads(pid)), [0, 0]

    async def watch() -> None:
        while True:
            maximum[:] = max(maximum[0], resident(pid)), max(maximum[1], threads(pid))
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    result = await asyncio.gather(*(timed(port, n) for n in range(clients)))
    watching.cancel()
    statuses = Counter(reply.status for reply, *_ in result)
    whole = sum(bool(reply.text) for reply, *_ in result)
    firsts, ends = [first for _, first, _ in result], [end for *_, end in result]
    print(
        f"{clients} streams at once: {dict(statuses)}, {whole} with text; the first word after "
        f"{median(firsts):.2f} s (99th percentile {quantiles(firsts, n=100)[98]:.2f} s), all after "
        f"{max(ends):.2f} s; memory {mib(before[0])} to at most {mib(maximum[0])}, threads "
        f"{before[1]} to at most {maximum[1]} (expected: all 200 with text)"
    )


async def drain(port: int, process: subprocess.Popen[str], clients: int) -> None:
    """All have asked, few have their answer: SIGTERM."""
    await warm(port)
    requesting = [asyncio.create_task(timed(port, n)) for n in range(clients)]
    while not any(task.done() for task in requesting):
        await asyncio.sleep(0.01)
    done = sum(task.done() for task in requesting)
    start = time.perf_counter()
    process.send_signal(signal.SIGTERM)
    result = await asyncio.gather(*requesting, return_exceptions=True)
    code = await asyncio.to_thread(process.wait)
    took = time.perf_counter() - start
    kinds = Counter(
        type(reply).__name__ if isinstance(reply, BaseException) else reply[0].status
        for reply in result
    )
    texts = {reply[0].text for reply in result if not isinstance(reply, BaseException)}
    print(
        f"SIGTERM with {clients - done} of {clients} streams under way: {dict(kinds)}, "
        f"{len(texts)} different answers to {len(IMAGES)} pictures; ended after "
        f"{took:.2f} s with exit code {code} (expected: all 200, as many answers as pictures, 0)"
    )


async def steady(port: int, pid: int, clients: int, seconds: float) -> None:
    await warm(port)
    end, statuses, memory, tokens = time.perf_counter() + seconds, Counter[object](), [], 0

    async def client(number: int) -> None:
        nonlocal tokens
        while time.perf_counter() < end:
            number += 1
            try:
                prompt = (DESCRIBE, COUNT)[number % 2]
                reply = await ask(port, body(prompt, IMAGES[number % len(IMAGES)]))
                statuses[reply.status] += 1
                tokens += len(reply.times)
            except (OSError, ValueError, IndexError) as error:
                statuses[type(error).__name__] += 1

    async def watch() -> None:
        while time.perf_counter() < end:
            memory.append(resident(pid))
            await asyncio.sleep(1)

    await asyncio.gather(watch(), *(client(n) for n in range(clients)))
    minutes = [mib(max(memory[at : at + 60])) for at in range(0, len(memory), 60)]
    late = memory[len(memory) // 5 :]
    drift = (max(late) - min(late)) / (sum(late) / len(late)) / 2
    rate, pieces = sum(statuses.values()) / seconds, tokens / seconds
    print(
        f"{clients} streams for {seconds:.0f} s: {dict(statuses)}, {rate:.1f} answers/s, "
        f"{pieces:.0f} pieces/s, {threads(pid)} threads; memory by the minute "
        f"{', '.join(minutes)}, after the first fifth +-{drift:.1%} (expected: only 200, at most "
        "5 %)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--burst", type=int, default=500, metavar="CLIENTS")
    parser.add_argument("--drain", type=int, default=200, metavar="CLIENTS")
    parser.add_argument("--clients", type=int, default=200, help="of the last part")
    parser.add_argument("--seconds", type=float, default=300, help="of the last part")
    parser.add_argument(
        "--serve",
        action="append",
        default=[],
        metavar="OPTION",
        help="an option of mtmd serve, as --serve=--engine-process; may be repeated. Memory and "
        "threads are told of its first process",
    )
    args = parser.parse_args()
    with served(*args.serve) as (port, process):
        asyncio.run(burst(port, process.pid, args.burst))
        asyncio.run(drain(port, process, args.drain))
    if args.seconds:
        with served(*args.serve) as (port, process):
            asyncio.run(steady(port, process.pid, args.clients, args.seconds))


if __name__ == "__main__":
    main()
