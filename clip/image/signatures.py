"""Picture formats recognised by a file's first bytes: those that are decoded, and, in words,
others. No pixels are read here.
"""

from __future__ import annotations

import struct

NAMES = {
    "JPEG": "JPEG",
    "PNG": "PNG",
    "WEBP": "WebP",
    "GIF": "GIF",
    "BMP": "BMP",
    "TIFF": "TIFF",
    "AVIF": "AVIF picture",
    "HEIF": "HEIC picture",
    "PDF": "PDF",
}
EXPECTED = "a JPEG, PNG, WebP, AVIF, HEIC, GIF, BMP or TIFF picture"
CONVERT = "convert it to PNG or JPEG first"

_TIFF = (
    b"II\x2a\x00",
    b"MM\x00\x2a",
    b"II\x2b\x00",
    b"MM\x00\x2b",
)  # classic and BigTIFF, in both byte orders
_PICTURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    *((prefix, "TIFF") for prefix in _TIFF),
)
_PAGE = "download the picture itself, not its page"
_EXPORT = "export the page as PNG or JPEG first"
_NOT_A_PICTURE = "give a picture file"
_OTHERS = (
    (b"%!PS", "a PostScript document", _EXPORT),
    (b"\xc5\xd0\xd3\xc6", "an EPS document", _EXPORT),
    (b"8BPS", "a Photoshop document", CONVERT),
    (b"\xff\x0a", "a JPEG XL picture", CONVERT),
    (b"\x00\x00\x00\x0cJXL ", "a JPEG XL picture", CONVERT),
    (b"\x00\x00\x00\x0cjP  ", "a JPEG 2000 picture", CONVERT),
    (b"\xff\x4f\xff\x51", "a JPEG 2000 picture", CONVERT),
    (b"\x00\x00\x01\x00", "a Windows icon", CONVERT),
    (b"DDS ", "a DDS texture", CONVERT),
    (b"qoif", "a QOI picture", CONVERT),
    (b"\x76\x2f\x31\x01", "an OpenEXR picture", CONVERT),
    (b"#?RADIANCE", "a Radiance HDR picture", CONVERT),
    (b"SIMPLE  =", "a FITS picture", CONVERT),
    (b"FUJIFILM", "a camera raw picture", CONVERT),
    (b"icns", "an Apple icon", CONVERT),
    (b"PK\x03\x04", "a ZIP archive or an Office document", "unpack it, or export the picture"),
    (b"\x1f\x8b", "a gzip archive", "unpack it first"),
    (b"7z\xbc\xaf", "a 7-Zip archive", "unpack it first"),
    (b"Rar!", "a RAR archive", "unpack it first"),
    (b"GGUF", "a GGUF model", _NOT_A_PICTURE),
    (b"\x7fELF", "a program", _NOT_A_PICTURE),
    (b"MZ", "a Windows program", _NOT_A_PICTURE),
    (b"ID3", "an MP3 sound", _NOT_A_PICTURE),
    (b"OggS", "an Ogg sound or video", _NOT_A_PICTURE),
    (b"\x1aE\xdf\xa3", "a Matroska or WebM video", "give it as a video, or extract a frame"),
)
# Text is looked at without its leading white space, in lower case.
_TEXTS = (
    (b"<svg", "an SVG drawing", CONVERT),
    (b"<!doctype html", "an HTML page", _PAGE),
    (b"<html", "an HTML page", _PAGE),
    (b"<head", "an HTML page", _PAGE),
    (b"version https://git-lfs", "a Git LFS pointer", "fetch the real file with `git lfs pull`"),
    (b"data:", "a data URL", "decode it to bytes first"),
    (b"http://", "the text of a web address", "download the picture first"),
    (b"https://", "the text of a web address", "download the picture first"),
    (b"{", "JSON or other text", _NOT_A_PICTURE),
)
_TIFF_TYPE_BYTES = {
    1: 1,
    2: 1,
    3: 2,
    4: 4,
    5: 8,
    6: 1,
    7: 1,
    8: 2,
    9: 4,
    10: 8,
    11: 4,
    12: 8,
    13: 4,
    16: 8,
    17: 8,
    18: 8,
}
# BitsPerSample, StripOffsets and -ByteCounts, ColorMap, TileOffsets and -ByteCounts, ExtraSamples,
# SampleFormat, JPEGTables
_TIFF_NEEDED = {258, 273, 279, 320, 324, 325, 338, 339, 347}
_AVIF_BRANDS = {b"avif", b"avis"}
_STILL_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}


