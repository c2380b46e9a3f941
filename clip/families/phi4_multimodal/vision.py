"""Pictures of Phi-4-multimodal (arXiv:2503.01743): SigLIP's tower, without its last layer, over a
whole picture and tiles of it, four patches a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import VitParams, bucketed_positions, read_vit, vit_block, vit_parameters
from mtmd.clip.resolution.ragged_tiles import RaggedTiles, read_ragged_tiles
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

IMAGE_TOKEN = "<|endoftext10|>"  # of the published vocabulary
EMBED = "model.embed_tokens_extend.image_embed"
LAYERS_LEFT_OUT = 1  # feature_layer is -2
MERGE = 2
# Of the authors' code, whose settings do not say
SIGLIP = {
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
}
WHITE = 1.0  # of a patch without picture, normalised
# What ends lines, and what stands between the tiles and the whole: as transformers saves them, and
# as the authors
MARKS = {
    "mm.line_end": (("sub_img_feature_extensor", 3), ("sub_GN", 3)),
    "mm.whole_next": (("global_img_feature_extensor", 2), ("glb_GN", 2)),
}


@dataclass(frozen=True)
class Phi4MultimodalVision:
    """`vit` has the layers that are read; `positions` are those on a side of the tower's table."""

    vit: VitParams
    positions: int
    text_width: int
    resolution: RaggedTiles
    image_token: str = IMAGE_TOKEN

    around = ("", "")
    bidirectional = False
    separator = None
    video = None
    in_line = True
    adapter = "vision-lora"

    @property
    def marker(self) -> str:
        return self.image_token

    @property
    def unused(self) -> tuple[str, ...]:
        tower = f"{EMBED}.img_processor".replace(".", r"\.")
        return (
            rf"{tower}\.(head|post_layernorm)\..*",
            rf"{tower}\.encoder\.layers\.{self.vit.layers}\..*",
        )

    def parameters(self) -> Mapping[str, Parameter]:
        width, patch = self.vit.width, self.resolution.patch
        sizes = {
            "patch_embd": (width, 3, patch, patch),
            "position_embd": (self.positions**2, width),
        }
        result = {
            **vit_parameters(self.vit, _tower),
            "v.patch_embd.weight": Parameter(
                sizes["patch_embd"], _tower("embeddings.patch_embedding.weight")
            ),
            "v.patch_embd.bias": Parameter((width,), _tower("embeddings.patch_embedding.bias")),
            "v.position_embd.weight": Parameter(
                sizes["position_embd"], _tower("embeddings.position_embedding.weight")
            ),
        }
        projector: dict[str, tuple[tuple[str, ...], Shape]] = {
            "mm.0": (("img_projection_up", "img_projection.0"), (self.text_width, width)),
            "mm.2": (("img_projection_down", "img_projection.2"), (self.text_width,) * 2),
        }
        for at, (names, shape) in projector.items():
            for kind, size in (("weight", shape), ("bias", shape[:1])):
                sources = tuple(f"{EMBED}.{name}.{kind}" for name in names)
                result[f"{at}.{kind}"] = Parameter(size, sources)
        for at, ways in MARKS.items():
            stored = (
                Stored((f"{EMBED}.{name}",), (*(1,) * ones, width), torch.flatten)
                for name, ones in ways
            )
            result[at] = Parameter((width,), (), others=tuple(stored))
        return result

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] -> embeddings [B, 2 + T, D]: the two marks, and the tokens"""
        w, patch = Weights(weights, tiles.dtype), self.resolution.patch
        batch, grid = tiles.shape[0], (tiles.shape[2] // patch, tiles.shape[3] // patch)
        kernel = [w.tensor(f"v.patch_embd.{kind}") for kind in ("weight", "bias")]
        x = ops.patch_embed(tiles, *kernel, name="v.patch_embd")
        x = ops.add(x, bucketed_positions(grid, self.positions, w), name="v.position_embd")
        cells = self._cells(grid)
        count, bounds = grid[0] * grid[1], None
        if cells.numel() > count:
            # All patches beyond the edge are white, at the first place, and nothing looks at them
            blank = torch.full((batch, 3, patch, patch), WHITE, dtype=tiles.dtype)
            y = graph_input("inp.blank", tuple(blank.shape), blank.dtype, lambda _: blank)
            y = ops.patch_embed(y, *kernel, name="v.blank")
            first = ops.rows(w.tensor("v.position_embd.weight"), start=0, stop=1, name="v.first")
            y = ops.add(y, first, name="v.blank.placed")
            x = ops.concat(x, y, axis=1, name="v.patches")
            limits = torch.tensor([0, count - 1], dtype=torch.int32).repeat(count + 1, 1)
            bounds = graph_input(
                "inp.seen", tuple(limits.shape), limits.dtype, lambda _: limits, keys=count
            )
        for index in w.layers(self.vit.layers):
            x = vit_block(x, index, self.vit, w, attention=attention, bounds=bounds)
        if bounds is not None:
            order = cells.flatten()
            rows = graph_input("inp.cells", tuple(order.shape), order.dtype, lambda _: order)
            x = ops.take_rows(x, rows, name="v.cells")
        shape = tuple(cells.shape)
        small = shape[0] // MERGE, shape[1] // MERGE
        x = ops.pool2d(x, grid=shape, size=small, name="v.pool")
        for mark in reversed(MARKS):
            x = ops.prepend(x, w.tensor(mark), name=f"{mark}.before")
        x = ops.gelu(w.linear(x, "mm.0", bias=True), approximate="none", name="mm.gelu")
        return w.linear(x, "mm.2", bias=True)

    def _cells(self, grid: tuple[int, int]) -> torch.Tensor:
        """int64 [rows, columns]: which patch lies there, of a grid filled up to whole tokens with
        what stands behind the last.
        """
        locations = torch.arange(grid[0] * grid[1]).view(grid)
        down, across = (-side % MERGE for side in grid)
        return torch.nn.functional.pad(locations, (0, across, 0, down), value=locations.numel())


def _tower(name: str) -> tuple[str, ...]:
    return (f"{EMBED}.img_processor.{name}",)


def usual_words(config: Settings) -> dict[str, Any]:
    """Return the authors' config.json, which says little of the towers, in transformers' words."""
    layers = config.part("embd_layer")
    image, audio = (layers.part(f"{kind}_embd_layer") for kind in ("image", "audio"))
    image.choice("hd_transform_order", ("sub_glb",), "sub_glb")
    for key in ("use_hd_transform", "with_learnable_separator"):
        image.choice(key, (True,), True)
    c = config.part("audio_processor").part("config")
    renamed = {
        "hidden_size": "attention_dim",
        "num_attention_heads": "attention_heads",
        "intermediate_size": "linear_units",
        "depthwise_separable_out_channel": "depthwise_seperable_out_channel",
    }
    ears = {
        **c.values,
        **{ours: c.get(theirs, None) for ours, theirs in renamed.items()},
        "nemo_conv_channels": c.part("nemo_conv_settings").get("conv_channels", None),
        "bias_max_distance": c.part("relative_attention_bias_args").get(
            "t5_bias_max_distance", None
        ),
        "downsample_rate": audio.get("downsample_rate", 1),
    }
    return {
        **config.values,
        "model_type": "phi4_multimodal",
        "vision_config": {**SIGLIP, "crop_size": image.get("crop_size", 448)},
        "audio_config": {key: value for key, value in ears.items() if value is not None},
    }


def read(top: Settings, image: Settings) -> Phi4MultimodalVision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c = top.part("vision_config")
    vit = read_vit(c, layers=27, width=1152, ffn=4304, heads=16, act="gelu_pytorch_tanh")
    c.choice("num_channels", (3,), 3)
    c.choice("feature_layer", (-2,), -2)
    if vit.layers <= LAYERS_LEFT_OUT:
        raise ModelError(
            f"{c.where}: num_hidden_layers is {vit.layers}, expected at least "
            f"{LAYERS_LEFT_OUT + 1}, as the last is not read"
        )
    side, patch = c.count("image_size", 448), c.count("patch_size", 14)
    c.choice("crop_size", (side,), side)
    token = image.part("tokens").get("image_token", IMAGE_TOKEN)
    return Phi4MultimodalVision(
        vit=replace(vit, layers=vit.layers - LAYERS_LEFT_OUT),
        positions=side // patch,
        text_width=top.count("hidden_size", 3072, maximum=MAX_WIDTH),
        resolution=read_ragged_tiles(image, side, patch, MERGE),
        image_token=str(token.get("content", IMAGE_TOKEN) if isinstance(token, dict) else token),
    )
