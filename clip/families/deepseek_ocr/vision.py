"""DeepSeek-OCR (arXiv:2510.18234) and Unlimited-OCR: SAM's encoder, whose features are the patches
of a CLIP tower, both side by side, one projection; tiles of a page and the whole of it.
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
    biased_parameters,
    read_vit,
    tower_keys,
    vit_block,
    vit_parameters,
)
from mtmd.clip.families.deepseek_ocr import ocr2
from mtmd.clip.families.deepseek_ocr.parts import (
    SEPARATOR,
    TASKS,
    TEMPLATE,
    UNLIMITED_TASKS,
    UNLIMITED_TEMPLATE,
    gguf_tiles,
    is_published,
    projector_parameters,
    sam_names,
    sam_settings,
    separator_parameter,
    text_width,
    tile_keys,
)
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.tiles_then_whole import TilesThenWhole, read_tiles_then_whole
from mtmd.clip.sam import (
    SamParams,
    at_size,
    one_side,
    read_sam,
    sam_features,
    sam_from_gguf,
    sam_keys,
    sam_parameters,
)
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

NEWLINE = "v.image_newline"
CLIP_EPS = 1e-5  # a GGUF has SAM's
# The most tiles of a page, and what resizes it: the authors' code has Pillow, transformers, which
# has only the second, torchvision.
TILES = {"deepseek_vl_v2": 9, "unlimited_ocr": 32}
TILE = 640


@dataclass(frozen=True)
class DeepseekOcrVision:
    """`grid` x `grid` patches are what CLIP's positions are learned for."""

    sam: SamParams
    vit: VitParams
    grid: int
    text_width: int
    resolution: TilesThenWhole
    unlimited: bool

    box_scale = "1000"
    marker = "<image>"
    around = ("", "")
    image_token = "<image>"
    bidirectional = False
    separator = SEPARATOR
    video = None
    unused = (
        r"(model\.)?vision_(model|tower\.vision_encoder)\.embeddings\.(patch_embedding\..*|position_ids)",
        r"v\.patch_embd\.weight",
    )

    @property
    def tasks(self) -> Mapping[str, str]:
        """Return the authors' prompts."""
        return UNLIMITED_TASKS if self.unlimited else TASKS

    @property
    def template(self) -> str:
        """Return how the authors write a conversation."""
        return UNLIMITED_TEMPLATE if self.unlimited else TEMPLATE

    def parameters(self) -> Mapping[str, Parameter]:
        width, text = self.vit.width, self.text_width
        parameters = sam_parameters(self.sam, sam_names)
        in_one = ("attn_q", "attn_k", "attn_v")
        parameters |= {
            name: parameter
            for name, parameter in vit_parameters(self.vit, _clip_names).items()
            if name.split(".")[3] not in in_one
        }
        for layer in range(self.vit.layers):
            parameters |= _fused(layer, width)
        parameters["v.class_embd"] = Parameter((width,), _clip_names("embeddings.class_embedding"))
        parameters["v.position_embd.weight"] = Parameter(
            (self.grid**2 + 1, width), _clip_names("embeddings.position_embedding.weight")
        )
        norm = {"v.pre_ln": ("pre_layrnorm", (width,))}  # spelled so
        parameters |= biased_parameters(norm, _clip_names)
        parameters |= projector_parameters((text, width + self.sam.ends[1]))
        parameters[NEWLINE] = Parameter((text,), ("model.image_newline", "image_newline"))
        return parameters | separator_parameter(text)

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] -> embeddings [B, 1 + T, D], a newline first"""
        w = Weights(weights, tiles.dtype)
        features = sam_features(tiles, self.sam, w, attention)
        patches = features.shape[1]
        x = ops.prepend(features, w.tensor("v.class_embd"), name="v.class_embd.first")
        x = ops.add(x, self._positions(isqrt(patches), w), name="v.position_embd")
        x = w.layer_norm(x, "v.pre_ln", self.vit.eps)
        for index in w.layers(self.vit.layers):
            x = vit_block(x, index, self.vit, w, attention=attention, fused=True)
        rest = graph_input(
            "inp.patches", (patches,), torch.int64, lambda _: torch.arange(1, patches + 1)
        )
        x = ops.take_rows(x, rest, name="v.patches")
        x = ops.concat(x, features, axis=2, name="v.features")
        x = w.linear(x, "mm.model.fc", bias=True)
        return ops.prepend(x, w.tensor(NEWLINE), name="mm.newline")

    def _positions(self, side: int, w: Weights) -> Node:
        """[1 + side * side, C], that of the class token first"""
        table, count = w.tensor("v.position_embd.weight"), self.grid**2
        if side == self.grid:
            return table
        first = ops.rows(table, start=0, stop=1, name="v.position_embd.class")
        grid = ops.rows(table, start=1, stop=count + 1, name="v.position_embd.grid")
        grid = at_size(grid, (self.grid, self.grid), (side, side), "v.position_embd.resized")
        return ops.concat(first, grid, axis=0, name="v.position_embd.joined")


def _clip_names(name: str) -> tuple[str, ...]:
    authors = name.replace("encoder.", "transformer.", 1)
    return (
        f"model.vision_model.{authors}",
        f"vision_model.{authors}",
        f"model.vision_tower.vision_encoder.{name}",
        f"vision_tower.vision_encoder.{name}",
    )


def _fused(layer: int, width: int) -> dict[str, Parameter]:
    """Queries, keys and values in one, as the authors and GGUF have them; transformers has
    three.
    """
    parameters: dict[str, Parameter] = {}
    for kind, shape in (("weight", (width, width)), ("bias", (width,))):
        names = [_clip_names(f"encoder.layers.{layer}.self_attn.{n}_proj.{kind}") for n in "qkv"]
        separate = (
            Stored(three, shape, _joined, picks_rows=True) for three in zip(*names, strict=True)
        )
        parameters[f"v.blk.{layer}.attn_qkv.{kind}"] = Parameter(
            (3 * width, *shape[1:]),
            _clip_names(f"encoder.layers.{layer}.self_attn.qkv_proj.{kind}"),
            others=tuple(separate),
        )
    return parameters


def _joined(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)


def to_gguf(family: DeepseekOcrVision) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    patch, resolution = 14, family.resolution
    keys = tower_keys(
        family.vit, image_size=family.grid * patch, patch=patch, text_width=family.text_width
    )
    keys |= sam_keys(family.sam) | tile_keys(resolution) | {"use_gelu": True}
    if family.unlimited:  # for us: llama.cpp reads no such key
        keys["unlimited_ocr"] = True
    return GgufTower("deepseekocr", keys)


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say; of CLIP's feed-forward
    layers the keys say something else than the tensors, of the size of tiles nothing.
    """
    sam = sam_from_gguf(keys, shapes)
    tiles = keys.get("vision.preproc_max_tiles", None)
    is_unlimited = keys.flag("unlimited_ocr", tiles == TILES["unlimited_ocr"])
    config = {
        "model_type": "unlimited_ocr" if is_unlimited else "deepseek_vl_v2",
        "vision_config": {
            "sam_config": sam,
            "encoder_config": {
                "num_hidden_layers": keys.get("vision.block_count", None),
                "hidden_size": keys.get("vision.embedding_length", None),
                "num_attention_heads": keys.get("vision.attention.head_count", None),
                "intermediate_size": [*shapes.get("v.blk.0.ffn_up.weight", ()), None][0],
                "image_size": keys.get("vision.image_size", None),
                "patch_size": keys.get("vision.patch_size", None),
            },
        },
        "text_config": {"hidden_size": keys.get("vision.projection_dim", None)},
    }
    return config, gguf_tiles(keys, sam, TILE)


