"""Audio files by format: as they should be, damaged, with other numbers in their headers, and files
that name others.
"""

from __future__ import annotations

import base64
import random
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from attempts import Attempt, chat, damaged, post, request
from sounds import encoded, tones, wav

FORMATS = (
    ("WAV", "wav", "pcm_s16le", 16_000),
    ("WAV", "wav", "pcm_f32le", 44_100),
    ("WAV", "wav", "adpcm_ms", 22_050),
    ("MP3", "mp3", "libmp3lame", 44_100),
    ("FLAC", "flac", "flac", 44_100),
    ("Ogg", "ogg", "libopus", 48_000),
    ("M4A", "ipod", "aac", 44_100),
    ("AAC", "adts", "aac", 44_100),
)
NUMBERS = (0, 1, 2, 255, 65_535, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
# What stands behind names of fields: sizes, rates, channels and times.
FIELDS = {
    "WAV": (b"RIFF", b"fmt ", b"data", b"fact"),
    "MP3": (b"ID3", b"Info", b"Xing", b"TSSE", b"\xff\xfb"),
    "FLAC": (b"fLaC", b"reference"),
    "Ogg": (b"OggS", b"OpusHead", b"OpusTags"),
    "M4A": (b"mvhd", b"tkhd", b"mdhd", b"stts", b"stsz", b"stco", b"stsc", b"mp4a", b"esds"),
    "AAC": (b"\xff\xf1",),
}


def recording(rng: random.Random) -> tuple[str, bytes]:
    """What it is, and the bytes of the file."""
    chance = rng.random()
    if chance < 0.15:
        name = rng.choice(list(BOMBS))
        return f"bomb: {name}", BOMBS[name](rng)
    index = rng.randrange(len(FORMATS))
    kind, data = FORMATS[index][0], sound(index)
    if chance < 0.2:
        return f"sound {kind}", data
    if chance < 0.45:
        return f"{kind} with other numbers", _renumbered(kind, data, rng)
    if chance < 0.57:
        return f"{kind} cut short", data[: rng.randrange(len(data))]
    if chance < 0.64:
        other = sound(rng.randrange(len(FORMATS)))
        cut = rng.randrange(len(data))
        return f"{kind} and another", data[:cut] + other[min(cut, len(other) // 2) :]
    if chance < 0.76:
        head = min(len(data), 200)
        return f"{kind} with a damaged head", damaged(data[:head], rng) + data[head:]
    return f"damaged {kind}", damaged(data, rng, 30)


def audio_attempt(rng: random.Random, key: str) -> Attempt:
    """One file, on any of the ways in."""
    what, data = recording(rng)
    way = rng.randrange(4)
    if way == 0:
        return Attempt(what, request("POST", "/api/images", data, "audio/wav", key))
    if way == 1:
        return Attempt(what, _form(data, key))
    plain = base64.b64encode(data).decode()
    part: dict[str, Any] = {"type": "input_audio", "input_audio": {"data": plain, "format": "wav"}}
    if way == 2:
        url = f"data:audio/mpeg;base64,{plain}"
        part = {"type": "audio_url", "audio_url": {"url": url}}
    body = chat(part, "What is said?", stream=rng.random() < 0.5)
    return Attempt(what, post("/v1/chat/completions", body, key))


def _form(data: bytes, key: str) -> bytes:
    """A request for a transcription of a few tokens."""
    field = b"--x\r\nContent-Disposition: form-data; name="
    body = field + b'"max_completion_tokens"\r\n\r\n2\r\n'
    body += field + b'"file"; filename="a.wav"\r\n\r\n' + data + b"\r\n--x--\r\n"
    return request("POST", "/v1/audio/transcriptions", body, "multipart/form-data; boundary=x", key)


@lru_cache(maxsize=len(FORMATS))
def sound(index: int) -> bytes:
    _, format, codec, rate = FORMATS[index]
    return encoded(tones(0.4, rate), rate, format, codec)


def _renumbered(kind: str, data: bytes, rng: random.Random) -> bytes:
    """Fields that say how much there is say something else."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = out.find(name := rng.choice(FIELDS[kind]))
        if at < 0:
            continue
        at += len(name) + rng.randrange(0, 24)
        size = rng.choice((1, 2, 4, 8))
        number = rng.choice(NUMBERS) & ((1 << 8 * size) - 1)
        out[at : at + size] = number.to_bytes(size, rng.choice(("big", "little")))
    return bytes(out)


def _header(channels: int, rate: int, bits: int, size: int) -> Callable[[random.Random], bytes]:
    """A WAV file of a few bytes that says this of itself."""
    block = channels * bits // 8 & 0xFFFF
    per_second = rate * max(block, 1) & 0xFFFFFFFF
    fields = struct.pack("<IHHIIHH", 16, 1, channels, rate, per_second, block, bits)
    head = b"WAVEfmt " + fields + b"data" + struct.pack("<I", size)
    return lambda rng: b"RIFF" + struct.pack("<I", size) + head + rng.randbytes(400)


def _hours(rng: random.Random) -> bytes:
    """A day of silence, in pages that each say that it is later."""
    data = bytearray(sound(5))
    last = data.rindex(b"OggS") + 6
    data[last : last + 8] = (48_000 * 86_400 * rng.choice((1, 365))).to_bytes(8, "little")
    return bytes(data)


def _silent_hours(_: random.Random) -> bytes:
    """Nine hours of silence, which FLAC has in 4 bytes for 65,535 samples."""
    data = bytearray(sound(4))
    total = 8_000 * 3600 * 9
    data[18:26] = (int.from_bytes(data[18:26], "big") & ~((1 << 36) - 1) | total).to_bytes(8, "big")
    return bytes(data) + data[len(data) // 2 :] * 50


BOMBS: dict[str, Callable[[random.Random], bytes]] = {
    "65,535 channels": _header(65_535, 16_000, 16, 1 << 20),
    "no channels": _header(0, 16_000, 16, 1 << 20),
    "4,294,967,295 samples a second": _header(1, (1 << 32) - 1, 16, 1 << 20),
    "no samples a second": _header(1, 0, 16, 1 << 20),
    "samples of no bits": _header(1, 16_000, 0, 1 << 20),
    "four gigabytes in a few bytes": _header(2, 48_000, 32, (1 << 32) - 1),
    "a day in an Ogg page": _hours,
    "nine hours of FLAC": _silent_hours,
    "a tag without an end": lambda rng: b"ID3\x04\0\0\x7f\x7f\x7f\x7f" + rng.randbytes(3000),
    "frames of MP3 without a body": lambda _: b"\xff\xfb\x90\x64" * 20_000,
    "zeros behind a head": lambda _: wav(tones(0.1))[:44] + bytes(400_000),
    "infinite samples": lambda _: sound(1)[:68] + struct.pack("<f", float("inf")) * 4000,
    "a playlist": lambda _: b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:1/a.ts\n",
    "a list of files": lambda _: b"ffconcat version 1.0\nfile '/etc/passwd'\n",
    "nothing": lambda _: b"",
}
