"""Gemma 4 12B (gemma4_unified), which has no encoder: raw pixels of patches of 48 x 48, normed and
projected, with embeddings of row and column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.clip.blocks import GgufTower, checkpoint_names
from mtmd.clip.families.gemma4.vision import SIZES, USUAL, embedded_locations, read_video
from mtmd.clip.grids import Cells, Grids, OneGrid
from mtmd.clip.image.pixels import gguf_image
from mtmd.clip.resolution.fixed_area import FixedArea, read_fixed_area
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.video.single import SingleFrames
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

NORM_EPS = 1e-5  # of the layer norms; the settings do not say
PATCH, POOL = 16, 3  # as published; GGUF files say 16 alone
NORMS = {1: "patch_ln1", 2: "patch_ln2", 3: "pos_norm"}


@dataclass(frozen=True)
class Gemma4Unified:
    """`side` pixels of a patch, C `width`; `locations`: how many columns have an embedding, and how
    many rows.
    """

    side: int
    width: int
    locations: int
    eps: float
    text_width: int
    bidirectional: bool
    resolution: FixedArea
    video: SingleFrames

    marker = image_token = "<|image|>"
    around = ("", "")
    separator = None
    unused = ()

    def parameters(self) -> Mapping[str, Parameter]:
        width, side, pixels = self.width, self.side, 3 * self.side**2

        def planes(tensor: torch.Tensor) -> torch.Tensor:
            """Columns of pixels as planes, which checkpoints have channel by channel in each."""
            whole: torch.Tensor = tensor.unflatten(-1, (side, side, 3))
            return whole.movedim(-1, -3).flatten(-3)

        parameters = {
            "v.patch_embd.weight": Parameter(
                (width, pixels), _names("patch_dense.weight"), convert=planes
            ),
            "v.patch_embd.bias": Parameter((width,), _names("patch_dense.bias")),
            "v.position_embd.weight": Parameter(
                shape=(2 * self.locations, width),
                sources=_names("pos_embedding"),
                stored=(self.locations, 2, width),
                convert=_by_axis,
                gguf=(
                    Stored(
                        ("v.position_embd.weight",),
                        (2, self.locations, width),
                        _joined,
                        invert=lambda table: (table.unflatten(0, (2, -1)),),
                    ),
                ),
            ),
            "mm.input_projection.weight": Parameter(
                (self.text_width, width),
                checkpoint_names("embed_vision.embedding_projection.weight"),
            ),
        }
        for number, name in NORMS.items():
            for end in ("weight", "bias"):
                parameters[f"v.patch_norm.{number}.{end}"] = Parameter(
                    (pixels if number == 1 else width,),
                    _names(f"{name}.{end}"),
                    convert=planes if number == 1 else None,
                )
        return parameters

    def prompt(self, plan: ImagePlan) -> str:
        return f"<|image>{self.image_token * plan.tokens}<image|>"

    @property
    def cells(self) -> Cells:
        return Cells(self.side)

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        return self.graph_on(OneGrid.of(tiles, self.cells), tiles, weights, attention)

    def graph_on(
        self,
        grids: Grids,
        tiles: Node,
        weights: WeightSource,
        attention: AttentionForm,  # noqa: ARG002
    ) -> Node:
        w = Weights(weights, tiles.dtype)
        x = ops.patches(tiles, size=self.side, name="v.patches")
        x = w.layer_norm(x, "v.patch_norm.1", NORM_EPS)
        x = w.layer_norm(w.linear(x, "v.patch_embd", bias=True), "v.patch_norm.2", NORM_EPS)
        x = ops.add(x, embedded_locations(grids, w, self.locations), name="v.patch_embd.placed")
        x = w.layer_norm(x, "v.patch_norm.3", NORM_EPS)
        return w.linear(ops.rms_norm(x, eps=self.eps, name="mm.norm"), "mm.input_projection")


def to_gguf(family: Gemma4Unified) -> GgufTower:
    """Return the keys of a GGUF that say the same: those of a transformer without blocks."""
    keys = {
        "vision.block_count": 0,
        "vision.embedding_length": family.width,
        "vision.feed_forward_length": 0,
        "vision.attention.head_count": 0,
        "vision.attention.layer_norm_epsilon": family.eps,
        "vision.image_size": 224,  # not read
        "vision.patch_size": family.side // POOL,
        "vision.projection_dim": family.text_width,
    }
    return GgufTower("gemma4uv", keys)


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say; as many tokens a
    picture as in published models.
    """
    table = shapes.get("v.position_embd.weight", ())
    vision = {
        "patch_size": keys.count("vision.patch_size", PATCH),
        "pooling_kernel_size": keys.count("vision.projector.scale_factor", POOL),
        "mm_embed_dim": keys.get("vision.embedding_length", None),
        "mm_posemb_size": table[1] if len(table) == 3 else None,
        "rms_norm_eps": keys.get("vision.attention.layer_norm_epsilon", None),
    }
    text = {
        "hidden_size": keys.get("vision.projection_dim", None),
        "use_bidirectional_attention": "vision",
    }
    merge = {key: vision[key] for key in ("patch_size", "pooling_kernel_size")}
    image = {**gguf_image(keys), **merge, "do_normalize": True}
    return {"vision_config": vision, "text_config": text}, image


def read(top: Settings, image: Settings) -> Gemma4Unified:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c, text = top.part("vision_config"), top.part("text_config")
    patch, pool = c.count("patch_size", PATCH), c.count("pooling_kernel_size", POOL)
    locations = c.count("mm_posemb_size", 1120)
    sizes = tuple(size for size in SIZES if size <= locations)
    return Gemma4Unified(
        side=patch * pool,
        width=c.count("mm_embed_dim", 3840, maximum=MAX_WIDTH),
        locations=locations,
        eps=c.number("rms_norm_eps", 1e-6),
        text_width=text.count("hidden_size", 2304, maximum=MAX_WIDTH),
        bidirectional=text.get("use_bidirectional_attention", "vision") == "vision",
        resolution=read_fixed_area(
            image, patch=patch, pool=pool, sizes=sizes, usual=USUAL, by_tensor=True
        ),
        video=read_video(image.part("video_processor"), patch, pool, sizes),
    )


def _names(name: str) -> tuple[str, ...]:
    return checkpoint_names(f"vision_embedder.{name}")


def _by_axis(tables: torch.Tensor) -> torch.Tensor:
    return tables.transpose(0, 1).flatten(0, 1)


def _joined(tables: torch.Tensor) -> torch.Tensor:
    return tables.flatten(0, 1)
