"""Limits of one audio file, for files and for samples that a caller gives."""

from __future__ import annotations

from dataclasses import dataclass

from mtmd.base.errors import AudioError

MIN_RATE, MAX_RATE = 1_000, 768_000  # samples a second
MAX_CHANNELS = 64


@dataclass(frozen=True)
class AudioLimits:
    """`max_bytes`: of the file. `max_seconds`: of its length. `cpu_s`: processor time to decode it
    once, where that is done in a process of its own.
    """

    max_bytes: int = 2 << 30
    max_seconds: float = 4 * 3600.0
    cpu_s: float = 120.0


DEFAULT_LIMITS = AudioLimits()


def check_bytes(count: int, limits: AudioLimits, name: str) -> None:
    """Raises AudioError for a file of `count` bytes that is empty or over the limit."""
    if count == 0:
        raise AudioError(f"{name}: found 0 bytes, expected audio; fetch or copy the file again")
    if count > limits.max_bytes:
        raise AudioError(
            f"{name}: found {count:,} bytes, expected at most {limits.max_bytes:,}; cut the audio "
            "or encode it smaller"
        )


def check_rate(rate: int, name: str) -> None:
    """Raises AudioError for a number of samples a second that no audio has."""
    if not MIN_RATE <= rate <= MAX_RATE:
        raise AudioError(
            f"{name}: found {rate:,} samples a second, expected {MIN_RATE:,} to {MAX_RATE:,}"
        )


def check_channels(channels: int, name: str) -> None:
    """Raises AudioError for a number of channels that no audio has."""
    if not 1 <= channels <= MAX_CHANNELS:
        raise AudioError(f"{name}: found {channels:,} channels, expected 1 to {MAX_CHANNELS}")


def check_seconds(seconds: float, limits: AudioLimits, name: str) -> None:
    """Raises AudioError for audio that is too long."""
    if not 0 <= seconds <= limits.max_seconds:
        raise AudioError(
            f"{name}: found {seconds:,.0f} seconds, expected at most {limits.max_seconds:,.0f}; "
            "cut the audio"
        )
