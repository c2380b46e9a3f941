"""DeepSeek-OCR-2 (arXiv:2601.20552): SAM's encoder, then a Qwen2 decoder as an encoder: patches see
each other, learned queries all patches and the queries before them; what stands at the queries is
projected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import GgufTower, attend, learned_queries, split_heads, swiglu
from mtmd.clip.families.deepseek_ocr.parts import (
    SEPARATOR,
    TASKS,
    TEMPLATE,
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
from mtmd.clip.sam import SamParams, read_sam, sam_features, sam_from_gguf, sam_keys, sam_parameters
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary, read_rotary, rope_settings
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource, constant, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

TILE, TILES = 768, 6
QUERIES = {144: "v.resample_query_768.weight", 256: "v.resample_query_1024.weight"}
THETA = 1e6
LAYER = {
    "ln1": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ln2": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class EncoderParams:
    """Qwen2 as an encoder: layers L, width C, FFN width F, heads H in groups G."""

    layers: int
    width: int
    ffn: int
    heads: int
    groups: int
    eps: float
    rotary: Rotary

    @property
    def head(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class DeepseekOcr2Vision:
    sam: SamParams
    encoder: EncoderParams
    text_width: int
    resolution: TilesThenWhole

    tasks = TASKS
    template = TEMPLATE
    box_scale = "1000"
    marker = "<image>"
    around = ("", "")
    image_token = "<image>"
    bidirectional = False
    separator = SEPARATOR
    video = None
    unused = (r"model\.qwen2_model\.model\.model\.embed_tokens\.weight",)

    def parameters(self) -> Mapping[str, Parameter]:
        e = self.encoder
        parameters = sam_parameters(self.sam, sam_names)
        shapes: dict[str, Shape] = {
            "ln1": (e.width,),
            "ln2": (e.width,),
            "attn_k": (e.groups * e.head, e.width),
            "attn_v": (e.groups * e.head, e.width),
            "ffn_gate": (e.ffn, e.width),
            "ffn_up": (e.ffn, e.width),
            "ffn_down": (e.width, e.ffn),
        }
        for layer in range(e.layers):
            for part, name in LAYER.items():
                at, shape = f"v.blk.{layer}.{part}", shapes.get(part, (e.width, e.width))
                theirs = f"layers.{layer}.{name}"
                parameters[f"{at}.weight"] = Parameter(shape, _names(f"{theirs}.weight"))
                if part in ("attn_q", "attn_k", "attn_v"):
                    parameters[f"{at}.bias"] = Parameter(shape[:1], _names(f"{theirs}.bias"))
        parameters["v.post_ln.weight"] = Parameter((e.width,), _names("norm.weight"))
        for count, name in QUERIES.items():
            size = 768 if count == 144 else 1024
            parameters[name] = Parameter(
                (count, e.width),
                (
                    f"model.qwen2_model.query_{size}.weight",
                    f"model.vision_tower.query_{size}_resolution.weight",
                    f"vision_tower.query_{size}_resolution.weight",
                ),
            )
        return (
            parameters
            | projector_parameters((self.text_width, e.width))
            | separator_parameter(self.text_width)
        )

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] -> embeddings [B, T, D]"""
        w, e = Weights(weights, tiles.dtype), self.encoder
        x = sam_features(tiles, self.sam, w, attention)
        batch, count = x.shape[:2]
        queries = learned_queries(QUERIES[count], batch, w)
        x = ops.concat(x, queries, axis=1, name="v.patches_and_queries")
        rows = 2 * count
        positions = graph_input(
            "inp.positions", (1, rows), torch.int64, lambda _: torch.arange(rows)[None]
        )
        angles = ops.rope_table(positions, None, rotary=e.rotary, name="inp.angles")
        bounds = graph_input("inp.bounds", (rows, 2), torch.int32, lambda _: _bounds(count))
        for layer in w.layers(e.layers):
            x = self._layer(x, f"v.blk.{layer}", w, attention, angles, bounds)
        last = constant("inp.query_rows", torch.arange(count, rows))
        x = w.rms_norm(ops.take_rows(x, last, name="v.at_queries"), "v.post_ln", e.eps)
        return w.linear(x, "mm.model.fc", bias=True)

    def _layer(
        self, x: Node, at: str, w: Weights, attention: AttentionForm, angles: Node, bounds: Node
    ) -> Node:
        e = self.encoder
        y = w.rms_norm(x, f"{at}.ln1", e.eps)
        q, k, v = (
            split_heads(w.linear(y, f"{at}.{part}", bias=True), heads, f"{at}.{part}")
            for part, heads in (("attn_q", e.heads), ("attn_k", e.groups), ("attn_v", e.groups))
        )
        q, k = (ops.rope(part, angles, name=f"{part.name}.rope") for part in (q, k))
        y = w.linear(attend(q, k, v, attention, at=at, bounds=bounds), f"{at}.attn_out")
        x = ops.add(y, x, name=f"{at}.attn_residual")
        y = w.rms_norm(x, f"{at}.ln2", e.eps)
        return ops.add(swiglu(y, at, w), x, name=f"{at}.ffn_residual")