def picture_format(data: bytes) -> str | None:
    """The format of `data` as a key of `NAMES`, or None when it is none of those we decode."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[:2] == b"BM" and not any(
        data[15:18]
    ):  # two letters are not enough: the header's size, which is small, follows
        return "BMP"
    if data[4:8] == b"ftyp":
        return _still(data)
    if data[:5] == b"%PDF-":
        return "PDF"
    return next((kind for prefix, kind in _PICTURES if data.startswith(prefix)), None)


def _still(data: bytes) -> str | None:
    """Return the still format of the file's brand, and of those it goes with, where its own names
    no codec.
    """
    brand = data[8:12]
    end = min(int.from_bytes(data[:4], "big"), 256, len(data))
    others = {data[at : at + 4] for at in range(16, end, 4)}
    if brand in _AVIF_BRANDS or (brand in (b"mif1", b"msf1") and others & _AVIF_BRANDS):
        return "AVIF"
    return "HEIF" if brand in _STILL_BRANDS else None


def looks_like(data: bytes) -> tuple[str, str]:
    """Return what data that is no picture of ours is, in words, and what to do with it."""
    for prefix, words, advice in _OTHERS:
        if data.startswith(prefix):
            return words, advice
    if data[4:8] == b"ftyp":
        return "an MP4 or QuickTime video", "give it as a video, or extract a frame"
    if data[:4] == b"RIFF" and data[8:12] in (b"AVI ", b"WAVE"):
        return "an AVI video or WAV sound", _NOT_A_PICTURE
    if _is_tga(data):
        return "a TGA picture", CONVERT
    if data[:4] == b"\x00\x00\x02\x00" and any(data[4:6]):  # the number of its pictures
        return "a Windows cursor", CONVERT
    if data[:1] == b"P" and data[1:2] in b"123456f7" and data[2:3].isspace():
        return "a PNM picture", CONVERT
    return _looks_like_text(data[:1024])


def _is_tga(data: bytes) -> bool:
    """Recognise it by its header, as it has no signature (Truevision, TGA file format specification
    2.0).
    """
    if len(data) < 18 or data[1] > 1 or data[2] not in (1, 2, 3, 9, 10, 11):
        return False
    has_map = any(data[3:8])
    size = data[12:14], data[14:16]
    return has_map == bool(data[1]) and all(map(any, size)) and data[16] in (8, 15, 16, 24, 32)


def _looks_like_text(head: bytes) -> tuple[str, str]:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for prefix, words, advice in _TEXTS:
        if text.startswith(prefix):
            return words, advice
    if text.startswith((b"<?xml", b"<!--", b"<!doctype svg")):
        return (
            ("an SVG drawing", CONVERT)
            if b"<svg" in text
            else ("an XML or HTML document", _NOT_A_PICTURE)
        )
    if not any(head):
        return "nothing but zero bytes", "fetch or copy the file again"
    printable = sum(byte >= 32 or byte in b"\t\n\r\f" for byte in head)
    words = "".join(text.decode("utf-8", "ignore").split())  # a letter may be cut at the end
    if printable == len(head) and words.isprintable() | text.isascii():
        return "plain text", _NOT_A_PICTURE
    return "data of an unknown type", _NOT_A_PICTURE


def webp_size(data: bytes) -> tuple[int, int] | None:
    """(width, height) of the canvas from a WebP's header (RFC 9649, section 2), or None when it is
    not there.

    Needed because libwebp allocates the whole canvas as soon as the file is opened.
    """
    if len(data) < 30:
        return None
    chunk = data[12:16]
    if chunk == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if chunk == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if chunk == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None


def ends_early(kind: str, data: bytes) -> bool:
    """Return whether `data` lacks the end that its format promises. Asked only to word the refusal
    of a picture that did not decode.
    """
    if kind == "JPEG":
        return not data.rstrip(b"\0").endswith(b"\xff\xd9")
    if kind == "PNG":
        return b"IEND" not in data[-64:]
    if kind == "GIF":
        return not data.rstrip(b"\0").endswith(b";")
    if kind == "WEBP":
        return len(data) < 12 or 8 + int.from_bytes(data[4:8], "little") > len(data)
    if kind == "BMP":
        return len(data) < 26 or int.from_bytes(data[2:6], "little") > len(data)
    if kind == "PDF":
        return b"%%EOF" not in data[-1024:]
    if kind in ("AVIF", "HEIF"):
        return _boxes_end_early(data)
    return _tiff_ends_early(data)


def _boxes_end_early(data: bytes) -> bool:
    """Return whether one of the outer boxes reaches beyond the end (ISO/IEC 14496-12, 4.2)."""
    position = 0
    for _ in range(64):
        if position >= len(data):
            return position > len(data)
        size = int.from_bytes(data[position : position + 4], "big")
        if size == 1:
            size = int.from_bytes(data[position + 8 : position + 16], "big")
        if size < 8:
            return False
        position += size
    return False


def _tiff_ends_early(data: bytes) -> bool:
    """Return whether the first directory of a TIFF, or a list that decoding needs, lies beyond the
    end (TIFF 6.0 section 2, BigTIFF).
    """
    order = "<" if data[:2] == b"II" else ">"
    big = 43 in data[2:4]
    start, count, entry, inline = ("Q", "Q", "HHQ", 8) if big else ("I", "H", "HHI", 4)
    try:
        (directory,) = struct.unpack_from(order + start, data, 8 if big else 4)
        (entries,) = struct.unpack_from(order + count, data, directory)
        position = directory + struct.calcsize(order + count)
        for _ in range(entries):
            tag, type_, values = struct.unpack_from(order + entry, data, position)
            position += struct.calcsize(order + entry)
            (offset,) = struct.unpack_from(order + start, data, position)
            position += inline
            size = values * _TIFF_TYPE_BYTES.get(type_, 0)
            if tag in _TIFF_NEEDED and size > inline and offset + size > len(data):
                return True
    except (struct.error, OverflowError):
        return True
    return False
