"""Files, Pillow images and arrays into upright RGB pixels.

Pillow decodes. The reader class of each format is opened directly, chosen by the first bytes, and
not through `Image.open`: so no other decoder can be reached, the size in the header meets our own
limit before anything is decoded, and Pillow's process-wide `MAX_IMAGE_PIXELS` need not be touched.
"""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageChops,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from mtmd.base.errors import ImageError
from mtmd.base.text import printable
from mtmd.clip.image.formats import (
    LIBRARIES,
    load_libraries,
    missing,
    open_avif,
    open_heif,
    pdf_page,
)
from mtmd.clip.image.headers import TooMuch, header_size
from mtmd.clip.image.jpeg_scans import check_scans, lacks_end, two_endings
from mtmd.clip.image.pixels import Pixels
from mtmd.clip.image.png_chunks import pixels_only
from mtmd.clip.image.quiet import quiet_pillow
from mtmd.clip.image.signatures import (
    CONVERT,
    EXPECTED,
    NAMES,
    ends_early,
    looks_like,
    picture_format,
)

_BLOCK_PIXELS = 1 << 20
"""Converted at a time: more would take further copies of the whole picture."""
Source: TypeAlias = "bytes | bytearray | memoryview | Image.Image | NDArray[Any]"

_READERS: dict[str, Callable[[io.BytesIO], ImageFile.ImageFile]] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
    "AVIF": open_avif,
    "HEIF": open_heif,
}
_GREY_OF_16 = ("PNG", "PPM")  # files that Pillow has as mode I only where they have 16 bits
_ORIENTATION = 0x0112  # EXIF and TIFF 6.0
PLANAR_CONFIGURATION = 284
_libtiff = Lock()
_TURNS: dict[int, Callable[[Pixels], Pixels]] = {  # from what the file holds to upright
    2: lambda p: p[:, ::-1],
    3: lambda p: p[::-1, ::-1],
    4: lambda p: p[::-1],
    5: lambda p: p.transpose(1, 0, 2),
    6: lambda p: np.rot90(p, -1),
    7: lambda p: p[::-1, ::-1].transpose(1, 0, 2),
    8: lambda p: np.rot90(p),
}


@dataclass(frozen=True)
class ImageLimits:
    """Limits of one picture. The pixels count for files, Pillow images and arrays alike, the bytes
    for files.
    """

    max_bytes: int = 64 << 20
    max_pixels: int = 128_000_000


DEFAULT_LIMITS = ImageLimits()


class Rows(Protocol):
    """Target for the pixels of a picture, uint8 `[H, W, 3]`, some rows at a time."""

    def __setitem__(self, rows: slice, values: Pixels, /) -> None: ...


R = TypeVar("R", bound=Rows)
R_co = TypeVar("R_co", bound=Rows, covariant=True)
NewRows: TypeAlias = Callable[[tuple[int, int, int]], R]


def _new(shape: tuple[int, int, int]) -> Pixels:
    return np.empty(shape, np.uint8)


@dataclass(frozen=True, eq=False)
class Picture:
    """Pixels ready for a model: `pixels` uint8 `[height, width, 3]` in RGB, upright; `size` is
    (width, height) as shown.

    `notes` say, for the receipt of an answer, what was done to the picture that its owner may not
    expect.
    """

    pixels: Pixels = field(repr=False)
    size: tuple[int, int]
    notes: tuple[str, ...] = ()
    pages: int = 1
    """Of the document that it is a page of."""

    @cached_property
    def sha256(self) -> str:
        """Hex digest of size and pixels: equal for what a model cannot tell apart, whatever the
        file it came from.
        """
        self.pixels.setflags(write=False)  # from now on they are known by this digest
        digest = hashlib.sha256(b"%dx%d " % self.size)
        digest.update(np.ascontiguousarray(self.pixels).data)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Decoded(Generic[R_co]):
    """Contents of a file: its pixels, notes on them, and how many pages there are."""

    pixels: R_co
    notes: list[str]
    pages: int = 1


