"""Settings of Qwen3-ASR: those of transformers where nothing is said, and what is refused; its
windows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sounds import tones

from mtmd.base.errors import ModelError
from mtmd.clip.audio.mel import Mel
from mtmd.clip.audio.seconds import MelSeconds
from mtmd.clip.families import qwen3_asr
from mtmd.kernels.checkpoint.settings import Settings


def read(**audio: Any) -> qwen3_asr.Qwen3Asr:
    return qwen3_asr.read(
        Settings({"audio_config": audio}, "config.json"), Settings({}, "preprocessor_config.json")
    )


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Qwen3ASRConfig

    theirs, ours = Qwen3ASRConfig().audio_config, read()
    vit = ours.tower.vit
    assert (vit.width, vit.ffn, vit.heads, vit.layers, ours.tower.bins) == (
        theirs.d_model,
        theirs.encoder_ffn_dim,
        theirs.encoder_attention_heads,
        theirs.encoder_layers,
        theirs.num_mel_bins,
    )
    assert (ours.channels, ours.text_width, ours.resolution.frames) == (
        theirs.downsample_hidden_size,
        theirs.output_dim,
        theirs.n_window_infer,
    )


@pytest.mark.parametrize(
    "wrong", [{"n_window": 40}, {"n_window_infer": 850}, {"d_model": 1001}, {"output_dim": -1}]
)
def test_settings_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(wrong)) if "d_model" not in wrong else "heads"):
        read(**wrong)


def test_a_forced_aligner_is_refused() -> None:
    kind = Settings({"model_type": "qwen3_forced_aligner"}, "config.json")
    with pytest.raises(ModelError, match="forced aligner"):
        qwen3_asr.read(kind, Settings({}, "preprocessor_config.json"))


def test_a_window_that_no_gguf_says_is_not_written() -> None:
    assert qwen3_asr.to_gguf(read(n_window_infer=100)) is None
    assert qwen3_asr.to_gguf(read()) is not None


@pytest.mark.parametrize("seconds", [0.0001, 0.5, 0.987, 1.0, 7.9951, 8.0, 16.3])
def test_windows_hold_all_of_it_and_no_more(seconds: float) -> None:
    from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
    from transformers.models.qwen3_asr.modeling_qwen3_asr import _get_feat_extract_output_lengths

    samples, windows = tones(seconds), MelSeconds(Mel(80), 800, 8000)
    theirs = Qwen3ASRFeatureExtractor(feature_size=80)(
        samples, sampling_rate=16_000, padding=True, return_attention_mask=True, return_tensors="np"
    )
    plan = windows.windows(samples)
    frames = int(theirs["attention_mask"].sum())
    assert plan.tokens == windows.token_count(len(samples))
    assert plan.tokens == int(_get_feat_extract_output_lengths(frames))
    ours = np.concatenate([tile[0] for tile in plan.tiles])
    assert frames <= len(ours) <= theirs["input_features"].shape[2]
    expected = theirs["input_features"][0].T[: len(ours)]
    assert np.square(ours - expected).sum() / np.square(expected).sum() <= 1e-10
    assert all(len(tile[0]) == 800 for tile in plan.tiles[:-1])
