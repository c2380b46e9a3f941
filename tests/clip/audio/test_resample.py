"""Resampling: sines come out as they would have been recorded at the other rate, what the other rate
cannot hold is gone, and blocks of any size give the same samples.
"""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from sounds import tones, wav

from mtmd.clip.audio import resample
from mtmd.clip.audio.recording import AudioFile
from mtmd.clip.audio.resample import resampled, resampled_count

RATES = [(44_100, 16_000), (48_000, 16_000), (8_000, 16_000), (11_025, 24_000), (44_101, 16_000)]


made = resample._filter


def at(rate: int, seconds: float, *frequencies: float) -> np.ndarray:
    times = np.arange(round(seconds * rate)) / rate
    return sum(np.sin(2 * np.pi * f * times + f) for f in frequencies).astype(np.float32)


def whole(samples: np.ndarray, rate: int, target: int) -> np.ndarray:
    return np.concatenate(list(resampled([samples], rate, target)))


@pytest.mark.parametrize(("rate", "target"), RATES)
def test_sines_are_those_of_the_other_rate(rate: int, target: int) -> None:
    frequencies = 200.0, 1234.5, 3000.0
    result = whole(at(rate, 0.5, *frequencies), rate, target)
    expected = at(target, 0.5, *frequencies)[: len(result)]
    inside = slice(len(expected) // 4, -len(expected) // 4)
    assert len(result) == -(-round(rate * 0.5) * target // rate)
    assert np.abs(result[: len(expected)] - expected)[inside].max() < 3e-3


@pytest.mark.parametrize("rate", [8_000, 32_000, 48_000, 96_000, 192_000, 768_000])
@pytest.mark.parametrize("count", [1, 5_000, 200_003])
def test_many_new_samples_are_computed_at_a_time(
    rate: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of a filter with the fewest columns, in fp64; with one column, numpy takes ten
    times as long, of which a worker may not have enough for a long recording.
    """
    old, new = Fraction(rate, 16_000).as_integer_ratio()
    filters = []
    monkeypatch.setattr(resample, "_filter", lambda *of: filters.append(of) or made(*of))
    samples = np.random.default_rng(1).normal(0, 1, count).astype(np.float32)
    result = whole(samples, rate, 16_000)
    [(used, columns)] = filters
    assert columns >= 16 and Fraction(used, columns) == Fraction(old, new)
    assert len(result) == resampled_count(count, rate, 16_000) == -(-count * new // old)
    taps, width = made(old, new)
    groups = -(-len(result) // new)
    padded = np.zeros(max(width + count, (groups - 1) * old + len(taps)))
    padded[width : width + count] = samples
    windows = np.lib.stride_tricks.sliding_window_view(padded, len(taps))[::old][:groups]
    expected = (windows @ taps.astype(np.float64)).flatten()[: len(result)]
    np.testing.assert_allclose(result, expected, atol=5e-6)


def test_what_the_lower_rate_cannot_hold_is_gone() -> None:
    for frequency in (8_500, 12_000, 20_000):
        result = whole(at(44_100, 0.5, frequency), 44_100, 16_000)[1000:-1000]
        assert 20 * np.log10(np.sqrt(np.mean(result**2))) < -100


@pytest.mark.parametrize(("rate", "target"), RATES[:3])
def test_blocks_of_any_size_give_the_same(rate: int, target: int) -> None:
    samples = np.random.default_rng(0).normal(0, 1, rate // 3).astype(np.float32)
    cuts = [0, 1, 700, 701, 5000, len(samples)]
    blocks = [samples[a:b] for a, b in pairwise(cuts)]
    result = np.concatenate(list(resampled(blocks, rate, target)))
    np.testing.assert_allclose(result, whole(samples, rate, target), atol=5e-6)


@pytest.mark.parametrize("count", [1, 2, 440, 442])
def test_the_shortest(count: int) -> None:
    result = whole(np.ones(count, np.float32), 44_100, 16_000)
    assert len(result) == -(-count * 16_000 // 44_100) and np.isfinite(result).all()


def test_the_same_rate_is_left_alone() -> None:
    samples = np.arange(7, dtype=np.float32)
    assert whole(samples, 16_000, 16_000) is not None
    np.testing.assert_array_equal(whole(samples, 16_000, 16_000), samples)


@pytest.mark.parametrize("rate", [44_100, 48_000, 8_000, 44_101, 16_001])
def test_a_worker_gives_the_same(rate: int) -> None:
    """By numpy: it has no torch."""
    data = wav(tones(1.2, rate), rate)
    here, there = (AudioFile(data, isolate=isolate).audio(16_000) for isolate in (False, True))
    assert here.facts == there.facts and here.samples.shape == there.samples.shape
    np.testing.assert_allclose(there.samples, here.samples, atol=2e-6)


def test_a_process_without_torch_reads_audio_without_it(tmp_path: Path) -> None:
    """As the web process, which would stand still for the seconds of its import."""
    (tmp_path / "a.wav").write_bytes(wav(tones(0.3, 44_100), 44_100))
    program = (
        "import sys; from mtmd.clip.audio.recording import AudioFile; "
        "made = AudioFile(sys.argv[1], isolate=True).audio(16_000); "
        "assert len(made.samples) == 4800 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "a.wav"], check=True)
