"""Video files through PyAV (FFmpeg): what they say of themselves, and frames out of them.

The demuxer is named by the file's first bytes, never guessed: so playlists and lists of other files
are none of the formats, no other file and no address is opened whatever the file names, and only
the codecs below decode. Frames are taken while decoding, and what lies between those that are
wanted is skipped from one key frame to the next where that is shorter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from mtmd.base.cores import usable_cores
from mtmd.base.errors import VideoError
from mtmd.base.extras import install_command
from mtmd.clip.image.pixels import Pixels
from mtmd.clip.video.choose import part_between
from mtmd.clip.video.limits import (
    MAX_FPS,
    MAX_FRAMES,
    VideoLimits,
    admit_any,
    check_facts,
    check_frames,
    check_size,
)
from mtmd.clip.video.signatures import NAMES
from mtmd.clip.video.video import Part, VideoFacts

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

_DEMUXERS = {"MOV": "mov", "MKV": "matroska", "AVI": "avi"}
_WHITELIST = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"
CODECS = frozenset(
    (
        *("h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mpeg1video", "mpeg2video", "mjpeg"),
        *("h263", "flv1", "msmpeg4v1", "msmpeg4v2", "msmpeg4v3", "wmv1", "wmv2", "wmv3", "vc1"),
        *("theora", "prores", "dnxhd", "cfhd", "dvvideo", "png", "qtrle", "rawvideo", "ffv1"),
        *("huffyuv", "ffvhuff", "utvideo", "cinepak", "svq1", "svq3", "rpza", "msrle", "gif"),
    )
)
_DECODERS = {"libdav1d": "av1", "libaom-av1": "av1", "libvpx": "vp8", "libvpx-vp9": "vp9"}
BUFFER_BYTES = 1 << 18
SCAN_BYTES = 1 << 30
"""A file up to this that has no table of its frames is read through once for their times."""
AHEAD = 8  # frames that are decoded sooner than a key frame is looked for
UNKNOWN_AHEAD_S = 10.0  # the same where nobody knows where key frames are
BAD_PACKETS = 256  # in a row, after which a stream is given up
THREADS = min(4, usable_cores().usable)
DEFAULT_FPS = 25.0
_LOCATION = np.dtype([("stamp", np.float64), ("key", np.bool_)])
"""Of a frame in a file."""
PQ, HLG = 16, 18  # transfer characteristics of ITU-T H.273
_TRANSFERS = {PQ: "PQ", HLG: "HLG"}


def check_installed(kind: str, name: str) -> None:
    """Raises VideoError, with the command, where PyAV is not there."""
    if find_spec("av") is None:
        raise VideoError(
            f"{name}: found an {NAMES[kind]}, expected PyAV, which reads it; install it: "
            f"{install_command('video')}"
        )


@dataclass(frozen=True)
class _Shape:
    """Shape of a decoded frame as it is shown: quarter turns counterclockwise, and its width and
    height before those.
    """

    turns: int
    width: int
    height: int

    @property
    def upright(self) -> tuple[int, int]:
        return (self.height, self.width) if self.turns % 2 else (self.width, self.height)


class Container:
    """Made of an open file of format `kind`: its first frame is decoded. Raises VideoError."""

    def __init__(
        self,
        file: BinaryIO,
        kind: str,
        limits: VideoLimits,
        name: str,
        admit: Callable[[int], None] = admit_any,
    ):
        check_installed(kind, name)
        self._name, self._words, self._limits = name, NAMES[kind], limits
        self._admit, self._early = admit, ""
        self._file, self._kind = file, kind
        self._bytes = file.seek(0, os.SEEK_END)
        try:
            self._open()
            first = self._first()
        except VideoError:
            raise
        except Exception as error:
            self._refuse(error)
        self._shape = _shape(self._stream, first)
        self._start = _seconds(first, 0.0)
        self._counts = _stamp(first) is None
        self._times, self._keys = self._timeline()
        self.facts = self._facts(first)
        check_size(self.facts.width, self.facts.height, limits, name)
        check_facts(self.facts, limits, name)
        self._rewind()
        self._decoded = self._decode()
        self._passed: tuple[float, VideoFrame] | None = None
        """The last frame that came, and its time."""
        self._next: tuple[float, VideoFrame] | None = None

    def close(self) -> None:
        self._container.close()

    def part(self, start: float | None, end: float | None) -> Part:
        return part_between(self.facts, self._times, start, end)

    def take(
        self, indices: Sequence[int], size: tuple[int, int]
    ) -> Iterator[tuple[int, float, Pixels]]:
        """(number, seconds, uint8 [Y, X, 3]) of each frame, in order; fewer where the file ends, or
        is damaged, before. Raises VideoError where there is none.
        """
        count = 0
        for index in indices:
            requested, limit = self._time(index), self._until(index)
            try:
                if self._is_far(requested):
                    self._seek(requested, limit)
                frame = self._frame_at(requested, limit)
            except VideoError:
                raise
            except Exception as error:
                self._refuse(error)
            if frame is None:
                break
            count += 1
            yield index, max(0.0, frame[0]), _pixels(frame[1], self._shape, size)
        if not count and len(indices):
            raise VideoError(
                f"{self._name}: found {_article(self._words)} that cannot be decoded where it was "
                "asked for, expected a whole one; fetch or copy the file again"
            )

    def _open(self) -> None:
        import av

        self._file.seek(0)
        av.logging.set_level(None)  # its words are about what it has survived
        maximum = str(self._limits.max_pixels)
        container: Any = av.open(
            self._file,
            format=_DEMUXERS[self._kind],
            options={"max_pixels": maximum, "threads": "1"},
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
        self._stream = self._best_stream()
        codec = self._stream.codec_context
        self._codec = _DECODERS.get(codec.name, codec.name)
        if self._codec not in CODECS:
            raise VideoError(
                f"{self._name}: found {_article(self._words)} in the codec {self._codec!r:.20}, "
                "expected a common one such as H.264, HEVC, AV1 or VP9; encode it anew"
            )
        check_size(codec.width, codec.height, self._limits, self._name)
        self._admit(codec.width * codec.height)
        codec.options = {"max_pixels": maximum}
        codec.thread_count = THREADS
        codec.thread_type = "AUTO"

    def _best_stream(self) -> VideoStream:
        """The largest that is no cover picture."""
        from av.stream import Discard, Disposition

        streams = [
            s
            for s in self._container.streams.video
            if s.codec_context is not None and not s.disposition & Disposition.attached_pic
        ]
        if not streams:
            raise VideoError(
                f"{self._name}: found {_article(self._words)} without pictures that can be "
                "decoded, expected some; give a file with a video track"
            )
        best = max(streams, key=lambda s: s.codec_context.width * s.codec_context.height)
        for stream in self._container.streams:
            if stream is not best:
                stream.discard = Discard.all
        return best

    def _first(self) -> VideoFrame:
        for frame in self._frames():
            return frame
        raise VideoError(
            f"{self._name}: found {_article(self._words)} of which no frame can be decoded, "
            "expected a whole one; fetch or copy the file again"
        )

    def _refuse(self, error: Exception) -> NoReturn:
        if isinstance(error, MemoryError):
            raise error
        if self._kind == "MOV" and _ends_early(self._file, self._bytes):
            raise VideoError(
                f"{self._name}: found a truncated {self._words}, expected the whole file; fetch or "
                "copy it again"
            ) from error
        raise VideoError(
            f"{self._name}: found {_article(self._words)} that is damaged or of an unusual kind, "
            "expected one that decodes; fetch the file again, or encode it as MP4 (H.264)"
        ) from error

    # What the file says of its frames.

    def _facts(self, first: VideoFrame) -> VideoFacts:
        times, stream = self._times, self._stream
        fps = float(stream.average_rate or stream.guessed_rate or 0)
        seconds = self._stated_seconds()
        if times is not None and len(times) > 1:
            gap = float(times[-1] - times[0]) / (len(times) - 1)
            there = float(times[-1] - times[0]) + gap
            if seconds > there + max(1.0, 2 * gap):
                self._early = f"ends at {there:.1f} s, not at {seconds:.1f} s as it says"
            seconds, fps = there, 1 / gap if gap > 0 else fps
        if not 0 < fps <= MAX_FPS:
            fps = DEFAULT_FPS
        frames = len(times) if times is not None else stream.frames
        if frames < 1 or (times is None and frames > MAX_FRAMES):  # a header that was not filled in
            frames = max(1, round(seconds * fps))
        if seconds <= 0:
            seconds = frames / fps
        width, height = self._shape.upright
        return VideoFacts(
            frames,
            fps,
            seconds,
            width,
            height,
            self._codec,
            tuple(self._notes(first)),
            any(s.codec_context is not None for s in self._container.streams.audio),
        )

    def _stated_seconds(self) -> float:
        if self._stream.duration and self._stream.time_base:
            return float(self._stream.duration * self._stream.time_base)
        return (self._container.duration or 0) / 1e6

    def _notes(self, first: VideoFrame) -> Iterator[str]:
        bits = max((c.bits for c in first.format.components), default=8)
        if bits > 8:
            yield f"{bits} bit, shown as 8"
        if transfer := _TRANSFERS.get(int(first.color_trc)):
            yield f"HDR ({transfer}), shown without tone mapping"
        if first.interlaced_frame:
            yield "interlaced"
        if self._shape.turns:
            yield f"rotated upright ({self._shape.turns * 90} degrees)"
        if (self._shape.width, self._shape.height) != (first.width, first.height):
            yield f"pixels that are not square: {first.width} x {first.height} in the file"
        if _has_alpha(first):
            yield "transparent parts laid on white"
        if self._early:
            yield self._early
        if self._counts:
            yield "timestamps missing: taken from the frame rate"
        elif self._times is not None and _varies(self._times):
            yield "variable frame rate"

    def _timeline(self) -> tuple[NDArray[np.float64] | None, NDArray[np.float64] | None]:
        """Seconds of each frame from the first, in order, and of each key frame; None where only
        reading all of a large file would tell.
        """
        if self._counts:
            return None, None
        base = float(self._stream.time_base or 0)
        check_frames(len(self._stream.index_entries), self._name)
        entries = np.fromiter(
            ((e.timestamp, e.is_keyframe) for e in self._stream.index_entries if not e.is_discard),
            _LOCATION,
        )
        if len(entries) == self._stream.frames and len(entries) > 1:
            stamps, keys = _ordered(entries, base)
            if not _varies(stamps):
                return stamps - stamps[0], keys - stamps[0]
        if self._bytes > SCAN_BYTES:
            return None, None
        result = np.fromiter(self._scan(), _LOCATION)
        check_frames(len(result), self._name)
        if not len(result):
            return None, None
        times, keys = (stamps - self._start for stamps in _ordered(result, base))
        return times[times > -1e-6], keys

    def _scan(self) -> Iterator[tuple[int, bool]]:
        """Yield, for every packet up to the limit, its time and whether it is a key frame. Nothing
        is decoded.
        """
        self._rewind()
        with suppress(Exception):  # what comes before the damage can be shown
            for packet in islice(self._container.demux(self._stream), MAX_FRAMES + 1):
                stamp = packet.pts if packet.pts is not None else packet.dts
                if stamp is not None and packet.size:
                    yield stamp, packet.is_keyframe
        self._rewind()

    def _time(self, index: int) -> float:
        """When a frame is, seconds from the first."""
        if self._times is not None and index < len(self._times):
            return float(self._times[index])
        return index / self.facts.fps

    def _until(self, index: int) -> float:
        """A frame before this is the one at `index`, or an earlier one."""
        if self._times is not None and index + 1 < len(self._times):
            return float(self._times[index] + self._times[index + 1]) / 2
        return self._time(index) + 0.5 / self.facts.fps

    # Where the decoder stands.

    def _is_far(self, requested: float) -> bool:
        """Return whether to begin anew at a key frame rather than to decode on."""
        if self._counts:
            return False
        here = self._passed[0] if self._passed else 0.0
        near = AHEAD / self.facts.fps
        if requested < here:
            return True
        if self._keys is None:
            return requested - here > max(UNKNOWN_AHEAD_S, near)
        at = int(np.searchsorted(self._keys, requested + 1e-6)) - 1
        return at >= 0 and float(self._keys[at]) > here + near

    def _seek(self, requested: float, limit: float) -> None:
        """Seek to a key frame at `requested`, or before it."""
        base, back = float(self._stream.time_base or 1), 0.0
        while True:
            target = max(0.0, requested - back)
            try:
                self._container.seek(int((self._start + target) / base), stream=self._stream)
            except Exception:  # nothing is known of the place: from the beginning then
                target = 0.0
                self._rewind()
            self._decoded, self._passed = self._decode(), None
            self._next = next(self._decoded, None)
            if target == 0 or (self._next is not None and self._next[0] < limit):
                return
            back = back * 4 or 1.0

    def _rewind(self) -> None:
        try:
            self._container.seek(0)
        except Exception:  # a file without an index, or a damaged one
            self._container.close()
            self._open()

    def _frame_at(self, requested: float, limit: float) -> tuple[float, VideoFrame] | None:
        """The last frame before `limit`; None where the file has ended well before it."""
        while True:
            if self._next is None:
                self._next = next(self._decoded, None)
            if self._next is None:
                passed = self._passed
                late = (
                    limit - requested if self._times is not None else max(0.5, 2 / self.facts.fps)
                )
                return passed if passed is not None and passed[0] >= requested - late else None
            if self._next[0] >= limit and self._passed is not None:
                return self._passed
            at_or_after = self._next[0] >= limit
            self._passed, self._next = self._next, None
            if at_or_after:  # the first that there is comes later
                return self._passed

    def _decode(self) -> Iterator[tuple[float, VideoFrame]]:
        """Frames with their times from where the file stands, in order."""
        if self._counts:
            self._rewind()
        for number, frame in enumerate(self._frames()):
            if self._counts:
                yield number / self.facts.fps, frame
            else:
                yield _seconds(frame, self._start) - self._start, frame

    def _frames(self) -> Iterator[VideoFrame]:
        """Decoded frames; what cannot be decoded is passed over."""
        import av

        bad = 0
        packets = self._container.demux(self._stream)
        while bad < BAD_PACKETS:
            try:
                packet = next(packets, None)
            except av.error.FFmpegError:  # the end, as far as it can be read
                packet, packets = None, iter(())
            try:
                frames = self._stream.codec_context.decode(packet)
            except (EOFError, MemoryError) as error:
                if isinstance(error, MemoryError):
                    raise
                return
            except av.error.FFmpegError:
                bad += 1
                if packet is None:
                    return
                continue
            for frame in frames:
                bad = 0
                if not frame.is_corrupt:
                    yield frame
            if packet is None:
                return


def refuse_other_files(_url: str, _flags: int, _options: dict[str, str]) -> NoReturn:
    raise PermissionError("a media file names another file")


def _ends_early(file: BinaryIO, size: int) -> bool:
    """Return whether one of the outer boxes reaches beyond the end (ISO/IEC 14496-12, 4.2)."""
    at = 0
    for _ in range(64):
        if at >= size:
            return at > size
        file.seek(at)
        head = file.read(16)
        length = int.from_bytes(head[:4], "big")
        if length == 1:
            length = int.from_bytes(head[8:16], "big")
        if length < 8:
            return False
        at += length
    return False


def _stamp(frame: VideoFrame) -> int | None:
    return frame.pts if frame.pts is not None else frame.dts


def _seconds(frame: VideoFrame, otherwise: float) -> float:
    stamp, base = _stamp(frame), frame.time_base
    return otherwise if stamp is None or base is None else float(stamp * base)


def _ordered(
    locations: NDArray[Any], base: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Times of frames and of key frames, each in order."""
    order = np.argsort(locations["stamp"], kind="stable")
    stamps = locations["stamp"][order] * base
    return stamps, stamps[locations["key"][order]]


