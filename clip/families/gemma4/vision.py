"""Gemma 4's vision tower: pictures of any shape in a number of tokens, patches embedded by their
column and their row, a gated tower whose linear layers are clipped in the small models, neighbours
averaged, one projection (transformers' models/gemma4; there is no paper).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.clip.blocks import GgufTower, checkpoint_names, gguf_vit, tower_keys
from mtmd.clip.families.gemma4.tower import GatedTower, read_gated_tower
from mtmd.clip.grids import Cells, Grids, OneGrid, grid_positions
from mtmd.clip.image.pixels import fused, gguf_image
from mtmd.clip.image.resize import read_resample
from mtmd.clip.image.tensor_resize import MODES
from mtmd.clip.resolution.fixed_area import FixedArea, read_fixed_area
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.sizes import Size
from mtmd.clip.token_budget import Budget
from mtmd.clip.video.family import ClipShape
from mtmd.clip.video.rules import Beginnings, FrameRule
from mtmd.clip.video.single import SingleFrames
from mtmd.clip.video.video import Video
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

SIZES = (
    70,
    140,
    280,
    560,
    1120,
)  # tokens of a picture: the model is made for these, and the reference takes no others
USUAL = 280
USUAL_FRAME = 70
VIDEO_TOKEN = "<|video|>"


@dataclass(frozen=True)
class Gemma4Vision:
    tower: GatedTower
    patch: int
    pool: int
    locations: int  # how many columns have an embedding, and how many rows
    standardized: bool
    text_width: int
    bidirectional: bool
    resolution: FixedArea
    video: SingleFrames

    marker = image_token = "<|image|>"
    around = ("", "")
    separator = None
    unused = ()

    def parameters(self) -> Mapping[str, Parameter]:
        width, patch, tables = self.tower.width, self.patch, (2, self.locations, self.tower.width)
        return {
            **self.tower.parameters(_names),
            "v.patch_embd.weight": Parameter(
                (width, 3, patch, patch),
                _names("patch_embedder.input_proj.weight"),
                (width, 3 * patch**2),
                lambda w: w.unflatten(1, (patch, patch, 3)).permute(0, 3, 1, 2),
            ),
            "v.position_embd.weight": Parameter(
                shape=(2 * self.locations, width),
                sources=_names("patch_embedder.position_embedding_table"),
                stored=tables,
                convert=_joined,
                gguf=(Stored(("v.position_embd.weight",), tables, _joined),),
            ),
            **{
                f"v.{name}": Parameter((width,), _names(name))
                for name in ("std_bias", "std_scale")
                if self.standardized
            },
            "mm.input_projection.weight": Parameter(
                (self.text_width, width),
                checkpoint_names("embed_vision.embedding_projection.weight"),
            ),
        }

    def prompt(self, plan: ImagePlan) -> str:
        return f"<|image>{self.image_token * plan.tokens}<image|>"

    @property
    def cells(self) -> Cells:
        return Cells(self.patch, self.pool)

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        return self.graph_on(OneGrid.of(tiles, self.cells), tiles, weights, attention)

    def graph_on(
        self, grids: Grids, tiles: Node, weights: WeightSource, attention: AttentionForm
    ) -> Node:
        w = Weights(weights, tiles.dtype)
        locations = grids.of_patches("inp.places", lambda *grid: grid_positions(*grid).flip(0), 2)
        angles = ops.rope_table(locations, rotary=self.tower.rotary, name="v.angles")
        x = ops.scale(tiles, factor=2.0, offset=-1.0, name="v.pixels")
        x = ops.patch_embed(x, w.tensor("v.patch_embd.weight"), name="v.patch_embd")
        x = ops.add(x, embedded_locations(grids, w, self.locations), name="v.patch_embd.placed")
        for layer in w.layers(self.tower.layers):
            x = self.tower.block(x, layer, angles, w, attention=attention, bounds=grids.segments)
        x = ops.rms_norm(self._pooled(x, grids.shape, w), eps=self.tower.eps, name="mm.norm")
        return w.linear(x, "mm.input_projection")

    def _pooled(self, x: Node, grid: tuple[int, int], w: Weights) -> Node:
        """Averages of neighbours times sqrt(C), standardized in fp32, for large numbers cancel
        there

        [B, P, C] -> [B, T, C]
        """
        x = ops.pool2d(
            x, grid=grid, size=(grid[0] // self.pool, grid[1] // self.pool), name="v.pool"
        )
        if not self.standardized:
            return ops.scale(x, factor=self.tower.width**0.5, name="v.pool.scaled")
        wide = (
            x if x.dtype == torch.float32 else ops.cast(x, dtype=torch.float32, name="v.pool.fp32")
        )
        wide = ops.scale(wide, factor=self.tower.width**0.5, name="v.pool.scaled")
        mean = ops.scale(
            w.tensor("v.std_bias", torch.float32), factor=-1.0, name="v.std_bias.negative"
        )
        wide = ops.mul(
            ops.add(wide, mean, name="v.pool.centred"),
            w.tensor("v.std_scale", torch.float32),
            name="v.pool.standardized",
        )
        return (
            wide
            if x.dtype == torch.float32
            else ops.cast(wide, dtype=x.dtype, name="v.pool.rounded")
        )


def to_gguf(family: Gemma4Vision) -> GgufTower:
    """Return the keys of a GGUF that say the same; a picture's size is the reader's choice."""
    keys = tower_keys(
        family.tower, image_size=224, patch=family.patch, text_width=family.text_width
    )
    return GgufTower("gemma4v", keys | {"vision.projector.scale_factor": family.pool})


def embedded_locations(grids: Grids, w: Weights, locations: int) -> Node:
    """Return what stands in the table for each patch's column, and, `locations` further down, for
    its row

    -> [P, C]
    """

    def of(rows: int, columns: int) -> torch.Tensor:
        row, column = grid_positions(rows, columns)
        return torch.stack((column, row + locations))

    count = grids.patches
    at = grids.of_patches("inp.place_rows", of, 2, flat=True)
    both = ops.embed(at, w.tensor("v.position_embd.weight"), name="v.position_embd")
    column, row = (
        ops.rows(both, start=start, stop=start + count, name=f"v.position_embd.{start}")
        for start in (0, count)
    )
    return ops.add(column, row, name="v.position_embd.sum")


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say. A projector does not
    say whether pictures are read in both directions; that they may be keeps them whole, and the
    decoder decides. Nor does it say how many tokens a picture takes: as many as in published
    models, unless the table of positions is too short for that.
    """
    plain, table = gguf_vit(keys), shapes.get("v.position_embd.weight", ())
    locations = table[1] if len(table) == 3 else None
    head = keys.count("vision.embedding_length", maximum=MAX_WIDTH) // keys.count(
        "vision.attention.head_count", maximum=MAX_HEADS
    )
    merge = {
        "patch_size": keys.count("vision.patch_size", 16),
        "pooling_kernel_size": keys.count("vision.projector.scale_factor", 3),
    }
    vision = {
        **plain,
        **merge,
        "rms_norm_eps": plain["layer_norm_eps"],
        "num_key_value_heads": plain["num_attention_heads"],
        "head_dim": head,
        "position_embedding_size": locations,
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in shapes,
        "standardize": "v.std_bias" in shapes,
    }
    text = {
        "hidden_size": keys.get("vision.projection_dim", None),
        "use_bidirectional_attention": "vision",
    }
    tokens = max(
        (size for size in _sizes(merge["pooling_kernel_size"], locations or 0) if size <= USUAL),
        default=None,
    )
    return {"vision_config": vision, "text_config": text}, {
        **gguf_image(keys),
        **merge,
        "do_normalize": True,
        "max_soft_tokens": tokens,
    }


