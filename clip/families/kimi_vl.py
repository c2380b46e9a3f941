"""MoonViT, the vision tower of Kimi-VL (arXiv:2504.07491) and of Kimi K2.5: pictures of any size,
their table of positions scaled to the grid, patches turned by row and column, 2 x 2 of them merged
into a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any

import torch

from mtmd.clip.blocks import (
    GgufTower,
    VitParams,
    biased_parameters,
    gguf_vit,
    mlp,
    qkv_parameters,
    read_grid_rotary,
    read_vit,
    rotary_attention,
    tower_keys,
)
from mtmd.clip.grids import Cells, Grids, OneGrid
from mtmd.clip.image.pixels import gguf_image
from mtmd.clip.resolution.padded_up import PaddedResolution, read_padded
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

K25, VL = "kimi_k25", "kimi_vl"
EPS = 1e-5  # of every norm; most settings do not say
SIDE = 512  # patches on a side, that tables of angles are made for
PATCHES = {K25: 16384, VL: 4096}
BEGINS = {K25: "<|media_begin|>", VL: "<|media_start|>"}
PROJECTOR = {
    K25: ("mm_projector.pre_norm", "mm_projector.proj.0", "mm_projector.proj.2"),
    VL: (
        "multi_modal_projector.pre_norm",
        "multi_modal_projector.linear_1",
        "multi_modal_projector.linear_2",
    ),
}
# The authors' names of K2.5's settings, by transformers'.
OLD = {
    "num_hidden_layers": "vt_num_hidden_layers",
    "hidden_size": "vt_hidden_size",
    "intermediate_size": "vt_intermediate_size",
    "num_attention_heads": "vt_num_attention_heads",
    "pos_emb_height": "init_pos_emb_height",
    "pos_emb_width": "init_pos_emb_width",
}


@dataclass(frozen=True)
class KimiVision:
    """`joint`: queries, keys and values have one matrix, and a head's pairs that turn by columns
    lie before those that turn by rows; else three, and they take turns.
    """

    kind: str
    vit: VitParams
    side: int  # of the table of positions, a square
    text_width: int
    rotary: Rotary
    projector_eps: float
    resolution: PaddedResolution

    marker = image_token = "<|media_pad|>"
    bidirectional = False
    separator = None
    video = None
    # A table of times, which are sines that can be computed
    unused = (r"vision_tower\.patch_embed\.pos_emb\.time_weight",)

    @property
    def around(self) -> tuple[str, str]:
        return f"{BEGINS[self.kind]}image<|media_content|>", "<|media_end|>"

    @property
    def joint(self) -> bool:
        return self.kind == K25

    @property
    def cells(self) -> Cells:
        return Cells(self.resolution.patch, self.resolution.merge)

    def parameters(self) -> Mapping[str, Parameter]:
        vit, patch = self.vit, self.resolution.patch
        width, merged = vit.width, vit.width * self.cells.patches
        tensors: dict[str, tuple[str, Shape]] = {
            "v.patch_embd": ("vision_tower.patch_embed.proj", (width, 3, patch, patch)),
            "v.post_ln": ("vision_tower.encoder.final_layernorm", (width,)),
        }
        shapes: tuple[Shape, ...] = ((width,), (merged, merged), (self.text_width, merged))
        for name, theirs, shape in zip(
            ("mm.input_norm", "mm.1", "mm.2"), PROJECTOR[self.kind], shapes, strict=True
        ):
            tensors[name] = theirs, shape
        parameters: dict[str, Parameter] = {}
        for layer in range(vit.layers):
            at, block = f"v.blk.{layer}", f"vision_tower.encoder.blocks.{layer}"
            tensors |= {
                f"{at}.ln1": (f"{block}.norm0", (width,)),
                f"{at}.ln2": (f"{block}.norm1", (width,)),
                f"{at}.attn_out": (f"{block}.wo", (width, width)),
                f"{at}.ffn_up": (f"{block}.mlp.fc0", (vit.ffn, width)),
                f"{at}.ffn_down": (f"{block}.mlp.fc1", (width, vit.ffn)),
            }
            parameters |= self._projections(at, f"{block}.wqkv")
        table: Shape = (self.side, self.side, width)
        rows = Stored(("v.position_embd.weight",), table, _flat)
        parameters["v.position_embd.weight"] = Parameter(
            (self.side**2, width),
            _source("vision_tower.patch_embed.pos_emb.weight"),
            stored=table,
            convert=_flat,
            gguf=(rows,) if self.joint else (),
        )
        return parameters | biased_parameters(tensors, _source)

    def _projections(self, at: str, theirs: str) -> dict[str, Parameter]:
        width = self.vit.width
        if not self.joint:
            return qkv_parameters(at, width, theirs, _source)
        shapes: dict[str, Shape] = {"weight": (3 * width, width), "bias": (3 * width,)}
        convert = partial(_by_axes, self.vit.heads)
        return {
            f"{at}.attn_qkv.{kind}": Parameter(
                shape, _source(f"{theirs}.{kind}"), convert=convert, picks_rows=kind == "weight"
            )
            for kind, shape in shapes.items()
        }

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        return self.graph_on(OneGrid.of(tiles, self.cells), tiles, weights, attention)

    def graph_on(
        self, grids: Grids, tiles: Node, weights: WeightSource, attention: AttentionForm
    ) -> Node:
        w, vit = Weights(weights, tiles.dtype), self.vit
        angles = ops.rope_table(grids.positions(), rotary=self.rotary, name="v.angles")
        patches = (w.tensor(f"v.patch_embd.{kind}") for kind in ("weight", "bias"))
        x = ops.patch_embed(tiles, *patches, name="v.patch_embd")
        rows, name = w.tensor("v.position_embd.weight"), "v.position_embd.scaled"
        x = ops.add(x, grids.table(rows, self.side, name, mode="bicubic"), name="v.position_embd")
        for layer in w.layers(vit.layers):
            at = f"v.blk.{layer}"
            y = rotary_attention(
                w.layer_norm(x, f"{at}.ln1", vit.eps),
                at,
                w,
                attention,
                heads=vit.heads,
                angles=angles,
                bounds=grids.segments,
                fused=self.joint,
                pairs="adjacent",
            )
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = mlp(w.layer_norm(x, f"{at}.ln2", vit.eps), at, vit.gelu, w)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        x = w.layer_norm(x, "v.post_ln", vit.eps)
        x = w.layer_norm(x, "mm.input_norm", self.projector_eps)
        x = ops.unshuffle(x, grid=grids.shape, factor=self.resolution.merge, name="mm.merged")
        x = ops.gelu(w.linear(x, "mm.1", bias=True), approximate="none", name="mm.gelu")
        return w.linear(x, "mm.2", bias=True)


def _source(name: str) -> tuple[str, ...]:
    return (name,)


def _flat(table: torch.Tensor) -> torch.Tensor:
    return table.flatten(0, 1)


def _by_axes(heads: int, joint: torch.Tensor) -> torch.Tensor:
    """[3 * C, ...] with queries' and keys' pairs that turn by columns before those that turn by
    rows, as a GGUF has them; a checkpoint has them by turns.
    """
    q, k, v = joint.chunk(3)
    turned = (part.unflatten(0, (heads, -1, 2, 2)).transpose(1, 2).flatten(0, 3) for part in (q, k))
    return torch.cat((*turned, v))


def to_gguf(family: KimiVision) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    way, width = family.resolution, family.text_width
    size = family.side * way.patch
    keys = tower_keys(family.vit, image_size=size, patch=way.patch, text_width=width)
    keys |= {"use_gelu": True, "vision.projector.scale_factor": way.merge}
    if family.joint:
        keys["vision.image_min_pixels"] = 8 * way.patch**2  # as llama.cpp's converter says
        keys["vision.image_max_pixels"] = way.patches * way.patch**2
    return GgufTower("kimik25" if family.joint else "kimivl", keys)


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say."""
    kind = K25 if keys.get("projector_type", "") == "kimik25" else VL
    image, patch = gguf_image(keys), keys.count("vision.patch_size", 14, maximum=MAX_WIDTH)
    rows = [*shapes.get("v.position_embd.weight", ()), 0][0]
    side = rows if kind == K25 else isqrt(rows)
    merge = keys.count("vision.projector.scale_factor", 2)
    vision = gguf_vit(keys) | {
        "pos_emb_height": side,
        "pos_emb_width": side,
        "merge_kernel_size": [merge, merge],
    }
    if keys.get("vision.image_max_pixels", None) is not None:
        image["max_patches"] = keys.count("vision.image_max_pixels") // patch**2
    config = {
        "model_type": kind,
        "vision_config": vision,
        "text_config": {"hidden_size": keys.count("vision.projection_dim")},
    }
    return config, image


