"""LLaVA 1.5 (arXiv:2310.03744), NeXT and ViP-LLaVA (arXiv:2312.00784): features from inside a CLIP
or SigLIP tower; in NeXT of tiles too, with newlines after rows, in ViP-LLaVA of several depths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    ACTIVATIONS,
    GgufTower,
    checkpoint_names,
    gguf_vit,
    read_vit,
    tower_keys,
)
from mtmd.clip.families.llava.tower import FeatureTower, read_features
from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD, gguf_image, read_normalize
from mtmd.clip.resolution.anyres import AnyResolution, read_canvases
from mtmd.clip.resolution.fixed_square import FixedSquare, read_fixed_square
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.video.single import SingleFrames
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.plan.flash_choice import AttentionForm

TOWERS = ("clip_vision_model", "siglip_vision_model")
NEWLINES = ("v.image_newline", "model.image_newline")  # as GGUF files have it
VIP_FEATURES = [-2, -5, -8, -11, 6]  # of published ViP-LLaVA models


@dataclass(frozen=True)
class LlavaVision:
    tower: FeatureTower
    resolution: FixedSquare | AnyResolution  # of LLaVA 1.5, and of NeXT
    video: SingleFrames | None = None  # of OneVision

    marker = "<image>"
    around = ("", "")
    image_token = "<image>"
    bidirectional = False

    @property
    def separator(self) -> str | None:
        return NEWLINES[0] if isinstance(self.resolution, AnyResolution) else None

    @property
    def unused(self) -> tuple[str, ...]:
        return self.tower.unused

    def parameters(self) -> Mapping[str, Parameter]:
        if self.separator is None:
            return self.tower.parameters()
        shape = (self.tower.text_width,)
        newline = Parameter(
            shape,
            checkpoint_names("image_newline"),
            gguf=tuple(Stored((name,), shape) for name in NEWLINES),
        )
        return {**self.tower.parameters(), NEWLINES[0]: newline}

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        return self.tower.graph(tiles, weights, attention)


def to_gguf(family: LlavaVision) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    tower = family.tower
    keys = tower_keys(
        tower.vit, image_size=tower.image_size, patch=tower.patch, text_width=tower.text_width
    )
    keys |= {"use_gelu": tower.vit.gelu == "none", "vision.feature_layer": list(tower.features)}
    if isinstance(family.resolution, AnyResolution):
        sizes = family.resolution.canvases
        keys["vision.image_grid_pinpoints"] = [edge for size in sizes for edge in size[::-1]]
    # None reads a video's frames and pictures as these models see them, or norms features.
    return GgufTower("mlp" if family.video is None and tower.norm_eps is None else "", keys)


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say.

    The first converters wrote these files: they drop the layers after the last feature, say nothing
    of the decoder's width, and of activations only whether it is the exact GELU.
    """
    size, layers, has_class = (
        keys.count("vision.image_size"),
        keys.count("vision.block_count"),
        "v.class_embd" in shapes,
    )
    act = (
        "gelu"
        if keys.flag("use_gelu", False)
        else "quick_gelu"
        if has_class
        else "gelu_pytorch_tanh"
    )
    edges: Any = keys.get("vision.image_grid_pinpoints", [])
    pinpoints = {
        "image_grid_pinpoints": isinstance(edges, list)
        and [edges[at : at + 2] for at in range(0, len(edges), 2)]
    }
    config = {
        **pinpoints,
        "model_type": "llava_next"
        if pinpoints["image_grid_pinpoints"] and not shapes.keys().isdisjoint(NEWLINES)
        else "llava",
        "vision_config": {**gguf_vit(keys), "hidden_act": act, "model_type": TOWERS[not has_class]},
        "text_config": {"hidden_size": [*shapes.get("mm.2.weight", ()), None][0]},
        "multimodal_projector_bias": "mm.0.bias" in shapes,
        "vision_feature_layer": keys.get("vision.feature_layer", layers),
        "vision_feature_select_strategy": "default" if has_class else "full",
    }
    return config, {
        **gguf_image(keys),
        **pinpoints,
        "size": {"shortest_edge": size},
        "crop_size": size,
    }


