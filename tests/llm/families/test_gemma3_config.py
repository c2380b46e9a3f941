"""Gemma 3's text settings: transformers' defaults, and sizes that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.rotary import rotary
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.families import gemma3


def read(values: dict[str, Any]) -> gemma3.Gemma3Text:
    return gemma3.read(Settings(values, "config.json: text_config"))


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Gemma3TextConfig

    actual, expected = read({}), Gemma3TextConfig()
    assert (
        actual.width,
        actual.ffn,
        actual.heads,
        actual.groups,
        actual.head,
        actual.vocabulary,
        actual.context,
        actual.window,
    ) == (
        expected.hidden_size,
        expected.intermediate_size,
        expected.num_attention_heads,
        expected.num_key_value_heads,
        expected.head_dim,
        expected.vocab_size,
        expected.max_position_embeddings,
        expected.sliding_window,
    )
    assert list(actual.kinds) == expected.layer_types
    assert actual.ropes == {
        kind: rotary(values["rope_theta"], expected.head_dim)
        for kind, values in expected.rope_parameters.items()
    }


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "layers": (
        {"num_hidden_layers": 10_000_000},
        "num_hidden_layers is 10000000, expected an integer from 1 to 1024",
    ),
    "width": (
        {"hidden_size": 1 << 24},
        "hidden_size is 16777216, expected an integer from 1 to 1048576",
    ),
    "ffn": ({"intermediate_size": 1 << 24}, "intermediate_size is 16777216, expected"),
    "heads": (
        {"num_attention_heads": 1 << 20},
        "num_attention_heads is 1048576, expected an integer from 1 to 4096",
    ),
    "groups": (
        {"num_key_value_heads": 1 << 20},
        "num_key_value_heads is 1048576, expected an integer from 1 to 4096",
    ),
    "head": ({"head_dim": 1 << 20}, "head_dim is 1048576, expected an integer from 1 to 4096"),
}


@pytest.mark.parametrize("case", WRONG)
def test_sizes_that_cannot_be(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        read(values).parameters()
