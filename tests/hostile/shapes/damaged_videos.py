"""Videos by format: as they should be, damaged, with other numbers in their headers, endless ones,
and files that name others.
"""

from __future__ import annotations

import base64
import random
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from attempts import Attempt, chat, damaged, post, request
from clips import animation, video

FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("MP4", {}),
    ("MP4", {"codec": "mpeg4", "rotation": 90}),
    ("MP4", {"codec": "libx265", "options": {"x265-params": "log-level=0:pools=1"}}),
    ("MOV", {"format": "mov", "codec": "mjpeg", "pix_fmt": "yuvj420p"}),
    ("MKV", {"format": "matroska", "options": {"bf": "2"}}),
    ("WebM", {"format": "webm", "codec": "libvpx"}),
    ("WebM", {"format": "webm", "codec": "libvpx", "container_options": {"live": "1"}}),
    ("AVI", {"format": "avi", "codec": "mpeg4"}),
    ("GIF", {}),
    ("WEBP", {}),
    ("PNG", {}),
)
MOVING = ("GIF", "WEBP", "PNG")
NUMBERS = (0, 1, 2, 255, 65_535, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
# What stands behind names of fields: sizes, times and counts.
FIELDS = {
    "MP4": (
        b"mvhd",
        b"tkhd",
        b"mdhd",
        b"stts",
        b"stsz",
        b"stco",
        b"stsc",
        b"ctts",
        b"avc1",
        b"elst",
    ),
    "MOV": (b"mvhd", b"tkhd", b"mdhd", b"stts", b"stsz", b"stco", b"stsc", b"jpeg", b"elst"),
    "MKV": (b"\x2a\xd7\xb1", b"\x44\x89", b"\xb0", b"\xba", b"\x23\xe3\x83", b"\x1f\x43\xb6\x75"),
    "WebM": (b"\x2a\xd7\xb1", b"\x44\x89", b"\xb0", b"\xba", b"\x23\xe3\x83", b"\x1f\x43\xb6\x75"),
    "AVI": (b"avih", b"strh", b"strf", b"idx1", b"movi"),
}


def film(rng: random.Random) -> tuple[str, bytes]:
    """What it is, and the bytes of the file."""
    chance = rng.random()
    if chance < 0.2:
        name = rng.choice(list(BOMBS))
        return f"bomb: {name}", BOMBS[name](rng)
    index = rng.randrange(len(FORMATS))
    kind, data = FORMATS[index][0], sound(index)
    if chance < 0.25:
        return f"sound {kind}", data
    if chance < 0.45 and kind in FIELDS:
        return f"{kind} with other numbers", _renumbered(kind, data, rng)
    if chance < 0.55:
        return f"{kind} cut short", data[: rng.randrange(len(data))]
    if chance < 0.62:
        other = sound(rng.randrange(len(FORMATS)))
        cut = rng.randrange(len(data))
        return f"{kind} and another", data[:cut] + other[min(cut, len(other) // 2) :]
    if chance < 0.75:
        head = min(len(data), 400)
        return f"{kind} with a damaged head", damaged(data[:head], rng) + data[head:]
    return f"damaged {kind}", damaged(data, rng, 30)


def video_attempt(rng: random.Random, key: str) -> Attempt:
    """One video, on any of the ways in."""
    what, data = film(rng)
    way = rng.randrange(4)
    if way == 0:
        return Attempt(what, request("POST", "/api/images", data, "video/mp4", key))
    part = _part(data, rng)
    if way == 1:
        body = chat("count", part)
        return Attempt(what, post("/v1/chat/completions/input_tokens", body, key))
    body = chat(part, "What moves?", stream=rng.random() < 0.5)
    return Attempt(what, post("/v1/chat/completions", body, key))


def _part(data: bytes, rng: random.Random) -> dict[str, Any]:
    plain = base64.b64encode(data).decode()
    requested: dict[str, Any] = rng.choice(
        (
            {},
            {"fps": rng.choice((0.01, 2, 240))},
            {"max_frames": rng.choice((1, 3, 1 << 20))},
            {"start": 1e8},
        )
    )
    if rng.random() < 0.5:
        return {"type": "input_video", "input_video": {"data": plain, **requested}}
    url = f"data:video/mp4;base64,{plain}"
    return {"type": "video_url", "video_url": {"url": url, **requested}}


@lru_cache(maxsize=len(FORMATS))
def sound(index: int) -> bytes:
    kind, options = FORMATS[index]
    return animation(kind, 6, 0.1) if kind in MOVING else video(12, **options)


def _renumbered(kind: str, data: bytes, rng: random.Random) -> bytes:
    """Fields that say how much there is say something else."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = out.find(name := rng.choice(FIELDS[kind]))
        if at < 0:
            continue
        at += len(name) + rng.randrange(0, 40)
        size = rng.choice((1, 2, 4, 8))
        number = rng.choice(NUMBERS) & ((1 << 8 * size) - 1)
        out[at : at + size] = number.to_bytes(size, rng.choice(("big", "little")))
    return bytes(out)


def box(kind: bytes, *content: bytes) -> bytes:
    data = b"".join(content)
    return struct.pack(">I", 8 + len(data)) + kind + data


def _endless_table(_: random.Random) -> bytes:
    """Four thousand million frames of one tick each, of which none is there."""
    data = bytearray(sound(0))
    for name in (b"stts", b"stsz"):
        at = data.index(name) + (8 if name == b"stts" else 12)
        data[at : at + 4] = b"\xff\xff\xff\xff"
    return bytes(data)


def many_frames(count: int) -> bytes:
    """A file of 9 KB whose tables say in a few numbers that there are so many frames, of 1/60 s."""
    data = sound(3).replace(b"edts", b"free")
    data = _with_box(data, box(b"stts", bytes(4), struct.pack(">III", 1, count, 204)))
    data = _with_box(data, box(b"stsz", bytes(4), struct.pack(">II", 100, count)))
    return _with_box(data, box(b"stsc", bytes(4), struct.pack(">IIII", 1, 1, count, 1)))


def _with_box(data: bytes, new: bytes) -> bytes:
    """The box in the table of samples of this kind, in another's place."""
    grown = bytearray(data)
    at = grown.index(new[4:8]) - 4
    old = int.from_bytes(grown[at : at + 4], "big")
    grown[at : at + old] = new
    for name in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
        location = grown.index(name) - 4
        size = int.from_bytes(grown[location : location + 4], "big") + len(new) - old
        grown[location : location + 4] = struct.pack(">I", size)
    return bytes(grown)


def _deep(rng: random.Random) -> bytes:
    inner = b""
    for _ in range(rng.choice((100, 5000))):
        inner = box(rng.choice((b"moov", b"trak", b"mdia")), inner)
    return box(b"ftyp", b"isom", bytes(4), b"isom") + inner


def _many_tracks(rng: random.Random) -> bytes:
    data = sound(0)
    at = data.index(b"trak") - 4
    track = data[at : at + int.from_bytes(data[at : at + 4], "big")]
    moov = data.index(b"moov") - 4
    many = rng.choice((200, 3000))
    size = int.from_bytes(data[moov : moov + 4], "big") + len(track) * many
    return (
        data[:moov]
        + struct.pack(">I", size)
        + data[moov + 4 : at]
        + track * (many + 1)
        + data[at + len(track) :]
    )


def names_another(path: bytes) -> bytes:
    """An MP4 whose frames are said to lie in the file at `path`."""
    data = sound(0)
    at = data.index(b"dref")
    entry = box(b"url ", bytes(4), b"file://" + path + b"\0")
    old = data[at - 4 : at - 4 + int.from_bytes(data[at - 4 : at], "big")]
    new = box(b"dref", bytes(4), struct.pack(">I", 1), entry)
    grown = bytearray(data.replace(old, new))
    for name in (b"moov", b"trak", b"mdia", b"minf", b"dinf"):
        location = grown.index(name) - 4
        size = int.from_bytes(grown[location : location + 4], "big") + len(new) - len(old)
        grown[location : location + 4] = struct.pack(">I", size)
    return bytes(grown)


def _with_playlist(_: random.Random) -> bytes:
    """An AVI with subtitles that are a playlist (GAB2)."""
    text = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
    gab2 = b"GAB2\0" + struct.pack("<HI", 2, 2) + b"a\0" + struct.pack("<HI", 4, len(text)) + text
    data = sound(7)
    at = data.index(b"movi") + 4
    chunk = b"02tx" + struct.pack("<I", len(gab2)) + gab2 + bytes(len(gab2) % 2)
    return data[:at] + chunk + data[at:]


def _large_gif(side: int, frames: int) -> bytes:
    frame = b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\2\2\x4c\1\0"
    return (
        b"GIF89a" + struct.pack("<HHBBB", side, side, 0x80, 0, 0) + bytes(6) + frame * frames + b";"
    )


def _text(words: str) -> Callable[[random.Random], bytes]:
    return lambda _: words.encode()


BOMBS: dict[str, Callable[[random.Random], bytes]] = {
    "a table of 4,294,967,295 frames": _endless_table,
    "tables of 200,000 frames that are not there": lambda _: many_frames(200_000),
    "boxes in boxes": _deep,
    "many tracks": _many_tracks,
    "a film in another file": lambda _: names_another(b"/etc/hostname"),
    "a playlist among subtitles": _with_playlist,
    "a GIF of 65,535 x 65,535": lambda _: _large_gif(65_535, 2),
    "a GIF of 200,000 frames": lambda _: _large_gif(rng_side(_), 200_000),
    "a box without an end": lambda _: (
        box(b"ftyp", b"isom", bytes(4)) + struct.pack(">I", 1) + b"mdat" + b"\xff" * 8
    ),
    "a playlist": _text("#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:1/a.ts\n"),
    "a list of files": _text("ffconcat version 1.0\nfile '/etc/passwd'\n"),
    "a manifest": _text('<?xml version="1.0"?><MPD><BaseURL>file:///etc/</BaseURL></MPD>'),
    "a session": _text("v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 9999 RTP/AVP 96\n"),
    "Matroska of unknown size": lambda rng: (
        sound(6)[:200] + b"\x18\x53\x80\x67\x01" + b"\xff" * 7 + rng.randbytes(5000)
    ),
    "zeros behind a head": lambda _: sound(4)[:300] + bytes(200_000),
    "nothing": lambda _: b"",
}


def rng_side(rng: random.Random) -> int:
    return rng.choice((8, 200))
