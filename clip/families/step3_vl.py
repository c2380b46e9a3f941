"""Step3-VL (arXiv:2601.09668): a perception encoder (arXiv:2504.13181) over windows of a picture
and the whole of it, patches turned by column and row, layer scales, two convolutions that leave a
sixteenth of the patches, one projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.base.errors import ModelError
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
)
from mtmd.clip.grids import Cells, OneGrid
from mtmd.clip.image.pixels import gguf_image
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.windows_then_whole import WindowsThenWhole, read_windows_then_whole
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.ops.image import Padding
from mtmd.kernels.plan.flash_choice import AttentionForm

MERGE = 4  # patches a side of a token: two convolutions of stride 2
AROUND: Padding = (1, 1, 1, 1)
WHOLE, WINDOW = 728, 504  # pixels of the published model's whole and of its tiles
# The authors' names of settings, by transformers'.
OLD = {"hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads"}
LAYER = {
    "ln1": "ln_1",
    "ln2": "ln_2",
    "attn_out": "attn.out_proj",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


@dataclass(frozen=True)
class Step3Vision:
    vit: VitParams
    rotary: Rotary
    patch: int
    text_width: int
    resolution: WindowsThenWhole

    marker = image_token = "<im_patch>"
    around = ("", "")
    bidirectional = False
    separator = None
    video = None
    unused = ()

    @property
    def side(self) -> int:
        """Patches a side of the whole, for which positions are learned."""
        return self.resolution.side // self.patch

    def parameters(self) -> Mapping[str, Parameter]:
        width, ffn, patch = self.vit.width, self.vit.ffn, self.patch
        tensors: dict[str, tuple[str, Shape]] = {
            "v.pre_ln": ("vision_model.ln_pre", (width,)),
            "mm.0": ("vision_model.vit_downsampler1", (2 * width, width, 3, 3)),
            "mm.1": ("vision_model.vit_downsampler2", (4 * width, 2 * width, 3, 3)),
        }
        single: dict[str, tuple[str, Shape]] = {
            "v.patch_embd.weight": ("vision_model.conv1.weight", (width, 3, patch, patch)),
            "v.position_embd.weight": ("vision_model.positional_embedding", (self.side**2, width)),
            "mm.model.fc.weight": ("vit_large_projector.weight", (self.text_width, 4 * width)),
        }
        shapes: dict[str, Shape] = {"attn_out": (width, width), "ffn_up": (ffn, width)}
        shapes["ffn_down"] = (width, ffn)
        for layer in range(self.vit.layers):
            at, block = f"v.blk.{layer}", f"vision_model.transformer.resblocks.{layer}"
            tensors |= {
                f"{at}.{part}": (f"{block}.{name}", shapes.get(part, (width,)))
                for part, name in LAYER.items()
            }
            single |= {
                f"{at}.attn_qkv.weight": (f"{block}.attn.in_proj_weight", (3 * width, width)),
                f"{at}.attn_qkv.bias": (f"{block}.attn.in_proj_bias", (3 * width,)),
                f"{at}.ls1.weight": (f"{block}.ls_1.gamma", (width,)),
                f"{at}.ls2.weight": (f"{block}.ls_2.gamma", (width,)),
            }
        parameters = {name: Parameter(shape, (theirs,)) for name, (theirs, shape) in single.items()}
        return parameters | biased_parameters(tensors, lambda name: (name,))

    def prompt(self, plan: ImagePlan) -> str:
        tile, whole = (
            self.image_token * (side // self.resolution.step) ** 2
            for side in (self.resolution.tile, self.resolution.side)
        )
        columns, text = plan.cut[1], ""
        windows = len(plan.sizes) - 1
        for window in range(1, windows + 1):
            text += f"<patch_start>{tile}<patch_end>"
            if window % columns == 0 and window < windows:
                text += "<patch_newline>"
        return f"{text}<im_start>{whole}<im_end>"

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] -> embeddings [B, T, D]"""
        w, vit = Weights(weights, tiles.dtype), self.vit
        grids = OneGrid.of(tiles, Cells(self.patch))
        angles = ops.rope_table(grids.positions(), rotary=self.rotary, name="v.angles")
        x = ops.patch_embed(tiles, w.tensor("v.patch_embd.weight"), name="v.patch_embd")
        rows, name = w.tensor("v.position_embd.weight"), "v.position_embd.scaled"
        x = ops.add(x, grids.table(rows, self.side, name, mode="bilinear"), name="v.position_embd")
        x = w.layer_norm(x, "v.pre_ln", vit.eps)
        for layer in w.layers(vit.layers):
            at = f"v.blk.{layer}"
            y = rotary_attention(
                w.layer_norm(x, f"{at}.ln1", vit.eps),
                at,
                w,
                attention,
                heads=vit.heads,
                angles=angles,
                fused=True,
                pairs="adjacent",
            )
            y = ops.mul(y, w.tensor(f"{at}.ls1.weight"), name=f"{at}.ls1")
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = mlp(w.layer_norm(x, f"{at}.ln2", vit.eps), at, vit.gelu, w)
            y = ops.mul(y, w.tensor(f"{at}.ls2.weight"), name=f"{at}.ls2")
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        grid = grids.shape
        for part in ("mm.0", "mm.1"):
            kernel, bias = (w.tensor(f"{part}.{kind}") for kind in ("weight", "bias"))
            x = ops.conv2d(x, kernel, bias, grid=grid, stride=(2, 2), padding=AROUND, name=part)
            grid = grid[0] // 2, grid[1] // 2
        return w.linear(x, "mm.model.fc")


