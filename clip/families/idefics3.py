"""Idefics3, SmolVLM (arXiv:2408.12637, 2504.05299): SigLIP over tiles and the whole picture, pixel
shuffle, row and column tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mtmd.clip import blocks
from mtmd.clip.blocks import (
    RESAMPLE,
    Normalize,
    VitParams,
    gguf_image,
    gguf_vit,
    read_normalize,
    read_vit,
)
from mtmd.clip.budget import DEFAULT_BUDGET, Budget
from mtmd.clip.family import ImagePlan
from mtmd.clip.image.decode import resize
from mtmd.clip.resolution.tiling import (
    MAX_SIDE,
    MAX_TILE,
    cut,
    edge_grid,
    read_longest,
    scaled_to_edge,
)
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.errors import ModelError
from mtmd.kernels.graph import Node, Type, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash import AttentionForm

ROWS = 6  # as many rows and columns have tokens


@dataclass(frozen=True)
class Idefics3Vision:
    vit: VitParams
    positions: int  # on a side of the tower's table
    patch: int
    tile: int
    longest: int
    splits: bool
    factor: int
    text_width: int
    normalize: Normalize
    resample: str

    marker = "<image>"
    image_token = "<image>"
    bidirectional = False
    separator = None
    unused = ()

    @property
    def grid(self) -> int:
        """Patches on a side of a tile."""
        return self.tile // self.patch

    @property
    def tile_tokens(self) -> int:
        return (self.grid // self.factor) ** 2

    def parameters(self) -> Mapping[str, Parameter]:
        width = self.vit.width
        patches = (width, 3, self.patch, self.patch)
        ends = {
            "v.patch_embd": ("embeddings.patch_embedding", patches),
            "v.post_ln": ("post_layernorm", (width,)),
        }
        found = blocks.vit_parameters(self.vit, _tower) | blocks.biased_parameters(ends, _tower)
        found["v.position_embd.weight"] = Parameter(
            (self.positions**2, width), _tower("embeddings.position_embedding.weight")
        )
        found["mm.model.fc.weight"] = Parameter(
            (self.text_width, width * self.factor**2),
            ("model.connector.modality_projection.proj.weight",),
        )
        return found

    def prepare(self, pixels: np.ndarray, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        """Scaled to the longest edge, stretched to whole tiles, cut, and once more as a whole; each
        step rounds as the reference does.
        """
        size, edges = (pixels.shape[1], pixels.shape[0]), self._edges(budget)
        grids = [edge_grid(size, edge, self.tile) for edge in edges]
        chosen, notes = budget.choose([self._tokens(grid) for grid in grids])
        rows, columns = grids[chosen]
        scaled = resize(pixels, *scaled_to_edge(size, edges[chosen] or self.longest), self.resample)
        if rows:
            scaled = resize(scaled, columns * self.tile, rows * self.tile, self.resample)
        tiles = [
            *(cut(scaled, rows, columns) if rows else []),
            resize(scaled, self.tile, self.tile, self.resample),
        ]
        return ImagePlan(
            tuple(self.normalize(t) for t in tiles),
            ((self.tile, self.tile),) * len(tiles),
            self._tokens((rows, columns)),
            self._prompt(rows, columns),
            notes=notes,
        )

    def _edges(self, budget: Budget) -> list[int]:
        """The longest edges at which a picture may be shown, the checkpoint's own first; 0 is the
        whole picture alone.
        """
        own = self.longest if self.splits else 0
        others = (
            [0, *(self.tile * count for count in range(2, ROWS + 1))]
            if self.splits and budget != DEFAULT_BUDGET
            else []
        )
        return [own, *others]

    def _tokens(self, grid: tuple[int, int]) -> int:
        return (grid[0] * grid[1] + 1) * self.tile_tokens

    def _prompt(self, rows: int, columns: int) -> str:
        around, images = "<fake_token_around_image>", self.image_token * self.tile_tokens
        lines = [
            "".join(
                f"{around}<row_{row + 1}_col_{column + 1}>{images}" for column in range(columns)
            )
            + "\n"
            for row in range(rows)
        ]
        return "".join(lines) + "\n" * bool(rows) + f"{around}<global-img>{images}{around}"

    def most_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        return budget.most(
            [self._tokens(edge_grid((1, 1), edge, self.tile)) for edge in self._edges(budget)]
        )

    def tile_type(self) -> Type:
        return Type.contiguous((3, self.tile, self.tile), torch.float32)

    largest_tile_type = tile_type

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
            x = blocks.vit_block(x, index, self.vit, w, attention)
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
    tile, longest = read_longest(image, "max_image_size", 364), read_longest(image, "size", 4 * 364)
    if (
        size < patch
        or tile % patch
        or (tile // patch) % factor
        or longest > MAX_SIDE * tile
        or tile > MAX_TILE
    ):
        raise ModelError(
            f"{image.where}: max_image_size {tile} does not fit size {longest}, or patch_size "
            f"{patch} and scale_factor "
            f"{factor} of config.json; expected at most {MAX_SIDE} tiles in a row, up to "
            f"{MAX_TILE} wide, of whole groups"
        )
    return Idefics3Vision(
        vit,
        size // patch,
        patch,
        tile,
        longest,
        image.flag("do_image_splitting", True),
        factor,
        top.part("text_config").count("hidden_size", 4096, most=MAX_WIDTH),
        read_normalize(image),
        RESAMPLE[image.choice("resample", RESAMPLE, 1)],
    )


def _tower(name: str) -> tuple[str, ...]:
    return (f"model.vision_model.{name}",)