def read(top: Settings, image: Settings) -> Gemma4Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c, text = top.part("vision_config"), top.part("text_config")
    patch, pool, locations = (
        c.count("patch_size", 16),
        c.count("pooling_kernel_size", 3),
        c.count("position_embedding_size", 10240),
    )
    return Gemma4Vision(
        tower=read_gated_tower(c),
        patch=patch,
        pool=pool,
        locations=locations,
        standardized=c.flag("standardize", False),
        text_width=text.count("hidden_size", 2304, maximum=MAX_WIDTH),
        bidirectional=text.get("use_bidirectional_attention", None) == "vision",
        resolution=read_fixed_area(
            image, patch=patch, pool=pool, sizes=_sizes(pool, locations), usual=USUAL
        ),
        video=read_video(image.part("video_processor"), patch, pool, _sizes(pool, locations)),
    )


@dataclass(frozen=True)
class Area:
    """Frames shown as pictures are, in as many tokens as frames have."""

    pictures: FixedArea

    def fit(self, size: Size, budget: Budget) -> tuple[Size, int]:
        rows, columns = self.pictures.grid(size[1], size[0], budget)
        return (columns * self.pictures.cell, rows * self.pictures.cell), rows * columns

    def steps(self, size: Size, shape: Size) -> tuple[Size, ...]:  # noqa: ARG002
        return (shape,)


def read_video(video: Settings, patch: int, pool: int, sizes: tuple[int, ...]) -> SingleFrames:
    """Return how frames are shown, in one of `sizes`. Raises ModelError for settings that do not
    fit the model's.
    """
    same = {"patch_size": patch, "pooling_kernel_size": pool, "do_normalize": True}
    stepped = {**same, **video.values}
    area = read_fixed_area(
        Settings(stepped, video.where), patch=patch, pool=pool, sizes=sizes, usual=USUAL_FRAME
    )
    return SingleFrames(
        how=Area(area),
        normalize=fused(area.normalize) if stepped["do_normalize"] else area.normalize,
        resample=read_resample(video, 3, MODES),
        rule=FrameRule(Beginnings(video.count("num_frames", 32))),
        markers=(VIDEO_TOKEN,),
        token=VIDEO_TOKEN,
        write=_write,
    )


def _write(video: Video, shape: ClipShape) -> str:
    """Each frame behind its minute and second."""
    tokens = f"<|image>{VIDEO_TOKEN * shape.tokens}<image|>"
    return " ".join(f"{int(t // 60):02d}:{int(t % 60):02d} {tokens}" for t in video.times)


def _sizes(pool: int, locations: int) -> tuple[int, ...]:
    """Return the sizes that a narrow picture, one token wide, can have: it is that many times
    `pool` patches long.
    """
    return tuple(size for size in SIZES if size * pool <= locations)


def _names(name: str) -> tuple[str, ...]:
    return checkpoint_names(f"vision_tower.{name}")


def _joined(tables: torch.Tensor) -> torch.Tensor:
    return tables.flatten(0, 1)
