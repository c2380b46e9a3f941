"""Nemotron 3 Nano Omni's and Nemotron Nano 2 VL's eyes (arXiv:2511.03929): C-RADIO
(arXiv:2412.07679), whose positions are cut out of one scaled square, before whose patches learned
rows stand; pixel unshuffle, an RMS norm and two layers with a squared ReLU between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    VitParams,
    attend,
    biased_parameters,
    gguf_vit,
    learned_queries,
    mlp,
    read_vit,
    split_heads,
)
from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD, gguf_image, read_normalize
from mtmd.clip.resolution.fixed_square import FixedSquare, read_fixed_square
from mtmd.clip.resolution.patch_limits import PatchLimits, read_patch_limits
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

SQUARE = "nemotron_v2_vl"  # the model_type that stands for a GGUF
PROJECTOR_EPS = 1e-5
MAX_MERGE = 8  # patches a side of a token; published models have 2
# Settings as published, by transformers' names.
OLD = {
    "image_token_id": "img_context_token_id",
    "text_config": "llm_config",
    "vision_hidden_size": "vit_hidden_size",
}
RADIO = "vision_model.radio_model."
LAYER = {"ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj"}
LAYER |= {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}


@dataclass(frozen=True)
class NemotronVision:
    """`first` rows stand before the patches; a table of `side` x `side` positions. `normed`: what
    the tower gives is normed, without weights, as where the decoder has layers that draft.
    """

    vit: VitParams
    patch: int
    merge: int
    first: int
    side: int
    normed: bool
    inner: int  # width between the projection's layers
    text_width: int
    resolution: PatchLimits | FixedSquare

    marker = image_token = "<image>"
    around = ("", "")
    bidirectional = False
    separator = None
    video = None
    # Frames of videos, ears, and what normalises pixels, which is done before
    unused = (
        rf"{RADIO}(input_conditioner|summary_idxs).*",
        rf"{RADIO}model\.patch_generator\.video_embedder\..*",
        rf"{RADIO}model\.blocks\.\d+\.layer_scale[12]\.lambda1",
        r"(sound_encoder|sound_projection|audio_tower|embed_audio)\..*",
        r"(a|mm\.a)\..*",
    )

    def parameters(self) -> Mapping[str, Parameter]:
        vit, patch, merged = self.vit, self.patch, self.vit.width * self.merge**2
        width, generator = vit.width, f"{RADIO}model.patch_generator"
        kernel, table = (width, 3, patch, patch), (self.side**2, width)
        linear = f"{generator}.embedder.weight"
        parameters = {
            "v.patch_embd.weight": Parameter(
                kernel, (linear,), (width, 3 * patch**2), lambda w: w.view(kernel)
            ),
            "v.position_embd.weight": Parameter(
                table,
                (f"{generator}.pos_embed",),
                (1, *table),
                lambda rows: rows[0],
                gguf=(
                    Stored(("v.position_embd.weight",), (1, *table), lambda rows: rows[0]),
                    Stored(("v.position_embd.weight",), table),
                ),
            ),
            "v.class_embd": Parameter((self.first, width), (f"{generator}.cls_token.token",)),
            "mm.model.mlp.0.weight": Parameter((merged,), _projector("layer_norm", "mlp1.0")),
            "mm.model.mlp.1.weight": Parameter(
                (self.inner, merged), _projector("linear_1", "mlp1.1")
            ),
            "mm.model.mlp.3.weight": Parameter(
                (self.text_width, self.inner), _projector("linear_2", "mlp1.3")
            ),
        }
        shapes: dict[str, Shape] = {
            "attn_qkv": (3 * width, width),
            "attn_out": (width, width),
            "ffn_up": (vit.ffn, width),
            "ffn_down": (width, vit.ffn),
        }
        tensors: dict[str, tuple[str, Shape]] = {
            f"v.blk.{layer}.{part}": (
                f"{RADIO}model.blocks.{layer}.{name}",
                shapes.get(part, (width,)),
            )
            for layer in range(vit.layers)
            for part, name in LAYER.items()
        }
        return parameters | biased_parameters(tensors, lambda name: (name,))

    def prompt(self, plan: ImagePlan) -> str:
        return f"<img>{self.image_token * plan.tokens}</img>"

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] -> embeddings [B, T, D]"""
        w, vit = Weights(weights, tiles.dtype), self.vit
        batch, rows, columns = (
            tiles.shape[0],
            tiles.shape[2] // self.patch,
            tiles.shape[3] // self.patch,
        )
        x = ops.patch_embed(tiles, w.tensor("v.patch_embd.weight"), name="v.patch_embd")
        x = ops.add(x, self._positions(rows, columns, w), name="v.position_embd")
        first = learned_queries("v.class_embd", batch, w)
        x = ops.concat(first, x, axis=1, name="v.class_embd.first")
        for layer in w.layers(vit.layers):
            x = self._layer(x, f"v.blk.{layer}", w, attention)
        patches = graph_input(
            "inp.patches",
            (rows * columns,),
            torch.int64,
            lambda _: torch.arange(self.first, self.first + rows * columns),
        )
        x = ops.take_rows(x, patches, name="v.patches")
        if self.normed:
            ones = graph_input(
                "inp.ones", (vit.width,), tiles.dtype, lambda _: torch.ones(vit.width).to(x.dtype)
            )
            x = ops.layer_norm(x, ones, eps=vit.eps, name="v.post_ln")
        x = ops.unshuffle(x, grid=(rows, columns), factor=self.merge, name="mm.unshuffle")
        x = w.rms_norm(x, "mm.model.mlp.0", PROJECTOR_EPS)
        x = ops.relu(w.linear(x, "mm.model.mlp.1"), name="mm.relu")
        return w.linear(ops.mul(x, x, name="mm.squared"), "mm.model.mlp.3")

    def _layer(self, x: Node, at: str, w: Weights, attention: AttentionForm) -> Node:
        vit = self.vit
        qkv = w.linear(w.layer_norm(x, f"{at}.ln1", vit.eps), f"{at}.attn_qkv", bias=True)
        q, k, v = (
            split_heads(
                ops.columns(
                    qkv, start=i * vit.width, stop=(i + 1) * vit.width, name=f"{at}.attn_{part}"
                ),
                vit.heads,
                f"{at}.attn_{part}",
            )
            for i, part in enumerate("qkv")
        )
        y = w.linear(attend(q, k, v, attention, at=at), f"{at}.attn_out", bias=True)
        x = ops.add(y, x, name=f"{at}.attn_residual")
        y = mlp(w.layer_norm(x, f"{at}.ln2", vit.eps), at, vit.gelu, w)
        return ops.add(y, x, name=f"{at}.ffn_residual")

    def _positions(self, rows: int, columns: int, w: Weights) -> Node:
        """The upper left of the table scaled to a square of the longer side: of each patch the
        mixture of four of its rows          -> [P, C]
        """
        table, longer = w.tensor("v.position_embd.weight"), max(rows, columns)
        if rows == columns == self.side:
            return table
        (top, bottom, down), (left, right, across) = (
            _between(count, longer, self.side) for count in (rows, columns)
        )
        mixed: Node | None = None
        for i, (line, share) in enumerate(((top, 1 - down), (bottom, down))):
            for j, (column, part) in enumerate(((left, 1 - across), (right, across))):
                name = f"v.position_embd.{i}{j}"
                at, factor = (
                    (line[:, None] * self.side + column).flatten(),
                    (share[:, None] * part).flatten()[:, None],
                )
                taken = ops.take_rows(table, _constant(f"inp.{name}.rows", at), name=name)
                weight = _constant(f"inp.{name}.factors", factor.to(table.dtype))
                taken = ops.mul(taken, weight, name=f"{name}.weighted")
                mixed = taken if mixed is None else ops.add(taken, mixed, name=f"{name}.sum")
        assert mixed is not None
        return mixed