def open_picture(
    source: Source, limits: ImageLimits = DEFAULT_LIMITS, name: str = "image", page: int = 0
) -> Picture:
    """The picture in `source`: the bytes of a file, a Pillow image (left open and as it was) or an
    array `[H, W(, 1|3|4)]` of uint8, or of floats from 0 to 1.

    How many bits of grey are white is what the file says, or Pillow's mode: `I;16` has 16, and `I`
    only where it comes from a PNG, PGM or TIFF that has them. Transparency is laid on white, EXIF
    orientation is applied, of several frames the first is taken, of a PDF the page with number
    `page`, from 0 on. `name` opens every message. Raises ImageError, in one line, for whatever is
    not a whole picture within `limits`.
    """
    name = one_line(name)
    if isinstance(source, Image.Image):
        _check_pixels(source.size, limits, name)
        try:
            with _decoding(name, "Pillow image"):
                return _made(*_decode(source, name, _new))
        except ImageError as error:
            if _is_closed(source, error.__cause__):
                raise ImageError(
                    f"{name}: found a Pillow image that is closed, expected an open one; use it "
                    "within its `with`, or give the path"
                ) from error.__cause__
            raise
    if isinstance(source, np.ndarray):
        return _open_array(source, limits, name)
    if isinstance(source, (bytes, bytearray, memoryview)):
        count = source.nbytes if isinstance(source, memoryview) else len(source)
        check_bytes(count, limits, name)
        result = decode_file(bytes(source), limits, name, _new, page)
        return _made(result.pixels, result.notes, result.pages)
    kind = type(source).__name__  # type: ignore[unreachable]  # callers need not be type-checked
    raise ImageError(
        f"{name}: found an object of type {kind}, expected bytes, a Pillow image or a uint8 "
        "array; open it first"
    )


def decode_file(
    data: bytes, limits: ImageLimits, name: str, new: NewRows[R], page: int = 0
) -> Decoded[R]:
    """Decode a file as `open_picture` does. `new`: makes what the pixels are put into, given their
    shape. Raises ImageError.
    """
    name = one_line(name)
    kind = _format(data, limits, name)
    with suppress(EOFError, ValueError, struct.error):  # which the decoder has better words for
        _check_pixels(_header_size(kind, data, name), limits, name)
    notes: list[str] = []
    with _refusing_too_much(kind, name):
        if kind == "JPEG":
            check_scans(data)
        if kind == "PNG":
            data, notes = pixels_only(data)
    with _decoding(name, NAMES[kind], lambda: ends_early(kind, data)):
        if kind == "TIFF" and ends_early(
            kind, data
        ):  # libtiff would go on, and write what it misses to stderr itself
            raise EOFError
        if kind == "PDF":
            return _decode_page(data, page, name, new)
        if kind == "JPEG" and lacks_end(data):
            data = _with_end(data)
            notes.append("the marker that ends a JPEG is missing; all of its pixels are there")
        image = _READERS[kind](io.BytesIO(data))
        _check_pixels(image.size, limits, name)
        if isinstance(image, TiffImagePlugin.TiffImageFile):
            _check_tiff(image, len(data), limits, name)
            if _has_wide_planes(image):
                image = _read_by_libtiff(data)
        if isinstance(image, PngImagePlugin.PngImageFile):
            _repair_grey_key(image, depth=data[24])
        pixels, more = _decode(image, name, new, own=True)
        return Decoded(pixels, [*notes, *more])


def _with_end(data: bytes) -> bytes:
    """A JPEG without an end marker, with one. Raises EOFError where pixels are missing: then what
    comes behind the data would change them.
    """
    endings = two_endings(data)
    if endings is None:
        raise EOFError
    first, other = (JpegImagePlugin.JpegImageFile(io.BytesIO(one)) for one in endings)
    if ImageChops.difference(first, other).getbbox(alpha_only=False) is not None:
        raise EOFError
    return endings[0]