def _varies(times: NDArray[np.float64]) -> bool:
    """Return whether frames are not all shown for the same time; rounded times are taken for the
    same.
    """
    if len(times) < 3:
        return False
    gaps = np.diff(times)
    usual = float(np.median(gaps))
    return bool(np.max(np.abs(gaps[:-1] - usual)) > max(0.25 * usual, 0.0021))


def _shape(stream: VideoStream, frame: VideoFrame) -> _Shape:
    turns = round(int(frame.rotation or 0) / 90) % 4
    aspect: Any = stream.sample_aspect_ratio
    ratio = float(aspect) if aspect else 1.0
    width, height = frame.width, frame.height
    if 1 / 8 <= ratio <= 8 and abs(ratio - 1) > 0.01:
        width = max(1, round(width * ratio))
    return _Shape(turns, width, height)


def _has_alpha(frame: VideoFrame) -> bool:
    return frame.format.name.startswith(("yuva", "rgba", "bgra", "argb", "abgr", "gbrap", "ya8"))


def _pixels(frame: VideoFrame, shape: _Shape, size: tuple[int, int]) -> Pixels:
    """uint8 [Y, X, 3] of `size` (width, height), upright."""
    width, height = (size[1], size[0]) if shape.turns % 2 else size
    scaled: dict[str, Any] = {}
    if (width, height) != (frame.width, frame.height):
        scaled = {"width": width, "height": height, "interpolation": "AREA"}
    kind = "rgba" if _has_alpha(frame) else "rgb24"
    array: Any = frame.to_ndarray(format=kind, **scaled)
    pixels: Pixels = array
    if kind == "rgba":
        alpha = pixels[..., 3:].astype(np.uint16)
        white = pixels[..., :3] * alpha + 255 * (255 - alpha)
        pixels = ((white + 127) // 255).astype(np.uint8)
    if frame.interlaced_frame and not scaled and len(pixels) > 2:
        pixels = _first_field(pixels)
    turned: Pixels = np.ascontiguousarray(np.rot90(pixels, shape.turns))
    return turned


def _first_field(pixels: Pixels) -> Pixels:
    """Each second line as the mean of those around it: two fields are of two times."""
    result: Pixels = pixels.copy()
    upper, lower = pixels[0:-2:2].astype(np.uint16), pixels[2::2]
    inside = result[1:-1:2]
    inside[:] = ((upper[: len(inside)] + lower[: len(inside)]) // 2).astype(np.uint8)
    if len(result) % 2 == 0:
        result[-1] = result[-2]
    return result


def _article(words: str) -> str:
    return f"{'an' if words[0] in 'AM' and words[:2] in ('AV', 'MP') else 'a'} {words}"
