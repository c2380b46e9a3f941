"""Little videos, made by PyAV and Pillow: every frame says which it is."""

from __future__ import annotations

import io
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CELL = 8  # pixels of a square that shows one bit


def numbered(number: int, width: int = 96, height: int = 64) -> np.ndarray:
    """A frame whose number stands in its upper row of squares, as bits."""
    frame = np.full((height, width, 3), 40, np.uint8)
    for bit in range(12):
        if number >> bit & 1 and (bit + 1) * CELL <= width:
            frame[:CELL, bit * CELL : (bit + 1) * CELL] = 230
    frame[height // 2 :, : 1 + number % width] = (200, 30, 60)
    return frame


def number_of(frame: np.ndarray) -> int:
    """What `numbered` wrote, whatever encoding did to it."""
    cells = [frame[2:6, bit * CELL + 2 : bit * CELL + 6].mean() for bit in range(12)]
    return sum(1 << bit for bit, value in enumerate(cells) if value > 128)


def video(
    frames: int = 48,
    *,
    fps: int = 12,
    format: str = "mp4",
    codec: str = "libx264",
    size: tuple[int, int] = (96, 64),
    pix_fmt: str = "yuv420p",
    times: list[float] | None = None,
    gop: int = 12,
    rotation: int = 0,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    index_first: bool = False,
    **fields: Any,
) -> bytes:
    """The file, as bytes. `times`: seconds of each frame, where they do not follow from `fps`;
    `index_first`: of an MP4, its index stands before the frames.
    """
    if index_first:  # the file is read again for it
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "video.mp4"
            _write(
                path,
                frames,
                fps,
                "mp4",
                codec,
                size,
                pix_fmt,
                times,
                gop,
                rotation,
                options,
                {"movflags": "faststart"},
                fields,
            )
            return path.read_bytes()
    file = io.BytesIO()
    _write(
        file,
        frames,
        fps,
        format,
        codec,
        size,
        pix_fmt,
        times,
        gop,
        rotation,
        options,
        container_options,
        fields,
    )
    return file.getvalue()


def _write(
    file: Any,
    frames: int,
    fps: int,
    format: str,
    codec: str,
    size: tuple[int, int],
    pix_fmt: str,
    times: list[float] | None,
    gop: int,
    rotation: int,
    options: Any,
    container_options: Any,
    fields: dict[str, Any],
) -> None:
    import av

    with av.open(file, "w", format=format, container_options=container_options or {}) as out:
        stream = out.add_stream(codec, rate=fps, options=options or {})
        stream.width, stream.height, stream.pix_fmt = *size, pix_fmt
        stream.codec_context.gop_size = gop
        if rotation:
            stream.set_display_rotation(rotation)
        for name, value in fields.items():
            setattr(stream.codec_context, name, value)
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(numbered(number, *size), format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = round(times[number] * 1000), Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())


def animation(format: str = "GIF", frames: int = 12, seconds: float = 0.25) -> bytes:
    """An animated GIF, WEBP or PNG."""
    pictures = [Image.fromarray(numbered(n)) for n in range(frames)]
    file = io.BytesIO()
    lossless = {"lossless": True} if format == "WEBP" else {}
    pictures[0].save(
        file,
        format,
        save_all=True,
        append_images=pictures[1:],
        duration=round(seconds * 1000),
        loop=0,
        **lossless,
    )
    return file.getvalue()


def with_sound(
    samples: np.ndarray, rate: int, *, frames: int, fps: int, size: tuple[int, int]
) -> bytes:
    """An MP4 of numbered frames, and samples [N] as its sound."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        pictures, sound = out.add_stream("libx264", rate=fps), out.add_stream("aac", rate=rate)
        pictures.width, pictures.height, pictures.pix_fmt = *size, "yuv420p"
        sound.layout = "mono"
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(numbered(number, *size), format="rgb24")
            out.mux(pictures.encode(frame))
        out.mux(pictures.encode(None))
        whole = av.AudioFrame.from_ndarray(samples[None].astype(np.float32), "flt", "mono")
        whole.sample_rate = rate
        made = sound.codec_context
        resampler = av.AudioResampler(made.format, "mono", rate, frame_size=made.frame_size)
        for part in (*resampler.resample(whole), *resampler.resample(None)):
            out.mux(sound.encode(part))
        out.mux(sound.encode(None))
    return file.getvalue()
