"""Llama 4's vision tower: tiles of a canvas and the whole, patches turned by row and column beside
a table of positions, a class token behind them, pixel shuffle and two layers (transformers'
Llama4VisionModel).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.clip import blocks
from mtmd.clip.blocks import GgufTower, VitParams, checkpoint_names, gguf_vit, tower_keys
from mtmd.clip.image.pixels import gguf_image
from mtmd.clip.resolution.padded_canvas import PaddedCanvas, read_padded_canvas
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.rotary import Rotary, rotary
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

IMAGE_TOKEN = "<|patch|>"
EPS = 1e-5  # of every norm, whatever the settings say
LAYER = {
    "ln1": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}


@dataclass(frozen=True)
class Llama4Vision:
    """`out` is the width of the layers behind the pixel shuffle."""

    vit: VitParams
    patch: int
    factor: int
    out: int
    text_width: int
    rotary: Rotary
    resolution: PaddedCanvas

    marker = "<|image|>"
    image_token = IMAGE_TOKEN
    around = ("", "")
    bidirectional = False
    separator = None
    video = None
    unused = ()

    @property
    def grid(self) -> int:
        """Patches on a side of a tile."""
        return self.resolution.tile // self.patch

    def parameters(self) -> Mapping[str, Parameter]:
        width, ffn, patch = self.vit.width, self.vit.ffn, self.patch
        embedding, kernels = "v.patch_embd.weight", (width, 3, patch, patch)
        flat = (width, 3 * patch**2)

        def unflat(rows: torch.Tensor) -> torch.Tensor:
            return rows.view(kernels)

        parameters = {
            embedding: Parameter(
                kernels,
                _tower("patch_embedding.linear.weight"),
                stored=flat,
                convert=unflat,
                gguf=(Stored((embedding,), flat, unflat, invert=lambda w: (w.flatten(1),)),),
            ),
            "v.class_embd": Parameter((width,), _tower("class_embedding")),
            "v.position_embd.weight": Parameter(
                (self.grid**2 + 1, width), _tower("positional_embedding_vlm")
            ),
            "mm.model.mlp.1.weight": Parameter(
                (self.out, width * self.factor**2), _tower("vision_adapter.mlp.fc1.weight")
            ),
            "mm.model.mlp.2.weight": Parameter(
                (self.out, self.out), _tower("vision_adapter.mlp.fc2.weight")
            ),
            "mm.model.fc.weight": Parameter(
                (self.text_width, self.out),
                checkpoint_names("multi_modal_projector.linear_1.weight"),
            ),
        }
        shapes = {
            "ln1": (width,),
            "attn_post_norm": (width,),
            "ffn_up": (ffn, width),
            "ffn_down": (width, ffn),
        }
        layers = {
            f"v.blk.{layer}.{part}": (
                f"model.layers.{layer}.{name}",
                shapes.get(part, (width,) * 2),
            )
            for layer in range(self.vit.layers)
            for part, name in LAYER.items()
        }
        norms = {"v.pre_ln": ("layernorm_pre", (width,)), "v.post_ln": ("layernorm_post", (width,))}
        return parameters | blocks.biased_parameters({**norms, **layers}, _tower)

    def prompt(self, plan: ImagePlan) -> str:
        """Tiles line by line, separators between and behind them, then the whole picture."""
        images, lines = self.image_token * self.resolution.tile_tokens, ""
        if len(plan.sizes) > 1:
            rows, columns = plan.cut
            line = "<|tile_x_separator|>".join([images] * columns)
            lines = f"{line}<|tile_y_separator|>" * rows
        return f"<|image_start|>{lines}<|image|>{images}<|image_end|>"

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w, patches = Weights(weights, tiles.dtype), self.grid**2
        x = ops.patch_embed(tiles, w.tensor("v.patch_embd.weight"), name="v.patch_embd")
        # The class token goes first here; its row of the table and its angles go with it.
        x = ops.prepend(x, w.tensor("v.class_embd"), name="v.class_embd.first")
        order = torch.cat((torch.tensor([patches]), torch.arange(patches)))
        at = graph_input("inp.position_rows", (patches + 1,), torch.int64, lambda _: order)
        table = ops.take_rows(w.tensor("v.position_embd.weight"), at, name="v.position_rows")
        x = w.layer_norm(ops.add(x, table, name="v.position_embd"), "v.pre_ln", self.vit.eps)
        locations = _locations(self.grid)
        positions = graph_input("inp.positions", (2, patches + 1), torch.int64, lambda _: locations)
        angles = ops.rope_table(positions, rotary=self.rotary, name="v.angles")
        for layer in w.layers(self.vit.layers):
            x = self._layer(x, f"v.blk.{layer}", angles, w, attention)
        rest = graph_input(
            "inp.patches", (patches,), torch.int64, lambda _: torch.arange(1, patches + 1)
        )
        x = ops.take_rows(w.layer_norm(x, "v.post_ln", self.vit.eps), rest, name="v.patches")
        x = ops.unshuffle(x, grid=(self.grid, self.grid), factor=self.factor, name="mm.unshuffle")
        for layer in (1, 2):
            x = w.linear(x, f"mm.model.mlp.{layer}")
            x = ops.gelu(x, approximate="none", name=f"mm.model.mlp.{layer}.gelu")
        return w.linear(x, "mm.model.fc")

    def _layer(self, x: Node, at: str, angles: Node, w: Weights, attention: AttentionForm) -> Node:
        y = blocks.rotary_attention(
            w.layer_norm(x, f"{at}.ln1", self.vit.eps),
            at,
            w,
            attention,
            heads=self.vit.heads,
            angles=angles,
            pairs="adjacent",
        )
        x = ops.add(y, x, name=f"{at}.attn_residual")
        y = w.layer_norm(x, f"{at}.attn_post_norm", self.vit.eps)
        return ops.add(blocks.mlp(y, at, self.vit.gelu, w), x, name=f"{at}.ffn_residual")


def _locations(grid: int) -> torch.Tensor:
    """Row and column of the class token, 0, and of each patch, from 1          int64 [2, P + 1]"""
    rows = torch.arange(1, grid + 1).repeat_interleave(grid)
    columns = torch.arange(1, grid + 1).repeat(grid)
    return torch.nn.functional.pad(torch.stack((rows, columns)), (1, 0))


def _tower(name: str) -> tuple[str, ...]:
    return checkpoint_names(f"vision_model.{name}")


def to_gguf(family: Llama4Vision) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    keys = tower_keys(
        family.vit,
        image_size=family.resolution.tile,
        patch=family.patch,
        text_width=family.text_width,
    )
    return GgufTower(
        "llama4", keys | {"use_gelu": True, "vision.projector.scale_factor": family.factor}
    )


def from_gguf(
    keys: Settings, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say; the number of tiles is
    that of the published checkpoints.
    """
    size = keys.count("vision.image_size")
    vision, out = gguf_vit(keys), shapes.get("mm.model.mlp.2.weight", (None,))[0]
    vision |= {
        "hidden_act": "gelu" if keys.flag("use_gelu", False) else vision["hidden_act"],
        "pixel_shuffle_ratio": 1 / keys.count("vision.projector.scale_factor", 2),
        **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), out),
    }
    config = {
        "vision_config": vision,
        "text_config": {"hidden_size": keys.count("vision.projection_dim")},
    }
    return config, {**gguf_image(keys), "size": {"height": size, "width": size}}


