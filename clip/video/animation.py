"""Pictures that move: GIF, WebP and PNG of several frames. Their times are read from the file
itself, before anything is decoded; Pillow decodes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import BinaryIO, TypeAlias

import numpy as np
from PIL import GifImagePlugin, Image, ImageFile, PngImagePlugin, WebPImagePlugin

from mtmd.base.errors import VideoError
from mtmd.clip.image.pixels import Pixels
from mtmd.clip.video.choose import part_between
from mtmd.clip.video.limits import VideoLimits, admit_any, check_size
from mtmd.clip.video.signatures import NAMES
from mtmd.clip.video.video import Part, VideoFacts

SHORTEST_S, USUAL_S = 0.011, 0.1
"""A frame shown for less than the first is shown for the second, as browsers do."""
MAX_FRAMES = 10_000  # each is drawn over the one before
MAX_BYTES = 256 << 20
"""Read into memory whole."""
# Twice as many as 64 MiB of a GIF have, of its usual 255 bytes each: as many as are looked at to
# see whether a picture moves. And twice as many as `MAX_BYTES` have, for one that does.
MAX_BLOCKS, MAX_BLOCKS_READ = 1 << 19, 1 << 21
Frame: TypeAlias = tuple[float, int, int]  # seconds, and where it ends to the right and below
_READERS: dict[str, Callable[[BinaryIO], ImageFile.ImageFile]] = {
    "GIF": GifImagePlugin.GifImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "PNG": PngImagePlugin.PngImageFile,
}


class Animation:
    """Made of an open file of format `kind`. Raises VideoError for one of a single frame, for what
    is damaged, and for what is longer than any such file has to be.
    """

    def __init__(
        self,
        file: BinaryIO,
        kind: str,
        limits: VideoLimits,
        name: str,
        admit: Callable[[int], None] = admit_any,
    ):
        data = file.read(min(limits.max_bytes, MAX_BYTES) + 1)
        if len(data) > MAX_BYTES:
            raise VideoError(
                f"{name}: found a {NAMES[kind]} of more than {MAX_BYTES:,} bytes, expected a "
                "smaller one; encode it as MP4"
            )
        file.seek(0)
        try:
            seconds, (width, height) = timing_and_canvas(data, kind)
        except _BlocksError as error:
            raise VideoError(
                f"{name}: found a {NAMES[kind]} of more than {MAX_BLOCKS_READ:,} blocks, expected "
                "fewer; encode it as MP4"
            ) from error
        self._file, self._kind, self._name = file, kind, name
        self._seconds = seconds
        if len(seconds) < 2:
            raise VideoError(
                f"{name}: found a {NAMES[kind]} of one frame, expected one that moves; give it as "
                "a picture"
            )
        if len(seconds) > MAX_FRAMES:
            raise VideoError(
                f"{name}: found a {NAMES[kind]} of more than {MAX_FRAMES:,} frames, expected "
                "fewer; encode it as MP4"
            )
        check_size(width, height, limits, name)
        admit(width * height)
        starts = np.cumsum([0.0, *seconds])
        self._starts = starts
        self._skipped = 1 if kind == "PNG" and _begins_with_a_still(data) else 0
        self.facts = VideoFacts(
            len(seconds),
            len(seconds) / float(starts[-1]),
            float(starts[-1]),
            width,
            height,
            {"GIF": "gif", "WEBP": "webp", "PNG": "apng"}[kind],
            ("variable frame rate",) if max(seconds) > 1.25 * min(seconds) else (),
        )

    def close(self) -> None:
        pass

    def part(self, start: float | None, end: float | None) -> Part:
        return part_between(self.facts, self._starts[:-1], start, end)

    def take(
        self, indices: Sequence[int], size: tuple[int, int]
    ) -> Iterator[tuple[int, float, Pixels]]:
        """(number, seconds, uint8 [Y, X, 3]) of each frame, transparent parts on white; fewer where
        the file ends, or is damaged, before. Raises VideoError where there is none.
        """
        image: ImageFile.ImageFile | None = None
        for index in indices:
            try:
                if image is None:
                    self._file.seek(0)
                    image = _READERS[self._kind](self._file)
                image.seek(index + self._skipped)
                pixels = self._shown(image, size)
            except MemoryError:
                raise
            except Exception as error:
                if index != indices[0]:
                    return  # who asked sees that
                raise VideoError(
                    f"{self._name}: found a damaged {NAMES[self._kind]}, expected one that "
                    "decodes; save it anew"
                ) from error
            yield index, float(self._starts[index]), pixels

    def _shown(self, image: Image.Image, size: tuple[int, int]) -> Pixels:
        whole = self.facts.width, self.facts.height
        frame = Image.new("RGBA", whole, (255, 255, 255, 255))
        frame.alpha_composite(image.convert("RGBA"))  # a GIF's may be smaller
        shown = frame.convert("RGB")
        if shown.size != size:
            shown = shown.resize(size, Image.Resampling.BOX)
        return np.asarray(shown)


class _BlocksError(Exception):
    """There are more blocks than are looked at."""


def _at_most(blocks: int) -> Iterator[int]:
    yield from range(blocks)
    raise _BlocksError


def timing_and_canvas(data: bytes, kind: str) -> tuple[list[float], tuple[int, int]]:
    """Seconds that each frame of a file is shown for; of a damaged file, of those that come before
    the damage; one, of any length, for a picture that does not move. And (width, height) that the
    header tells, of a GIF those that hold all its frames; (0, 0) where the header is not there.
    Raises _BlocksError.
    """
    width, height = _canvas(data, kind)
    seconds = []
    frames = _FRAMES[kind](data, _at_most(MAX_BLOCKS_READ))
    for shown, right, below in islice(frames, MAX_FRAMES + 1):
        seconds.append(shown if shown >= SHORTEST_S else USUAL_S)
        width, height = max(width, right), max(height, below)
    return seconds or [USUAL_S], (width, height)


def moves(data: bytes, kind: str | None) -> bool:
    """Return whether a picture file of format `kind` has several frames, the second within the
    first `MAX_BLOCKS` blocks.
    """
    if kind not in _READERS:
        return False
    result = _FRAMES[str(kind)](data, iter(range(MAX_BLOCKS)))
    return len(list(islice(result, 2))) > 1


def _canvas(data: bytes, kind: str) -> tuple[int, int]:
    try:
        if kind == "GIF":
            return struct.unpack_from("<HH", data, 6)
        if kind == "PNG":
            return struct.unpack_from(">II", data, 16)
    except struct.error:
        return 0, 0
    if data[12:16] != b"VP8X" or len(data) < 30:
        return 0, 0
    return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")


def _gif(data: bytes, blocks: Iterator[int]) -> Iterator[Frame]:
    """GIF89a: blocks one after another, of which as many are looked at as `blocks` yields; a
    frame's time stands in the extension before it.
    """
    at, delay = 13, 0.0
    if len(data) > 10 and data[10] & 0x80:
        at += 3 << ((data[10] & 7) + 1)
    while at + 1 < len(data):
        mark, label = data[at], data[at + 1]
        if mark == 0x21:
            if label == 0xF9 and at + 6 < len(data):
                delay = int.from_bytes(data[at + 4 : at + 6], "little") / 100
            at = _after_blocks(data, at + 2, blocks)
        elif mark == 0x2C:
            if at + 9 >= len(data):
                yield delay, 0, 0
                return
            left, top, width, height = struct.unpack_from("<HHHH", data, at + 1)
            yield delay, left + width, top + height
            colours = 3 << ((data[at + 9] & 7) + 1) if data[at + 9] & 0x80 else 0
            at, delay = _after_blocks(data, at + 11 + colours, blocks), 0.0
        else:
            return


def _after_blocks(data: bytes, at: int, blocks: Iterator[int]) -> int:
    for _ in blocks:
        if at >= len(data) or not data[at]:
            return at + 1
        at += data[at] + 1
    return len(data)


def _webp(data: bytes, blocks: Iterator[int]) -> Iterator[Frame]:
    """RFC 9649: ANMF chunks, with the time in milliseconds, within the canvas."""
    at = 12
    for _ in blocks:
        if at + 8 > len(data):
            return
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        if data[at : at + 4] == b"ANMF" and at + 24 <= len(data):
            yield int.from_bytes(data[at + 20 : at + 23], "little") / 1000, 0, 0
        at += 8 + size + size % 2


def _png(data: bytes, blocks: Iterator[int]) -> Iterator[Frame]:
    """PNG, third edition: fcTL chunks, with the time as a fraction, within the canvas; as many as
    acTL says, which stands before the first picture.
    """
    left = 0
    for at, size, kind in _chunks(data, blocks):
        if kind == b"acTL":
            if left or size != 8 or at + 12 > len(data):
                return
            (left,) = struct.unpack_from(">I", data, at + 8)
        elif kind == b"IDAT" and not left:
            return
        elif kind == b"fcTL" and left and size == 26 and at + 34 <= len(data):
            above, below = struct.unpack_from(">HH", data, at + 28)
            left -= 1
            yield above / (below or 100), 0, 0


def _begins_with_a_still(data: bytes) -> bool:
    """Return whether the first picture is for readers that know no animation, and no part of it."""
    # one of them comes within MOST_BLOCKS_READ, as there are frames
    kinds = (kind for _, _, kind in _chunks(data, count()))
    return next((k for k in kinds if k in (b"fcTL", b"IDAT")), b"") == b"IDAT"


def _chunks(data: bytes, blocks: Iterator[int]) -> Iterator[tuple[int, int, bytes]]:
    at = 8
    for _ in blocks:
        if at + 8 > len(data):
            return
        size = int.from_bytes(data[at : at + 4], "big")
        yield at, size, data[at + 4 : at + 8]
        at += 12 + size


_FRAMES = {"GIF": _gif, "WEBP": _webp, "PNG": _png}
