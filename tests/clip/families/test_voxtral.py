"""Settings of Voxtral: those of transformers where nothing is said, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families import voxtral
from mtmd.kernels.checkpoint.settings import Settings


def read(**audio: Any) -> voxtral.Voxtral:
    return voxtral.read(
        Settings({"audio_config": audio}, "config.json"), Settings({}, "preprocessor_config.json")
    )


def test_defaults_are_those_of_transformers() -> None:
    from transformers import VoxtralConfig

    theirs, ours = VoxtralConfig().audio_config, read().tower
    assert (ours.vit.width, ours.vit.ffn, ours.vit.heads, ours.vit.layers, ours.bins) == (
        theirs.hidden_size,
        theirs.intermediate_size,
        theirs.num_attention_heads,
        theirs.num_hidden_layers,
        theirs.num_mel_bins,
    )
    assert ours.positions == theirs.max_source_positions


@pytest.mark.parametrize("wrong", [{"intermediate_size": 5000}, {"num_attention_heads": 7}])
def test_settings_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read(**wrong)
