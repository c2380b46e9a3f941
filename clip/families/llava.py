"""LLaVA 1.5 (arXiv:2310.03744) and NeXT: features from inside a CLIP or SigLIP tower; in NeXT of
tiles too, with newlines after rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mtmd.clip.blocks import (
    ACTIVATIONS,
    CLIP_MEAN,
    CLIP_STD,
    RESAMPLE,
    Normalize,
    anywhere,
    gguf_image,
    gguf_vit,
    read_normalize,
    read_vit,
)
from mtmd.clip.budget import DEFAULT_BUDGET, Budget
from mtmd.clip.family import ImagePlan
from mtmd.clip.image.decode import Pixels, resize
from mtmd.clip.resolution.tiling import (
    Size,
    Squared,
    best_canvas,
    cut,
    letterboxed,
    read_canvases,
    read_squared,
    unpadded,
)
from mtmd.clip.tower import FeatureTower, read_features
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.errors import ModelError
from mtmd.kernels.graph import Node, Shape, Type, WeightSource
from mtmd.kernels.plan.flash import AttentionForm

TOWERS = ("clip_vision_model", "siglip_vision_model")
NEWLINES = ("v.image_newline", "model.image_newline")  # as GGUF files have it


@dataclass(frozen=True)
class LlavaVision:
    tower: FeatureTower
    normalize: Normalize
    resample: str
    squared: Squared
    canvases: tuple[Size, ...]  # none in LLaVA 1.5

    marker = "<image>"
    image_token = "<image>"
    bidirectional = False

    @property
    def separator(self) -> str | None:
        return NEWLINES[0] if self.canvases else None

    @property
    def unused(self) -> tuple[str, ...]:
        return self.tower.unused

    def parameters(self) -> Mapping[str, Parameter]:
        if not self.canvases:
            return self.tower.parameters()
        shape = (self.tower.text_width,)
        newline = Parameter(
            shape,
            anywhere("image_newline"),
            gguf=tuple(Stored((name,), shape) for name in NEWLINES),
        )
        return {**self.tower.parameters(), NEWLINES[0]: newline}

    def prepare(self, pixels: np.ndarray, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        side, count = self.tower.image_size, self.tower.tokens
        if not self.canvases:
            budget.check_fixed(count)
            return ImagePlan(
                (self.normalize(self.squared(pixels, side, self.resample)),),
                ((side, side),),
                count,
                self.image_token * count,
            )
        tiles, order, notes = self._tiles(pixels, budget)
        return ImagePlan(
            tuple(self.normalize(t) for t in tiles),
            ((side, side),) * len(tiles),
            len(order),
            self.image_token * len(order),
            order=order,
            notes=notes,
        )

    def _tiles(
        self, pixels: Pixels, budget: Budget
    ) -> tuple[list[Pixels], np.ndarray, tuple[str, ...]]:
        """The whole picture stretched to a tile, then tiles of it on the best canvas, or none where
        the budget leaves no room.
        """
        size, side = (pixels.shape[1], pixels.shape[0]), self.tower.image_size
        ways: list[Size | None] = [
            best_canvas(size, self.canvases),
            *((*self.canvases, None) if budget != DEFAULT_BUDGET else ()),
        ]
        orders = [self._order(size, canvas) for canvas in ways]
        chosen, notes = budget.choose([len(order) for order in orders])
        tiles, canvas = [resize(pixels, side, side, self.resample)], ways[chosen]
        if canvas is not None:
            tiles += cut(
                letterboxed(pixels, canvas, self.resample), canvas[1] // side, canvas[0] // side
            )
        return tiles, orders[chosen], notes

    def _order(self, size: Size, canvas: Size | None) -> np.ndarray:
        """The first tile's tokens, then those of the canvas that show the picture, row by row, a
        newline after each; int64 [T]
        """
        count, grid, side = self.tower.tokens, self.tower.grid, self.tower.image_size
        first = np.arange(count)
        if canvas is None:
            return np.append(first, -1)
        rows, columns = canvas[1] // side, canvas[0] // side
        cells = count + np.arange(rows * columns * count).reshape(rows, columns, grid, grid)
        cells = unpadded(cells.transpose(0, 2, 1, 3).reshape(rows * grid, columns * grid), size)
        return np.append(first, np.append(cells, np.full((len(cells), 1), -1), 1))

    def most_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        if not self.canvases:
            return self.tower.tokens
        most = [
            self.tower.tokens + down // self.tower.patch * (across // self.tower.patch + 1)
            for across, down in self.canvases
        ]
        return budget.most([max(most), *most, self.tower.tokens + 1])

    def tile_type(self) -> Type:
        return self.tower.tile_type

    largest_tile_type = tile_type

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        return self.tower.graph(tiles, weights, attention)


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What config.json and the image processor's settings would say.

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
        "model_type": "llava_next" if edges and not shapes.keys().isdisjoint(NEWLINES) else "llava",
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
    """From config.json and the image processor's settings, with transformers' defaults; ModelError
    where a value cannot be followed.
    """
    tower, tiled = _tower(top), top.get("model_type", "llava") == "llava_next"
    if tiled and tower.tokens != tower.grid**2:
        raise ModelError(
            f"{top.where}: vision_feature_select_strategy gives {tower.tokens} features for "
            f"{tower.grid**2} patches, "
            "expected as many: default for a tower with a class token, full for one without"
        )
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
    squared = read_squared(
        image, tower.image_size, crops=not kind.startswith("Siglip"), ground=ground
    )
    if tiled and squared.edge != tower.image_size:
        raise ModelError(
            f"{image.where}: size is {squared.edge}, expected {tower.image_size} as in "
            "config.json; correct one of them"
        )
    return LlavaVision(
        tower,
        normalize,
        RESAMPLE[image.choice("resample", RESAMPLE, 3)],
        squared,
        read_canvases(top, image, tower.image_size) if tiled else (),
    )


def _tower(top: Settings) -> FeatureTower:
    vision = top.part("vision_config")
    is_clip = vision.choice("model_type", TOWERS, TOWERS[0]) == TOWERS[0]
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
    if size % patch:
        raise ModelError(f"{vision.where}: image_size {size} is no multiple of patch_size {patch}")
    features = read_features(top, vit.layers)
    skip = top.choice("vision_feature_select_strategy", ("default", "full"), "default") == "default"
    return FeatureTower(
        replace(vit, layers=max(features)),
        size,
        patch,
        is_clip,
        features,
        skip,
        top.part("text_config").count("hidden_size", 4096, most=MAX_WIDTH),
        top.flag("multimodal_projector_bias", True),
        ACTIVATIONS[top.choice("projector_hidden_act", ACTIVATIONS, "gelu")],
    )
