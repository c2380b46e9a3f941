"""Settings of Ultravox: what is refused, and the tokens that stand for audio in vocabularies that
do not know of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.checkpoint.open import open_checkpoint
from mtmd.clip.families import ultravox
from mtmd.kernels.checkpoint.settings import Settings


def read(template: str = "", **config: Any) -> ultravox.Ultravox:
    return ultravox.read(
        Settings({"audio_config": {}, **config}, "config.json"),
        Settings({"tokens": {"chat_template": template}}, "preprocessor_config.json"),
    )


def test_the_encoder_is_that_of_transformers_where_nothing_is_said() -> None:
    from transformers import WhisperConfig

    theirs, ours = WhisperConfig(), read().tower
    assert (ours.vit.width, ours.vit.ffn, ours.vit.heads, ours.vit.layers, ours.bins) == (
        theirs.d_model,
        theirs.encoder_ffn_dim,
        theirs.encoder_attention_heads,
        theirs.encoder_layers,
        theirs.num_mel_bins,
    )
    assert ours.positions == theirs.max_source_positions


@pytest.mark.parametrize(
    "wrong", [{"projector_act": "gelu"}, {"stack_factor": 1501}, {"audio_latency_block_size": 100}]
)
def test_settings_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read(**wrong)


@pytest.mark.parametrize(
    ("template", "token"),
    [
        ("{{ '<|eot_id|>' }}", "<|reserved_special_token_0|>"),
        ("{{ '<|im_start|>' }}", "<|image_pad|>"),
        ("{{ '[INST]' }}", "<|audio|>"),
    ],
)
def test_a_token_of_the_vocabulary_stands_for_audio(template: str, token: str) -> None:
    assert read(template).token == token


def test_a_folder_without_its_decoder_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "ultravox", "audio_config": {}, "text_model_id": "org/decoder"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match=r"its decoder is another checkpoint, 'org/decoder'.*GGUF"):
        open_checkpoint(tmp_path)