def read(top: Settings, image: Settings) -> Llama4Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c = top.part("vision_config")
    plain = Settings({**c.values, "layer_norm_eps": EPS}, c.where)
    vit = blocks.read_vit(plain, layers=34, width=768, ffn=5632, heads=16, act="gelu")
    for key, value in (
        ("hidden_act", "gelu"),
        ("num_channels", 3),
        ("vision_feature_select_strategy", "default"),
        ("multi_modal_projector_bias", False),
    ):
        c.choice(key, (value,), value)
    tile, patch = c.count("image_size", 448), c.count("patch_size", 14)
    ratio = c.number("pixel_shuffle_ratio", 0.5)
    if (factor := round(1 / ratio)) < 1 or 1 / factor != ratio or tile % (side := patch * factor):
        raise ModelError(
            f"{c.where}: image_size {tile}, patch_size {patch} and pixel_shuffle_ratio {ratio} do "
            "not fit together; expected whole patches, and whole groups of them"
        )
    if vit.head % 4:
        raise ModelError(f"{c.where}: heads of {vit.head}, expected a multiple of 4")
    rope = c.part("rope_parameters")
    rope.choice("rope_type", ("default",), "default")
    half = rotary(rope.number("rope_theta", c.number("rope_theta", 1e4)), vit.head // 2).frequencies
    out = c.count("projector_output_dim", 4096, maximum=MAX_WIDTH)
    for key, default, value in (
        ("intermediate_size", vit.ffn, vit.width * factor**2),
        ("projector_input_dim", 4096, out),
        ("vision_output_dim", 7680, out),
    ):
        if (width := c.count(key, default, maximum=MAX_WIDTH)) != value:
            raise ModelError(f"{c.where}: {key} is {width}, expected {value}, the width before it")
    return Llama4Vision(
        vit=vit,
        patch=patch,
        factor=factor,
        out=out,
        text_width=top.part("text_config").count("hidden_size", 5120, maximum=MAX_WIDTH),
        rotary=Rotary(half * 2, (1,) * len(half) + (0,) * len(half)),
        resolution=read_padded_canvas(image, tile, (tile // side) ** 2),
    )
