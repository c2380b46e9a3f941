"""Idefics3, SmolVLM (arXiv:2408.12637, 2504.05299): SigLIP over tiles and the whole picture, pixel
shuffle, row and column tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.clip import blocks
from mtmd.clip.blocks import GgufTower, VitParams, gguf_vit, read_vit, tower_keys
from mtmd.clip.image.pixels import fused, gguf_image, read_normalize
from mtmd.clip.image.resize import read_resample
from mtmd.clip.image.tensor_resize import MODES
from mtmd.clip.resolution.longest_edge import (
    LONGEST,
    LongestEdgeTiling,
    read_longest_edge_tiling,
    scaled_to_edge,
)
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.sizes import Size, read_longest
from mtmd.clip.token_budget import Budget
from mtmd.clip.video.family import ClipShape
from mtmd.clip.video.number_words import in_words
from mtmd.clip.video.rules import FrameRule, WithoutEnds
from mtmd.clip.video.single import SingleFrames
from mtmd.clip.video.video import Video
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

IMAGE_TOKEN, AROUND = "<image>", "<fake_token_around_image>"
ROWS = 6  # as many rows and columns have tokens


@dataclass(frozen=True)
class Idefics3Vision:
    vit: VitParams
    positions: int  # on a side of the tower's table
    patch: int
    factor: int
    text_width: int
    resolution: LongestEdgeTiling
    video: SingleFrames | None  # of SmolVLM2

    marker = image_token = IMAGE_TOKEN
    around = ("", "")
    bidirectional = False
    separator = None
    unused = ()

    @property
    def grid(self) -> int:
        """Patches on a side of a tile."""
        return self.resolution.tile // self.patch

    def parameters(self) -> Mapping[str, Parameter]:
        width = self.vit.width
        parameters = blocks.plain_vit_parameters(self.vit, self.patch, self.positions**2, _tower)
        parameters["mm.model.fc.weight"] = Parameter(
            (self.text_width, width * self.factor**2),
            (
                "model.connector.modality_projection.proj.weight",
                "connector.modality_projection.proj.weight",
            ),
        )
        return parameters

    def prompt(self, plan: ImagePlan) -> str:
        """Tiles line by line, each behind its row and column, and the whole picture."""
        around, images = AROUND, self.image_token * self.resolution.tile_tokens
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
        positions = blocks.bucketed_positions((self.grid, self.grid), self.positions, w)
        x = blocks.plain_vit(tiles, positions, self.vit, w, attention)
        return w.linear(
            ops.unshuffle(x, grid=(self.grid, self.grid), factor=self.factor, name="mm.unshuffle"),
            "mm.model.fc",
        )


def to_gguf(family: Idefics3Vision) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    tile = family.resolution.tile
    keys = tower_keys(family.vit, image_size=tile, patch=family.patch, text_width=family.text_width)
    return GgufTower(
        "idefics3",
        keys
        | {
            "use_gelu": True,
            "vision.projector.scale_factor": family.factor,
            "vision.preproc_image_size": family.resolution.longest,
        },
    )


def from_gguf(keys: Settings, names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ARG001
    """Return what config.json and the image processor's settings would say."""
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
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    vision = top.part("vision_config")
    vit = read_vit(vision, layers=12, width=1152, ffn=3072, heads=16, act="gelu_pytorch_tanh")
    vision.choice("num_channels", (3,), 3)
    size, patch, factor = (
        vision.count("image_size", 224),
        vision.count("patch_size", 32),
        top.count("scale_factor", 2),
    )
    resolution = read_longest_edge_tiling(
        image, patch=patch, positions=size // patch, factor=factor, max_in_a_row=ROWS
    )
    films = top.get("model_type", "") == "smolvlm"  # which a GGUF does not say
    return Idefics3Vision(
        vit=vit,
        positions=size // patch,
        patch=patch,
        factor=factor,
        text_width=top.part("text_config").count("hidden_size", 4096, maximum=MAX_WIDTH),
        resolution=resolution,
        video=_read_video(image.part("video_processor"), resolution) if films else None,
    )


@dataclass(frozen=True)
class Squared:
    """A square of `side` pixels, by way of a size whose longer edge is `longest`."""

    side: int
    tokens: int
    longest: int

    def fit(self, size: Size, budget: Budget) -> tuple[Size, int]:  # noqa: ARG002
        budget.check_fixed(self.tokens)
        return (self.side, self.side), self.tokens

    def steps(self, size: Size, shape: Size) -> tuple[Size, ...]:
        return scaled_to_edge(size, min(self.longest, LONGEST)), shape


def _read_video(video: Settings, resolution: LongestEdgeTiling) -> SingleFrames:
    """Sampling is told by a part of its own, in which the size counts where none is beside it."""
    tile = read_longest(video, "max_image_size", resolution.tile)
    if tile != resolution.tile:
        raise ModelError(
            f"{video.where}: max_image_size is {tile}, expected {resolution.tile} as for pictures; "
            "correct one of them"
        )
    sampling = video.part("video_sampling")
    sized = video if video.part("size").values else sampling
    key = "size" if sized is video else "video_size"
    default = 4 * 364
    return SingleFrames(
        how=Squared(tile, resolution.tile_tokens, read_longest(sized, key, default)),
        normalize=fused(read_normalize(video)),
        resample=read_resample(video, 1, MODES),
        rule=FrameRule(
            WithoutEnds(
                sampling.number("fps", video.number("fps", 1.0)),
                sampling.count("max_frames", video.count("num_frames", 64)),
            )
        ),
        markers=("<video>",),
        token=IMAGE_TOKEN,
        write=_write,
    )


def _write(video: Video, shape: ClipShape) -> str:
    """Each frame behind its minute and second."""
    tokens = f"{AROUND}<global-img>{IMAGE_TOKEN * shape.tokens}{AROUND}"
    length = timedelta(seconds=int(video.facts.seconds))
    frames = (
        f"\nFrame from {int(time // 60):02d}:{int(time % 60):02d}:{tokens}" for time in video.times
    )
    return (
        f"You are provided the following series of {in_words(shape.groups)} frames from a {length} "
        f"[H:MM:SS] video.\n{''.join(frames)}\n\n"
    )


def _tower(name: str) -> tuple[str, ...]:
    return f"model.vision_model.{name}", f"vision_model.{name}"