def _bounds(count: int) -> torch.Tensor:
    """int32 [2 count, 2]: patches see all patches, queries these and those before them."""
    last = torch.cat((torch.full((count,), count - 1), torch.arange(count, 2 * count)))
    return torch.stack((torch.zeros_like(last), last), 1).int()


def _names(name: str) -> tuple[str, ...]:
    return (
        f"model.qwen2_model.model.model.{name}",
        f"model.vision_tower.vision_encoder.{name}",
        f"vision_tower.vision_encoder.{name}",
    )


def to_gguf(family: DeepseekOcr2Vision) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    e, sam = family.encoder, family.sam
    keys = {
        "vision.image_size": sam.side * sam.patch,
        "vision.patch_size": sam.patch,
        "vision.block_count": e.layers,
        "vision.embedding_length": e.width,
        "vision.feed_forward_length": e.ffn,
        "vision.attention.head_count": e.heads,
        "vision.attention.head_count_kv": e.groups,
        "vision.attention.layer_norm_epsilon": e.eps,
        "vision.projection_dim": family.text_width,
        "use_gelu": True,
    }
    return GgufTower("deepseekocr2", keys | sam_keys(sam) | tile_keys(family.resolution))


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say."""
    sam = sam_from_gguf(keys, shapes)
    encoder = {
        "num_hidden_layers": keys.get("vision.block_count", None),
        "hidden_size": keys.get("vision.embedding_length", None),
        "intermediate_size": keys.get("vision.feed_forward_length", None),
        "num_attention_heads": keys.get("vision.attention.head_count", None),
        "num_key_value_heads": keys.get("vision.attention.head_count_kv", None),
        "rms_norm_eps": keys.get("vision.attention.layer_norm_epsilon", None),
    }
    config = {
        "vision_config": {"sam_config": sam, "encoder_config": encoder},
        "text_config": {"hidden_size": keys.get("vision.projection_dim", None)},
    }
    return config, gguf_tiles(keys, sam, TILE)


def read(top: Settings, image: Settings) -> DeepseekOcr2Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults or
    the authors' keys; ModelError where a value cannot be followed.
    """
    vision = top.part("vision_config")
    c = vision.part("encoder_config")
    if is_published(vision):
        theirs = vision.part("width").part("qwen2-0-5b")
        c = Settings({"hidden_size": theirs.get("dim", None)}, theirs.where)
    sam = read_sam(sam_settings(vision), ends=(512, 896))
    width, heads = (
        c.count("hidden_size", 896, maximum=MAX_WIDTH),
        c.count("num_attention_heads", 14, maximum=MAX_HEADS),
    )
    groups = c.count("num_key_value_heads", 2, maximum=MAX_HEADS)
    c.choice("hidden_act", ("silu",), "silu")
    c.choice("use_sliding_window", (False,), False)
    if width % heads or heads % groups or width // heads % 2 or sam.ends[1] != width:
        raise ModelError(
            f"{c.where}: {heads} heads in {groups} groups of width {width} behind {sam.ends[1]} "
            "channels; expected groups that divide heads, heads of an even size that divide the "
            "width, and as many channels"
        )
    resolution = read_tiles_then_whole(
        image, side=1024, tile=TILE, maximum=TILES, step=sam.step, newlines=False
    )
    for pixels in (resolution.side, resolution.tile):
        if (count := sam.tokens_a_side(pixels) ** 2) not in QUERIES:
            raise ModelError(
                f"{image.where}: {pixels} pixels a side give {count} patches, expected "
                f"{' or '.join(map(str, QUERIES))}, for which there are queries"
            )
    rope = rope_settings(c)
    context = c.count("max_position_embeddings", 32768)
    return DeepseekOcr2Vision(
        sam=sam,
        encoder=EncoderParams(
            layers=c.count("num_hidden_layers", 24, maximum=MAX_LAYERS),
            width=width,
            ffn=c.count("intermediate_size", 4864, maximum=MAX_WIDTH),
            heads=heads,
            groups=groups,
            eps=c.number("rms_norm_eps", 1e-6),
            rotary=read_rotary(rope, width // heads, c.number("rope_theta", THETA), context),
        ),
        text_width=text_width(top),
        resolution=resolution,
    )
