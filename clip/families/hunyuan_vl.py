"""HunyuanOCR's vision tower (arXiv:2511.19575): pictures of any size, a table of positions scaled
to their grid; convolutions make tokens of patches, and vectors of their own begin the picture, end
each of its rows, and end it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mtmd.clip.blocks import (
    GgufTower,
    VitParams,
    biased_parameters,
    gguf_vit,
    read_vit,
    tower_keys,
    vit_block,
    vit_parameters,
)
from mtmd.clip.grids import Cells, OneGrid
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.smart_resize import DynamicResolution, gguf_dynamic, read_dynamic
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

PIXELS = 512 * 512, 2048 * 2048  # transformers' defaults
IMAGE_TOKEN = "<｜hy_place▁holder▁no▁102｜>"
AROUND = "<｜hy_place▁holder▁no▁100｜>", "<｜hy_place▁holder▁no▁101｜>"
NAMES = {
    "layer_norm1": "input_layernorm",
    "layer_norm2": "post_attention_layernorm",
    "fc1": "dense_h_to_4h",
    "fc2": "dense_4h_to_h",
    "out_proj": "o_proj",
}
# As in its model card
TASKS = {
    "markdown": "Extract all information from the main body of the document image and represent it "
    "in markdown format, ignoring headers and footers. Tables should be expressed in HTML format, "
    "formulas in the document should be represented using LaTeX format, and the parsing should be "
    "organized according to the reading order.",
    "text": "Extract the text in the image.",
    "table": "Parse the table in the image into HTML.",
    "formula": "Identify the formula in the image and represent it using LaTeX format.",
    "layout": "Detect and recognize text in the image, and output the text coordinates in a "
    "formatted manner.",
}
VECTORS = {"mm.image_begin": "image_begin", "mm.image_end": "image_end"}


@dataclass(frozen=True)
class HunyuanVision:
    vit: VitParams
    side: int  # of the table of positions, a square
    text_width: int
    image_token: str
    resolution: DynamicResolution

    around = AROUND
    bidirectional = False
    separator = None
    video = None
    unused = ()

    tasks = TASKS

    @property
    def marker(self) -> str:
        return self.image_token

    @property
    def cells(self) -> Cells:
        return Cells(self.resolution.patch, self.resolution.merge)

    def parameters(self) -> Mapping[str, Parameter]:
        width, patch, merge, text = (
            self.vit.width,
            self.resolution.patch,
            self.resolution.merge,
            self.text_width,
        )
        parameters = vit_parameters(self.vit, _layer)
        parameters |= biased_parameters(
            {
                "v.patch_embd": ("embeddings.patch_embedding", (width, 3, patch, patch)),
                "mm.model.fc": ("perceive.mlp", (text, 4 * width)),
            },
            _vit,
        )
        parameters["v.position_embd.weight"] = Parameter(
            shape=(self.side**2, width),
            sources=_vit("embeddings.position_embedding.weight"),
            stored=(self.side**2 + 1, width),  # the first is of a class token that is not there
            convert=lambda table: table[1:],
        )
        kernels = {
            "mm.0": ("perceive.proj.0", (2 * width, width, merge, merge)),
            "mm.2": ("perceive.proj.2", (4 * width, 2 * width, 1, 1)),
        }
        for name, (theirs, shape) in kernels.items():
            at = f"{name}.weight"
            flat = partial(torch.flatten, start_dim=1)
            parameters[at] = Parameter(
                shape=(shape[0], shape[1] * shape[2] * shape[3]),
                sources=_vit(f"{theirs}.weight"),
                stored=shape,
                convert=flat,
                gguf=(Stored((at,), shape, flat),),
            )
            parameters[f"{name}.bias"] = Parameter(shape[:1], _vit(f"{theirs}.bias"))
        vectors: dict[str, tuple[str, int]] = {
            "mm.pre_norm.weight": ("before_rms.weight", width),
            "mm.post_norm.weight": ("after_rms.weight", text),
            "v.image_newline": ("image_newline", 4 * width),
            "mm.image_begin": ("image_begin", text),
            "mm.image_end": ("image_end", text),
            "v.view_seperator": ("image_sep", text),  # as GGUF spells it; no graph reads it
        }
        return parameters | {
            name: Parameter((size,), _vit(f"perceive.{theirs}"))
            for name, (theirs, size) in vectors.items()
        }

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w, vit, grids = Weights(weights, tiles.dtype), self.vit, OneGrid.of(tiles, self.cells)
        x = ops.patch_embed(
            tiles,
            w.tensor("v.patch_embd.weight"),
            w.tensor("v.patch_embd.bias"),
            name="v.patch_embd",
        )
        rows, name = w.tensor("v.position_embd.weight"), "v.position_embd.scaled"
        x = ops.add(x, grids.table(rows, self.side, name, mode="bilinear"), name="v.position_embd")
        for index in w.layers(vit.layers):
            x = vit_block(x, index, vit, w, attention=attention)
        merge = self.resolution.merge
        x = ops.unshuffle(
            w.rms_norm(x, "mm.pre_norm", vit.eps),
            grid=grids.shape,
            factor=merge,
            channels_first=True,
            name="mm.merged",
        )
        x = ops.gelu(w.linear(x, "mm.0", bias=True), approximate=vit.gelu, name="mm.gelu")
        x = ops.prepend(
            w.linear(x, "mm.2", bias=True), w.tensor("v.image_newline"), name="mm.newline"
        )
        x = w.linear(x, "mm.model.fc", bias=True)
        for name in reversed(VECTORS):
            x = ops.prepend(x, w.tensor(name), name=f"{name}.first")
        order = _order(grids.shape[0] // merge, grids.shape[1] // merge)
        at = graph_input("inp.order", tuple(order.shape), torch.int64, lambda _: order)
        return w.rms_norm(ops.take_rows(x, at, name="mm.ordered"), "mm.post_norm", vit.eps)


def _order(rows: int, columns: int) -> torch.Tensor:
    """int64 [rows * (columns + 1) + 2]: which of begin, end, newline and tokens, in that order,
    stands where.
    """
    tokens = torch.arange(rows * columns).view(rows, columns) + 3
    lines = torch.cat((tokens, torch.full((rows, 1), 2)), 1).flatten()
    return torch.cat((torch.tensor([0]), lines, torch.tensor([1])))


def to_gguf(family: HunyuanVision) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    way = family.resolution
    keys = tower_keys(
        family.vit,
        image_size=family.side * way.patch,
        patch=way.patch,
        text_width=family.text_width,
    )
    return GgufTower(
        "hunyuanvl",
        keys
        | {
            "use_gelu": True,
            "vision.spatial_merge_size": way.merge,
            "vision.image_min_pixels": way.minimum,
            "vision.image_max_pixels": way.maximum,
        },
    )


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ARG001
    """Return what config.json and the image processor's settings would say."""
    merge = keys.count("vision.spatial_merge_size", 2)
    vision = gguf_vit(keys) | {
        "hidden_act": "gelu",  # as published; files do not say which
        "max_image_size": keys.count("vision.image_size", 2048),
        "spatial_merge_size": merge,
    }
    config = {
        "vision_config": vision,
        "text_config": {"hidden_size": keys.count("vision.projection_dim")},
    }
    return config, {**gguf_dynamic(keys, merge), "temporal_patch_size": 1}


