"""Audio as a family gets it: mono samples at its rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mtmd.base.errors import AudioError

Samples: TypeAlias = NDArray[np.float32]
"""[N], mono, full scale from -1 to 1."""
LOUDEST = 2.0**31  # as of samples of 32 bits that are not divided by their full scale


@dataclass(frozen=True)
class AudioFacts:
    """Facts about a file, or about samples that a caller gave.

    Args:
        seconds: length of what was decoded.
        rate: samples a second, in the file.
        channels: how many there are; their mean is taken.
        codec: short name, "mp3"; "arrays" where the caller gave samples.
        notes: what a user should know: "ends early: ...".
    """

    seconds: float
    rate: int
    channels: int
    codec: str = "arrays"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Audio:
    """`samples` at `rate` samples a second, with what the file they are from says."""

    samples: Samples
    rate: int
    facts: AudioFacts


def is_numeric(samples: NDArray[Any]) -> bool:
    """Return whether numbers of this type are samples: real ones, and whole ones with a middle."""
    kind = samples.dtype
    return kind.kind == "f" or kind == np.uint8 or (kind.kind == "i" and kind.itemsize <= 4)


def averaged(planes: NDArray[Any]) -> Samples:
    """The mean of channels [C, N], of real numbers, or of whole ones divided by their full scale,
    as [N].
    """
    with np.errstate(over="ignore", invalid="ignore"):  # of what no sound has, which is refused
        if planes.dtype == np.uint8:
            scaled = (planes.astype(np.float32) - 128) / 128
        elif planes.dtype.kind == "i":
            scaled = planes.astype(np.float32) / np.float32(-float(np.iinfo(planes.dtype).min))
        else:
            scaled = planes.astype(np.float32)
        result: Samples = scaled[0] if len(scaled) == 1 else scaled.mean(axis=0, dtype=np.float32)
    return result


def finite(samples: Samples, name: str) -> Samples:
    """The samples. Raises AudioError for what is no number, or no loudness that a sound has."""
    if not (np.abs(samples) <= LOUDEST).all():
        raise AudioError(
            f"{name}: found samples that are no numbers, or above 2^31, expected -1 to 1"
        )
    return samples