def read(top: Settings, image: Settings) -> KimiVision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    kind, given = top.choice("model_type", (K25, VL), K25), top.part("vision_config")
    named = {key: given.get(old, None) for key, old in OLD.items()}
    named = {key: value for key, value in named.items() if value is not None}
    c = Settings({**named, **given.values}, given.where)
    vit = read_vit(c, layers=27, width=1152, ffn=4304, heads=16, act="gelu_pytorch_tanh", eps=EPS)
    side = c.count("pos_emb_height", 64, maximum=SIDE)
    c.choice("pos_emb_width", (side,), 64)
    merge = _side(c, "merge_kernel_size", [2, 2])
    grid = read_grid_rotary(c, vit.width, vit.heads).frequencies
    half = grid[: len(grid) // 2]
    joint = kind == K25
    return KimiVision(
        kind=kind,
        vit=vit,
        side=side,
        text_width=top.part("text_config").count("hidden_size", 7168, maximum=MAX_WIDTH),
        rotary=Rotary(half * 2, (1,) * len(half) + (0,) * len(half))
        if joint
        else Rotary(tuple(f for f in half for _ in range(2)), (1, 0) * len(half)),
        projector_eps=top.number(
            "projection_layer_norm_eps", given.number("projector_ln_eps", EPS)
        ),
        resolution=_resolution(kind, c.count("patch_size", 14, maximum=MAX_WIDTH), merge, image),
    )


def _side(c: Settings, key: str, default: list[int]) -> int:
    """Return one number for both sides."""
    sides: object = c.get(key, default)
    if isinstance(sides, (list, tuple)) and len(sides) == 2 and sides[0] == sides[1]:
        sides = sides[0]
    return Settings({key: sides}, c.where).count(key, maximum=16)


def _resolution(kind: str, patch: int, merge: int, image: Settings) -> PaddedResolution:
    """Read the way of pictures: transformers' settings of K2.5, or the authors' of both."""
    authors = image.part("media_proc_cfg")
    own = Settings({**image.values, **authors.values}, image.where)
    own.choice("patch_size", (patch,), patch)
    own.choice("pad_input", (True,), True)
    if own.get("fixed_output_tokens", None) is not None:
        own.choice("fixed_output_tokens", (None,), None)
    names = ("max_patches", "in_patch_limit", "in_token_limit")
    limit = next((name for name in names if own.get(name, None) is not None), names[0])
    size = own.part("size").get("max_height", own.get("patch_limit_on_one_side", SIDE))
    return read_padded(
        own, patch, merge, own.count(limit, PATCHES[kind]), size, by_tensor=kind == K25
    )