def read(top: Settings, image: Settings) -> HunyuanVision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c = top.part("vision_config")
    c.choice("num_channels", (3,), 3)
    c.choice("temporal_patch_size", (1,), 1)
    c.choice("interpolate_mode", ("bilinear",), "bilinear")
    patch, text = c.count("patch_size", 16), top.part("text_config")
    # The reference resizes with its own filter, whatever the settings name.
    cubic = Settings({"patch_size": 16, **image.values, "resample": 3}, image.where)
    return HunyuanVision(
        vit=read_vit(
            c,
            layers=27,
            width=1152,
            ffn=4304,
            heads=16,
            act="gelu",
            eps=c.number("rms_norm_eps", 1e-5),
        ),
        side=c.count("max_image_size", 2048) // patch,
        # Published settings have the decoder's beside these.
        text_width=(text if text.values else top).count("hidden_size", 4096, maximum=MAX_WIDTH),
        image_token=str(image.part("tokens").get("image_token", IMAGE_TOKEN)),
        resolution=read_dynamic(
            cubic,
            patch,
            c.count("spatial_merge_size", 2),
            temporal=1,
            limits=PIXELS,
            separated=True,
        ),
    )


def _layer(name: str) -> tuple[str, ...]:
    """The checkpoint's name of a layer's tensor, from SigLIP's."""
    *before, part, kind = name.removeprefix("encoder.").split(".")
    return _vit(".".join((*before, NAMES.get(part, part), kind)))


def _vit(name: str) -> tuple[str, ...]:
    return (f"vit.{name}",)