def _decode_page(data: bytes, page: int, name: str, new: NewRows[R]) -> Decoded[R]:
    drawn, count = pdf_page(data, page, name)
    pixels = new((drawn.shape[0], drawn.shape[1], 3))
    pixels[:] = drawn
    return Decoded(pixels, [f"page {page + 1:,} of {count:,}"] if count > 1 else [], count)


def picture_size(
    data: bytes, limits: ImageLimits = DEFAULT_LIMITS, name: str = "image"
) -> tuple[int, int]:
    """(width, height) that the header of a picture file tells, before orientation. Nothing is
    decoded, and no decoder is asked. Raises ImageError.
    """
    name = one_line(name)
    kind = _format(data, limits, name)
    with _decoding(name, NAMES[kind], lambda: ends_early(kind, data)):
        size = _header_size(kind, data, name)
    _check_pixels(size, limits, name)
    return size


def _header_size(kind: str, data: bytes, name: str) -> tuple[int, int]:
    with _refusing_too_much(kind, name):
        return header_size(kind, data)


@contextmanager
def _refusing_too_much(kind: str, name: str) -> Iterator[None]:
    try:
        yield
    except TooMuch as error:
        raise ImageError(
            f"{name}: found a {NAMES[kind]} with {error}, expected a usual one; save it anew as "
            "PNG or JPEG"
        ) from error


def one_line(text: str) -> str:
    """`text` fit for a message: a file's name may hold line breaks and terminal escapes."""
    return printable(text) or "image"


def _format(data: bytes, limits: ImageLimits, name: str) -> str:
    check_bytes(len(data), limits, name)
    kind = picture_format(data)
    if kind is None:
        words, advice = looks_like(data)
        raise ImageError(f"{name}: found {words}, expected {EXPECTED}; {advice}")
    if needed := missing(kind):
        article = "an" if kind == "AVIF" else "a"
        instead = "export the page as PNG or JPEG" if kind == "PDF" else CONVERT
        raise ImageError(f"{name}: found {article} {NAMES[kind]}; {needed}, or {instead}")
    return kind


def check_bytes(count: int, limits: ImageLimits, name: str) -> None:
    """Raises ImageError when a file of `count` bytes is empty or over the limit."""
    if count == 0:
        raise ImageError(
            f"{name}: found 0 bytes, expected {EXPECTED}; fetch or copy the file again"
        )
    if count > limits.max_bytes:
        raise ImageError(
            f"{name}: found {count:,} bytes, expected at most {limits.max_bytes:,}; scale the "
            "picture down or compress it"
        )


def _check_pixels(size: tuple[int, int], limits: ImageLimits, name: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise ImageError(f"{name}: found {width} x {height} pixels, expected at least 1 x 1")
    if width * height > limits.max_pixels:
        maximum = f"{limits.max_pixels:,}"
        raise ImageError(
            f"{name}: found {width:,} x {height:,} pixels, expected at most {maximum} in all; "
            "scale the picture down"
        )


def _turn(array: NDArray[Any]) -> str:
    """Return what to do about an array that is not taken, where that can be told."""
    if array.dtype.kind in "USO":  # paths, or pictures
        return "; give its content as a list, x.tolist()"
    if array.ndim == 4:
        return "; give those of a batch as a list, list(x)"
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        return "; move the channels last"
    if array.dtype == bool:
        return "; make it floats, x.astype('float32')"
    if array.dtype.kind in "iu" and array.dtype != np.uint8 and array.size:
        if array.min() >= 0 and array.max() <= 255:
            return "; make it uint8, x.astype('uint8')"
        return "; make it floats and divide them by 65535" if array.dtype == np.uint16 else ""
    return ""


def _open_array(array: NDArray[Any], limits: ImageLimits, name: str) -> Picture:
    channels = array.shape[2] if array.ndim == 3 else 1
    if (
        not (array.dtype == np.uint8 or np.issubdtype(array.dtype, np.floating))
        or array.ndim not in (2, 3)
        or channels not in (1, 3, 4)
        or array.size == 0
    ):
        raise ImageError(
            f"{name}: found an array of {array.dtype} and shape {list(array.shape)}, expected one "
            "picture as uint8, or as floats from 0 to 1, of shape [H, W], [H, W, 1], [H, W, 3] or "
            f"[H, W, 4] with at least one pixel{_turn(array)}"
        )
    height, width = array.shape[:2]
    _check_pixels((width, height), limits, name)
    made = array.dtype != np.uint8
    if made:
        array = _from_floats(array, name)
    if channels == 3:
        return Picture(array if made else array.copy(order="C"), (width, height))
    image = Image.fromarray(array.reshape(height, width) if channels == 1 else array)
    return _made(*_decode(image, name, _new))


def _from_floats(array: NDArray[Any], name: str) -> NDArray[np.uint8]:
    """Floats from 0 to 1 as bytes, to the nearest: k / 255 becomes k again."""
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):
        advice = (
            "divide it by 255, or make it uint8"
            if low >= 0 and 1 < high <= 255
            else "replace what is not a number"
            if np.isnan(low)
            else "undo its normalisation, as x * std + mean"
        )
        raise ImageError(
            f"{name}: found an array of {array.dtype} with values from {low:.4g} to {high:.4g}, "
            f"expected 0 to 1; {advice}"
        )
    pixels = np.empty(array.shape, np.uint8)
    for row, values in zip(pixels, array, strict=True):
        row[:] = np.rint(values.astype(np.float32) * 255)
    return pixels


