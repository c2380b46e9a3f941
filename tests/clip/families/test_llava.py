"""What is special to LLaVA: squares and canvases, the order of a canvas's tokens, towers and
features, budgets, settings, GGUF.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tensor_file import TensorFile

from mtmd.base.errors import ImageError, ModelError, OptionError
from mtmd.clip.encoder import Encoder
from mtmd.clip.families.llava.vision import LlavaVision, read
from mtmd.clip.family import FAMILIES, Entry, gguf_vision_family, vision_family
from mtmd.clip.resolution.anyres import AnyResolution
from mtmd.clip.token_budget import Budget
from mtmd.kernels.backends.cpu import Cpu
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, check_no_extra
from mtmd.kernels.checkpoint.open_weights import GgufFile
from mtmd.kernels.checkpoint.settings import Settings

VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
SQUARE = {"height": 28, "width": 28}


def family(
    kind: str = "llava",
    top: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    **image: Any,
) -> LlavaVision:
    pinpoints = {"image_grid_pinpoints": PINPOINTS} if kind == "llava_next" else {}
    config = (
        {
            "model_type": kind,
            "vision_config": VISION | (vision or {}),
            "text_config": {"hidden_size": 24},
        }
        | pinpoints
        | (top or {})
    )
    settings = {"size": {"shortest_edge": 28}, "crop_size": SQUARE} | pinpoints | image
    result = vision_family(
        kind, Settings(config, "config.json"), Settings(settings, "preprocessor_config.json")
    )
    assert isinstance(result, LlavaVision)
    return result


def picture(seed: int, width: int, height: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def sizes() -> list[tuple[int, int]]:
    rng = np.random.default_rng(3)
    drawn = rng.integers(1, 150, (30, 2)).tolist()
    return [
        (28, 28),
        (27, 200),
        (300, 20),
        (56, 28),
        (1, 1),
        (1, 400),
        (400, 2),
        *((width, height) for width, height in drawn),
    ]


PROCESSORS: dict[str, dict[str, Any]] = {
    "CLIPImageProcessor": {"size": {"shortest_edge": 28}, "crop_size": SQUARE},
    "CLIPImageProcessor, cut from a larger one": {
        "size": {"shortest_edge": 31},
        "crop_size": SQUARE,
    },
    "LlavaImageProcessor": {"size": {"shortest_edge": 28}, "crop_size": SQUARE, "do_pad": True},
    "SiglipImageProcessor": {"size": SQUARE, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_squares_are_those_of_the_reference(case: str) -> None:
    from PIL import Image
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    name = case.split(",")[0]
    kinds = {
        k.__name__: k
        for k in (CLIPImageProcessorPil, LlavaImageProcessorPil, SiglipImageProcessorPil)
    }
    theirs = kinds[f"{name}Pil"](**PROCESSORS[case])
    crop = {"crop_size": None} if name.startswith("Siglip") else {}
    ours = family(**PROCESSORS[case] | crop, image_processor_type=name)
    for seed, size in enumerate(sizes()):
        pixels = picture(seed, *size)
        result = ours.resolution.prepare(pixels)
        assert np.array_equal(
            result.tiles[0],
            theirs([Image.fromarray(pixels)], return_tensors="np")["pixel_values"][0],
        ), size
        assert result.tokens == 16 == ours.prompt(result).count("<image>")


def test_canvases_and_their_tokens_are_those_of_the_reference() -> None:
    """Pixels from the processor, the order from the model: its features are numbered, and a newline
    is -1.
    """
    from PIL import Image
    from transformers import LlavaNextModel
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    ours = family("llava_next")
    theirs = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS
    )
    model = SimpleNamespace(
        config=SimpleNamespace(
            vision_config=SimpleNamespace(**VISION), image_grid_pinpoints=PINPOINTS
        )
    )
    for seed, size in enumerate(sizes()):
        pixels = picture(seed, *size)
        plan, result = (
            ours.resolution.prepare(pixels),
            theirs([Image.fromarray(pixels)], return_tensors="np"),
        )
        assert np.array_equal(np.stack(plan.tiles), result["pixel_values"][0]), size
        numbers = torch.arange(len(plan.tiles) * 16.0).view(-1, 16, 1)
        order, _ = LlavaNextModel.pack_image_features(
            model,
            [numbers],
            torch.from_numpy(result["image_sizes"]),
            "default",
            image_newline=torch.tensor([-1.0]),
        )
        assert plan.order is not None
        assert plan.order.tolist() == order[0][:, 0].tolist(), size
        assert (
            plan.tokens
            == len(plan.order)
            == ours.prompt(plan).count("<image>")
            <= ours.resolution.max_tokens()
        )


def test_pictures_too_narrow_are_refused() -> None:
    with pytest.raises(
        ImageError, match=r"1 x 200000 pixels, 28 x 5600000 when scaled to its shorter edge"
    ):
        family().resolution.prepare(np.zeros((200000, 1, 3), np.uint8))


BUDGETS: dict[
    str, tuple[Budget, int]
] = {  # the tokens of a picture of 56 x 56; 16 + 8 * 9 are the checkpoint's own
    "none": (Budget(), 88),
    "high": (Budget(detail="high"), 88),
    "low": (Budget(detail="low"), 17),
    "to spare": (Budget(max_tokens=500), 88),
    "a smaller canvas": (Budget(max_tokens=80), 36),
    "the whole alone": (Budget(max_tokens=20), 17),
    "least": (Budget(min_tokens=60), 88),
    "more than there is": (Budget(min_tokens=500), 88),
}


@pytest.mark.parametrize("case", BUDGETS)
def test_budgets(case: str) -> None:
    budget, tokens = BUDGETS[case]
    ours = family("llava_next")
    plan = ours.resolution.prepare(picture(0, 56, 56), budget)
    assert (
        plan.tokens
        == tokens
        == ours.prompt(plan).count("<image>")
        <= ours.resolution.max_tokens(budget)
    )
    assert plan.order is not None
    assert plan.order.max() < len(plan.tiles) * 16
    assert bool(plan.notes) == (tokens != 88 or case == "more than there is")


@pytest.mark.parametrize(("kind", "maximum"), [("llava", 15), ("llava_next", 16)])
def test_budgets_that_are_too_small(kind: str, maximum: int) -> None:
    with pytest.raises(OptionError, match=str(maximum)):
        family(kind).resolution.prepare(picture(0, 56, 56), Budget(max_tokens=maximum))


def towers(kind: str, **more: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """transformers' model with random weights, and its tensors under published names."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    text = {
        "model_type": "llama",
        "hidden_size": 24,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=VISION | {"model_type": f"{kind}_vision_model"},
        text_config=text,
        image_token_index=8,
        **more,
    )
    model = LlavaForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    prefix = "vision_model." if kind == "clip" else ""
    names = {
        "model.vision_tower.": f"vision_tower.{prefix}",
        "model.multi_modal_projector.": "multi_modal_projector.",
    }
    tensors = {
        n.replace(old, new): t
        for n, t in model.state_dict().items()
        for old, new in names.items()
        if n.startswith(old)
    }
    return model, tensors