def read(top: Settings, image: Settings) -> DeepseekOcrVision | ocr2.DeepseekOcr2Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults or
    the authors' keys; ModelError where a value cannot be followed.
    """
    kind = top.choice("model_type", TILES, "deepseek_vl_v2")
    vision = top.part("vision_config")
    if is_published(vision) and "qwen2-0-5b" in vision.part("width").values:
        return ocr2.read(top, image)  # of the same model_type
    encoder = vision.part("encoder_config")
    sam = read_sam(sam_settings(vision))
    if is_published(vision):
        theirs = vision.part("width").part("clip-l-14-224")
        width = theirs.count("width", 1024, maximum=MAX_WIDTH)
        encoder = Settings(
            {
                "num_hidden_layers": theirs.get("layers", None),
                "hidden_size": width,
                "num_attention_heads": theirs.get("heads", None),
                "intermediate_size": 4 * width,
                "image_size": theirs.get("image_size", None),
                "patch_size": theirs.get("patch_size", None),
            },
            theirs.where,
        )
        top.part("projector_config").choice("projector_type", ("linear",), "linear")
    vit = read_vit(
        encoder, layers=24, width=1024, ffn=4096, heads=16, act="quick_gelu", eps=CLIP_EPS
    )
    size, patch = one_side(encoder, "image_size", 224), one_side(encoder, "patch_size", 14)
    if size % patch or sam.ends[1] != vit.width:
        raise ModelError(
            f"{encoder.where}: pictures of {size} pixels in patches of {patch}, width {vit.width} "
            f"behind {sam.ends[1]} channels; expected whole patches, and as many channels"
        )
    return DeepseekOcrVision(
        sam=sam,
        vit=vit,
        grid=size // patch,
        text_width=text_width(top),
        resolution=read_tiles_then_whole(
            image,
            side=1024,
            tile=TILE,
            maximum=TILES[kind],
            step=sam.step,
            newlines=True,
            by_tensor=kind == "unlimited_ocr",
        ),
        unlimited=kind == "unlimited_ocr",
    )
