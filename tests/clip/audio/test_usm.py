"""The Universal Speech Model's spectrum: that of transformers' feature extractor bit for bit, and
settings that are refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sounds import tones
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

from mtmd.base.errors import ModelError
from mtmd.clip.audio.usm import UsmFrames, read_emphasizing_usm, read_usm
from mtmd.kernels.checkpoint.settings import Settings


def read(bins: int = 128, **settings: Any) -> UsmFrames:
    return read_usm(Settings(settings, "processor_config.json"), bins, 4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"feature_size": 40, "frame_length_ms": 32.0, "hop_length_ms": 16.0, "fft_overdrive": True},
        {"feature_size": 20, "sampling_rate": 8000, "max_frequency": 4000.0, "mel_floor": 1e-5},
    ],
)
def test_it_is_that_of_transformers(settings: dict[str, Any]) -> None:
    theirs = Gemma4AudioFeatureExtractor(**settings)
    ours = read(theirs.feature_size, **settings)
    shortest = ours.mel.shortest
    for count in (shortest, shortest + 1, 640, 641, 1603, 12345, 480_000, 480_001):
        samples = tones(count / 16_000, 16_000)[:count]
        made = theirs([samples], return_tensors="np")
        mask = made["input_features_mask"][0]
        plan = ours.windows(samples)
        assert np.array_equal(plan.tiles[0][0], made["input_features"][0][mask]), count
        assert plan.tokens == ours.token_count(count) == mask[::2][::2].sum()
        assert bool(plan.notes) == (count > 480_000)
    (note,) = plan.notes
    assert f"first {480_000 / ours.mel.rate:.0f} s" in note
    assert plan.tokens == ours.max_tokens() and plan.tiles[0].shape == ours.tile_type().shape


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"feature_size": 40, "frame_length_ms": 20.0, "fft_overdrive": False, "min_frequency": 0.0},
        {"feature_size": 20, "max_frequency": 4000.0, "mel_floor": 1e-3, "preemphasis": 0.5},
    ],
)
def test_frames_with_emphasis_are_those_of_transformers(settings: dict[str, Any]) -> None:
    from transformers.models.gemma3n.feature_extraction_gemma3n import Gemma3nAudioFeatureExtractor

    theirs = Gemma3nAudioFeatureExtractor(**settings)
    where = Settings(settings, "processor_config.json")
    ours = read_emphasizing_usm(where, theirs.feature_size, 16, 188)
    for count in (513, 640, 641, 1603, 12345, 480_000, 480_001):
        samples = tones(count / 16_000, 16_000)[:count]
        made = theirs([samples], return_tensors="np")
        mask, expected = made["input_features_mask"][0], made["input_features"][0]
        plan = ours.windows(samples)
        assert mask.all() and plan.tiles[0][0].shape == expected.shape
        error = np.square(plan.tiles[0][0] - expected).sum() / np.square(expected).sum()
        assert error <= 1e-10, count
        assert plan.tokens == ours.token_count(count) == 188
        heard = -(-len(expected) // 16)
        assert heard == 188 if plan.order is None else (plan.order >= 0).sum() == heard
        assert bool(plan.notes) == (count > 480_000)
    shortest = ours.windows(np.ones(1, np.float32))
    assert shortest.order is not None and (shortest.order >= 0).sum() == 1
    assert plan.tiles[0].shape == ours.tile_type().shape


@pytest.mark.parametrize("lowest", [7600.0, 7900.0])
def test_frequencies_that_leave_nothing_are_refused(lowest: float) -> None:
    settings = Settings({"min_frequency": lowest, "max_frequency": 7600.0}, "here")
    with pytest.raises(ModelError, match="expected less than the 7600 of max_frequency"):
        read_emphasizing_usm(settings, 128, 16, 188)


@pytest.mark.parametrize("count", [1, 160])
def test_what_has_no_whole_frame_is_filled_up(count: int) -> None:
    """transformers leaves such a recording without a token."""
    made = Gemma4AudioFeatureExtractor()([np.ones(count, np.float32)], return_tensors="np")
    assert not made["input_features_mask"].any()
    plan = read().windows(np.ones(count, np.float32))
    assert plan.tokens == read().token_count(count) == 1 and plan.tiles[0].shape == (1, 1, 128)


@pytest.mark.parametrize(
    "wrong",
    [
        {"feature_size": 80},
        {"dither": 0.1},
        {"preemphasis": 0.97},
        {"input_scale_factor": 2.0},
        {"per_bin_mean": [0.0] * 128},
        {"sampling_rate": 0},
        {"frame_length_ms": 1e308},
        {"hop_length_ms": 1e-3},
        {"hop_length_ms": 30.0},
        {"frame_length": 400},
        {"fft_length": 1024},
        {"mel_floor": 0.0},
    ],
)
def test_settings_that_are_refused(wrong: dict[str, Any]) -> None:
    key = next(iter(wrong))
    with pytest.raises(ModelError, match="frames of" if key.endswith("_ms") else key):
        read(**wrong)
