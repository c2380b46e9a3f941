"""Pixtral (arXiv:2410.07073), Mistral Small 3.1: pictures in their own size, patches turned by row
and column, a token to end each row. LightOnOCR (arXiv:2601.14251): the same tower without these
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.clip import blocks
from mtmd.clip.blocks import ACTIVATIONS, AXIAL, GgufTower, checkpoint_names
from mtmd.clip.grids import Cells, Grids, OneGrid
from mtmd.clip.image.pixels import gguf_image
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.rounded_up import NativeResolution, read_native
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, adjacent_pairs
from mtmd.kernels.checkpoint.rotary import Rotary, rotary
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

EPS = 1e-5  # of the tower's norms; the settings do not say
LIGHTON = "lighton_ocr"
# Published checkpoints say mistral3 and one of these; what transformers saves, lighton_ocr.
LIGHTON_CLASSES = ["LightOnOCRForConditionalGeneration"], ["LightOnOcrForConditionalGeneration"]
LAYER = {
    "ln1": "attention_norm",
    "ln2": "ffn_norm",
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_out": "attention.o_proj",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}


@dataclass(frozen=True)
class PixtralVision:
    layers: int
    width: int
    ffn: int
    heads: int
    act: str  # "silu", or which gelu
    rotary: Rotary
    patch: int
    merge: int | None  # as many patches on a side become one, after a norm; None in Pixtral
    merge_eps: float
    text_width: int
    bias: bool  # of the projection
    gelu: str
    breaks: bool  # whether tokens of their own end each row and the picture
    resolution: NativeResolution

    around = ("", "")
    bidirectional = False
    separator = None
    video = None
    unused = (r"v\.token_embd\.img_break",)  # a row of the decoder's table, which has it too

    @property
    def marker(self) -> str:
        return "[IMG]" if self.breaks else "<|image_pad|>"

    @property
    def image_token(self) -> str:
        return self.marker

    def parameters(self) -> Mapping[str, Parameter]:
        width, ffn, text = self.width, self.ffn, self.text_width
        shapes: dict[str, tuple[int, ...]] = {
            "ln1": (width,),
            "ln2": (width,),
            "ffn_gate": (ffn, width),
            "ffn_up": (ffn, width),
            "ffn_down": (width, ffn),
        }
        turned = dict.fromkeys(("attn_q", "attn_k"), adjacent_pairs(self.heads))
        parameters = {
            "v.patch_embd.weight": Parameter(
                (width, 3, self.patch, self.patch), _tower("patch_conv.weight")
            ),
            "v.pre_ln.weight": Parameter((width,), _tower("ln_pre.weight")),
        }
        for layer in range(self.layers):
            for part, name in LAYER.items():
                sources = _tower(f"transformer.layers.{layer}.{name}.weight")
                parameters[f"v.blk.{layer}.{part}.weight"] = Parameter(
                    shapes.get(part, (width, width)),
                    sources,
                    convert=turned.get(part),
                    picks_rows=part in turned,
                )
        ends: dict[str, tuple[str, tuple[int, ...]]] = {
            "mm.1": ("linear_1", (text, width)),
            "mm.2": ("linear_2", (text, text)),
        }
        parameters |= {
            name: p
            for name, p in blocks.biased_parameters(ends, _projector).items()
            if self.bias or name.endswith("weight")
        }
        if self.merge:
            merger = Parameter(
                (width, width * self.merge**2), _projector("patch_merger.merging_layer.weight")
            )
            parameters |= {
                "mm.input_norm.weight": Parameter((width,), _projector("norm.weight")),
                "mm.patch_merger.weight": merger,
            }
        return parameters

    def prompt(self, plan: ImagePlan) -> str:
        if not self.breaks:
            return self.image_token * plan.tokens
        width, height = plan.sizes[0]
        rows, columns = height // self.resolution.factor, width // self.resolution.factor
        return "[IMG_BREAK]".join([self.image_token * columns] * rows) + "[IMG_END]"

    @property
    def cells(self) -> Cells:
        return Cells(self.patch, self.merge or 1)

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        return self.graph_on(OneGrid.of(tiles, self.cells), tiles, weights, attention)

    def graph_on(
        self, grids: Grids, tiles: Node, weights: WeightSource, attention: AttentionForm
    ) -> Node:
        w = Weights(weights, tiles.dtype)
        angles = ops.rope_table(grids.positions(), rotary=self.rotary, name="v.angles")
        x = w.rms_norm(
            ops.patch_embed(tiles, w.tensor("v.patch_embd.weight"), name="v.patch_embd"),
            "v.pre_ln",
            EPS,
        )
        for layer in w.layers(self.layers):
            x = self._layer(
                x, f"v.blk.{layer}", angles, w, attention=attention, bounds=grids.segments
            )
        if self.merge:
            x = w.rms_norm(x, "mm.input_norm", self.merge_eps)
            x = ops.unshuffle(
                x, grid=grids.shape, factor=self.merge, channels_first=True, name="mm.merged"
            )
            x = w.linear(x, "mm.patch_merger")
        x = ops.gelu(w.linear(x, "mm.1", bias=self.bias), approximate=self.gelu, name="mm.gelu")
        return w.linear(x, "mm.2", bias=self.bias)

    def _layer(
        self,
        x: Node,
        at: str,
        angles: Node,
        w: Weights,
        *,
        attention: AttentionForm,
        bounds: Node | None,
    ) -> Node:
        y = w.rms_norm(x, f"{at}.ln1", EPS)
        q, k, v = (
            blocks.split_heads(w.linear(y, f"{at}.{part}"), self.heads, f"{at}.{part}")
            for part in ("attn_q", "attn_k", "attn_v")
        )
        q, k = (
            ops.rope(part, angles, pairs="adjacent", name=f"{part.name}.rope") for part in (q, k)
        )
        x = ops.add(
            w.linear(blocks.attend(q, k, v, attention, at=at, bounds=bounds), f"{at}.attn_out"),
            x,
            name=f"{at}.attn_residual",
        )
        y = w.rms_norm(x, f"{at}.ln2", EPS)
        gate, up, name = (
            w.linear(y, f"{at}.ffn_gate"),
            w.linear(y, f"{at}.ffn_up"),
            f"{at}.ffn_gated",
        )
        y = (
            ops.silu_mul(gate, up, name=name)
            if self.act == "silu"
            else ops.gelu_mul(gate, up, approximate=self.act, name=name)
        )
        return ops.add(w.linear(y, f"{at}.ffn_down"), x, name=f"{at}.ffn_residual")


def to_gguf(family: PixtralVision) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    keys = blocks.tower_keys(
        family,
        image_size=family.resolution.longest,
        patch=family.patch,
        text_width=family.text_width,
    )
    eps = family.merge_eps if family.breaks else EPS
    keys |= {"vision.attention.layer_norm_epsilon": eps}
    keys["use_silu" if family.act == "silu" else "use_gelu"] = True
    if family.merge is not None:
        keys["vision.spatial_merge_size"] = family.merge
    if not family.breaks:
        return GgufTower("lightonocr", keys)
    return GgufTower("pixtral", keys, {"v.token_embd.img_break": "[IMG_BREAK]"})


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say. In published models
    image_size is the longest edge, and the decoder's norms, of which the file says nothing, have
    the tower's epsilon, those of LightOnOCR Qwen3's.
    """
    vision = {
        **blocks.gguf_vit(keys),
        "hidden_act": "gelu" if keys.flag("use_gelu", False) else "silu",
        "rope_theta": keys.get("rope.freq_base", None),
    }
    kind = "mistral3" if "mm.patch_merger.weight" in shapes else "llava"
    kind = LIGHTON if keys.get("projector_type", "") == "lightonocr" else kind
    config = {
        "model_type": kind,
        "vision_config": vision,
        "text_config": {
            "hidden_size": keys.count("vision.projection_dim"),
            "rms_norm_eps": 1e-6 if kind == LIGHTON else vision["layer_norm_eps"],
        },
        "spatial_merge_size": keys.get("vision.spatial_merge_size", None),
        "multimodal_projector_bias": "mm.1.bias" in shapes,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }
    return config, {**gguf_image(keys), "size": {"longest_edge": keys.count("vision.image_size")}}


