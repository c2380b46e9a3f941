"""Settings of MERaLiON: the authors' defaults, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families import meralion
from mtmd.kernels.checkpoint.settings import Settings


def read(processor: dict[str, Any] | None = None, **config: Any) -> meralion.Meralion:
    return meralion.read(
        Settings({"speech_config": {}, **config}, "config.json"),
        Settings({"processor": processor or {}}, "preprocessor_config.json"),
    )


def test_where_nothing_is_said() -> None:
    family = read()
    vit, way = family.tower.vit, family.resolution
    assert (vit.width, vit.ffn, vit.heads, vit.layers, family.tower.bins) == (
        1280,
        5120,
        20,
        32,
        128,
    )
    assert (family.stacked, family.gated, way.limit, way.even) == (15, True, 10, True)
    assert [way.token_count(seconds * 16_000) for seconds in (1, 30, 31, 300, 3600)] == [
        100,
        100,
        200,
        1000,
        1000,
    ]


def test_how_samples_are_prepared_is_what_the_processor_says() -> None:
    said = {"time_duration_limit": 60, "whisper_chunk_size": 30, "do_normalize": False}
    way = read(said).resolution
    assert (way.limit, way.even) == (2, False)
    samples = np.random.default_rng(0).normal(0.3, 0.01, 16_000).astype(np.float32)
    (even,), (own,) = (one.windows(samples).tiles for one in (read().resolution, way))
    assert even.shape == own.shape == (1, 3000, 128) and not np.allclose(even, own, atol=0.1)


@pytest.mark.parametrize("wrong", [{"speech_mlp_scale_factor": 7}, {"speech_mlp_scale_factor": 0}])
def test_settings_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read(**wrong)


def test_a_projector_that_no_gguf_holds() -> None:
    assert meralion.to_gguf(read(speech_mlp_use_projection=False)) is None
