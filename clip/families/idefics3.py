"""Idefics3, SmolVLM (arXiv:2408.12637, 2504.05299): SigLIP over tiles and the whole picture, pixel
shuffle, row and column tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.clip import blocks
from mtmd.clip.blocks import VitParams, gguf_vit, read_vit
from mtmd.clip.image.pixels import gguf_image
from mtmd.clip.resolution.longest_edge import LongestEdgeTiling, read_longest_edge_tiling
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

ROWS = 6  # as many rows and columns have tokens


@dataclass(frozen=True)
class Idefics3Vision:
    vit: VitParams
    positions: int  # on a side of the tower's table
    patch: int
    factor: int
    text_width: int
    resolution: LongestEdgeTiling

    marker = "<image>"
    image_token = "<image>"
    bidirectional = False
    separator = None
    video = None
    unused = ()

    @property
    def grid(self) -> int:
        """Patches on a side of a tile."""
        return self.resolution.tile // self.patch

    def parameters(self) -> Mapping[str, Parameter]:
        width = self.vit.width
        patches = (width, 3, self.patch, self.patch)
        ends = {
            "v.patch_embd": ("embeddings.patch_embedding", patches),
            "v.post_ln": ("post_layernorm", (width,)),
        }
        parameters = blocks.vit_parameters(self.vit, _tower) | blocks.biased_parameters(
            ends, _tower
        )
        parameters["v.position_embd.weight"] = Parameter(
            (self.positions**2, width), _tower("embeddings.position_embedding.weight")
        )
        parameters["mm.model.fc.weight"] = Parameter(
            (self.text_width, width * self.factor**2),
            ("model.connector.modality_projection.proj.weight",),
        )
        return parameters

    def prompt(self, plan: ImagePlan) -> str:
        """Tiles line by line, each behind its row and column, and the whole picture."""
        around, images = "<fake_token_around_image>", self.image_token * self.resolution.tile_tokens
        rows, columns = plan.cut if len(plan.sizes) > 1 else (0, 0)
        lines = [
            "".join(
                f"{around}<row_{row + 1}_col_{column + 1}>{images}" for column in range(columns)
            )
            + "\n"
            for row in range(rows)
        ]
        return "".join(lines) + "\n" * bool(rows) + f"{around}<global-img>{images}{around}"

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, tiles.dtype)
        x = ops.patch_embed(
            tiles,
            w.tensor("v.patch_embd.weight"),
            w.tensor("v.patch_embd.bias"),
            name="v.patch_embd",
        )
        rows = _position_rows(self.grid, self.positions)
        at = graph_input("inp.position_rows", tuple(rows.shape), rows.dtype, lambda _: rows)
        x = ops.add(
            x,
            ops.take_rows(w.tensor("v.position_embd.weight"), at, name="v.position_rows"),
            name="v.position_embd",
        )
        for index in range(self.vit.layers):
            x = blocks.vit_block(x, index, self.vit, w, attention=attention)
        x = w.layer_norm(x, "v.post_ln", self.vit.eps)
        return w.linear(
            ops.unshuffle(x, grid=(self.grid, self.grid), factor=self.factor, name="mm.unshuffle"),
            "mm.model.fc",
        )


def _position_rows(grid: int, positions: int) -> torch.Tensor:
    """Which row of the tower's table, `positions` on a side, each patch of a tile takes, int64 [P]

    The reference puts fractions into buckets in fp32; one that falls just below its own bound
    shares its neighbour's row.
    """
    bounds = torch.arange(1 / positions, 1.0, 1 / positions)
    step = 1.0 / torch.tensor(grid)
    fractions = (torch.arange(grid, dtype=torch.float32) * step).clamp(max=1.0 - 1e-6)
    side = torch.bucketize(fractions, bounds, right=True)
    return (side[:, None] * positions + side).flatten()


def from_gguf(keys: Settings, names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ARG001
    """What config.json and the image processor's settings would say."""
    tile = keys.count("vision.image_size")
    config = {
        "vision_config": gguf_vit(keys),
        "text_config": {"hidden_size": keys.count("vision.projection_dim")},
        "scale_factor": keys.count("vision.projector.scale_factor", 2),
    }
    longest = keys.count(
        "vision.preproc_image_size", 4 * tile
    )  # older files leave it out: as in all models of their time
    return config, {
        **gguf_image(keys),
        "size": {"longest_edge": longest},
        "max_image_size": {"longest_edge": tile},
    }


def read(top: Settings, image: Settings) -> Idefics3Vision:
    """From config.json and the image processor's settings, with transformers' defaults; ModelError
    where a value cannot be followed.
    """
    vision = top.part("vision_config")
    vit = read_vit(vision, layers=12, width=1152, ffn=3072, heads=16, act="gelu_pytorch_tanh")
    vision.choice("num_channels", (3,), 3)
    size, patch, factor = (
        vision.count("image_size", 224),
        vision.count("patch_size", 32),
        top.count("scale_factor", 2),
    )
    return Idefics3Vision(
        vit=vit,
        positions=size // patch,
        patch=patch,
        factor=factor,
        text_width=top.part("text_config").count("hidden_size", 4096, most=MAX_WIDTH),
        resolution=read_longest_edge_tiling(
            image, patch=patch, positions=size // patch, factor=factor, most_in_a_row=ROWS
        ),
    )


def _tower(name: str) -> tuple[str, ...]:
    return (f"model.vision_model.{name}",)
