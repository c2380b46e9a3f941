"""Picture files decoded in a process of their own, with limits of memory and time: a file that
makes its decoder take all memory, run for minutes or crash takes nothing else along.

A picture has twice the time that the slowest takes on a server's core (noise as a progressive JPEG,
80 ns a pixel; others 5 to 60), and room for the reader that needs most (WebP, 11 bytes a pixel) and
more. The pixels come back block by block, while the next are made. It costs a few milliseconds a
picture beyond decoding here, and a process, so who decodes his own pictures does it here
(`decode.open_picture`); a server does not.
"""

from __future__ import annotations

import json
from functools import lru_cache, partial
from typing import Any

import numpy as np

from mtmd.base.cores import usable_cores
from mtmd.base.errors import ImageError
from mtmd.base.isolation.channel import Channel
from mtmd.base.isolation.fork_server import ForkServer, Worker, WorkerFailed
from mtmd.base.isolation.limits import Limits
from mtmd.clip.image.decode import (
    DEFAULT_LIMITS,
    ImageLimits,
    Picture,
    decode_file,
    one_line,
    one_of_each,
    open_picture,
    picture_size,
)
from mtmd.clip.image.pixels import Pixels
from mtmd.clip.image.signatures import picture_format

AT_ONCE = max(2, usable_cores().usable)
CPU_S, CPU_S_A_PIXEL = 2.0, 20 / 128e6
MEMORY_BYTES, MEMORY_BYTES_A_PIXEL = 96 << 20, 20
PAGE_CPU_S, PAGE_MEMORY_BYTES = 8.0, 512 << 20
_ANSWER_BYTES = 1 << 16


def open_isolated(
    data: bytes, limits: ImageLimits = DEFAULT_LIMITS, name: str = "image", page: int = 0
) -> Picture:
    """Open the bytes of a file as `decode.open_picture` does. Waits while as many are being decoded
    as may at once. Raises ImageError, also for one that takes more memory or time than a picture of
    its size may, and BusyError.
    """
    width, height = picture_size(data, limits, name)
    pixels = width * height
    # What its header promises is what has room here: a file that turns out larger is refused.
    request = json.dumps([len(data), pixels, name, page]).encode()
    taken = _limits(data, pixels)
    try:
        with _server().job(taken) as worker:
            worker.send(request)
            worker.send(data)
            return _receive(worker, pixels)
    except WorkerFailed as error:
        raise ImageError(
            f"{one_line(name)}: found a picture of {width:,} x {height:,} pixels that takes "
            f"{error.needs} to decode, expected a usual one; save it anew as PNG or JPEG"
        ) from error


def prepare(_: bytes) -> None:
    """Prepare the fork server: each decoder is used once, so that no worker has to load it."""
    for data in one_of_each():
        open_picture(data)


def serve(channel: Channel, _prepared: Any) -> None:
    """Serve one picture in a worker."""
    size, maximum, name, page = json.loads(channel.receive(_ANSWER_BYTES))
    data = bytes(channel.receive(size))
    try:
        result = decode_file(data, ImageLimits(size, maximum), name, partial(_Sent, channel), page)
    except ImageError as error:
        channel.send(b"")
        channel.send(json.dumps({"error": str(error)}).encode())
    else:
        channel.send(json.dumps({"notes": result.notes, "pages": result.pages}).encode())


class _Sent:
    """Pixels on their way: first their size, then their rows, in order. While some are received,
    the next are made.
    """

    def __init__(self, channel: Channel, shape: tuple[int, int, int]) -> None:
        self._channel = channel
        channel.send(json.dumps({"size": (shape[1], shape[0])}).encode())

    def __setitem__(self, _: slice, values: Pixels) -> None:
        self._channel.send(np.ascontiguousarray(values).data.cast("B"))


def _receive(worker: Worker, pixels: int) -> Picture:
    """Return what a worker sends of a picture of so many `pixels`, checked like anything from
    outside.
    """
    try:
        first = worker.receive(_ANSWER_BYTES)
        if first:
            width, height = (int(n) for n in json.loads(first)["size"])
            if not 0 < width * height <= pixels:  # of a page, or a picture to be cut, it is less
                raise ValueError
            data = np.empty((height, width, 3), np.uint8)
            room = data.data.cast("B")
            while room and (count := worker.receive_into(room)):
                room = room[count:]
            if not room:
                last = json.loads(worker.receive(_ANSWER_BYTES))
                notes = tuple(str(n)[:200] for n in last["notes"][:8])
                return Picture(data, (width, height), notes, int(last["pages"]))
        raise ImageError(str(json.loads(worker.receive(_ANSWER_BYTES))["error"])[:1000])
    except (ValueError, KeyError, TypeError) as error:
        raise ImageError(
            "found a picture that made its decoder answer senselessly; save it anew as PNG or JPEG"
        ) from error


def _memory(count: int, pixels: int) -> int:
    return MEMORY_BYTES + 3 * count + MEMORY_BYTES_A_PIXEL * pixels


def _limits(data: bytes, pixels: int) -> Limits:
    """A page may hold pictures larger than itself."""
    cpu_s = CPU_S + pixels * CPU_S_A_PIXEL
    memory = _memory(len(data), pixels)
    if picture_format(data) == "PDF":
        return Limits(cpu_s + PAGE_CPU_S, memory + PAGE_MEMORY_BYTES)
    return Limits(cpu_s, memory)


@lru_cache(maxsize=1)
def _server() -> ForkServer:
    """One for the whole process."""
    return ForkServer(__name__, at_once=AT_ONCE)


def start() -> None:
    """Begin to start what the first picture would wait for."""
    _server().start()
