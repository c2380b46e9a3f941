"""Pictures by format: as they should be, damaged, with other sizes in their headers, and bombs."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from attempts import Attempt, chat, damaged, picture_part, post, request
from PIL import Image

FORMATS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("JPEG", "RGB", {}),
    ("JPEG", "L", {"progressive": True}),
    ("JPEG", "CMYK", {"quality": 30}),
    ("JPEG", "RGB", {"progressive": True, "comment": b"\xff\xff\xffx"}),
    ("PNG", "RGB", {}),
    ("PNG", "RGBA", {}),
    ("PNG", "I;16", {}),
    ("PNG", "P", {}),
    ("PNG", "1", {}),
    ("WEBP", "RGB", {}),
    ("WEBP", "RGBA", {"lossless": True}),
    ("GIF", "P", {"comment": b"x" * 700}),
    ("AVIF", "RGB", {"speed": 10}),
    ("BMP", "RGB", {}),
    ("BMP", "P", {}),
    ("TIFF", "RGB", {}),
    ("TIFF", "L", {"big_tiff": True}),
    ("TIFF", "1", {"compression": "group4"}),
    ("TIFF", "RGB", {"compression": "tiff_lzw"}),
    ("TIFF", "RGB", {"compression": "tiff_adobe_deflate"}),
)
SIZES = ((1, 1), (7, 3), (31, 17), (64, 64), (300, 211), (1200, 900))
EDGES = (
    0,
    1,
    255,
    256,
    8000,
    11_300,
    32_767,
    65_535,
    65_536,
    1 << 24,
    (1 << 31) - 1,
    (1 << 32) - 1,
)
HEAVY = 0.004  # of all: those that take seconds of a core


def picture(rng: random.Random) -> tuple[str, bytes]:
    """What it is, and the bytes of the file."""
    chance = rng.random()
    if chance < HEAVY:
        name = rng.choice(list(HEAVY_BOMBS))
        return f"heavy: {name}", HEAVY_BOMBS[name](rng)
    if chance < 0.12:
        name = rng.choice(list(BOMBS))
        return f"bomb: {name}", BOMBS[name](rng)
    index = rng.randrange(len(FORMATS))
    kind = FORMATS[index][0]
    data = _sound(index, rng.choices(range(len(SIZES)), (1, 2, 4, 4, 2, 0.4))[0])
    if chance < 0.25:
        return f"sound {kind}", data
    if chance < 0.45:
        return f"{kind} with other sizes", _resized(kind, data, rng)
    if chance < 0.5:
        other = _sound(rng.randrange(len(FORMATS)), 2)
        cut = rng.randrange(len(data))
        return f"{kind} and another", data[:cut] + other[min(cut, len(other) // 2) :]
    if chance < 0.6:
        return f"{kind} cut short", data[: rng.randrange(len(data))]
    head = rng.random() < 0.5  # where most of what is read differently stands
    size = min(len(data), 200)
    if head:
        return f"{kind} with a damaged head", damaged(data[:size], rng) + data[size:]
    return f"damaged {kind}", damaged(data, rng, 30)


def small_picture(rng: random.Random) -> bytes:
    return _sound(rng.randrange(len(FORMATS)), 2)


def picture_attempt(rng: random.Random, key: str) -> Attempt:
    """One picture, on any of the ways in."""
    what, data = picture(rng)
    way = rng.randrange(5)
    if way == 0:
        return Attempt(what, request("POST", "/api/images", data, "image/png", key))
    if way == 1:
        body = chat("count", picture_part(data))
        return Attempt(what, post("/v1/chat/completions/input_tokens", body, key))
    if way == 2:
        edge = "edge-of-a-form"
        form = f'--{edge}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n'
        form += f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        whole = form.encode() + data + f"\r\n--{edge}--\r\n".encode()
        kind = f"multipart/form-data; boundary={edge}"
        return Attempt(what, request("POST", "/v1/files", whole, kind, key))
    pictures = [picture_part(data)] * rng.choice((1, 1, 1, 2, 5))
    body = chat(*pictures, "What is this?", stream=rng.random() < 0.5)
    return Attempt(what, post("/v1/chat/completions", body, key))


@lru_cache(maxsize=256)
def _sound(index: int, size: int) -> bytes:
    kind, mode, options = FORMATS[index]
    width, height = SIZES[size]
    noise = random.Random(index).randbytes(width * height * 3)
    pixels = Image.frombytes("RGB", (width, height), noise)
    made = (
        pixels.convert("L").convert("I").convert("I;16") if mode == "I;16" else pixels.convert(mode)
    )
    file = io.BytesIO()
    made.save(file, kind, **options)
    return file.getvalue()


def _resized(kind: str, data: bytes, rng: random.Random) -> bytes:
    """Other edges where the header has them, the rest as it was."""
    width, height, out = rng.choice(EDGES), rng.choice(EDGES), bytearray(data)
    if kind == "PNG":
        out[16:24] = struct.pack(">II", width, height)
        out[29:33] = struct.pack(">I", zlib.crc32(out[12:29]))
    elif kind == "GIF":
        size = struct.pack("<HH", width & 0xFFFF, height & 0xFFFF)
        out[6:10] = size
        if rng.random() < 0.5 and (at := out.find(b",")) > 0:
            out[at + 5 : at + 9] = size
    elif kind == "BMP":
        out[18:26] = struct.pack("<II", width, height)
    elif kind == "JPEG":
        for mark in (b"\xff\xc0", b"\xff\xc2"):
            if (at := out.find(mark)) > 0:
                out[at + 5 : at + 9] = struct.pack(">HH", height & 0xFFFF, width & 0xFFFF)
    elif kind == "WEBP" and len(out) > 30:
        out[24:30] = struct.pack("<HI", width & 0xFFFF, height)
    else:
        at = rng.randrange(4, min(len(out), 200) - 4)
        out[at : at + 4] = struct.pack("<I", width)
    return bytes(out)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, mode: int, rows: bytes, *more: bytes) -> bytes:
    """With what its header says, whatever the (compressed) rows are."""
    head = struct.pack(">IIBBBBB", width, height, depth, mode, 0, 0, 0)
    parts = (_chunk(b"IHDR", head), *more, _chunk(b"IDAT", rows), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@lru_cache(maxsize=8)
def _zeros(count: int) -> bytes:
    """Compressed."""
    packer, piece = zlib.compressobj(9), bytes(1 << 20)
    parts = [packer.compress(piece) for _ in range(count >> 20)]
    return b"".join([*parts, packer.compress(bytes(count & 0xFFFFF)), packer.flush()])


def rle(side: int) -> bytes:
    """A bitmap of one run for each pixel."""
    rows = (b"\1\1" * side + b"\0\0") * side + b"\0\1"
    head = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(rows), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 1078 + len(rows), 0, 0, 1078) + head + bytes(1024) + rows


def _jpeg(rng: random.Random, segments: int = 0, fill: int = 0, scans: int = 0) -> bytes:
    data = _sound(1, 2)
    scan = data[data.index(b"\xff\xda") : -2]
    between = b"\xff\xfe\0\x02" * segments + b"\xff" * fill
    return data[:2] + between + data[2:-2] + scan * scans + data[-2:]


def _tiff(rng: random.Random) -> bytes:
    """A directory of very many entries, or with counts that nothing stands for."""
    count = rng.choice((10, 4096, 65_535))
    entry = struct.pack(
        "<HHII", rng.choice((256, 257, 258, 273, 700)), rng.choice((1, 3, 4, 12)), 1 << 30, 8
    )
    return b"II*\0\x08\0\0\0" + struct.pack("<H", count) + entry * count + bytes(4)


def _text_chunk(kind: bytes) -> Callable[[random.Random], bytes]:
    rows = zlib.compress(b"\0" * 13 * 4)
    return lambda rng: png(4, 4, 8, 2, rows, _chunk(kind, b"a\0\0" + _zeros(64 << 20)))


def _gif(side: int) -> bytes:
    frame = b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\2\2\x4c\1\0"
    return b"GIF89a" + struct.pack("<HHBBB", side, side, 0x80, 0, 0) + bytes(6) + frame + b";"


BOMBS: dict[str, Callable[[random.Random], bytes]] = {
    "a PNG of 60,000 x 60,000": lambda rng: png(60_000, 60_000, 1, 0, zlib.compress(b"\0")),
    "a PNG of 20,000 x 20,000": lambda rng: png(20_000, 20_000, 16, 6, _zeros(1 << 20)),
    "rows for more than it says": lambda rng: png(4, 4, 8, 2, _zeros(64 << 20)),
    "zTXt": _text_chunk(b"zTXt"),
    "iCCP": _text_chunk(b"iCCP"),
    "eXIf": lambda rng: png(4, 4, 8, 2, zlib.compress(bytes(52)), _chunk(b"eXIf", _tiff(rng))),
    "a large GIF": lambda rng: _gif(rng.choice((2000, 40_000, 65_535))),
    "an empty bitmap of 100,000 x 100,000": lambda rng: (
        b"BM"
        + struct.pack("<IHHIIiiHHII", 60, 0, 0, 54, 40, 100_000, 100_000, 1, 24, 0, 0)
        + bytes(20)
    ),
    "a short bitmap of RLE": lambda rng: rle(rng.choice((100, 400))),
    "a JPEG of many scans": lambda rng: _jpeg(rng, scans=rng.choice((50, 99, 150, 4000))),
    "a JPEG of many segments": lambda rng: _jpeg(rng, segments=rng.choice((4000, 100_000))),
    "a JPEG with fill bytes": lambda rng: _jpeg(rng, fill=rng.choice((60_000, 2_000_000))),
    "a TIFF's directory": _tiff,
    "WebP that ends early": lambda rng: (
        b"RIFF\x1a\0\0\0WEBPVP8L\x0d\0\0\0\x2f" + b"\xff" * rng.randint(4, 40)
    ),
    "SVG": lambda rng: b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///'/></svg>",
    "PDF": lambda rng: b"%PDF-1.4\n" + small_picture(rng),
    "nothing": lambda rng: b"",
}
HEAVY_BOMBS: dict[str, Callable[[random.Random], bytes]] = {
    "a GIF of 43 bytes": lambda rng: _gif(rng.choice((8000, 11_000))),
    "grey of 16 bits, 11,300 x 11,300": lambda rng: png(
        11_300, 11_300, 16, 0, _zeros(11_300 * 22_601)
    ),
    "RLE of 16 Mpx": lambda rng: rle(4000),
    "a PNG of 11,000 x 11,000": lambda rng: png(11_000, 11_000, 1, 0, _zeros(11_000 * 1376)),
}
