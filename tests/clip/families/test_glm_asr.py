"""Settings of GLM-ASR: those of transformers where nothing is said, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families import glm_asr
from mtmd.kernels.checkpoint.settings import Settings


def read(**audio: Any) -> glm_asr.GlmAsr:
    return glm_asr.read(
        Settings({"audio_config": audio}, "config.json"), Settings({}, "preprocessor_config.json")
    )


def test_defaults_are_those_of_transformers() -> None:
    from transformers import GlmAsrConfig

    whole = GlmAsrConfig()
    theirs, family = whole.audio_config, read()
    ours = family.tower
    assert (ours.vit.width, ours.vit.ffn, ours.vit.heads, ours.vit.layers, ours.bins) == (
        theirs.hidden_size,
        theirs.intermediate_size,
        theirs.num_attention_heads,
        theirs.num_hidden_layers,
        theirs.num_mel_bins,
    )
    assert ours.rotary is not None and len(ours.rotary.frequencies) == 16
    assert (family.resolution.frames, family.resolution.limit) == (3000, 21)
    assert family.text_width == whole.text_config.hidden_size


@pytest.mark.parametrize(
    "wrong",
    [
        {"intermediate_size": 5000},
        {"num_key_value_heads": 5},
        {"partial_rotary_factor": 0.01},
        {"rope_parameters": {"rope_type": "yarn"}},
        {"hidden_act": "relu"},
    ],
)
def test_settings_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read(**wrong)


def test_the_shortest_recording_has_a_token() -> None:
    plan = read().resolution.windows(np.zeros(1, np.float32))
    assert plan.tokens == 1 and plan.order is not None and plan.order.tolist() == [0]
