"""Phi-4-multimodal's settings, and the adapters that lie beside it."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from mtmd.base.errors import ModelError
from mtmd.checkpoint.hub import ALLOWED, IGNORED
from mtmd.clip.families.phi4_multimodal import audio, vision
from mtmd.kernels.checkpoint.settings import Settings

PUBLISHED: dict[str, Any] = {
    "model_type": "phi4mm",
    "hidden_size": 3072,
    "embd_layer": {
        "image_embd_layer": {"crop_size": 448, "hd_transform_order": "sub_glb"},
        "audio_embd_layer": {"downsample_rate": 1},
    },
    "audio_processor": {
        "config": {
            "attention_dim": 1024,
            "attention_heads": 16,
            "linear_units": 1536,
            "num_blocks": 24,
            "relative_attention_bias_args": {"t5_bias_max_distance": 500, "type": "t5"},
            "nemo_conv_settings": {"conv_channels": 1024},
        }
    },
}


def usual(**changes: Any) -> Settings:
    return Settings(
        vision.usual_words(Settings({**PUBLISHED, **changes}, "config.json")), "config.json"
    )


def test_as_published() -> None:
    config = usual()
    ears = audio.read(config, Settings({}, "preprocessor_config.json"))
    assert (ears.layers, ears.width, ears.ffn, ears.heads) == (24, 1024, 1536, 16)
    assert (ears.reach, ears.channels, ears.kernel, ears.rows) == (500, 1024, 3, 10)
    assert ears.token == "<|endoftext11|>" and ears.rate == 16_000
    eyes = vision.read(config, Settings({}, "preprocessor_config.json"))
    assert (eyes.vit.layers, eyes.vit.width, eyes.positions) == (26, 1152, 32)
    assert eyes.resolution.tiles == 36 and eyes.marker == "<|endoftext10|>"
    # the whole, 16 x 16 tokens and an end of each line, and one tile like it
    assert eyes.resolution.tokens((448, 448), (1, 1)) == 2 * (256 + 16) + 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "biases too near": ({"bias_max_distance": 400}, "biases for 500 positions"),
    "heads": ({"num_attention_heads": 5}, "heads that divide the width"),
    "chunks": ({"chunk_size": 18}, "chunk_size is 18"),
    "another reduction": ({"time_reduction": 4}, "time_reduction is 4"),
    "symmetric": ({"bias_symmetric": True}, "bias_symmetric is True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_of_audio_that_are_not_followed(case: str) -> None:
    changes, message = REFUSED[case]
    config = Settings({"audio_config": changes}, "config.json")
    with pytest.raises(ModelError, match=message):
        audio.read(config, Settings({}, "preprocessor_config.json"))


@pytest.mark.parametrize(
    "changes", [{"feature_layer": -1}, {"num_hidden_layers": 1}, {"crop_size": 336}]
)
def test_settings_of_pictures_that_are_not_followed(changes: dict[str, Any]) -> None:
    config = Settings({"vision_config": changes}, "config.json")
    with pytest.raises(ModelError, match=next(iter(changes))):
        vision.read(config, Settings({}, "preprocessor_config.json"))


def test_adapters_are_fetched_with_the_model() -> None:
    wanted = [
        f"{folder}/{file}"
        for folder in ("vision-lora", "speech-lora")
        for file in ("adapter_config.json", "adapter_model.safetensors")
    ]
    others = ["vision_tower/model.safetensors", "speech_tokenizer/model.safetensors", "src/a.json"]
    files = [*wanted, *others]
    assert [*filter_repo_objects(files, allow_patterns=ALLOWED, ignore_patterns=IGNORED)] == wanted
