"""The log-mel spectrum against transformers' feature extractor, and windows of it."""

from __future__ import annotations

import numpy as np
import pytest
from sounds import tones

from mtmd.base.errors import ModelError
from mtmd.clip.audio.mel import Mel, MelWindows, mel_filters, read_mel
from mtmd.kernels.checkpoint.settings import Settings


@pytest.mark.parametrize("bins", [80, 128])
def test_filters_are_those_of_transformers(bins: int) -> None:
    from transformers.audio_utils import mel_filter_bank

    expected = mel_filter_bank(201, bins, 0.0, 8000.0, 16_000, norm="slaney", mel_scale="slaney")
    np.testing.assert_allclose(mel_filters(bins, 400, 16_000).numpy(), expected, atol=1e-7)


@pytest.mark.parametrize("seconds", [0.0001, 0.357, 1.0, 30.0, 30.01])
def test_spectra_are_those_of_transformers(seconds: float) -> None:
    from transformers import WhisperFeatureExtractor

    samples = tones(seconds)
    theirs = WhisperFeatureExtractor(feature_size=80)(
        samples, sampling_rate=16_000, return_tensors="np", return_attention_mask=True
    )
    padded = np.zeros(480_000, np.float32)
    padded[: len(samples)] = samples[: len(padded)]
    ours, expected = Mel(80)(padded), theirs["input_features"][0].T
    assert np.square(ours - expected).sum() / np.square(expected).sum() <= 1e-10
    plan = MelWindows(Mel(80), 3000, 4, whole=False, limit=1).windows(samples)
    frames = int(theirs["attention_mask"].sum())
    assert plan.tokens == max(1, ((frames - 1) // 2 + 1) // 2)
    assert plan.tiles[0].shape == (1, min(3000, 2 * max(2, (frames - 1) // 2 + 1) + 1), 80)
    np.testing.assert_array_equal(plan.tiles[0][0], ours[: plan.tiles[0].shape[1]])
    assert bool(plan.notes) == (seconds > 30)


def test_whole_windows_hold_all_of_it() -> None:
    plan = MelWindows(Mel(80), 3000, 8, whole=True).windows(tones(31))
    assert [tile.shape for tile in plan.tiles] == [(1, 3000, 80)] * 2 and plan.tokens == 750


@pytest.mark.parametrize("wrong", [{"feature_size": 64}, {"dither": 0.5}, {"n_fft": -1}])
def test_settings_that_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ModelError, match=next(iter(wrong))):
        read_mel(Settings({"feature_size": 80, **wrong}, "preprocessor_config.json"), 80)
