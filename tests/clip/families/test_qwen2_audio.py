"""Settings of Qwen2-Audio: those of transformers where nothing is said, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families import qwen2_audio
from mtmd.kernels.checkpoint.settings import Settings


def read(**audio: Any) -> qwen2_audio.Qwen2Audio:
    return qwen2_audio.read(
        Settings({"audio_config": audio}, "config.json"), Settings({}, "preprocessor_config.json")
    )


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Qwen2AudioConfig

    theirs, ours = Qwen2AudioConfig().audio_config, read().tower
    assert (ours.vit.width, ours.vit.ffn, ours.vit.heads, ours.vit.layers, ours.bins) == (
        theirs.d_model,
        theirs.encoder_ffn_dim,
        theirs.encoder_attention_heads,
        theirs.encoder_layers,
        theirs.num_mel_bins,
    )
    assert ours.positions == theirs.max_source_positions


@pytest.mark.parametrize(
    "wrong",
    [{"d_model": 10**9}, {"encoder_layers": 0}, {"activation_function": "relu"}, {"d_model": 1281}],
)
def test_settings_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read(**wrong)