def encode(ours: LlavaVision, file: Any, pixels: np.ndarray) -> torch.Tensor:
    weights = CanonicalWeights(file, ours.parameters(), "test")
    check_no_extra(file, weights.sources, ours.unused, "test")
    encoder = Encoder(ours, weights, [Cpu()], dtype=torch.float32)
    plan = ours.resolution.prepare(pixels)
    return encoder.join(plan, encoder.encode(plan.tiles))


def expected(model: Any, pixels: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.model.get_image_features(
            torch.from_numpy(pixels)[None]
        ).pooler_output[0]
    return result


FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "clip": ("clip", {}),
    "clip, first layer": ("clip", {"vision_feature_layer": 1}),
    "clip, before any": ("clip", {"vision_feature_layer": [0]}),
    "clip, several": ("clip", {"vision_feature_layer": [-1, 1, -3]}),
    "clip, all tokens": (
        "clip",
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "clip, no bias": (
        "clip",
        {"multimodal_projector_bias": False, "projector_hidden_act": "gelu_pytorch_tanh"},
    ),
    "siglip": ("siglip", {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}),
    "siglip, several, without the first patch": ("siglip", {"vision_feature_layer": [-2, 3]}),
}


@pytest.mark.parametrize("case", FEATURES)
def test_features_are_those_of_the_reference(case: str) -> None:
    kind, more = FEATURES[case]
    model, tensors = towers(kind, **more)
    ours = family(top=more, vision={"model_type": f"{kind}_vision_model"})
    pixels = picture(0, 30, 40)
    requested = expected(model, ours.resolution.prepare(pixels).tiles[0])
    actual = encode(ours, TensorFile(tensors), pixels)
    assert actual.shape == requested.shape == (ours.tower.tokens, 24)
    assert (actual - requested).square().sum() <= 1e-10 * requested.square().sum()


def first_converter(
    path: Path, tensors: dict[str, torch.Tensor], kind: str, tiled: bool, listed: bool
) -> None:
    """A projector file as llama.cpp's convert_image_encoder_to_gguf.py writes it, from the tensors
    of a tower.
    """
    out = gguf.GGUFWriter(path, "clip")
    out.add_bool("clip.has_llava_projector", True)
    out.add_string("clip.projector_type", "mlp")
    numbers = {
        "image_size": 28,
        "patch_size": 7,
        "embedding_length": 32,
        "feed_forward_length": 40,
        "projection_dim": 512,
        "block_count": 2,
        "attention.head_count": 2,
    }
    for key, value in numbers.items():
        out.add_uint32(f"clip.vision.{key}", value)
    out.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5 if kind == "clip" else 1e-6)
    out.add_bool("clip.use_gelu", False)
    for key, values in (
        ("image_mean", [0.48145466, 0.4578275, 0.40821073]),
        ("image_std", [0.26862954, 0.26130258, 0.27577711]),
    ):
        out.add_array(f"clip.vision.{key}", values)
    if tiled:
        out.add_array(
            "clip.vision.image_grid_pinpoints", [edge for pair in PINPOINTS for edge in pair]
        )
        out.add_tensor("model.image_newline", np.arange(24, dtype=np.float32))
    if listed:
        out.add_array("clip.vision.feature_layer", [2])
    names = {
        "vision_tower.": "",
        "vision_model.": "v.",
        "multi_modal_projector.": "mm.",
        "linear_1": "0",
        "linear_2": "2",
        "encoder.layers": "blk",
        "embeddings.": "",
        "_proj": "",
        "self_attn.": "attn_",
        "layer_norm": "ln",
        "layernorm": "ln",
        "mlp.fc1": "ffn_down",
        "mlp.fc2": "ffn_up",
        "embedding": "embd",
        "layrnorm": "ln",
    }
    for name, tensor in tensors.items():
        if "post_layernorm" in name or ".layers.2." in name or ".head." in name:
            continue
        name = (
            name
            if "vision_model." in name or "tower" not in name
            else name.replace("vision_tower.", "vision_tower.vision_model.")
        )
        for old, new in names.items():
            name = name.replace(old, new)
        out.add_tensor(name, tensor.numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


@pytest.mark.parametrize("listed", [False, True], ids=["", "features listed"])
@pytest.mark.parametrize("tiled", [False, True], ids=["1.5", "next"])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_files_of_the_first_converter(tmp_path: Path, kind: str, tiled: bool, listed: bool) -> None:
    """They have one layer less, the ways up and down under each other's name, and nothing of the
    decoder: the answer is the reference's.
    """
    strategy = "default" if kind == "clip" else "full"
    model, tensors = towers(kind, vision_feature_select_strategy=strategy)
    first_converter(tmp_path / "mmproj.gguf", tensors, kind, tiled, listed)
    file = GgufFile(tmp_path / "mmproj.gguf")
    ours = gguf_vision_family(
        "mlp", file.metadata, {name: file.meta(name)[0] for name in file.names()}, "mmproj.gguf"
    )
    assert isinstance(ours, LlavaVision)
    assert isinstance(ours.resolution, AnyResolution) == tiled
    pixels = picture(0, 56, 28)
    tiles = ours.resolution.prepare(pixels).tiles
    requested = torch.cat([expected(model, tile) for tile in tiles])
    actual = encode(ours, file, pixels)
    assert len(tiles) == (3 if tiled else 1)
    if tiled:
        newlines = actual == torch.arange(24.0)
        assert newlines.all(1).sum() == 4
        requested = torch.cat((requested, torch.arange(24.0)[None]))[
            torch.from_numpy(ours.resolution.prepare(pixels).order)
        ]
    assert (actual - requested).square().sum() <= 1e-10 * requested.square().sum()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another tower": (
        {"vision": {"model_type": "beit"}},
        "config.json: vision_config: model_type is 'beit', expected one of",
    ),
    "less than a patch": (
        {"vision": {"patch_size": 29}},
        "config.json: vision_config: image_size 28 is less than patch_size 29",
    ),
    "layer": (
        {"top": {"vision_feature_layer": 4}},
        "config.json: vision_feature_layer is 4, expected a number from -4 to 3",
    ),
    "no layers": (
        {"top": {"vision_feature_layer": []}},
        r"config.json: vision_feature_layer is \[\], expected",
    ),
    "strategy": (
        {"top": {"vision_feature_select_strategy": "first"}},
        "config.json: vision_feature_select_strategy is 'first'",
    ),
    "act": (
        {"top": {"projector_hidden_act": "relu"}},
        "config.json: projector_hidden_act is 'relu', expected one of",
    ),
    "class tokens in tiles": (
        {"kind": "llava_next", "top": {"vision_feature_select_strategy": "full"}},
        "config.json: vision_feature_select_strategy gives 17 features for 16 patches",
    ),
    "pinpoint": (
        {
            "kind": "llava_next",
            "top": {"image_grid_pinpoints": [[28, 30]]},
            "image_grid_pinpoints": [[28, 30]],
        },
        "config.json: image_grid_pinpoints have to be pairs of height and width, multiples of 28",
    ),
    "pinpoints differ": (
        {"kind": "llava_next", "image_grid_pinpoints": [[28, 28]]},
        "preprocessor_config.json: image_grid_pinpoints differ from those of config.json",
    ),
    "crop": (
        {"crop_size": {"height": 30, "width": 30}},
        "preprocessor_config.json: size 28 and crop_size 30 does not give 28 x 28",
    ),
    "small": (
        {"size": 20},
        "preprocessor_config.json: size 20 and crop_size 28 does not give 28 x 28",
    ),
    "not cropped": (
        {"do_center_crop": False},
        "preprocessor_config.json: size 28 without a crop does not give 28 x 28",
    ),
    "rectangle": (
        {"size": {"height": 28, "width": 30}},
        "preprocessor_config.json: size has height, width, expected an equal height",
    ),
    "padding": (
        {"do_pad": True},
        "preprocessor_config.json: do_pad true is not supported for this image processor",
    ),
    "larger tiles": (
        {"kind": "llava_next", "size": 30},
        "preprocessor_config.json: size is 30, expected 28",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^{reported}"):
        family(**values)


def test_a_tower_of_its_own_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """One model_type, two families: the tower's name tells them apart."""
    from mtmd.clip.families import gemma3

    entry = Entry(gemma3.__name__, ("llava/other_tower",))
    monkeypatch.setattr("mtmd.clip.family.FAMILIES", (*FAMILIES, entry))
    monkeypatch.setattr(gemma3, "read", lambda *_: "the other")
    other = Settings({"vision_config": {"model_type": "other_tower"}}, "config.json")
    assert vision_family("llava", other, Settings({}, "image")) == "the other"  # type: ignore[comparison-overlap]
    assert isinstance(family(), LlavaVision)


def test_defaults_are_those_of_transformers() -> None:
    from transformers import LlavaNextConfig
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    config, image = LlavaNextConfig(), LlavaNextImageProcessorPil()
    side = config.vision_config.image_size
    ours = read(
        Settings(
            {"model_type": "llava_next", "vision_config": {"image_size": side, "patch_size": 14}},
            "config.json",
        ),
        Settings({"size": side, "crop_size": side}, "preprocessor_config.json"),
    )
    assert (
        [[height, width] for width, height in ours.resolution.canvases]
        == config.image_grid_pinpoints
        == image.image_grid_pinpoints
    )
    assert (ours.tower.features, ours.tower.skip_first) == (
        (11,),
        config.vision_feature_select_strategy == "default",
    )
    assert (ours.tower.bias, ours.tower.text_width) == (
        config.multimodal_projector_bias,
        config.text_config.hidden_size,
    )
    assert (
        ours.resolution.normalize.mean,
        ours.resolution.normalize.std,
        ours.resolution.resample,
    ) == (tuple(image.image_mean), tuple(image.image_std), "bicubic")
