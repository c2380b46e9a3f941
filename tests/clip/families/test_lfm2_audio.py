"""Settings of LFM2-Audio: the authors' where nothing is said, what is refused, its prompt for
transcripts, long recordings in pieces, and the GGUF that llama.cpp's converter would write.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mtmd.base.errors import ModelError
from mtmd.clip.audio.audio import Audio, AudioFacts
from mtmd.clip.audio.nemo import NemoMel, NemoPieces
from mtmd.clip.audio_family import with_model_type
from mtmd.clip.families import lfm2_audio
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.transcription import TranscriptionRequest, audio_pieces

NAMED = {"architectures": ["Lfm2AudioForConditionalGeneration"], "lfm": {"hidden_size": 2048}}


def read(preprocessor: dict[str, Any] | None = None, **encoder: Any) -> lfm2_audio.Lfm2Audio:
    config = {**NAMED, "encoder": encoder, "preprocessor": preprocessor or {}}
    usual = with_model_type(Settings(config, "config.json"))
    assert usual.get("model_type", None) == "lfm2_audio"
    return lfm2_audio.read(usual, Settings({}, "preprocessor_config.json"))


def test_defaults_are_those_of_the_authors() -> None:
    ours = read()
    assert (ours.layers, ours.width, ours.ffn, ours.heads, ours.channels, ours.kernel) == (
        *(17, 512, 2048, 8),
        *(256, 9),
    )
    assert ours.resolution.mel == NemoMel(128) and not ours.scaled
    described = lfm2_audio.to_gguf(ours)
    assert described is not None and described.projector == "lfm2a"
    # as llama.cpp's converter writes it
    assert described.keys["audio.feed_forward_length"] == 512


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_heads": 7},
        {"feat_in": 126},
        {"subsampling": "striding"},
        {"self_attention_model": "abs_pos"},
        {"att_context_size": [70, 1]},
        {"conv_norm_type": "layer_norm"},
        {"reduction": "pooling"},
        {"preprocessor": {"features": 80}},
        {"preprocessor": {"window_size": 0.05}},
        {"preprocessor": {"window_stride": 0.03}},
        {"preprocessor": {"normalize": "all_features"}},
    ],
)
def test_settings_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read(**wrong)


def test_what_llama_cpp_has_as_a_constant_is_not_converted() -> None:
    assert lfm2_audio.to_gguf(read(xscaling=True)) is None
    assert lfm2_audio.to_gguf(read(conv_kernel_size=5)) is None


def test_transcripts_are_asked_for_by_the_system_message() -> None:
    silence = Audio(np.zeros(16_000, np.float32), 16_000, AudioFacts(1.0, 16_000, 1))
    (piece,) = audio_pieces(silence, lfm2_audio.INSTRUCTIONS, TranscriptionRequest())
    system, user = piece.messages
    assert system == {"role": "system", "content": "Perform ASR."}
    assert [part["type"] for part in user["content"]] == ["audio"]  # type: ignore[index]
    (piece,) = audio_pieces(
        silence, lfm2_audio.INSTRUCTIONS, TranscriptionRequest("fr", translate=True)
    )
    assert [message["role"] for message in piece.messages] == ["user"]


def test_long_recordings_are_encoded_in_pieces() -> None:
    way = NemoPieces(NemoMel(4), 32, 8)
    plan = way.windows(np.zeros(75 * 160, np.float32))
    assert [len(tile[0]) for tile in plan.tiles] == [32, 32, 12]
    assert plan.tokens == 10 == way.token_count(75 * 160) and way.max_tokens() == 4


@pytest.mark.parametrize("samples", [1, 159, 160, 319])
def test_a_single_frame_has_no_deviation(samples: int) -> None:
    made = NemoMel(4)(np.full(samples, 0.3, np.float32))
    assert made.shape == (samples // 160 + 1, 4) and not np.any(made)


def test_positions_turned_are_distances() -> None:
    """The product of a turned vector and a turned 1 is that with sines and cosines of the distance."""
    from transformers import ParakeetEncoderConfig
    from transformers.models.parakeet.modeling_parakeet import ParakeetEncoderRelPositionalEncoding

    from mtmd.kernels import ops

    count, width = 9, 12
    config = ParakeetEncoderConfig(hidden_size=width)
    table = ParakeetEncoderRelPositionalEncoding(config)(torch.zeros(1, count, width))[0]
    rotary = read(d_model=width, n_heads=2).turning
    angles = ops.rope_table.reference(torch.arange(count)[None], rotary=rotary)
    vector = torch.randn(width)
    one = torch.tensor([0.0, 1.0]).repeat(width // 2)
    turned, still = (
        ops.rope.reference(x.expand(count, 1, width), angles, pairs="adjacent")[:, 0]
        for x in (vector, one)
    )
    for i in range(count):
        for j in range(count):
            expected = vector @ table[count - 1 - (i - j)]
            torch.testing.assert_close(turned[i] @ still[j], expected, atol=2e-5, rtol=1e-4)