def _between(count: int, longer: int, side: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, of `count` of `longer` places over a table `side` long, the entries before and behind
    each, and how far it is from the first, as torch's bilinear interpolation has it.
    """
    at = ((torch.arange(count) + 0.5) * (side / longer) - 0.5).clamp(min=0)
    before = at.to(torch.int64)
    return before, (before + 1).clamp(max=side - 1), at - before


def _constant(name: str, value: torch.Tensor) -> Node:
    return graph_input(name, tuple(value.shape), value.dtype, lambda _: value)


def _projector(transformers: str, published: str) -> tuple[str, ...]:
    return f"{published}.weight", f"multi_modal_projector.{transformers}.weight"


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say: files have positions
    of one square, in which every picture is shown.
    """
    size, patch = keys.count("vision.image_size", 512), keys.count("vision.patch_size", 16)
    vision = gguf_vit(keys)
    rows = [*shapes.get("v.class_embd", ()), 0][0]
    vision |= {
        "hidden_act": "gelu",
        "max_img_size": size,
        "patch_size": patch,
        "num_cls_tokens": 0 if rows == 0 else 1,
        "num_registers": rows - 1 if rows > 0 else 0,
    }
    config = {
        "model_type": SQUARE,
        "vision_config": vision,
        "downsample_ratio": 1 / keys.count("vision.projector.scale_factor", 2, maximum=MAX_MERGE),
        "projector_hidden_size": [*shapes.get("mm.model.mlp.1.weight", ()), 0][0] or None,
        "text_config": {"hidden_size": keys.count("vision.projection_dim")},
    }
    return config, {**gguf_image(keys), "size": {"height": size, "width": size}}


def read(top: Settings, image: Settings) -> NemotronVision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    named = {key: top.get(old, None) for key, old in OLD.items()}
    named = {key: value for key, value in named.items() if value is not None}
    top = Settings({**named, **top.values}, top.where)
    c, text = top.part("vision_config"), top.part("text_config")
    width = c.count("hidden_size", 1280, maximum=MAX_WIDTH)
    ffn = int(width * c.number("mlp_ratio", 4.0))
    vit = read_vit(c, layers=32, width=1280, ffn=ffn, heads=16, act="gelu")
    for settings, key, value in (
        (c, "num_channels", 3),
        (c, "qkv_bias", True),
        (c, "use_swiglu_ffn", False),
        (c, "layerscale_value", 1.0),
        (top, "vision_hidden_size", width),
    ):
        settings.choice(key, (value,), value)
    patch, size = c.count("patch_size", 16, maximum=MAX_WIDTH), c.count("max_img_size", 2048)
    ratio = top.number("downsample_ratio", 0.5)
    merge = round(1 / ratio) if ratio >= 1 / MAX_MERGE else 0
    if not merge or 1 / merge != ratio or size % patch:
        raise ModelError(
            f"{top.where}: downsample_ratio is {ratio}, max_img_size {size} and patch_size "
            f"{patch}, expected one of 1, 1/2 to 1/{MAX_MERGE}, and whole patches"
        )
    resolution: PatchLimits | FixedSquare
    if top.get("model_type", "") == SQUARE:
        if size % (patch * merge):
            raise ModelError(f"{top.where}: image_size is {size}, expected whole tokens of patches")
        tokens = (size // patch // merge) ** 2
        resolution = read_fixed_square(
            image,
            size,
            tokens,
            read_normalize(image, CLIP_MEAN, CLIP_STD),
            crops=False,
            ground=None,
        )
    else:
        resolution = read_patch_limits(image, patch, merge)
    drafts = text.get("num_nextn_predict_layers", 0)
    return NemotronVision(
        vit=vit,
        patch=patch,
        merge=merge,
        first=_rows(c, "num_cls_tokens", 3) + _rows(c, "num_registers", 7),
        side=math.floor(size / patch),
        normed=bool(drafts),
        inner=top.count("projector_hidden_size", 4096, maximum=MAX_WIDTH),
        text_width=text.count("hidden_size", 4096, maximum=MAX_WIDTH),
        resolution=resolution,
    )


def _rows(c: Settings, key: str, default: int) -> int:
    """A number of learned rows, which may be none."""
    return c.count(key, default, maximum=1024) if c.get(key, default) != 0 else 0
