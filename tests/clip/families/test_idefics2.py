"""Idefics2's picture settings, and what its processor makes of the text around pictures."""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families.idefics2 import AROUND, Idefics2Vision, read
from mtmd.kernels.checkpoint.settings import Settings

CONFIG: dict[str, Any] = {
    "vision_config": {"hidden_size": 72, "image_size": 84, "patch_size": 14},
    "perceiver_config": {"resampler_n_latents": 8, "rms_norm_eps": 1e-3},
    "text_config": {"hidden_size": 64, "rms_norm_eps": 1e-5},
}


def family(image: dict[str, Any] | None = None, **parts: dict[str, Any]) -> Idefics2Vision:
    config = {name: part | parts.get(name, {}) for name, part in CONFIG.items()}
    return read(Settings(config, "config.json"), Settings(image or {}, "preprocessor_config.json"))


def test_the_resampler_has_the_decoders_width() -> None:
    """One that says another has the decoder's eps, as in the published files' first version."""
    assert family().resampler.eps == 1e-5
    assert family(perceiver_config={"hidden_size": 64}).resampler.eps == 1e-3
    assert family().parameters()["resampler.query"].shape == (8, 64)


def test_the_text_around_pictures() -> None:
    text = f"a{AROUND}<image>{AROUND}{AROUND}<image>{AROUND}word, {AROUND}<image>{AROUND} word"
    assert family().rewritten(text) == (
        f"a{AROUND}<image>{AROUND}<image>{AROUND} word, {AROUND}<image>{AROUND} word"
    )


WRONG: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]], str]] = {
    "edges": ({"size": {"shortest_edge": 90, "longest_edge": 80}}, {}, "edges of 90 to 80 pixels"),
    "patch": ({"size": {"shortest_edge": 13, "longest_edge": 80}}, {}, "a patch of 14"),
    "long": ({"size": {"shortest_edge": 13, "longest_edge": 1 << 20}}, {}, "from 1 to 4096"),
    "groups": ({}, {"perceiver_config": {"num_key_value_heads": 3}}, "16 heads in 3 groups"),
    "tokens": ({}, {"perceiver_config": {"resampler_n_latents": 1 << 20}}, "resampler_n_latents"),
    "depth": ({}, {"perceiver_config": {"resampler_depth": 1 << 20}}, "from 1 to 1024"),
    "act": ({}, {"text_config": {"hidden_act": "relu"}}, "hidden_act"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_followed(case: str) -> None:
    image, parts, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        family(image, **parts)
