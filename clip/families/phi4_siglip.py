"""Phi-4-reasoning-vision (model_type phi4-siglip): SigLIP 2's tower (arXiv:2502.14786) over a
picture in its own shape, a token for each patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    GgufTower,
    VitParams,
    biased_parameters,
    gguf_vit,
    linear_patches,
    read_vit,
    tower_keys,
    vit_block,
    vit_parameters,
)
from mtmd.clip.grids import Cells, Grids, OneGrid
from mtmd.clip.image.pixels import gguf_image
from mtmd.clip.resolution.naflex import MAX_PATCHES, PatchLimit, read_patch_limit
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

PADDING = "<|dummy_85|>"  # of the published vocabulary
TOWER = "model.vision_tower.vision_tower.vision_model"
LAYERS_LEFT_OUT = 1  # mm_vision_select_layer is -2


@dataclass(frozen=True)
class Phi4Vision:
    """`vit` has the layers that are read. `image_token` is the vocabulary's padding: the authors'
    prompts have a picture where no token stands.
    """

    vit: VitParams
    positions: int  # on a side of the tower's table
    text_width: int
    resolution: PatchLimit
    image_token: str = PADDING

    marker = "<image>"
    around = ("", "")
    bidirectional = False
    separator = None
    video = None

    @property
    def unused(self) -> tuple[str, ...]:
        tower = TOWER.replace(".", r"\.")
        return (
            rf"{tower}\.(head|post_layernorm)\..*",
            rf"{tower}\.encoder\.layers\.{self.vit.layers}\..*",
        )

    @property
    def cells(self) -> Cells:
        return Cells(self.resolution.patch)

    def parameters(self) -> Mapping[str, Parameter]:
        width = self.vit.width
        projector: dict[str, tuple[str, Shape]] = {
            "mm.0": ("model.mm_projector.0", (self.text_width, width)),
            "mm.2": ("model.mm_projector.2", (self.text_width, self.text_width)),
        }
        table = Parameter(
            (self.positions**2, width), _tower("embeddings.position_embedding.weight")
        )
        return {
            **vit_parameters(self.vit, _tower),
            **linear_patches(width, self.resolution.patch, _tower),
            **biased_parameters(projector, lambda name: (name,)),
            "v.position_embd.weight": table,
        }

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        return self.graph_on(OneGrid.of(tiles, self.cells), tiles, weights, attention)

    def graph_on(
        self, grids: Grids, tiles: Node, weights: WeightSource, attention: AttentionForm
    ) -> Node:
        w = Weights(weights, tiles.dtype)
        patches = (w.tensor(f"v.patch_embd.{kind}") for kind in ("weight", "bias"))
        x = ops.patch_embed(tiles, *patches, name="v.patch_embd")
        table = grids.table(
            w.tensor("v.position_embd.weight"),
            self.positions,
            "v.position_embd.resized",
            mode="bilinear",
            antialias=True,
        )
        x = ops.add(x, table, name="v.position_embd")
        for index in w.layers(self.vit.layers):
            x = vit_block(x, index, self.vit, w, attention=attention, bounds=grids.segments)
        x = ops.gelu(w.linear(x, "mm.0", bias=True), approximate="none", name="mm.gelu")
        return w.linear(x, "mm.2", bias=True)


def _tower(name: str) -> tuple[str, ...]:
    return (f"{TOWER}.{name}",)


def to_gguf(family: Phi4Vision) -> GgufTower:
    """Return the keys of a GGUF that says the same."""
    limit = family.resolution
    area = limit.patch**2
    keys = tower_keys(
        family.vit,
        image_size=family.positions * limit.patch,
        patch=limit.patch,
        text_width=family.text_width,
    )
    pixels = {"image_min_pixels": (limit.minimum or 1), "image_max_pixels": limit.maximum}
    keys |= {f"vision.{name}": count * area for name, count in pixels.items()}
    return GgufTower("phi4", keys | {"use_gelu": True})


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say; the layer that is not
    read is not in the file.
    """
    vision, patch = gguf_vit(keys), keys.count("vision.patch_size", 16)
    vision["num_hidden_layers"] = keys.count("vision.block_count") + LAYERS_LEFT_OUT
    rows = [*shapes.get("v.position_embd.weight", ()), None][0]
    config = {
        "vision_config": {**vision, "num_patches": rows},
        "hidden_size": keys.count("vision.projection_dim"),
    }
    limits = {
        f"{end}_num_patches": keys.count(f"vision.image_{end}_pixels", default) // patch**2
        for end, default in (("min", 256 * patch**2), ("max", 3600 * patch**2))
    }
    return config, {**gguf_image(keys), "patch_size": patch, **limits}


def read(top: Settings, image: Settings) -> Phi4Vision:
    """Read it from config.json and the image processor's settings, with the authors' defaults;
    ModelError where a value cannot be followed.
    """
    vision = top.part("vision_config")
    vit = read_vit(vision, layers=27, width=1152, ffn=4304, heads=16, act="gelu_pytorch_tanh")
    vision.choice("num_channels", (3,), 3)
    top.choice("mm_projector_type", ("mlp2x_gelu",), "mlp2x_gelu")
    top.choice("mm_vision_select_layer", (-2,), -2)
    if vit.layers <= LAYERS_LEFT_OUT:
        raise ModelError(
            f"{vision.where}: num_hidden_layers is {vit.layers}, expected at least "
            f"{LAYERS_LEFT_OUT + 1}, as the last is not read"
        )
    patches, patch = vision.count("num_patches", 256), vision.count("patch_size", 16)
    if isqrt(patches) ** 2 != patches:
        raise ModelError(
            f"{vision.where}: num_patches is {patches}, expected a square number, the rows of a "
            "position table"
        )
    if (value := image.count("patch_size", patch)) != patch:
        raise ModelError(
            f"{image.where}: patch_size is {value}, expected {patch} as config.json says; correct "
            "one of them"
        )
    low, high = (
        image.count(key, top.count(key, default, maximum=MAX_PATCHES), maximum=MAX_PATCHES)
        for key, default in (("min_num_patches", 256), ("max_num_patches", 3600))
    )
    if low > high:
        raise ModelError(
            f"{image.where}: min_num_patches is {low}, expected at most max_num_patches, {high}"
        )
    limit = read_patch_limit(
        Settings({**image.values, "max_num_patches": high}, image.where), patch
    )
    padding = image.part("tokens").get("pad_token", PADDING)
    return Phi4Vision(
        vit=replace(vit, layers=vit.layers - LAYERS_LEFT_OUT),
        positions=isqrt(patches),
        text_width=top.count("hidden_size", 5120, maximum=MAX_WIDTH),
        resolution=replace(limit, minimum=low),
        image_token=str(padding.get("content", PADDING) if isinstance(padding, dict) else padding),
    )
