"""Settings of Granite Speech: those of transformers where nothing is said, what is refused, and long
recordings in pieces.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.audio.pairs import PairMel, PairWindows
from mtmd.clip.families import granite_speech
from mtmd.kernels.checkpoint.settings import Settings

PROJECTOR = {"cross_attention_frequency": 1, "encoder_hidden_size": 1024, "num_hidden_layers": 2}


def read(
    projector: dict[str, Any] | None = None, top: dict[str, Any] | None = None, **encoder: Any
) -> granite_speech.GraniteSpeech:
    config = {
        "encoder_config": encoder,
        "projector_config": PROJECTOR | (projector or {}),
        **(top or {}),
    }
    return granite_speech.read(
        Settings(config, "config.json"), Settings({}, "preprocessor_config.json")
    )


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Blip2QFormerConfig, GraniteSpeechConfig

    whole, ours = GraniteSpeechConfig(), read()
    theirs, former = whole.encoder_config, Blip2QFormerConfig()
    assert (ours.width, ours.ffn, ours.heads, ours.head, ours.layers) == (
        theirs.hidden_dim,
        theirs.hidden_dim * theirs.feedforward_mult,
        theirs.num_heads,
        theirs.dim_head,
        theirs.num_layers,
    )
    assert (ours.context, ours.reach, ours.kernel, ours.classes) == (
        theirs.context_size,
        theirs.max_pos_emb,
        theirs.conv_kernel_size,
        theirs.output_dim,
    )
    assert ours.inner == theirs.hidden_dim * theirs.conv_expansion_factor
    assert 2 * ours.resolution.mel.bins == theirs.input_dim
    own = ours.former
    assert (own.width, own.ffn, own.heads, own.eps) == (
        former.hidden_size,
        former.intermediate_size,
        former.num_attention_heads,
        former.layer_norm_eps,
    )
    assert (own.window, own.queries) == (15, 3) and ours.resolution.frames == 15_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_heads": 7},
        {"context_size": 513},
        {"input_dim": 161},
        {"hidden_dim": 2048},
        {"projector": {"cross_attention_frequency": 2}},
        {"projector": {"num_attention_heads": 5}},
        {"top": {"downsample_rate": 4}},
    ],
)
def test_settings_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read(**wrong)


def test_long_recordings_are_encoded_in_pieces() -> None:
    way = PairWindows(PairMel(2), 30, 15, 3)
    plan = way.windows(np.zeros(75 * 160, np.float32))
    assert [len(tile[0]) for tile in plan.tiles] == [30, 8]
    assert plan.tokens == 9 == way.token_count(75 * 160) and way.max_tokens() == 6
    assert way.windows(np.zeros(1, np.float32)).tokens == 3
