"""A model small enough to be measured in a second."""

import json

import pytest


@pytest.fixture
def shape(tmp_path):
    """A config.json of random weights: SmolVLM's families with three layers."""
    config = {
        "model_type": "smolvlm",
        "scale_factor": 2,
        "text_config": {
            "model_type": "llama",
            "hidden_size": 96,
            "intermediate_size": 160,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "vocab_size": 640,
            "max_position_embeddings": 4096,
        },
        "vision_config": {
            "hidden_size": 72,
            "intermediate_size": 110,
            "num_hidden_layers": 2,
            "num_attention_heads": 1,
            "image_size": 32,
            "patch_size": 8,
        },
    }
    processor = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder / "config.json"
