"""Bodies of requests that clients have compressed, made plain piece by piece: never more of one
than its route takes, whatever it would become.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from mmap import mmap
from typing import Any, TypeAlias

from mtmd.web.errors import ApiError

PIECE = 256 << 10  # bytes that are read, or made, at once
MEMBERS = 256  # of gzip, or frames of zstd, one behind another
BLOCKS = 1 << 17  # of zstd: a walk over so many takes a tenth of a second
_ZSTD_HEAD = 18  # bytes, at most
_ZSTD_WINDOW = 8 << 20  # bytes: as RFC 9659 has it for the web
Memory: TypeAlias = bytes | mmap
Pieces: TypeAlias = Iterator[bytes]


class _WrongError(ValueError):
    """Describes what is no compressed text."""


def _inflated(data: Memory, kind: int) -> Pieces:
    """Return the inflated by zlib; gzip's files may stand one behind another."""
    left = memoryview(data)
    if not left:
        raise _WrongError("nothing is there")
    for _ in range(MEMBERS):
        one = zlib.decompressobj(kind)
        while not one.eof:
            waiting: bytes | memoryview = one.unconsumed_tail
            if not waiting:
                waiting, left = left[:PIECE], left[PIECE:]
            piece = one.decompress(waiting, PIECE)
            if not (waiting or piece or one.eof):
                raise _WrongError("it ends too soon")
            yield piece
        rest = len(one.unused_data)
        left = memoryview(data)[len(data) - len(left) - rest :]
        if not left:
            return
        if kind != _GZIP:
            raise _WrongError("there is data after its end")
    raise _WrongError(f"it has more than {MEMBERS} parts")


_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


def _gzip(data: Memory) -> Pieces:
    return _inflated(data, _GZIP)


def _deflate(data: Memory) -> Pieces:
    """Return it in zlib's form, as RFC 9110 has it, or without, as some send it."""
    head = bytes(data[:2])
    is_zlib = len(head) == 2 and head[0] & 15 == 8 and int.from_bytes(head, "big") % 31 == 0
    return _inflated(data, _ZLIB if is_zlib else _RAW)


def _brotli(data: Memory) -> Pieces:
    one: Any = import_module("brotli").Decompressor()
    left = memoryview(data)
    while not one.is_finished():
        waiting = b""
        if one.can_accept_more_data():
            waiting, left = bytes(left[:PIECE]), left[PIECE:]
        piece = one.process(waiting, output_buffer_limit=PIECE)
        if not (waiting or piece or one.is_finished()):
            raise _WrongError("it ends too soon")
        yield piece
    if left:
        raise _WrongError("there is data after its end")


def _zstd(data: Memory) -> Pieces:
    """The library does not say whether the last frame was whole: that is checked before."""
    zstandard: Any = import_module("zstandard")
    _check_frames(data, zstandard)
    source = io.BytesIO(data)
    reader = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).stream_reader(
        source, read_size=PIECE, read_across_frames=True
    )
    yield from iter(lambda: reader.read(PIECE), b"")


def _check_frames(data: Memory, zstandard: Any) -> None:
    """Raises _WrongError for frames (RFC 8878, section 3.1) of which one does not end, and for one
    whose window takes too much memory.
    """
    at, frames, blocks = 0, 0, 0
    while at < len(data) or not frames:
        frames += 1
        if frames > MEMBERS:
            raise _WrongError(f"it has more than {MEMBERS} parts")
        head = bytes(data[at : at + _ZSTD_HEAD])
        if head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5:  # a frame to be skipped
            at += 8 + int.from_bytes(head[4:8], "little")
            last = len(head) >= 8
        else:
            if not head.startswith(b"\x28\xb5\x2f\xfd"):
                raise _WrongError(
                    "there is data after its end" if at else "it does not start as one"
                )
            reported = zstandard.get_frame_parameters(head)
            if reported.window_size > _ZSTD_WINDOW:
                raise _WrongError(
                    f"found a window of {reported.window_size:,} bytes, expected at most "
                    f"{_ZSTD_WINDOW:,}; compress it with a smaller one (zstd without --long)"
                )
            at += zstandard.frame_header_size(head)
            last = False
            while not last and at + 3 <= len(data):
                block = int.from_bytes(data[at : at + 3], "little")
                last, is_one_byte = bool(block & 1), block >> 1 & 3 == 1  # said how often it comes
                at += 3 + (1 if is_one_byte else block >> 3)
                blocks += 1
                if blocks > BLOCKS:
                    raise _WrongError(f"it has more than {BLOCKS:,} blocks")
            at += 4 if reported.has_checksum else 0
        if not last or at > len(data):
            raise _WrongError("it ends too soon")


_READERS: dict[str, tuple[Callable[[Memory], Pieces], str | None]] = {  # and the library it takes
    "gzip": (_gzip, None),
    "x-gzip": (_gzip, None),
    "deflate": (_deflate, None),
    "br": (_brotli, "brotli"),
    "zstd": (_zstd, "zstandard"),
}


def supported() -> list[str]:
    """Return what may stand in Content-Encoding: brotli and zstd where their libraries are."""
    return [
        name
        for name, (_, library) in _READERS.items()
        if name != "x-gzip" and (library is None or find_spec(library) is not None)
    ]


def refused(encoding: str, names: list[str]) -> ApiError:
    """An encoding that is none of these `names`."""
    listed = ", ".join(names) or "none"
    return ApiError(
        415,
        f"found the header 'Content-Encoding: {encoding[:40]}', expected one of: {listed}",
        code="unsupported_encoding",
        headers={"Accept-Encoding": ", ".join(names) or "identity"},
    )


def plain(data: Memory, encoding: str, maximum: int, take: Callable[[int], None]) -> Memory:
    """A body as it was before it was compressed. `take` is called with how many bytes are made, as
    they come. Raises ApiError for another encoding, for more than `maximum` bytes, and for what
    cannot be read; and what `take` raises.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return data
    names = supported()
    if name not in (*names, "x-gzip"):
        raise refused(encoding, names)
    pieces, count = list[bytes](), 0
    try:
        for piece in _READERS[name][0](data):
            count += len(piece)
            if count > maximum:
                break
            take(len(piece))
            pieces.append(piece)
    except (ApiError, MemoryError):
        raise
    except Exception as error:  # each library has its own
        reason = str(error) if isinstance(error, _WrongError) else "it is damaged"
        raise ApiError(400, f"the body cannot be read as {name}: {reason}") from error
    if count > maximum:
        raise ApiError(
            413,
            f"the body has more than {maximum:,} bytes when decompressed as "
            f"{name}, the maximum for this route",
            code="body_too_large",
        )
    return _joined(pieces, count)


def _joined(pieces: list[bytes], count: int) -> Memory:
    """A long one in memory that is given back while other threads run; no step takes long. Each
    piece is released once it is there, so that no byte is in memory twice.
    """
    if count <= PIECE:
        return b"".join(pieces)
    memory, at = mmap(-1, count), 0
    pieces.reverse()
    while pieces:
        end = at + len(pieces[-1])
        memory[at:end] = pieces.pop()
        at = end
    return memory
