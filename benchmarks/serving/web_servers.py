"""Web servers under the whole application, with a service that has no model: open connections that
send nothing, half requests, streams, and a request to end.

    .venv/bin/python benchmarks/serving/web_servers.py mtmd     # as `mtmd serve` has it
    .venv/bin/python benchmarks/serving/web_servers.py gevent   # gevent.pywsgi as it comes
    .venv/bin/python benchmarks/serving/web_servers.py cheroot
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parents[2] / "tests" / "support"
WORDS_A_SECOND = 20
THREADS = 600
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)
HALF_BODY = HALF + b"Content-Length: 1000\r\n\r\n{"


def serve(kind: str, words: int) -> None:
    """Serve on a free port, whose number is printed."""
    if kind in ("gevent", "mtmd"):
        from mtmd.__main__ import patch

        patch()
    sys.path.insert(0, str(SUPPORT))
    from fake_service import FakeService

    from mtmd.web.app import create_app
    from mtmd.web.server import Server, bind
    from mtmd.web.settings import ServerSettings

    service = FakeService(pace_s=1 / WORDS_A_SECOND)
    service.words = " ".join(["word"] * words)
    settings = ServerSettings(port=0, queue=4096)
    app = create_app(service, settings)
    if kind == "cheroot":
        from cheroot.wsgi import Server as Cheroot

        cheroot = Cheroot(("127.0.0.1", 0), app, numthreads=THREADS, request_queue_size=1024)
        signal.signal(signal.SIGTERM, lambda *_: cheroot.stop())
        cheroot.prepare()
        print(cheroot.bind_addr[1], flush=True)
        cheroot.serve()
    elif kind == "gevent":
        from gevent.pywsgi import WSGIServer

        plain = WSGIServer(("127.0.0.1", 0), app, log=None)
        plain.start()
        signal.signal(signal.SIGTERM, lambda *_: plain.stop())
        print(plain.server_port, flush=True)
        plain.serve_forever()
    else:
        sock = bind(settings)
        print(sock.getsockname()[1], flush=True)
        own = Server(app, settings, sock)
        signal.signal(signal.SIGTERM, lambda *_: own.drain(60))
        own.serve(closing=service.close)


async def crowd(port: int, data: bytes, count: int) -> list[Any]:
    async def one() -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        return reader, writer

    opened = []
    for _ in range(0, count, 100):
        opened += await asyncio.gather(*(one() for _ in range(100)))
    return opened


async def watch(port: int, result: list[float], end: asyncio.Event) -> None:
    while not end.is_set():
        began = time.perf_counter()
        try:
            async with asyncio.timeout(30):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(HEALTH)
                assert b" 200 " in await reader.readline()
                writer.close()
        except (OSError, TimeoutError, AssertionError):
            result.append(30.0)
        else:
            result.append(time.perf_counter() - began)
        await asyncio.sleep(0.1)


async def stream(port: int, words: int) -> float | None:
    """Seconds that it took longer than its words do; None where its end did not come."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": words}
    ).encode()
    try:
        async with asyncio.timeout(120):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            began = time.perf_counter()
            writer.write(HALF + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            received = await reader.readuntil(b"data: [DONE]")
            taken = time.perf_counter() - began
            writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return None
    except asyncio.LimitOverrunError:
        return None
    return taken - words / WORDS_A_SECOND if received.count(b"word") == words else None


def usage(pid: int) -> tuple[float, float, int]:
    """CPU seconds, MiB and threads of a process."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text()
    words = dict(line.split(":", 1) for line in status.splitlines())
    cpu = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    return cpu, int(words["VmRSS"].split()[0]) / 1024, int(words["Threads"])


async def measure(kind: str, idle: int, streams: int, words: int) -> None:
    process = subprocess.Popen(
        [sys.executable, __file__, kind, "--serve", "--words", str(words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    port, row = int(process.stdout.readline()), dict[str, Any]()
    await asyncio.sleep(2)

    async def phase(name: str, doing: Any) -> Any:
        result, end, (cpu, *_) = list[float](), asyncio.Event(), usage(process.pid)
        watching = asyncio.create_task(watch(port, result, end))
        try:
            return await doing
        finally:
            end.set()
            await watching
            now, memory, threads = usage(process.pid)
            row[name] = {
                "worst /health ms": round(max(result) * 1e3),
                "CPU s": round(now - cpu, 2),
                "MiB": round(memory),
                "threads": threads,
            }
            print(kind, name, row[name], flush=True)

    async def idling() -> Any:
        opened = [await crowd(port, data, idle // 4) for data in (b"", HALF, HALF_BODY, HALF[:20])]
        await asyncio.sleep(3)
        return [one for each in opened for one in each]

    try:
        await phase("calm", asyncio.sleep(2))
        opened = await phase(f"{idle} idle or half", idling())

        def run() -> Any:
            return asyncio.gather(*(stream(port, words) for _ in range(streams)))

        late = await phase(f"with {streams} streams", run())
        whole = sorted(one for one in late if one is not None)
        print(
            kind,
            f"whole {len(whole)} of {streams}",
            f"late by at most {whole[-1] if whole else float('nan'):.2f} s",
            flush=True,
        )
        for _, writer in opened:
            writer.close()
        ending = asyncio.ensure_future(run())
        await asyncio.sleep(min(3.0, words / WORDS_A_SECOND / 2))
        began = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        late = await ending
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, 30)
        left = words / WORDS_A_SECOND - min(3.0, words / WORDS_A_SECOND / 2)
        print(
            kind,
            f"drain: whole {sum(one is not None for one in late)} of {streams}",
            f"ended {time.perf_counter() - began - left:.1f} s after the last word,",
            f"exit code {process.poll()}",
            flush=True,
        )
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--words", type=int, default=200)
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=500)
    args = parser.parse_args()
    if args.serve:
        serve(args.kind, args.words)
    else:
        asyncio.run(measure(args.kind, args.idle, args.streams, args.words))
