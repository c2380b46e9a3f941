"""Aya Vision (arXiv:2505.08751): SigLIP over tiles of a picture and the whole of it, pixel
unshuffle, a gated projection. Command A Vision is the same with SigLIP's last norm in place of the
projection's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    VitParams,
    biased_parameters,
    checkpoint_names,
    read_vit,
    tower_names,
    vit_block,
    vit_parameters,
)
from mtmd.clip.resolution.closest_grid import (
    StretchedTiling,
    read_canvas_tiling,
    read_stretched_tiling,
)
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm


@dataclass(frozen=True)
class AyaVision:
    vit: VitParams
    patch: int
    factor: int
    inner: int  # width of the projection's first layer: the values, then their gates
    inner_eps: float | None  # of the projection's norm; None where SigLIP's last norm is read
    text_width: int
    resolution: StretchedTiling

    around = ("", "")
    image_token = "<|IMG_PATCH|>"
    bidirectional = False
    separator = None
    video = None

    @property
    def marker(self) -> str:
        return "<image>" if self.inner_eps else self.image_token

    @property
    def unused(self) -> tuple[str, ...]:
        parts = "(head|post_layernorm)" if self.inner_eps else "head"
        return (rf"(model\.)?vision_tower\.(vision_model\.)?{parts}\..*",)

    @property
    def grid(self) -> int:
        return self.resolution.tile // self.patch

    def parameters(self) -> Mapping[str, Parameter]:
        width, merged = self.vit.width, self.vit.width * self.factor**2
        tower: dict[str, tuple[str, tuple[int, ...]]] = {
            "v.patch_embd": ("embeddings.patch_embedding", (width, 3, self.patch, self.patch))
        }
        if not self.inner_eps:
            tower["v.post_ln"] = ("post_layernorm", (width,))
        norm = {"mm.model.mlp.0": ("multi_modal_projector.layernorm", (merged,))}
        projection: dict[str, tuple[str, tuple[int, ...]]] = {
            **(norm if self.inner_eps else {}),
            "mm.model.mlp.1": ("multi_modal_projector.linear_1", (self.inner, merged)),
            "mm.model.mlp.3": (
                "multi_modal_projector.linear_2",
                (self.text_width, self.inner // 2),
            ),
        }
        positions = Parameter(
            (self.grid**2, width), tower_names("embeddings.position_embedding.weight")
        )
        return {
            **vit_parameters(self.vit, tower_names),
            **biased_parameters(tower, tower_names),
            "v.position_embd.weight": positions,
            **biased_parameters(projection, checkpoint_names),
        }

    def prompt(self, plan: ImagePlan) -> str:
        """Tiles by their number, then the whole picture; without numbers in Command A Vision."""
        patches = self.image_token * self.resolution.tile_tokens
        if not self.inner_eps:
            tiles = f"{patches}<|IMG_LINE_BREAK|>" * len(plan.sizes)
            return f"<|START_OF_IMG|>{tiles}<|END_OF_IMG|>"
        tiles = "".join(f"TILE_{number}{patches}" for number in range(1, len(plan.sizes)))
        return f"<|START_OF_IMG|>{tiles}TILE_GLOBAL{patches}<|END_OF_IMG|>"

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, tiles.dtype)
        x = ops.patch_embed(
            tiles,
            w.tensor("v.patch_embd.weight"),
            w.tensor("v.patch_embd.bias"),
            name="v.patch_embd",
        )
        x = ops.add(x, w.tensor("v.position_embd.weight"), name="v.position_embd")
        for index in w.layers(self.vit.layers):
            x = vit_block(x, index, self.vit, w, attention=attention)
        if not self.inner_eps:
            x = w.layer_norm(x, "v.post_ln", self.vit.eps)
        x = ops.unshuffle(x, grid=(self.grid, self.grid), factor=self.factor, name="mm.unshuffle")
        if self.inner_eps:
            x = w.layer_norm(x, "mm.model.mlp.0", self.inner_eps)
        x = w.linear(x, "mm.model.mlp.1", bias=True)
        half = self.inner // 2
        values = ops.columns(x, start=0, stop=half, name="mm.values")
        gates = ops.columns(x, start=half, stop=self.inner, name="mm.gates")
        return w.linear(ops.silu_mul(gates, values, name="mm.gated"), "mm.model.mlp.3", bias=True)


def read(top: Settings, image: Settings) -> AyaVision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c, text_width = (
        top.part("vision_config"),
        top.part("text_config").count("hidden_size", 8192, maximum=MAX_WIDTH),
    )
    command = top.get("model_type", "") == "cohere2_vision"
    layers, width = (27, 1152) if command else (12, 768)
    vit = read_vit(c, layers=layers, width=width, ffn=3072, heads=12, act="gelu_pytorch_tanh")
    c.choice("model_type", ("siglip_vision_model",), "siglip_vision_model")
    c.choice("num_channels", (3,), 3)
    top.choice("vision_feature_layer", (-1,), -1)
    top.choice("vision_feature_select_strategy", ("full",), "full")
    size, patch, factor = (
        c.count("image_size", 512 if command else 224),
        c.count("patch_size", 16),
        top.count("downsample_factor", 2),
    )
    grid, inner = (
        size // patch,
        top.count(
            "alignment_intermediate_size", 36864 if command else text_width, maximum=MAX_WIDTH
        ),
    )
    if not grid or grid % factor or inner % 2:
        raise ModelError(
            f"{top.where}: image_size {size}, patch_size {patch}, downsample_factor {factor} and "
            f"alignment_intermediate_size {inner} do not fit together; expected a grid of patches "
            "that divides into groups, and an even size"
        )
    read_tiling = read_canvas_tiling if command else read_stretched_tiling
    return AyaVision(
        vit=vit,
        patch=patch,
        factor=factor,
        inner=inner,
        inner_eps=None if command else top.number("adapter_layer_norm_eps", 1e-6),
        text_width=text_width,
        resolution=read_tiling(image, size, (grid // factor) ** 2),
    )
