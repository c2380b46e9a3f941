"""Pictures decoded in worker processes: the same pixels, and bombs that end alone."""

from __future__ import annotations

import io
import struct
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_headers import SAVED, saved

from mtmd.base.errors import ImageError
from mtmd.base.isolation import fork_server
from mtmd.base.isolation.limits import Limits
from mtmd.clip.image import isolated
from mtmd.clip.image.decode import ImageLimits, open_picture
from mtmd.clip.image.isolated import open_isolated


def noise(kind: str, width: int, height: int, **options: object) -> bytes:
    pixels, file = np.random.default_rng(width).integers(0, 256, (height, width, 3)), io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, kind, **options)  # type: ignore[arg-type]
    return file.getvalue()


def grey16(side: int) -> bytes:
    """A PNG of zeros, 16 bits each, in few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(2 * side + 1)) for _ in range(side)) + packer.flush()
    head = struct.pack(">IIBBBBB", side, side, 16, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("kind", "mode", "options"), SAVED, ids=[f"{k}-{m}-{len(o)}" for k, m, o in SAVED]
)
def test_the_same_picture(kind: str, mode: str, options: dict[str, object]) -> None:
    data = saved(kind, mode, **options)
    here, there = open_picture(data), open_isolated(data)
    assert (there.size, there.notes, there.sha256) == (here.size, here.notes, here.sha256)


@pytest.mark.parametrize("size", [(1, 1), (2003, 1009), (5, 3000)])
def test_the_same_pixels_whatever_the_size(size: tuple[int, int]) -> None:
    data = noise("PNG", *size)
    assert open_isolated(data).sha256 == open_picture(data).sha256


def test_turned_and_transparent() -> None:
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    alpha = np.random.default_rng(1).integers(0, 256, (700, 1700, 4)).astype(np.uint8)
    Image.fromarray(alpha).save(file, "PNG", exif=exif)
    here, there = open_picture(file.getvalue()), open_isolated(file.getvalue())
    assert there.size == (700, 1700) and len(there.notes) == 2
    assert (there.notes, there.sha256) == (here.notes, here.sha256)


def test_what_is_wrong_is_told_in_the_same_words() -> None:
    for data in (noise("JPEG", 50, 40)[:900], b"%PDF-", noise("PNG", 50, 40)[:-3000], b""):
        with pytest.raises(ImageError) as here:
            open_picture(data, name="x")
        with pytest.raises(ImageError) as there:
            open_isolated(data, name="x")
        assert str(here.value) == str(there.value)
    with pytest.raises(ImageError, match="expected at most 1,999 in all"):
        open_isolated(noise("PNG", 50, 40), ImageLimits(max_pixels=1999))


def test_a_picture_larger_than_its_header_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "picture_size", lambda *_: (20, 20))
    with pytest.raises(ImageError, match="found 50 x 40 pixels, expected at most 400"):
        open_isolated(noise("PNG", 50, 40))


def test_one_that_takes_too_much_memory_takes_nothing_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolated, "_memory", lambda *_: 8 << 20)
    with pytest.raises(ImageError, match=r"too large for the memory|more than 8 MiB of memory"):
        open_isolated(noise("JPEG", 3000, 2000))
    monkeypatch.undo()
    assert open_isolated(noise("PNG", 30, 20)).size == (30, 20)


def rle(side: int) -> bytes:
    """A bitmap of one run for each pixel, which Pillow unpacks in Python, a run at a time."""
    rows = (b"\1\1" * side + b"\0\0") * side + b"\0\1"
    palette = bytes(1024)
    return (
        b"BM"
        + struct.pack("<IHHI", 54 + 1024 + len(rows), 0, 0, 54 + 1024)
        + struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(rows), 0, 0, 256, 0)
        + palette
        + rows
    )


def test_who_burns_is_ended_and_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as may at once and more of them burn, in Python's own code, and the next picture is
    decoded before they end.
    """
    monkeypatch.setattr(fork_server, "PATIENCE_S", 0.05)
    monkeypatch.setattr(isolated, "CPU_S", 0.5)
    monkeypatch.setattr(isolated, "CPU_S_A_PIXEL", 0.0)
    data, errors = rle(4000), list[ImageError]()

    def burn() -> None:
        try:
            open_isolated(data)
        except ImageError as error:
            errors.append(error)

    burners = [threading.Thread(target=burn) for _ in range(isolated.AT_ONCE + 1)]
    for thread in burners:
        thread.start()
    sizes = [open_isolated(noise("PNG", 30, n)).size for n in range(1, 6)]
    assert sizes == [(30, n) for n in range(1, 6)]
    assert len(errors) < len(burners)
    for thread in burners:
        thread.join()
    assert all("more than 0.5 s of processor time to decode" in str(error) for error in errors)
    assert len(errors) == len(burners)


def test_grey_of_16_bits_takes_no_more_than_others() -> None:
    """Its peak was 19 bytes a pixel."""
    limits = Limits(20, isolated.MEMORY_BYTES + 8 * 3000**2)
    data = grey16(3000)
    with isolated._server().job(limits) as worker:
        worker.send(b'[%d, %d, "x", 0]' % (len(data), 3000**2))
        worker.send(data)
        assert isolated._receive(worker, 3000**2).size == (3000, 3000)


def test_files_are_closed() -> None:
    open_isolated(noise("PNG", 30, 20))
    before = len(list(Path("/proc/self/fd").iterdir()))
    stored = [open_isolated(noise("PNG", 30, n)) for n in range(1, 40)]
    stored += [open_isolated(noise("PNG", 2000, 1000))]
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1


class Odd:
    """A worker that says what it is told to."""

    def __init__(self, *messages: bytes) -> None:
        self.messages = list(messages)

    def receive(self, maximum: int) -> bytes:
        assert maximum < 1 << 20
        return self.messages.pop(0)

    def receive_into(self, room: memoryview) -> int:
        message = self.messages.pop(0)
        room[: len(message)] = message
        return len(message)


SIZE, ROWS = b'{"size": [9, 9]}', bytes(243)


@pytest.mark.parametrize(
    "messages",
    [
        (b"{}",),
        (b"[]",),
        (b"\xff",),
        (b'{"size": "x"}',),
        (b'{"size": [9, 9, 9]}',),
        (b'{"size": [81, 2]}',),
        (b'{"size": [-9, -9]}',),
        (SIZE, ROWS, b"{}"),
        (SIZE, ROWS, b'{"notes": 3}'),
        (SIZE, ROWS[:27], b"", b"{}"),
        (b"", b"[]"),
    ],
)
def test_a_senseless_answer_is_an_error(messages: tuple[bytes, ...]) -> None:
    with pytest.raises(ImageError, match="answer senselessly"):
        isolated._receive(Odd(*messages), 81)  # type: ignore[arg-type]


def test_what_goes_wrong_between_rows_is_told() -> None:
    odd = Odd(SIZE, ROWS[:27], ROWS[:27], b"", b'{"error": "image: found a truncated PNG"}')
    with pytest.raises(ImageError, match=r"^image: found a truncated PNG$"):
        isolated._receive(odd, 81)  # type: ignore[arg-type]
