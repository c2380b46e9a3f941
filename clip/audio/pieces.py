"""Long audio in pieces that a model was trained on, cut where it is quietest."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mtmd.clip.audio.audio import Samples

FRAME_S = 0.02  # whose loudness is looked at
LOOKED = 3  # a piece ends in its last third, or at its end


def pieces(samples: Samples, rate: int, seconds: float) -> Iterator[tuple[int, int]]:
    """Yield where pieces of at most `seconds` begin and end, in samples: each ends in the middle of
    the quietest stretch of its last third, the last where the audio does.
    """
    longest, start = max(1, int(seconds * rate)), 0
    while len(samples) - start > longest:
        frame = max(1, int(FRAME_S * rate))
        first = start + longest - longest // LOOKED
        frames = (start + longest - first) // frame
        stop = start + longest
        if frames:
            looked = samples[first : first + frames * frame].reshape(frames, frame)
            energy = np.einsum("fs,fs->f", looked, looked)
            smooth = np.convolve(energy, np.ones(5), "same")  # a tenth of a second
            stop = first + int(smooth.argmin()) * frame + frame // 2
        yield start, stop
        start = stop
    if start < len(samples):
        yield start, len(samples)
