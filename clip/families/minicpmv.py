"""MiniCPM-V 2.6, 4.0 and 4.5, and the eyes of MiniCPM-o 2.6 and 4.5 (arXiv:2408.01800,
2509.18154): SigLIP over a picture and its slices, each of which a resampler (arXiv:2308.12966)
reads into a fixed number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    GgufTower,
    VitParams,
    attend,
    biased_parameters,
    buckets,
    gguf_vit,
    learned_queries,
    plain_vit,
    plain_vit_parameters,
    position_sines,
    read_vit,
    split_heads,
    table_rows,
    third,
    tower_keys,
)
from mtmd.clip.image.pixels import gguf_image
from mtmd.clip.image.resize import resize
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.slices import SlicedTiling, read_sliced_tiling
from mtmd.clip.video.family import ClipShape
from mtmd.clip.video.rules import FrameRule, Pick, SecondsOrMiddles, SpreadMiddles
from mtmd.clip.video.single import SingleFrames, WholeFrame
from mtmd.clip.video.video import Video
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

HEAD = 128  # of the resampler; the settings do not say
EPS = 1e-6  # of its norms, neither
IMAGE_TOKEN = "<unk>"
MAX_TOKENS = 4096  # of a tile; published models have 64
TABLE = 70  # positions on a side of a tensor that GGUF files have and nothing reads
# clip.minicpmv_version of GGUF files -> model_type and version of config.json
VERSIONS = {
    3: ("minicpmv", "2.6"),
    4: ("minicpmo", "2.6"),
    5: ("minicpmv", "4.0"),
    6: ("minicpmv", "4.5"),
    100045: ("minicpmo", "4.5"),
}
# Frames that the authors' examples take; 4.5's put those of longer videos together by threes.
SECONDS, SPREAD = SecondsOrMiddles(1.0, 64), SpreadMiddles(3.0, 180)
RULES: dict[str, Pick] = {"2.6": SECONDS, "4.0": SECONDS, "4.5": SPREAD}


@dataclass(frozen=True)
class MiniCpmVision:
    """`version` is a GGUF's clip.minicpmv_version."""

    version: int
    vit: VitParams
    positions: int  # on a side of the tower's table
    patch: int
    tokens: int  # of a tile
    text_width: int
    numbers: bool  # whether the prompt counts pictures
    resolution: SlicedTiling
    video: SingleFrames

    marker = "(<image>./</image>)"
    image_token = IMAGE_TOKEN
    around = ("", "")
    bidirectional = False
    separator = None
    unused = (
        r"resampler\.pos_embed_k",
        r"(apm|audio_projection_layer|tts)\..*",  # ears and voice of MiniCPM-o
    )

    def parameters(self) -> Mapping[str, Parameter]:
        width, inner = self.text_width, self.vit.width
        at = "resampler"
        ends: dict[str, tuple[str, Shape]] = {
            f"{at}.{name}": (f"{at}.{name}", (width,)) for name in ("ln_q", "ln_kv", "ln_post")
        }
        ends[f"{at}.attn.out"] = f"{at}.attn.out_proj", (width, width)
        shapes: dict[str, Shape] = {"weight": (width, width), "bias": (width,)}
        fused = {
            f"{at}.attn.{part}.{kind}": Parameter(
                shape, (f"{at}.attn.in_proj_{kind}",), (3 * width, *shape[1:]), third(index)
            )
            for index, part in enumerate("qkv")
            for kind, shape in shapes.items()
        }
        return {
            **plain_vit_parameters(self.vit, self.patch, self.positions**2, _tower),
            f"{at}.query": Parameter((self.tokens, width), (f"{at}.query",)),
            f"{at}.kv.weight": Parameter((width, inner), (f"{at}.kv_proj.weight",)),
            **fused,
            **biased_parameters(ends, lambda name: (name,)),
            f"{at}.proj.weight": Parameter(
                (width, width), (f"{at}.proj",), convert=lambda matrix: matrix.T
            ),
        }

    def numbered(self, index: int, video: bool) -> str:
        """The text before a picture that says which of a conversation's it is."""
        return f"<image_id>{index}</image_id>" if self.numbers and not video else ""

    def prompt(self, plan: ImagePlan) -> str:
        """The whole picture, and its slices line by line."""
        tokens, columns = self.image_token * self.tokens, plan.cut[1]
        sliced = [f"<slice>{tokens}</slice>"] * (len(plan.sizes) - 1)
        lines = ["".join(sliced[i : i + columns]) for i in range(0, len(sliced), columns)]
        return f"<image>{tokens}</image>" + "\n".join(lines)

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w, at, batch = Weights(weights, tiles.dtype), "resampler", tiles.shape[0]
        rows, columns = (side // self.patch for side in tiles.shape[2:])
        down, across = (torch.arange(0, 1 - 1e-6, 1 / side) for side in (rows, columns))
        positions = table_rows(buckets(down, across, self.positions), w)
        x = w.linear(plain_vit(tiles, positions, self.vit, w, attention), f"{at}.kv")
        values = w.layer_norm(x, f"{at}.ln_kv", EPS)
        sines = graph_input(
            "inp.sines",
            (rows * columns, self.text_width),
            tiles.dtype,
            lambda _: position_sines(rows, columns, self.text_width).to(tiles.dtype),
        )
        keys = ops.add(values, sines, name=f"{at}.positions")
        queries = w.layer_norm(learned_queries(f"{at}.query", batch, w), f"{at}.ln_q", EPS)
        q, k, v = (
            split_heads(w.linear(y, name, bias=True), self.text_width // HEAD, name)
            for y, name in (
                (queries, f"{at}.attn.q"),
                (keys, f"{at}.attn.k"),
                (values, f"{at}.attn.v"),
            )
        )
        x = w.linear(attend(q, k, v, attention, at=at), f"{at}.attn.out", bias=True)
        return w.linear(w.layer_norm(x, f"{at}.ln_post", EPS), f"{at}.proj")


def _tower(name: str) -> tuple[str, ...]:
    return (f"vpm.{name}",)


def _write(video: Video, shape: ClipShape) -> str:  # noqa: ARG001
    """Each frame as a picture, one below the other."""
    return "\n".join([f"<image>{IMAGE_TOKEN * shape.tokens}</image>"] * shape.groups)


def to_gguf(family: MiniCpmVision) -> GgufTower:
    """Return the keys of a GGUF that says the same, and a table of positions, without which
    llama.cpp does not open it.
    """
    keys = tower_keys(
        family.vit,
        image_size=family.resolution.side,
        patch=family.patch,
        text_width=family.text_width,
    )
    table = position_sines(TABLE, TABLE, family.text_width)
    return GgufTower(
        "resampler",
        keys
        | {
            "use_gelu": True,
            "has_minicpmv_projector": True,
            "minicpmv_version": family.version,
            "minicpmv_query_num": family.tokens,
        },
        tensors={"resampler.pos_embed_k": table},
    )


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say; how many slices there
    are, files do not tell.
    """
    vision, patch = gguf_vit(keys), keys.count("vision.patch_size", 14)
    version = keys.choice("minicpmv_version", VERSIONS, 0)
    kind, named = VERSIONS[version]
    rows = [*shapes.get("v.position_embd.weight", ()), 0][0]
    tokens, width = shapes.get("resampler.query", (0, 0))
    config = {
        "model_type": kind,
        "version": named,
        "vision_config": vision | {"image_size": isqrt(rows) * patch},
        "hidden_size": width,
        "query_num": tokens,
    }
    image = {
        **gguf_image(keys),
        "patch_size": patch,
        "scale_resolution": keys.count("vision.image_size", 448),
        "use_image_id": True,
    }
    return config, image


def read(top: Settings, image: Settings) -> MiniCpmVision:
    """Read it from config.json and the image processor's settings, with the defaults of the authors
    and of transformers' SigLIP; ModelError where a value cannot be followed.
    """
    kind, named = top.get("model_type", None), str(top.get("version", None))
    version = next((key for key, value in VERSIONS.items() if value == (kind, named)), None)
    if version is None:
        known = ", ".join(name for model, name in VERSIONS.values() if model == kind)
        raise ModelError(f"{top.where}: version is {named:.40}, expected one of {known}")
    vision = top.part("vision_config")
    vit = read_vit(vision, layers=12, width=768, ffn=3072, heads=12, act="gelu_pytorch_tanh")
    vision.choice("num_channels", (3,), 3)
    top.choice("drop_vision_last_layer", (False,), False)
    image.choice("slice_mode", (True,), True)
    patch = vision.count("patch_size", 16)
    width = top.count("hidden_size", 4096, maximum=MAX_WIDTH)
    if width % HEAD:
        raise ModelError(
            f"{top.where}: hidden_size is {width}, expected a multiple of {HEAD}, the size of the "
            "resampler's heads"
        )
    tokens = top.count("query_num", 64, maximum=MAX_TOKENS)
    image.choice("image_feature_size", (tokens,), tokens)
    side = vision.count("image_size", 224)
    if side < patch:
        raise ModelError(f"{vision.where}: image_size {side} is less than patch_size {patch}")
    named_otherwise = {
        ours: image.get(theirs, None)
        for ours, theirs in (("image_mean", "norm_mean"), ("image_std", "norm_std"))
        if image.get(theirs, None) is not None
    }
    image = Settings({**image.values, **named_otherwise}, image.where)
    resolution = read_sliced_tiling(image, patch, 1, tokens)
    return MiniCpmVision(
        version=version,
        vit=vit,
        positions=side // patch,
        patch=patch,
        tokens=tokens,
        text_width=width,
        numbers=image.flag("use_image_id", False),
        resolution=resolution,
        video=SingleFrames(
            how=WholeFrame(resolution),
            normalize=resolution.normalize,
            resample=resolution.resample,
            rule=FrameRule(RULES[named]),
            markers=("(<video>./</video>)",),
            token=IMAGE_TOKEN,
            write=_write,
            scaled=resize,
        ),
    )
