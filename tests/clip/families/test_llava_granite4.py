"""What is special to Granite 4 Vision: which depths are projected for which layers, windows, keys of
a GGUF, settings.
"""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families.llava.granite4 import Granite4Vision, to_gguf
from mtmd.clip.family import vision_family
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.family import text_family

VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 20,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 8,
}
CONFIG = {
    "vision_config": VISION,
    "text_config": {"hidden_size": 24},
    "vision_feature_select_strategy": "full",
    "downsample_rate": "4/8",
    "deepstack_layer_map": [[-19, 9], [-13, 6], [-7, 3], [-1, 0]],  # the published ones
    "spatial_vision_layer": -1,
    "spatial_target_layers": [12, 15, 18, 21],
    "image_grid_pinpoints": [[64, 128]],
}


def family(**top: Any) -> Granite4Vision:
    size = {"size": {"height": 64, "width": 64}, "do_center_crop": False}
    result = vision_family(
        "granite4_vision",
        Settings({"model_type": "granite4_vision", **CONFIG, **top}, "config.json"),
        Settings({**size, "image_grid_pinpoints": [[64, 128]]}, "preprocessor_config.json"),
    )
    assert isinstance(result, Granite4Vision)
    return result


def test_depths_are_in_the_order_of_the_decoders_layers() -> None:
    made = family()
    assert [d.state for d in made.depths] == [20, 14, 8, 2, 20, 20, 20, 20]
    assert [d.corner for d in made.depths] == [None] * 4 + [0, 1, 2, 3]
    assert made.depths[0].name == "layerwise_projectors.3"
    assert (made.side, made.resolution.grid, made.tower.vit.layers) == (4, 4, 20)
    assert made.parameters()["v.image_newline"].shape == (8 * 24,)


def test_keys_of_a_gguf() -> None:
    keys = to_gguf(family()).keys
    assert keys["vision.feature_layer"] == [19, 13, 7, 1, 19, 19, 19, 19]
    assert keys["vision.projector.spatial_offsets"] == [-1, -1, -1, -1, 0, 1, 2, 3]
    assert keys["vision.image_grid_pinpoints"] == [128, 64]
    assert to_gguf(family(qformer_config={"num_hidden_layers": 2})).projector == ""


def test_layers_of_the_decoder() -> None:
    def text(**more: Any) -> Any:
        kind = "granite4_vision_text"
        settings = {"model_type": kind, **CONFIG, **more}
        return text_family(kind, Settings(settings, "config.json"))

    assert text().stacked == (0, 3, 6, 9, 12, 15, 18, 21)
    assert text().image_width == 8 * text().width
    with pytest.raises(ModelError, match="expected numbers below 20, the layers of the decoder"):
        text(num_hidden_layers=20)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no first layer": ({"deepstack_layer_map": [[-1, 1]]}, "the first layer among them"),
    "a layer twice": ({"spatial_target_layers": [12, 15, 18, 9]}, "each for a layer of its own"),
    "too deep": ({"deepstack_layer_map": [[-22, 0]]}, "expected features from -21 to 20"),
    "three corners": ({"spatial_target_layers": [1, 2, 3]}, "expected pairs of layers, and 4"),
    "no pairs": ({"deepstack_layer_map": {"a": 1}}, "expected pairs of layers, and 4 layers"),
    "words": ({"deepstack_layer_map": [["a", 0]]}, "deepstack_layer_map"),
    "a third": ({"downsample_rate": "1/3"}, "one half of the other, such as 4/8"),
    "no rate": ({"downsample_rate": None}, "downsample_rate is '', expected"),
    "windows that do not fit": ({"downsample_rate": "3/6"}, "windows that divide the 8 patches"),
    "heads": ({"vision_config": VISION | {"hidden_size": 32}}, "expected a multiple of 64"),
    "text": ({"qformer_config": {"use_qformer_text_input": True}}, "use_qformer_text_input"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    top, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        family(**top)
