"""Janus-Pro's eyes for understanding (arXiv:2501.17811) and DeepSeek-VL's (arXiv:2403.05525):
SigLIP over one square, two layers to the decoder's width. What Janus-Pro draws with is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    ACTIVATIONS,
    GgufTower,
    VitParams,
    biased_parameters,
    checkpoint_names,
    gguf_vit,
    plain_vit,
    plain_vit_parameters,
    read_vit,
    tower_keys,
    tower_names,
)
from mtmd.clip.image.pixels import gguf_image
from mtmd.clip.resolution.letterbox import Letterbox, read_letterbox
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

MAX_DEPTH = 8  # layers of the projection; published models have 2
SYSTEM = (
    "You are a helpful language and vision assistant. You are able to understand the visual "
    "content that the user provides, and assist the user with a variety of tasks using natural "
    "language.\n\n"
)  # of the reference processor, before all else


@dataclass(frozen=True)
class JanusVision:
    """`depth` layers of `inner` width bring patches to the decoder, after a GELU each but the
    first. `draws`: it is Janus-Pro's, which has marks around pictures.
    """

    vit: VitParams
    patch: int
    depth: int
    text_width: int
    gelu: str
    draws: bool
    greets: bool
    resolution: Letterbox

    marker = image_token = "<image_placeholder>"
    around = ("", "")
    bidirectional = False
    separator = None
    video = None

    @property
    def unused(self) -> tuple[str, ...]:
        names = r"(head\..*|embeddings\.position_ids)"
        drawing = r"(model\.)?(vqmodel|generation_(embeddings|aligner|head))\..*"
        return rf"(model\.)?vision_model\.(vision_model\.)?{names}", *(drawing,) * self.draws

    def parameters(self) -> Mapping[str, Parameter]:
        text, width = self.text_width, self.vit.width
        names = partial(_tower_names, draws=self.draws)
        patches = (self.resolution.side // self.patch) ** 2
        ends = {
            f"mm.{i}": (_layer(i, self.draws), (text, text if i else width))
            for i in range(self.depth)
        }
        return {
            **plain_vit_parameters(self.vit, self.patch, patches, names),
            **biased_parameters(ends, lambda name: checkpoint_names(f"aligner.{name}")),
        }

    def prompt(self, plan: ImagePlan) -> str:
        tokens = self.image_token * plan.tokens
        return f"<begin_of_image>{tokens}<end_of_image>" if self.draws else tokens

    def rewritten(self, text: str) -> str:
        return SYSTEM + text if self.greets else text

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, tiles.dtype)
        x = plain_vit(tiles, w.tensor("v.position_embd.weight"), self.vit, w, attention)
        for layer in range(self.depth):
            if layer:
                x = ops.gelu(x, approximate=self.gelu, name=f"mm.{layer}.gelu")
            x = w.linear(x, f"mm.{layer}", bias=True)
        return x


def _layer(index: int, draws: bool) -> str:
    """The name of a layer of the projection."""
    if not draws:
        return f"linear{index + 1}"
    return f"hidden_layers.{index - 1}" if index else "fc1"


def _tower_names(name: str, draws: bool) -> tuple[str, ...]:
    own = name.replace("self_attn.out_proj", "self_attn.projection_layer") if draws else name
    return tower_names(own, "vision_model")


def to_gguf(family: JanusVision) -> GgufTower:
    """Return the keys of a GGUF that say the same; none holds DeepSeek-VL's, or other layers of a
    projection than two.
    """
    keys = tower_keys(
        family.vit,
        image_size=family.resolution.side,
        patch=family.patch,
        text_width=family.text_width,
    )
    supported = family.draws and family.depth == 2
    return GgufTower("janus_pro" if supported else "", keys | {"use_gelu": True})


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say."""
    plain = gguf_vit(keys)
    width, ffn = (
        keys.count(f"vision.{key}_length", maximum=MAX_WIDTH)
        for key in ("embedding", "feed_forward")
    )
    vision = {
        **plain,
        "hidden_act": "gelu" if plain["hidden_act"] == "gelu_pytorch_tanh" else plain["hidden_act"],
        "mlp_ratio": ffn / width,
        "projection_dim": keys.get("vision.projection_dim", None),
        "depth": sum(name.startswith("mm.") and name.endswith(".weight") for name in shapes),
    }
    return {"model_type": "janus", "vision_config": vision}, {
        **gguf_image(keys),
        "processor": {"use_default_system_prompt": True},
    }


def read(top: Settings, image: Settings) -> JanusVision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c, draws = top.part("vision_config"), top.get("model_type", "janus") == "janus"
    c.choice("num_channels", (3,), 3)
    if draws:
        c.choice("use_qk_norm", (False,), False)
        c.choice("attention_bias", (True,), True)
        width = c.count("hidden_size", 1024, maximum=MAX_WIDTH)
        ffn = {"intermediate_size": int(width * c.number("mlp_ratio", 4.0))}
        vit = read_vit(
            Settings({**c.values, **ffn}, c.where),
            layers=24,
            width=1024,
            ffn=4096,
            heads=16,
            act="gelu",
        )
        text_width = c.count("projection_dim", 2048, maximum=MAX_WIDTH)
        gelu, depth = vit.gelu, c.count("depth", 2, maximum=MAX_DEPTH)
    else:
        c.choice("model_type", ("siglip_vision_model",), "siglip_vision_model")
        vit = read_vit(c, layers=12, width=768, ffn=3072, heads=12, act="gelu_pytorch_tanh")
        text_width = top.part("text_config").count("hidden_size", 4096, maximum=MAX_WIDTH)
        gelu, depth = ACTIVATIONS["gelu"], 2
    side, patch = c.count("image_size", 384 if draws else 224), c.count("patch_size", 16)
    if side % patch:
        raise ModelError(
            f"{c.where}: image_size {side} and patch_size {patch}, expected whole patches"
        )
    processor = image.part("processor")
    tokens = (side // patch) ** 2
    expected = processor.count("num_image_tokens", tokens)
    if expected != tokens:
        raise ModelError(
            f"{image.where}: num_image_tokens is {expected}, expected {tokens}, as many as the "
            f"patches of {side} pixels a side; correct one of them"
        )
    return JanusVision(
        vit=vit,
        patch=patch,
        depth=depth,
        text_width=text_width,
        gelu=gelu,
        draws=draws,
        greets=draws and processor.flag("use_default_system_prompt", False),
        resolution=read_letterbox(image, side, tokens),
    )