def _is_closed(image: Image.Image, error: BaseException | None) -> bool:
    """Return what Pillow says of an image that was closed, and the bare assertion of one whose
    `with` has ended before it was decoded.
    """
    ended = isinstance(error, AssertionError) and getattr(image, "fp", image) is None
    return ended or (isinstance(error, ValueError) and "closed" in str(error))


def _made(pixels: Pixels, notes: list[str], pages: int = 1) -> Picture:
    height, width = pixels.shape[:2]
    return Picture(pixels, (width, height), tuple(notes), pages)


def _decode(
    image: Image.Image, name: str, new: NewRows[R], own: bool = False
) -> tuple[R, list[str]]:
    """Decodes and converts. `own`: this module opened the file, so it may seek in it and looks for
    further frames.
    """
    notes: list[str] = []
    if not own and isinstance(image, TiffImagePlugin.TiffImageFile) and _has_wide_planes(image):
        raise ImageError(
            f"{name}: found a Pillow image of a TIFF whose channels of {_bits(image)} bits lie one "
            "after another, which Pillow reads wrongly; give its path or bytes"
        )
    # Pillow turns TIFFs by itself while it decodes, and then forgets the tag.
    orientation = _orientation(image) if image.format == "TIFF" else 1
    image.load()
    remaining = _orientation(image)
    if remaining == 1:
        pixels = _rgb(image, notes, name, new)
    else:
        turned = np.ascontiguousarray(_TURNS[remaining](_rgb(image, notes, name, _new)))
        pixels = new((turned.shape[0], turned.shape[1], 3))
        pixels[:] = turned
        orientation = remaining
    if orientation != 1:
        notes.append(f"rotated upright (EXIF orientation {orientation})")
    if own and _has_more_frames(image):
        notes.append(
            "only the first page was read"
            if image.format == "TIFF"
            else "only the first frame was read"
        )
    if own and ImageFile.LOAD_TRUNCATED_IMAGES:
        notes.append(
            "missing parts would go unnoticed: another library has set Pillow's "
            "LOAD_TRUNCATED_IMAGES"
        )
    return pixels, notes


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1 to 8; 1 where the EXIF block is missing, broken or senseless, which is no
    reason to refuse the picture.
    """
    with suppress(Exception):
        value = image.getexif().get(_ORIENTATION)
        if isinstance(value, int) and value in _TURNS:
            return value
    return 1


def _has_more_frames(image: Image.Image) -> bool:
    """Return whether frames follow the first. Asked last: it moves within the file, and a broken
    second frame does not spoil the first.
    """
    with suppress(Exception):
        return bool(getattr(image, "is_animated", False))
    return False


def _rgb(image: Image.Image, notes: list[str], name: str, new: NewRows[R]) -> R:
    """uint8 `[H, W, 3]` of a loaded image of any mode; adds to `notes`."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _rgb_from_grey16(image, notes, name, new)
    if image.mode == "F":
        raise ImageError(
            f"{name}: found float pixels, expected 8 or 16 bits a channel; their range is not "
            f"known: {CONVERT}"
        )
    if image.mode == "CMYK":
        notes.append("converted from CMYK to RGB without a colour profile")
    pixels, transparent = new((image.height, image.width, 3)), False
    for rows, block in _blocks(image):
        if image.has_transparency_data:
            # Pillow has no direct way from La to RGBA
            block = (block.convert("LA") if block.mode == "La" else block).convert("RGBA")
            if block.getchannel("A").getextrema() != (255, 255):
                transparent = True
                white = Image.new("RGBA", block.size, (255, 255, 255, 255))
                block = Image.alpha_composite(white, block)
        pixels[rows] = np.asarray(block if block.mode == "RGB" else block.convert("RGB"))
    if transparent:
        notes.append("transparent parts laid on white")
    return pixels


