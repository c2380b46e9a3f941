"""Audio formats recognised by a file's first bytes."""

from __future__ import annotations

from mtmd.clip.video.signatures import HEAD_BYTES, video_format

__all__ = ["EXPECTED", "HEAD_BYTES", "NAMES", "audio_format", "container_format"]

NAMES = {
    "WAV": "WAV file",
    "MP3": "MP3 file",
    "FLAC": "FLAC file",
    "OGG": "Ogg file",
    "AAC": "AAC file",
    "MOV": "MP4 or M4A file",
    "MKV": "WebM or Matroska file",
}
EXPECTED = "a WAV, MP3, FLAC, Ogg, Opus, M4A, AAC or WebM file"
TYPES = {
    "WAV": "audio/wav",
    "MP3": "audio/mpeg",
    "FLAC": "audio/flac",
    "OGG": "audio/ogg",
    "AAC": "audio/aac",
    "MOV": "audio/mp4",
    "MKV": "audio/webm",
}
_BRANDS = frozenset([b"M4A ", b"M4B ", b"M4P ", b"F4A ", b"F4B "])
_THEORA = b"\x80theora"
_CODEC_AT = 28  # in the first page of an Ogg file, which has one packet of one segment


def audio_format(head: bytes) -> str | None:
    """The format as a key of `NAMES` of a file that begins so and can be nothing but audio; None
    for any other, also for containers of videos.
    """
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return "WAV"
    if head[:3] == b"ID3" or _is_mp3_frame(head):
        return "MP3"
    if head[:4] == b"fLaC":
        return "FLAC"
    if head[:4] == b"OggS" and not head[_CODEC_AT:].startswith(_THEORA):
        return "OGG"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0:  # ADTS
        return "AAC"
    if head[4:8] == b"ftyp" and head[8:12] in _BRANDS:
        return "MOV"
    return None


def container_format(head: bytes) -> str | None:
    """The same for a file that is said to be audio: containers that videos come in hold it, too."""
    kind = audio_format(head) or video_format(head)
    return kind if kind in NAMES else None


def _is_mp3_frame(head: bytes) -> bool:
    """Return whether a header of MPEG audio of layer III stands there (ISO/IEC 11172-3,
    2.4.1.3).
    """
    if len(head) < 3 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return False
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    bitrate, rate = head[2] >> 4, head[2] >> 2 & 3
    return version != 1 and layer == 1 and bitrate not in (0, 15) and rate != 3
