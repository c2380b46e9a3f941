"""Settings of Audio Flamingo 3: those of transformers where nothing is said, what is refused, and
how much of long audio is heard.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families import audio_flamingo3
from mtmd.kernels.checkpoint.settings import Settings


def read(**audio: Any) -> audio_flamingo3.AudioFlamingo3:
    return audio_flamingo3.read(
        Settings({"audio_config": audio}, "config.json"), Settings({}, "preprocessor_config.json")
    )


def test_defaults_are_those_of_transformers() -> None:
    from transformers import AudioFlamingo3Config

    theirs, ours = AudioFlamingo3Config().audio_config, read().tower
    assert (ours.vit.width, ours.vit.ffn, ours.vit.heads, ours.vit.layers, ours.bins) == (
        theirs.hidden_size,
        theirs.intermediate_size,
        theirs.num_attention_heads,
        theirs.num_hidden_layers,
        theirs.num_mel_bins,
    )
    assert ours.positions == theirs.max_source_positions


@pytest.mark.parametrize("wrong", [{"hidden_size": 10**9}, {"d_model": 7}, {"num_mel_bins": 0}])
def test_settings_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read(**wrong)


def test_settings_of_times() -> None:
    def times(**more: Any) -> audio_flamingo3.AudioFlamingo3:
        config = {"model_type": "musicflamingo", "audio_config": {}, **more}
        return audio_flamingo3.read(Settings(config, "config.json"), Settings({}, "features"))

    ours = times()
    assert ours.times == audio_flamingo3.Times(128, 1200.0, 0.04)
    assert ours.resolution.limit == 40 and ours.resolution.tile_type().shape == (1, 3000, 129)
    assert audio_flamingo3.to_gguf(ours) is None
    for rope in ({"rope_theta": 100.0}, {"partial_rotary_factor": 0.9}):
        with pytest.raises(ModelError, match="expected an even number of numbers"):
            times(rope_parameters=rope)


def test_a_moment_behind_whole_windows_has_no_token() -> None:
    way = read().resolution
    window = 480_000
    counts = {window: 750, window + 1: 750, window + 320: 750, window + 321: 751, 1: 1}
    for samples, tokens in counts.items():
        plan = way.windows(np.zeros(samples, np.float32))
        assert plan.tokens == tokens == way.token_count(samples)
        assert len(plan.tiles) == 1 + (tokens > 750)


def test_ten_minutes_are_heard() -> None:
    way = read(max_source_positions=4, num_mel_bins=2).resolution
    window = 8 * 160
    plan = way.windows(np.zeros(21 * window, np.float32))
    assert len(plan.tiles) == 20 and plan.tokens == 40 == way.token_count(21 * window)
    assert plan.notes == ("only the first 2 s are heard, the maximum for this model",)
    assert not way.windows(np.zeros(20 * window, np.float32)).notes