def read(top: Settings, image: Settings) -> LlavaVision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    kind = top.get("model_type", "llava")
    if kind == "vipllava":
        tower = replace(
            read_tower(_with_several(top)), norm_eps=top.number("projector_layernorm_eps", 1e-5)
        )
    else:
        tower = read_tower(top)
    return read_pictures(top, image, tower, tiled=kind == "llava_next")


def _with_several(top: Settings) -> Settings:
    """ViP-LLaVA's settings as LLaVA's. Those of the published 7B have a single feature in LLaVA's
    key, which its projection contradicts: only a list counts.
    """
    given = top.get("vision_feature_layers", top.get("vision_feature_layer", None))
    layers = given if isinstance(given, list) else VIP_FEATURES
    same = {"vision_feature_layer": layers, "vision_feature_select_strategy": "default"}
    return Settings({**top.values, **same}, top.where)


def read_pictures(
    top: Settings, image: Settings, tower: FeatureTower, *, tiled: bool
) -> LlavaVision:
    """Return how pictures are shown to a tower: `tiled` as LLaVA-NeXT shows them, or each as a
    square.
    """
    if tiled:
        check_grid(top, tower)
    normalize, kind = (
        read_normalize(image, CLIP_MEAN, CLIP_STD),
        str(image.get("image_processor_type", "")),
    )
    ground = None
    if not tiled and image.flag("do_pad", False):
        if not kind.startswith("LlavaImageProcessor"):
            raise ModelError(
                f"{image.where}: do_pad true is not supported for "
                f"{kind or 'this image processor'}; set it to false"
            )
        ground = tuple(int(m * 255) for m in normalize.mean)
    square = read_fixed_square(
        image,
        tower.image_size,
        tower.tokens,
        normalize,
        crops=not kind.startswith("Siglip"),
        ground=ground,
    )
    square = replace(square, saved=tower.saved)
    if not tiled:
        return LlavaVision(tower, square)
    check_uncut(image, square)
    resolution = AnyResolution(
        side=square.side,
        grid=tower.grid,
        canvases=read_canvases(top, image, square.side),
        normalize=normalize,
        resample=square.resample,
        saved=tower.saved,
    )
    return LlavaVision(tower, resolution)


def check_grid(top: Settings, tower: FeatureTower) -> None:
    """ModelError where the features are not those of the patches, of which canvases are made."""
    if tower.tokens != tower.grid**2:
        raise ModelError(
            f"{top.where}: vision_feature_select_strategy gives {tower.tokens} features for "
            f"{tower.grid**2} patches, "
            "expected as many: default for a tower with a class token, full for one without"
        )


def check_uncut(image: Settings, square: FixedSquare) -> None:
    """ModelError where more is scaled than is shown."""
    if square.edge != square.side:
        raise ModelError(
            f"{image.where}: size is {square.edge}, expected {square.side} as in "
            "config.json; correct one of them"
        )


def read_tower(
    top: Settings, kind: str = TOWERS[0], layer: int = -2, strategy: str = "default"
) -> FeatureTower:
    """The other arguments: what counts where config.json says nothing."""
    vision = top.part("vision_config")
    is_clip = vision.choice("model_type", TOWERS, kind) == TOWERS[0]
    vit = read_vit(
        vision,
        layers=12,
        width=768,
        ffn=3072,
        heads=12,
        act="quick_gelu" if is_clip else "gelu_pytorch_tanh",
        eps=1e-5 if is_clip else 1e-6,
    )
    vision.choice("num_channels", (3,), 3)
    size, patch = vision.count("image_size", 224), vision.count("patch_size", 32 if is_clip else 16)
    if size < patch:
        raise ModelError(f"{vision.where}: image_size {size} is less than patch_size {patch}")
    features = read_features(top, vit.layers, layer)
    strategies = ("default", "full")
    skip = top.choice("vision_feature_select_strategy", strategies, strategy) == "default"
    return FeatureTower(
        vit=replace(vit, layers=max(features)),
        image_size=size,
        patch=patch,
        class_token=is_clip,
        features=features,
        skip_first=skip,
        text_width=top.part("text_config").count("hidden_size", 4096, maximum=MAX_WIDTH),
        bias=top.flag("multimodal_projector_bias", True),
        gelu=ACTIVATIONS[top.choice("projector_hidden_act", ACTIVATIONS, "gelu")],
    )