def read(top: Settings, image: Settings) -> PixtralVision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c, text, kind = (
        top.part("vision_config"),
        top.part("text_config"),
        top.get("model_type", "mistral3"),
    )
    if top.get("architectures", None) in LIGHTON_CLASSES:
        kind = LIGHTON
    merges, plain = kind != "llava", kind == LIGHTON
    top.choice("vision_feature_layer", (-1,), -1 if merges else -2)
    if not merges:
        top.choice("vision_feature_select_strategy", ("full",), "default")
    c.choice("num_channels", (3,), 3)
    width, heads = (
        c.count("hidden_size", 1024, maximum=MAX_WIDTH),
        c.count("num_attention_heads", 16, maximum=MAX_HEADS),
    )
    patch = c.count("patch_size", 14 if plain else 16)
    merge = top.count("spatial_merge_size", 2) if merges else None
    act, text_eps = (
        c.choice("hidden_act", ("silu", *ACTIVATIONS), "silu" if plain else "gelu"),
        1e-5 if text.get("model_type", "") == "ministral3" else 1e-6,
    )
    return PixtralVision(
        layers=c.count("num_hidden_layers", 24, maximum=MAX_LAYERS),
        width=width,
        ffn=c.count("intermediate_size", 4096, maximum=MAX_WIDTH),
        heads=heads,
        act=ACTIVATIONS.get(act, act),
        rotary=_read_rotary(c, width, heads),
        patch=patch,
        merge=merge,
        merge_eps=text.number("rms_norm_eps", text_eps),
        text_width=text.count("hidden_size", 4096, maximum=MAX_WIDTH),
        bias=top.flag("multimodal_projector_bias", not merges),
        gelu=ACTIVATIONS[top.choice("projector_hidden_act", ACTIVATIONS, "gelu")],
        breaks=not plain,
        resolution=read_native(image, patch * (merge or 1), _step(image, patch) if plain else None),
    )


