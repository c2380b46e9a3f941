"""PaddleOCR-VL's vision tower (arXiv:2510.14528): SigLIP over pictures of any size, its table of
positions scaled to their grid, patches turned by their row and column, 2 x 2 of them merged into a
token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from mtmd.clip.blocks import (
    GgufTower,
    VitParams,
    biased_parameters,
    gguf_vit,
    mlp,
    read_grid_rotary,
    read_vit,
    rotary_attention,
    tower_keys,
    vit_parameters,
)
from mtmd.clip.grids import Cells, Grids, OneGrid
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.smart_resize import (
    DynamicResolution,
    enlarged_by_side,
    gguf_dynamic,
    read_dynamic,
)
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

PROJECTOR_EPS = 1e-5  # the settings do not say
TASKS = {
    "text": "OCR:",
    "table": "Table Recognition:",
    "formula": "Formula Recognition:",
    "layout": "Spotting:",  # since 1.5
}
PIXELS = 384 * 384, 1536 * 1536  # transformers' defaults


@dataclass(frozen=True)
class PaddleVision:
    vit: VitParams
    side: int  # of the table of positions, a square
    text_width: int
    rotary: Rotary
    resolution: DynamicResolution

    marker = image_token = "<|IMAGE_PLACEHOLDER|>"
    around = ("<|IMAGE_START|>", "<|IMAGE_END|>")
    bidirectional = False
    separator = None
    video = None
    # SigLIP's pooling head, and a table of positions that is not read
    unused = (r"(model\.)?visual\.vision_model\.(head|embeddings\.packing_position_embedding)\..*",)

    tasks = TASKS

    @property
    def cells(self) -> Cells:
        return Cells(self.resolution.patch, self.resolution.merge)

    def parameters(self) -> Mapping[str, Parameter]:
        width, patch, merged = (
            self.vit.width,
            self.resolution.patch,
            self.vit.width * self.cells.patches,
        )
        ends = {
            "v.patch_embd": ("embeddings.patch_embedding", (width, 3, patch, patch)),
            "v.post_ln": ("post_layernorm", (width,)),
        }
        projector = {
            "mm.input_norm": ("pre_norm", (width,)),
            "mm.1": ("linear_1", (merged, merged)),
            "mm.2": ("linear_2", (self.text_width, merged)),
        }
        parameters = vit_parameters(self.vit, _tower) | biased_parameters(ends, _tower)
        parameters["v.position_embd.weight"] = Parameter(
            (self.side**2, width), _tower("embeddings.position_embedding.weight")
        )
        return parameters | biased_parameters(
            projector, lambda name: (f"mlp_AR.{name}", f"model.projector.{name}")
        )

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        return self.graph_on(OneGrid.of(tiles, self.cells), tiles, weights, attention)

    def graph_on(
        self, grids: Grids, tiles: Node, weights: WeightSource, attention: AttentionForm
    ) -> Node:
        w, vit = Weights(weights, tiles.dtype), self.vit
        angles = ops.rope_table(grids.positions(), rotary=self.rotary, name="v.angles")
        x = ops.patch_embed(
            tiles,
            w.tensor("v.patch_embd.weight"),
            w.tensor("v.patch_embd.bias"),
            name="v.patch_embd",
        )
        rows, name = w.tensor("v.position_embd.weight"), "v.position_embd.scaled"
        x = ops.add(x, grids.table(rows, self.side, name, mode="bilinear"), name="v.position_embd")
        for layer in range(vit.layers):
            at = f"v.blk.{layer}"
            y = rotary_attention(
                w.layer_norm(x, f"{at}.ln1", vit.eps),
                at,
                w,
                attention,
                heads=vit.heads,
                angles=angles,
                bounds=grids.segments,
            )
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = mlp(w.layer_norm(x, f"{at}.ln2", vit.eps), at, vit.gelu, w)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        x = w.layer_norm(w.layer_norm(x, "v.post_ln", vit.eps), "mm.input_norm", PROJECTOR_EPS)
        x = ops.unshuffle(x, grid=grids.shape, factor=self.resolution.merge, name="mm.merged")
        x = ops.gelu(w.linear(x, "mm.1", bias=True), approximate="none", name="mm.gelu")
        return w.linear(x, "mm.2", bias=True)


def to_gguf(family: PaddleVision) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    way = family.resolution
    keys = tower_keys(
        family.vit, image_size=isqrt(way.maximum), patch=way.patch, text_width=family.text_width
    )
    return GgufTower(
        "paddleocr",
        keys
        | {
            "use_gelu": True,
            "vision.image_min_pixels": way.minimum,
            "vision.image_max_pixels": way.maximum,
        },
    )


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say."""
    image, rows = gguf_dynamic(keys), [*shapes.get("v.position_embd.weight", ()), 0][0]
    side = isqrt(rows) * keys.count("vision.patch_size", 14)
    config = {
        "vision_config": gguf_vit(keys) | {"image_size": side},
        "text_config": {"hidden_size": keys.count("vision.projection_dim")},
    }
    return config, {**image, "temporal_patch_size": 1}


def read(top: Settings, image: Settings) -> PaddleVision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c = top.part("vision_config")
    vit = read_vit(c, layers=27, width=1152, ffn=4304, heads=16, act="gelu_pytorch_tanh")
    c.choice("num_channels", (3,), 3)
    patch, merge = c.count("patch_size", 14), c.count("spatial_merge_size", 2)
    text = top.part("text_config")
    return PaddleVision(
        vit=vit,
        side=c.count("image_size", 384) // patch,
        # Published settings have the decoder's beside these.
        text_width=(text if text.values else top).count("hidden_size", 1024, maximum=MAX_WIDTH),
        rotary=read_grid_rotary(c, vit.width, vit.heads),
        resolution=read_dynamic(
            image, patch, merge, temporal=1, limits=PIXELS, enlarge=enlarged_by_side
        ),
    )


def _tower(name: str) -> tuple[str, ...]:
    name = f"visual.vision_model.{name}"
    return name, f"model.{name}"
