"""Video formats recognised by a file's first bytes."""

from __future__ import annotations

NAMES = {
    "MOV": "MP4 or QuickTime video",
    "MKV": "Matroska or WebM video",
    "AVI": "AVI video",
    "GIF": "GIF",
    "WEBP": "WebP",
    "PNG": "PNG",
}
EXPECTED = "an MP4, MOV, WebM, MKV or AVI video, or an animated GIF, WebP or PNG"
HEAD_BYTES = 64
"""Are enough to tell."""
_PICTURES = frozenset(  # of HEIF and AVIF, which lie in the same boxes
    [b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"]
)
_BOXES = frozenset([b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"])


def video_format(head: bytes) -> str | None:
    """The format as a key of `NAMES` that the first bytes of a file, `HEAD_BYTES` at least, are
    those of, None where it is no video. Pictures of a format that can move are told apart by
    `animation.moves`.
    """
    if head[:4] == b"\x1aE\xdf\xa3":
        return "MKV"
    if head[:4] == b"RIFF" and head[8:12] in (b"AVI ", b"AVIX"):
        return "AVI"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if head[:8] == b"\x89PNG\r\n\x1a\n":
        return "PNG"
    if head[4:8] in _BOXES and head[8:12] not in _PICTURES:
        return "MOV"
    return None


def is_container(kind: str | None) -> bool:
    """Return whether a format holds a video always, and is not a picture's that may move."""
    return kind in ("MOV", "MKV", "AVI")