def to_gguf(family: Step3Vision) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    way = family.resolution
    keys = tower_keys(
        family.vit, image_size=way.side, patch=family.patch, text_width=family.text_width
    )
    keys |= {"vision.projector.scale_factor": MERGE, "vision.preproc_image_size": way.longest}
    return GgufTower("step3vl", keys, unrounded=("v.position_embd.weight",))


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ARG001
    """Return what config.json and the image processor's settings would say; tiles are to the whole
    as the published model's are.
    """
    side, patch = keys.count("vision.image_size", WHOLE), keys.count("vision.patch_size", 14)
    step = MERGE * patch
    config = {
        "model_type": "step_robotics",
        "vision_config": gguf_vit(keys),
        "text_config": {"hidden_size": keys.count("vision.projection_dim")},
    }
    return config, {
        **gguf_image(keys),
        "size": {"height": side, "width": side},
        "patch_size": max(side * WINDOW // WHOLE // step, 1) * step,
        "max_image_size": keys.get("vision.preproc_image_size", None),
    }


def read(top: Settings, image: Settings) -> Step3Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    given = top.part("vision_config")
    named = {key: given.get(old, None) for key, old in OLD.items()}
    named = {key: value for key, value in named.items() if value is not None}
    c = Settings({**given.values, **named}, given.where)
    width = c.count("hidden_size", 1536, maximum=MAX_WIDTH)
    vit = read_vit(
        c,
        layers=47,
        width=1536,
        ffn=int(width * c.number("mlp_ratio", 8960 / 1536)),
        heads=16,
        act="quick_gelu",
        eps=1e-5,
    )
    for settings, key, value in (
        (c, "num_channels", 3),
        (c, "use_cls_token", False),
        (c, "use_ln_post", False),
        (top, "projector_bias", False),
        (top, "understand_projector_stride", 2),
    ):
        settings.choice(key, (value,), value)
    patch, side = c.count("patch_size", 14, maximum=MAX_WIDTH), c.count("image_size", WHOLE)
    if side % (step := MERGE * patch):
        raise ModelError(
            f"{c.where}: image_size is {side} and patch_size {patch}, expected a multiple of {step}"
        )
    half = read_grid_rotary(c, vit.width, vit.heads)
    return Step3Vision(
        vit=vit,
        rotary=half.by_axes([1 - axis for axis in half.axes]),
        patch=patch,
        text_width=top.part("text_config").count("hidden_size", 4096, maximum=MAX_WIDTH),
        resolution=read_windows_then_whole(image, side, step),
    )
