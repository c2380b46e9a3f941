"""Settings of Qwen2.5-Omni's audio: those of transformers where nothing is said, and what is
refused; its chunks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sounds import tones

from mtmd.base.errors import ModelError
from mtmd.clip.audio.mel import Mel, MelChunks
from mtmd.clip.families import qwen2_5_omni_audio
from mtmd.kernels.checkpoint.settings import Settings


def read(features: dict[str, Any] | None = None, **audio: Any) -> Any:
    config = Settings({"audio_config": audio}, "config.json")
    return qwen2_5_omni_audio.read(config, Settings(features or {}, "preprocessor_config.json"))


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Qwen2_5OmniThinkerConfig

    theirs, ours = Qwen2_5OmniThinkerConfig().audio_config, read()
    vit = ours.tower.vit
    assert (vit.width, vit.ffn, vit.heads, vit.layers, ours.tower.bins) == (
        theirs.d_model,
        theirs.encoder_ffn_dim,
        theirs.encoder_attention_heads,
        theirs.encoder_layers,
        theirs.num_mel_bins,
    )
    assert (ours.text_width, ours.resolution.frames) == (theirs.output_dim, 2 * theirs.n_window)


@pytest.mark.parametrize("wrong", [{"n_window": 25}, {"output_dim": -1}, {"n_window": 10**6}])
def test_settings_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(wrong))):
        read(**wrong)


def test_chunks_that_no_gguf_says_are_not_written() -> None:
    assert qwen2_5_omni_audio.to_gguf(read(n_window=50)) is None
    assert qwen2_5_omni_audio.to_gguf(read()) is not None


@pytest.mark.parametrize("seconds", [0.0001, 0.02, 0.5, 1.999, 2.0, 2.013, 4.1, 6.0, 7.3])
def test_chunks_are_the_frames_of_transformers(seconds: float) -> None:
    from transformers import WhisperFeatureExtractor

    samples, chunks = tones(seconds), MelChunks(Mel(80), 200, 600)
    made = WhisperFeatureExtractor(feature_size=80, chunk_length=6)(
        samples, sampling_rate=16_000, return_attention_mask=True, return_tensors="np"
    )
    plan, frames = chunks.windows(samples), max(int(made["attention_mask"].sum()), 3)
    ours = np.concatenate([tile[0] for tile in plan.tiles])
    assert frames - 2 <= len(ours) <= frames and len(ours) >= 3
    expected = made["input_features"][0].T[: len(ours)]
    assert np.square(ours - expected).sum() / np.square(expected).sum() <= 1e-10
    assert plan.tokens == chunks.token_count(len(samples)) == ((frames - 1) // 2 - 1) // 2 + 1
    assert bool(plan.notes) == (seconds > 6)
