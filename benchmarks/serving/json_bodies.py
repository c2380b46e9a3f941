"""What a body of JSON with a picture in base64 takes, from its file to the picture's bytes: how
long other threads of Python cannot run, the processor's time, and the most memory.

Both ways in turn: read as a whole, and with long texts taken out before. Of all rounds the least is
told, as other programs only add to it.

    .venv/bin/python benchmarks/serving/json_bodies.py [--mib 1 8 32] [--rounds 5]
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from multiprocessing import Pipe, get_context
from pathlib import Path
from typing import IO
from unittest.mock import patch

from flask import request

from mtmd.loaded.interpreter import shared_promptly
from mtmd.web.intake import long_texts, request_limits
from mtmd.web.intake.media import Media
from mtmd.web.intake.picture_budget import PictureBudget
from mtmd.web.intake.request_limits import Body, Gate, GatedFlask, takes
from mtmd.web.intake.typed_body import json_body
from mtmd.web.intake.uploads import Uploads
from mtmd.web.interfaces.openai_requests import ChatRequest
from mtmd.web.settings import ServerSettings

MIB = 1 << 20
WAYS = ("as a whole", "taken out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    read = reader()
    with ExitStack() as files:
        bodies = {n: files.enter_context(tempfile.TemporaryFile()) for n in (0, *options.mib)}
        for mib, body in bodies.items():
            in_a_process(partial(write, body, mib * MIB or MIB // 8))
        for way in WAYS:
            with in_the(way):
                read(bodies[0])  # what is loaded once
        peaks = {}
        for mib, way in product(options.mib, WAYS):
            with in_the(way):
                peaks[mib, way] = in_a_process(partial(peak_bytes, read, bodies[mib])) / MIB / mib
        print("body, MiB | way | longest others wait, ms | processor, ms | peak memory, bodies")
        for mib in options.mib:
            measured = {way: list[tuple[float, float]]() for way in WAYS}
            with shared_promptly():
                for _, way in product(range(options.rounds), WAYS):
                    with in_the(way):
                        measured[way].append((gap_s(read, bodies[mib]), cpu_s(read, bodies[mib])))
            for way in WAYS:
                gap, cpu = (min(values) * 1e3 for values in zip(*measured[way], strict=True))
                print(f"{mib} | {way} | {gap:.1f} | {cpu:.0f} | {peaks[mib, way]:.2f}", flush=True)


@contextmanager
def in_the(way: str) -> Iterator[None]:
    with ExitStack() as stack:
        if way == "as a whole":
            stack.enter_context(patch.object(long_texts, "LONG", 1 << 60))
            stack.enter_context(patch.object(request_limits, "_in_memory", _get_data))
        yield


def _get_data() -> bytes:
    return request.get_data(cache=False)


def write(body: IO[bytes], count: int) -> int:
    """A request of so many bytes, most of which are a picture: any bytes, as none is decoded."""
    url = "data:image/png;base64," + base64.b64encode(os.urandom(count * 3 // 4)).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    body.write(json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode())
    body.flush()
    return body.tell()


def reader() -> Callable[[IO[bytes]], bytes]:
    """Reads such a request as the server does, up to the file of its picture."""
    app, settings = GatedFlask(__name__, static_folder=None), ServerSettings()
    Gate(app, settings, 1, lambda: "")
    media = Media(PictureBudget(settings.media), Uploads(0), None)

    @app.post("/")
    @takes(Body.JSON_WITH_PICTURES)
    def view() -> str:
        raise NotImplementedError

    def read(body: IO[bytes]) -> bytes:
        body.seek(0)
        count = os.fstat(body.fileno()).st_size
        with app.test_request_context(
            "/", method="POST", input_stream=body, content_length=count,
            content_type="application/json",
        ):  # fmt: skip
            request.max_content_length = count
            requested = json_body(ChatRequest)
            ((_, data),) = media._read(media._sources([*requested.media()], ""))
            return data

    return read


def gap_s(read: Callable[[IO[bytes]], bytes], body: IO[bytes]) -> float:
    """The most that this thread does while one that does nothing but look at its clock does not
    run. Its own time, not that of the day: on a busy machine either may wait for a core.
    """
    longest, over, begun = 0.0, threading.Event(), threading.Event()
    clock = time.pthread_getcpuclockid(threading.get_ident())

    def look() -> None:
        nonlocal longest
        begun.set()
        last = time.clock_gettime(clock)
        while not over.is_set():
            now = time.clock_gettime(clock)
            longest, last = max(longest, now - last), now

    thread = threading.Thread(target=look)
    thread.start()
    begun.wait()
    read(body)
    over.set()
    thread.join()
    return longest


def cpu_s(read: Callable[[IO[bytes]], bytes], body: IO[bytes]) -> float:
    before = time.thread_time()
    read(body)
    return time.thread_time() - before


def peak_bytes(read: Callable[[IO[bytes]], bytes], body: IO[bytes]) -> int:
    """How much more memory a process has at most while it reads, the picture's bytes counted in."""
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
    before = status_bytes("VmRSS")
    read(body)
    return status_bytes("VmHWM") - before


def in_a_process(work: Callable[[], int]) -> int:
    """Of its own, as memory that was used once is used again."""
    here, there = Pipe(duplex=False)
    child = get_context("fork").Process(target=lambda: there.send(work()))
    child.start()
    result: int = here.recv()
    child.join()
    return result


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
