"""The server under load, with the demo model: throughput, gaps between tokens while pictures are
encoded, clients that come and go.

    python benchmarks/serve.py                  all three, five minutes of the last
    python benchmarks/serve.py --seconds 60     a shorter last part

Clients and server share the machine: on two cores the numbers are of both together. Nothing here is
a test; what must hold is printed beside what was found.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

EXAMPLES = Path(__file__).parents[1] / "examples"
DESCRIBE, COUNT = "Describe the image.", "How many shapes are there?"


@dataclass
class Reply:
    """One answer as a client saw it: the HTTP status, and when each piece of text came, in
    seconds.
    """

    status: int
    times: list[float] = field(default_factory=list)
    text: str = ""


def picture(path: Path, seed: int | None = None) -> str:
    """A data URL; with a seed, bytes that differ though the picture does not, or a picture of
    noise.
    """
    if seed is None:
        return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    rng = random.Random(seed)
    header = b"P6 64 64 255\n"
    from io import BytesIO

    from PIL import Image

    data = BytesIO()
    Image.open(BytesIO(header + rng.randbytes(64 * 64 * 3))).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def body(prompt: str, image: str | None, **more: object) -> bytes:
    parts: list[object] = [{"type": "image_url", "image_url": {"url": image}}] if image else []
    return json.dumps(
        {
            "model": "demo model",
            "stream": True,
            **more,
            "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}],
        }
    ).encode()


async def lines(port: int, request: bytes) -> AsyncIterator[tuple[int, str]]:
    """(status, line) of a streamed reply; leaving the loop closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    try:
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: "
            b"application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n" % (port, len(request)) + request
        )
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        yield status, ""
        while line := await reader.readline():
            yield status, line.decode(errors="replace").strip()
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def ask(port: int, request: bytes, leave_after: float | None = None) -> Reply:
    """One answer, or what came of it before the client left."""
    start, reply = time.perf_counter(), Reply(0)
    async for status, line in lines(port, request):
        reply.status = status
        if line.startswith("data: {"):
            choices = json.loads(line[6:]).get("choices") or []
            if choices and choices[0]["delta"].get("content"):
                reply.times.append(time.perf_counter())
                reply.text += choices[0]["delta"]["content"]
        if leave_after is not None and time.perf_counter() - start > leave_after:
            break
    return reply


async def throughput(port: int, clients: int, seconds: float, stream: bool = False) -> float:
    """Answers a second with so many clients, each asking again as soon as it has its answer, whole
    or streamed.
    """
    end, done = time.perf_counter() + seconds, 0
    images = [picture(p) for p in sorted(EXAMPLES.glob("*.png"))]

    async def client(number: int) -> None:
        nonlocal done
        while time.perf_counter() < end:
            reply = await ask(
                port, body(DESCRIBE, images[(number + done) % len(images)], stream=stream)
            )
            if reply.status == 200 and time.perf_counter() < end:
                done += 1

    await asyncio.gather(*(client(n) for n in range(clients)))
    return done / seconds


async def gaps(port: int, seconds: float, encoding: bool) -> float:
    """The 99th percentile of the time between two tokens of four answers under way, in ms;
    `encoding`: new pictures come all the while.
    """
    end, result = time.perf_counter() + seconds, []

    async def reader() -> None:
        while time.perf_counter() < end:
            reply = await ask(port, body(DESCRIBE, None, max_tokens=400, mtmd_ignore_eos=True))
            result.extend(b - a for a, b in zip(reply.times, reply.times[1:], strict=False))

    async def sender() -> None:
        while time.perf_counter() < end:
            await ask(
                port,
                body(COUNT, picture(EXAMPLES / "one.png", random.randrange(1 << 30)), max_tokens=1),
            )

    await asyncio.gather(
        *(reader() for _ in range(4)), *(sender() for _ in range(2 if encoding else 0))
    )
    return quantiles(result, n=100)[98] * 1e3


async def soak(port: int, pid: int, clients: int, seconds: float) -> None:
    end, statuses, memory = time.perf_counter() + seconds, Counter[str](), []
    images = [picture(p) for p in sorted(EXAMPLES.glob("*.png"))] + [
        picture(EXAMPLES, seed) for seed in range(20)
    ]

    async def client(number: int) -> None:
        rng = random.Random(number)
        while time.perf_counter() < end:
            leave = rng.uniform(0, 2) if rng.random() < 0.3 else None
            try:
                reply = await ask(
                    port,
                    body(rng.choice((DESCRIBE, COUNT)), rng.choice(images), max_tokens=64),
                    leave,
                )
                statuses["left" if leave is not None else str(reply.status)] += 1
                if reply.status == 429:
                    await asyncio.sleep(rng.uniform(0.2, 1))
            except (OSError, ValueError, IndexError) as error:
                statuses[type(error).__name__] += 1

    async def watch() -> None:
        while time.perf_counter() < end:
            memory.append(resident(pid))
            await asyncio.sleep(2)

    await asyncio.gather(watch(), *(client(n) for n in range(clients)))
    late = memory[len(memory) // 5 :]
    drift = (max(late) - min(late)) / (sum(late) / len(late)) / 2
    print(
        f"soak: {clients} clients, {seconds:.0f} s: {dict(statuses)}; expected only 200, 429, 413 "
        "and those who left"
    )
    print(
        f"      memory {memory[0] >> 20} MiB at first, {min(late) >> 20} to {max(late) >> 20} MiB "
        "after the first fifth: "
        f"+-{drift:.1%} (expected at most 5 %)"
    )


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@contextmanager
def server(python: str = sys.executable, folder: Path | None = None) -> Iterator[tuple[int, int]]:
    """(port, process id) of a server that keeps nothing, run by an interpreter in a folder."""
    command = [
        python,
        "-m",
        "mtmd.cli",
        "serve",
        "--port",
        "0",
        "--no-history",
        "--parallel",
        "16",
        "--queue",
        "256",
        "--rate-limit",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        assert process.stdout
        for line in process.stdout:
            if match := re.search(r"serving at http://127\.0\.0\.1:(\d+)", line):
                break
        try:
            yield int(match[1]), process.pid  # type: ignore[index]
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--seconds", type=float, default=300, help="of the last part (default: %(default)s)"
    )
    parser.add_argument(
        "--clients", type=int, default=200, help="of the last part (default: %(default)s)"
    )
    args = parser.parse_args()
    with server() as (port, pid):
        asyncio.run(throughput(port, 4, 3))  # kernels, plans and caches warm up
        for stream in (False, True):
            one, sixteen = (asyncio.run(throughput(port, n, 15, stream)) for n in (1, 16))
            print(
                f"throughput, {'streamed' if stream else 'whole answers'}: {one:.1f} answers/s "
                f"alone, {sixteen:.1f} with 16 at once: "
                f"ratio {sixteen / one:.2f} (expected at least 4)"
            )
        without, during = (asyncio.run(gaps(port, 15, encoding)) for encoding in (False, True))
        print(
            f"gaps between tokens, 99th percentile: {without:.1f} ms alone, {during:.1f} ms while "
            "pictures are encoded: "
            f"ratio {during / without:.2f} (expected at most 3)"
        )
        asyncio.run(soak(port, pid, args.clients, args.seconds))


if __name__ == "__main__":
    main()