def _read_rotary(c: Settings, width: int, heads: int) -> Rotary:
    """Half of a head's pairs turn by a patch's row, half by its column, the ones at the even
    frequencies, the others at the odd ones.
    """
    head, rope = width // heads, c.part("rope_parameters")
    if width % heads or head % 4:
        raise ModelError(
            f"{c.where}: {heads} heads of width {width}; expected heads that divide the width, "
            "each of a multiple of 4"
        )
    rope.choice("rope_type", AXIAL, "axial")
    pairs = rotary(rope.number("rope_theta", c.number("rope_theta", 1e4)), head).frequencies
    return Rotary(pairs[::2] + pairs[1::2], (0,) * (head // 4) + (1,) * (head // 4))


def _step(image: Settings, patch: int) -> int:
    """Return the pixels to whose multiples LightOnOCR's pictures are rounded up, which do not have
    to be those of a token. Raises ModelError where they are no whole patches.
    """
    size = image.get("patch_size", patch)
    if isinstance(size, Mapping) and size.get("height") == size.get("width"):
        size = size.get("height")
    step = Settings({"patch_size": size}, image.where).count("patch_size", maximum=MAX_WIDTH)
    if step % patch:
        raise ModelError(
            f"{image.where}: patch_size is {step}, expected a multiple of the encoder's, {patch}"
        )
    return step


def _tower(name: str) -> tuple[str, ...]:
    return (
        *checkpoint_names(f"vision_tower.{name}"),
        *checkpoint_names(f"vision_encoder.{name}"),
        f"vision_tower.vision_model.{name}",
    )


def _projector(name: str) -> tuple[str, ...]:
    return (
        *checkpoint_names(f"multi_modal_projector.{name}"),
        *checkpoint_names(f"vision_projection.{name}"),
    )