def _blocks(image: Image.Image) -> Iterator[tuple[slice, Image.Image]]:
    """The rows of a loaded image, some at a time."""
    step = max(_BLOCK_PIXELS // image.width, 1)
    for top in range(0, image.height, step):
        end = min(top + step, image.height)
        yield slice(top, end), image.crop((0, top, image.width, end))


def _rgb_from_grey16(image: Image.Image, notes: list[str], name: str, new: NewRows[R]) -> R:
    """Grey of more than 8 bits, scaled by its white (Pillow's own conversion clips at 255
    instead).
    """
    tags = image.tag_v2 if isinstance(image, TiffImagePlugin.TiffImageFile) else {}
    bits = max(tags.get(TiffImagePlugin.BITSPERSAMPLE, (16,)))
    signed = max(tags.get(TiffImagePlugin.SAMPLEFORMAT, (1,))) == 2
    ranges = [
        (values.min(), values.max())
        for _, block in _blocks(image)
        for values in [np.asarray(block)]
    ]
    low, high = int(min(low for low, _ in ranges)), int(max(high for _, high in ranges))
    white = (1 << bits) - 1
    if image.mode == "I" and not tags and image.format not in _GREY_OF_16:
        raise ImageError(
            f"{name}: found 32-bit grey of a Pillow image with values from {low} to {high}, "
            "expected 8 or 16 bits, as which of them is white is not known; convert it: "
            "image.convert('L') where it is 255, Image.fromarray(numpy.uint16(image)) where it is "
            "65535"
        )
    if bits > 16 or signed or low < 0 or high > white:
        depth = f"{bits}-bit signed" if signed else f"{max(bits, 17)}-bit or signed"
        raise ImageError(
            f"{name}: found {depth} grey with values from {low} to {high}, expected 8 or 16 bits "
            f"without sign; {CONVERT}"
        )
    key = image.info.get("transparency")
    # white is zero, which Pillow ignores at this depth
    inverted = tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0
    pixels, transparent = new((image.height, image.width, 3)), False
    for rows, block in _blocks(image):
        values = np.asarray(block).astype(np.int64)
        clear = values == key if isinstance(key, int) else np.zeros(values.shape, bool)
        if inverted:
            values = white - values
        grey = ((values * 255 + white // 2) // white).astype(np.uint8)
        grey[clear] = 255
        transparent |= bool(clear.any())
        pixels[rows] = np.repeat(grey[:, :, None], 3, axis=2)
    notes.append(f"{bits}-bit grey scaled to 8 bits")
    if transparent:
        notes.append("transparent parts laid on white")
    return pixels


def _check_tiff(
    image: TiffImagePlugin.TiffImageFile, file_bytes: int, limits: ImageLimits, name: str
) -> None:
    """Check for what only a TIFF's tags show: a thumbnail in place of the picture, a tile larger
    than any picture, data beyond the end.
    """
    tags = image.tag_v2
    if (
        tags.get(254, 0) & 1 or 50706 in tags
    ):  # NewSubfileType "reduced", DNGVersion: the full picture is elsewhere in the file
        raise ImageError(
            f"{name}: found a camera raw file or a TIFF that opens with a thumbnail, expected "
            f"{EXPECTED}; {CONVERT}"
        )
    _check_pixels((tags.get(322, 1), tags.get(323, 1)), limits, name)
    for starts, counts in ((273, 279), (324, 325)):  # strips, tiles
        ends = map(sum, zip(tags.get(starts, ()), tags.get(counts, ()), strict=False))
        if max(ends, default=0) > file_bytes:
            raise EOFError

    if 2 in tags.get(TiffImagePlugin.SAMPLEFORMAT, ()) and _bits(image) == 8:
        raise ImageError(
            f"{name}: found a TIFF of signed 8-bit values, expected 8 or 16 bits without sign; "
            f"{CONVERT}"
        )


def _bits(image: TiffImagePlugin.TiffImageFile) -> int:
    """Return the bits of its widest channel."""
    return int(max(image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,))))


def _has_wide_planes(image: TiffImagePlugin.TiffImageFile) -> bool:
    """Return whether channels of more than 8 bits lie one after another and are not compressed:
    Pillow (up to 13.0, at least) would read their bytes as pixels.
    """
    tags = image.tag_v2
    raw, separate = (
        tags.get(TiffImagePlugin.COMPRESSION, 1) == 1,
        tags.get(PLANAR_CONFIGURATION) == 2,
    )
    channels = tags.get(TiffImagePlugin.SAMPLESPERPIXEL, 1)
    return raw and separate and channels > 1 and _bits(image) > 8


def _read_by_libtiff(data: bytes) -> TiffImagePlugin.TiffImageFile:
    """Opened so that libtiff decodes it, though it is not compressed. Pillow's setting is one for
    the process: others may read theirs by libtiff meanwhile, which are the same pixels.
    """
    with _libtiff:
        before, TiffImagePlugin.READ_LIBTIFF = TiffImagePlugin.READ_LIBTIFF, True
        try:
            return TiffImagePlugin.TiffImageFile(io.BytesIO(data))
        finally:
            TiffImagePlugin.READ_LIBTIFF = before


def _repair_grey_key(image: PngImagePlugin.PngImageFile, depth: int) -> None:
    """Pillow spreads grey of 2 and 4 bits (before version 11 also of 1) over 0 to 255, but leaves
    the transparent value as in the file.
    """
    key, top = image.info.get("transparency"), (1 << depth) - 1
    if depth in (1, 2, 4) and image.mode in ("1", "L") and isinstance(key, int) and key <= top:
        image.info["transparency"] = key * 255 // top


def one_of_each() -> Iterator[bytes]:
    """A small file of each format that is always read. What the others need is loaded."""
    load_libraries()
    for kind in _READERS.keys() - LIBRARIES.keys():
        if missing(kind):
            continue
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, kind)
        yield file.getvalue()


@contextmanager
def _decoding(
    name: str, words: str, ends_early: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Turns whatever a decoder raises into one ImageError; the decoder's own words stay behind, as
    its cause.
    """
    try:
        with quiet_pillow:
            yield
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(
            f"{name}: found a {words} with more pixels than Pillow allows; scale the picture down"
        ) from error
    except MemoryError as error:
        raise ImageError(
            f"{name}: found a {words} too large for the memory of this machine; scale the picture "
            "down"
        ) from error
    except Exception as error:
        if isinstance(error, EOFError) or "truncated" in str(error).lower() or ends_early():
            raise ImageError(
                f"{name}: found a truncated {words}, expected the whole file; fetch or copy it "
                "again"
            ) from error
        raise ImageError(
            f"{name}: found a {words} that is damaged or of an unusual kind, expected one that "
            "decodes; save it anew as PNG or JPEG"
        ) from error
