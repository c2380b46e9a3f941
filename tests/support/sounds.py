"""Little audio files, made by the standard library and PyAV, and samples to put into them."""

from __future__ import annotations

import io
import wave

import numpy as np


def tones(seconds: float, rate: int = 16_000, seed: int = 0) -> np.ndarray:
    """Some sines with noise, fp32 [N]."""
    rng = np.random.default_rng(seed)
    at = np.arange(round(seconds * rate)) / rate
    sines = sum(np.sin(2 * np.pi * f * at + p) for f, p in rng.uniform(80, 2000, (4, 2)))
    return (0.15 * sines + rng.normal(0, 0.02, len(at))).astype(np.float32)


def wav(samples: np.ndarray, rate: int = 16_000) -> bytes:
    """Samples [N] or [C, N] as 16 bits."""
    planes = np.atleast_2d(samples)
    whole = np.clip(np.rint(planes.T * 32767), -32768, 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(len(planes))
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(whole.tobytes())
    return file.getvalue()


def encoded(samples: np.ndarray, rate: int, format: str, codec: str) -> bytes:
    """Samples [N] in another format, by PyAV."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=format) as out:
        stream = out.add_stream(codec, rate=rate)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(samples[None].astype(np.float32), "flt", "mono")
        frame.sample_rate = rate
        made = stream.codec_context
        resampler = av.AudioResampler(made.format, "mono", rate, frame_size=made.frame_size)
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return file.getvalue()
