"""Audio files through PyAV (FFmpeg), block by block: mono, as fp32, at the file's own rate.

The demuxer is named by the file's first bytes, never guessed, and only the codecs below decode, as
with videos (`mtmd.clip.video.container`). Channels are averaged; whole numbers are divided by their
full scale, so that 16 bits become what soundfile and librosa read.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, Protocol

import numpy as np

from mtmd.base.errors import AudioError
from mtmd.base.extras import install_command
from mtmd.clip.audio.audio import AudioFacts, Samples, averaged
from mtmd.clip.audio.limits import (
    DEFAULT_LIMITS,
    AudioLimits,
    check_channels,
    check_rate,
    check_seconds,
)
from mtmd.clip.audio.signatures import EXPECTED, HEAD_BYTES, NAMES, container_format
from mtmd.clip.image.decode import one_line
from mtmd.clip.image.signatures import NAMES as PICTURES
from mtmd.clip.image.signatures import looks_like, picture_format
from mtmd.clip.video.container import BAD_PACKETS, BUFFER_BYTES, refuse_other_files

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer

_DEMUXERS = {
    "WAV": "wav",
    "MP3": "mp3",
    "FLAC": "flac",
    "OGG": "ogg",
    "AAC": "aac",
    "MOV": "mov",
    "MKV": "matroska",
}
_WHITELIST = "wav,mp3,flac,ogg,aac,mov,mp4,m4a,3gp,3g2,mj2,matroska,webm"
CODECS = frozenset(
    (
        *("mp3", "mp3float", "mp2", "mp2float", "flac", "vorbis", "opus", "aac", "alac", "speex"),
        *("pcm_u8", "pcm_s8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le"),
        *("pcm_s32be", "pcm_f32le", "pcm_f32be", "pcm_f64le", "pcm_f64be", "pcm_alaw"),
        *("pcm_mulaw", "adpcm_ms", "adpcm_ima_wav", "ac3", "eac3", "gsm_ms"),
    )
)
_SHORT = {"mp3float": "mp3", "mp2float": "mp2", "libopus": "opus", "libvorbis": "vorbis"}
_DECODERS = ("libopus", "libvorbis", "libspeex")
EARLY_S = 0.1  # that are missing at the end before a note says so
LONGEST_HEADER = 64  # bytes of an MP3's first frame, in which its length may be stated
ADDED = 3  # frames at most that encoders add, and decoders leave out
MP3_RATES = 44_100, 48_000, 32_000
MAX_CHUNKS = 64  # of a WAV file, before its samples
BLOCK = 1 << 16  # samples handed on together, and a frame more


class Reader(Protocol):
    """An open audio file, to be read once. Not thread-safe."""

    rate: int
    """Samples a second."""

    def blocks(self) -> Iterator[Samples]:
        """Yield all samples, in blocks. Raises AudioError."""

    @property
    def facts(self) -> AudioFacts:
        """Return what is known once all blocks were read."""

    def close(self) -> None:
        """Let go of what decodes."""


def kind_of(head: bytes, name: str) -> str:
    """The format of a file that begins with `head`, as a key of `NAMES`. Raises AudioError for what
    is no audio by its first bytes.
    """
    if (kind := container_format(head)) is not None:
        return kind
    picture = picture_format(head)
    words = f"a picture ({PICTURES[picture]})" if picture else looks_like(head)[0]
    advice = (
        "ask about it as a picture, as with `mtmd describe`"
        if picture
        else "convert it, as with ffmpeg, to WAV"
    )
    raise AudioError(f"{one_line(name)}: found {words}, expected {EXPECTED}; {advice}")


def open_audio(
    file: BinaryIO, limits: AudioLimits = DEFAULT_LIMITS, name: str = "audio"
) -> AudioStreamReader:
    """Read what the header says. `file` can be seeked in; `name` opens every message. Raises
    AudioError, in one line, for whatever is not audio within `limits`.
    """
    kind = kind_of(file.read(HEAD_BYTES), name)
    name = one_line(name)
    if find_spec("av") is None:
        raise AudioError(
            f"{name}: found {article(kind)}, expected PyAV, which reads it; install it: "
            f"{install_command('video')}"
        )
    file.seek(0)
    return AudioStreamReader(file, kind, limits, name)


class AudioStreamReader:
    """Made of an open file of format `kind`. Raises AudioError."""

    def __init__(self, file: BinaryIO, kind: str, limits: AudioLimits, name: str):
        self._file, self._kind, self._limits, self._name = file, kind, limits, name
        self._count, self._notes = 0, list[str]()
        self._stated = stated_seconds(file, kind)
        try:
            self._open()
        except AudioError:
            raise
        except Exception as error:
            self._refuse(error)

    def _open(self) -> None:
        import av

        av.logging.set_level(None)  # its words are about what it has survived
        container: Any = av.open(
            self._file,
            format=_DEMUXERS[self._kind],
            options={"threads": "1"},
            container_options={
                "protocol_whitelist": "none",
                "format_whitelist": _WHITELIST,
                "codec_whitelist": ",".join([*CODECS, *_DECODERS]),
            },
            metadata_errors="replace",
            buffer_size=BUFFER_BYTES,
            io_open=refuse_other_files,
        )
        self._container: InputContainer = container
        self._stream = self._first_stream()
        codec = self._stream.codec_context
        self.codec = _SHORT.get(codec.name, codec.name)
        if codec.name not in CODECS and codec.name not in _DECODERS:
            raise AudioError(
                f"{self._name}: found {article(self._kind)} in the codec {codec.name!r:.20}, "
                "expected a common one such as MP3, AAC, FLAC, Opus or PCM; encode it anew"
            )
        self.rate, self.channels = int(codec.sample_rate or 0), int(codec.channels or 0)
        check_rate(self.rate, self._name)
        check_channels(self.channels, self._name)
        self.stated = self._stated_seconds()
        check_seconds(self.stated, self._limits, self._name)
        codec.thread_count = 1

    def _first_stream(self) -> AudioStream:
        from av.stream import Discard

        streams = [s for s in self._container.streams.audio if s.codec_context is not None]
        if not streams:
            raise AudioError(
                f"{self._name}: found {article(self._kind)} without sound that can be decoded, "
                "expected some; give a file with an audio track"
            )
        for stream in self._container.streams:
            if stream is not streams[0]:
                stream.discard = Discard.all
        return streams[0]

    def _stated_seconds(self) -> float:
        """Return the length that the header states, 0 where it does not."""
        stream = self._stream
        if stream.duration and stream.time_base:
            return max(0.0, float(stream.duration * stream.time_base))
        return max(0.0, (self._container.duration or 0) / 1e6)

    @property
    def facts(self) -> AudioFacts:
        seconds = self._count / self.rate
        notes = list(self._notes)
        # what the library has of these is an estimate, or what is there
        stated = self._stated if self._kind in ("MP3", "AAC", "WAV") else self.stated
        if stated > seconds + max(EARLY_S, 0.02 * seconds):
            notes.append(f"ends at {seconds:.1f} s, not at {stated:.1f} s as it says")
        return AudioFacts(seconds, self.rate, self.channels, self.codec, tuple(notes))

    def close(self) -> None:
        self._container.close()

    def blocks(self) -> Iterator[Samples]:
        maximum = int(self._limits.max_seconds * self.rate)
        waiting: list[Samples] = []
        stored = 0
        for samples in self._decoded():
            self._count += len(samples)
            if self._count > maximum:
                check_seconds(self._count / self.rate, self._limits, self._name)
            waiting.append(samples)
            stored += len(samples)
            if stored >= BLOCK:
                yield np.concatenate(waiting)
                waiting, stored = [], 0
        if waiting:
            yield np.concatenate(waiting)
        if not self._count:
            raise AudioError(
                f"{self._name}: found {article(self._kind)} of which no sound can be decoded, "
                "expected a whole one; fetch or copy the file again"
            )

    def _decoded(self) -> Iterator[Samples]:
        """Yield mono samples of each frame; what cannot be decoded is passed over."""
        import av

        bad, passed_over = 0, 0
        packets = self._container.demux(self._stream)
        while bad < BAD_PACKETS:
            try:
                packet = next(packets, None)
            except av.error.FFmpegError:  # the end, as far as it can be read
                packet, packets = None, iter(())
            try:
                frames = self._stream.codec_context.decode(packet)
            except EOFError:
                return
            except av.error.FFmpegError:
                bad += 1
                passed_over += packet is not None
                if passed_over == 1:
                    self._notes.append("damaged in places, which are left out")
                if packet is None:
                    return
                continue
            for frame in frames:
                bad = 0
                if frame.sample_rate != self.rate or len(frame.layout.channels) != self.channels:
                    raise AudioError(
                        f"{self._name}: found audio that changes from {self.rate:,} to "
                        f"{frame.sample_rate:,} samples a second or to other channels midway, "
                        "expected one kind throughout; encode it anew"
                    )
                yield mono(frame.to_ndarray(), frame.format.is_planar, self.channels)
            if packet is None:
                return

    def _refuse(self, error: Exception) -> NoReturn:
        if isinstance(error, MemoryError):
            raise error
        raise AudioError(
            f"{self._name}: found {article(self._kind)} that is damaged or of an unusual kind, "
            "expected one that decodes; fetch the file again, or encode it as WAV"
        ) from error


def stated_seconds(file: BinaryIO, kind: str) -> float:
    """Return how long an MP3 or a WAV file says it is, by the header of its first frame (Xing's and
    LAME's) or of its samples, for which libraries put what there is; 0 where it does not say, and
    for others. Leaves it at its beginning.
    """
    read = {"MP3": _stated_by_mp3, "WAV": _stated_by_wav}.get(kind)
    result = read(file) if read else 0.0
    file.seek(0)
    return result


def _stated_by_mp3(file: BinaryIO) -> float:
    file.seek(0)
    head = file.read(10)
    tag = head[6:10] if head[:3] == b"ID3" else b""  # its length in groups of 7 bits
    file.seek(10 + sum(byte << 7 * (3 - i) for i, byte in enumerate(tag)) if tag else 0)
    frame = file.read(LONGEST_HEADER)
    at = max(frame.find(b"Xing"), frame.find(b"Info"))
    if at < 4 or len(frame) < at + 12 or not frame[at + 7] & 1:
        return 0.0
    version, index = frame[1] >> 3 & 3, frame[2] >> 2 & 3
    # version 3 is MPEG-1, 2 MPEG-2 with half its rates, 0 MPEG-2.5 with a quarter
    rate = (*MP3_RATES, 0)[index] >> (3 - version if version > 1 else 2)
    each = 1152 if version == 3 else 576  # samples of a frame
    frames = int.from_bytes(frame[at + 8 : at + 12], "big") - ADDED
    return max(0, frames * each) / rate if rate else 0.0


def _stated_by_wav(file: BinaryIO) -> float:
    file.seek(12)
    per_second = 0
    for _ in range(MAX_CHUNKS):
        head = file.read(8)
        name, size = head[:4], int.from_bytes(head[4:], "little")
        if name == b"data":
            is_known = 0 < size < (1 << 32) - 1  # by who wrote it to a pipe, it is not
            return size / per_second if is_known and per_second else 0.0
        start = file.tell()
        if name == b"fmt ":
            per_second = int.from_bytes(file.read(12)[8:], "little")
        if len(head) < 8:
            break
        file.seek(start + size + size % 2)
    return 0.0


def article(kind: str) -> str:
    """Return what files of a format are called, with its article."""
    return f"{'an' if kind in ('MP3', 'AAC', 'MOV', 'OGG') else 'a'} {NAMES[kind]}"


def mono(values: np.ndarray, is_planar: bool, channels: int) -> Samples:
    """One decoded frame, [C, N] or [1, N C], as the mean of its channels, [N]."""
    return averaged(values if is_planar else values.reshape(-1, channels).T)
