"""Kaldi's spectrum: that of transformers' feature extractor bit for bit, in pieces too, and
settings that are refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sounds import tones
from transformers import Phi4MultimodalFeatureExtractor

from mtmd.base.errors import ModelError
from mtmd.clip.audio.kaldi import KaldiPieces, read_kaldi
from mtmd.kernels.checkpoint.settings import Settings


def read(bins: int = 80, frames: int = 4000, mark: float = 0.0, **settings: Any) -> KaldiPieces:
    mel = read_kaldi(Settings(settings, "preprocessor_config.json"), bins)
    return KaldiPieces(mel, frames, 8, mark)


@pytest.mark.parametrize(
    "settings",
    [{}, {"feature_size": 20, "win_length": 320, "hop_length": 100, "mel_max_frequency": 4000.0}],
)
@pytest.mark.parametrize("frames", [4000, 48])
def test_it_is_that_of_transformers(settings: dict[str, Any], frames: int) -> None:
    theirs = Phi4MultimodalFeatureExtractor(**settings)
    ours = read(theirs.feature_size, frames, **settings)
    window = theirs.win_length
    for count in (window, window + 1, window + theirs.hop_length, 1603, 12345, 70_000):
        samples = tones(count / 16_000)[:count]
        made = theirs([samples], sampling_rate=16_000, return_tensors="np")
        plan = ours.windows(samples)
        spectrum = np.concatenate([tile[0, :, :-1] for tile in plan.tiles])
        assert np.array_equal(spectrum, made["audio_input_features"][0]), count
        assert plan.tokens == ours.token_count(count) == made["audio_embed_sizes"][0]
        assert all(tile.shape[1] == frames for tile in plan.tiles[:-1])


def test_what_is_shorter_than_a_frame_is_filled_up() -> None:
    (tile,) = read().windows(np.full(1, 0.5, np.float32)).tiles
    assert tile.shape == (1, 1, 81)
    filled = np.zeros(400, np.float32)
    filled[0] = 0.5
    assert np.array_equal(tile, read().windows(filled).tiles[0])


def test_a_mark_stands_behind_the_bins() -> None:
    tiles = [read(mark=mark).windows(tones(0.1)).tiles[0] for mark in (0.0, 1.0)]
    assert [set(tile[0, :, -1].tolist()) for tile in tiles] == [{0.0}, {1.0}]
    assert np.array_equal(tiles[0][..., :-1], tiles[1][..., :-1])


REFUSED = {
    "bins of another encoder": ({"feature_size": 40}, "feature_size is 40, expected one of 80"),
    "a window that does not fit": ({"win_length": 600}, "600 samples in a transform of 512"),
    "gaps": ({"hop_length": 500}, "expected steps no longer than a window"),
    "another rate": ({"sampling_rate": 8000}, "sampling_rate is 8000, expected one of 16000"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    settings, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        read(**settings)
