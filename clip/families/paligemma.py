"""PaliGemma (arXiv:2407.07726) and PaliGemma 2 (arXiv:2412.03555): SigLIP over one square, every
patch a token, in a prompt that is read in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    VitParams,
    biased_parameters,
    checkpoint_names,
    plain_vit,
    plain_vit_parameters,
    read_vit,
    tower_names,
)
from mtmd.clip.image.pixels import read_normalize
from mtmd.clip.resolution.fixed_square import FixedSquare, read_fixed_square
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

TEMPLATE = (
    "{% for m in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True)
class PaliGemmaVision:
    vit: VitParams
    patch: int
    text_width: int
    resolution: FixedSquare

    marker = image_token = "<image>"
    around = ("", "")
    bidirectional = True
    separator = None
    video = None
    template = TEMPLATE
    whole_prompt = True
    before_bos = True
    unused = (r"(model\.)?vision_tower\.(vision_model\.)?head\..*",)  # SigLIP's pooling head

    def parameters(self) -> Mapping[str, Parameter]:
        shape = (self.text_width, self.vit.width)
        projection = {"mm.input_projection": ("multi_modal_projector.linear", shape)}
        return {
            **plain_vit_parameters(self.vit, self.patch, self.resolution.tokens, tower_names),
            **biased_parameters(projection, checkpoint_names),
        }

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    def rewritten(self, text: str) -> str:
        """Return the prompt with `<bos>` behind the last picture, and a line break at its end."""
        pictures, token, question = text.rpartition(self.image_token)
        return f"{pictures}{token}<bos>{question}\n"

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, tiles.dtype)
        x = plain_vit(tiles, w.tensor("v.position_embd.weight"), self.vit, w, attention)
        return w.linear(x, "mm.input_projection", bias=True)


def read(top: Settings, image: Settings) -> PaliGemmaVision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    vision, text = top.part("vision_config"), top.part("text_config")
    vit = read_vit(vision, layers=12, width=768, ffn=3072, heads=12, act="gelu_pytorch_tanh")
    vision.choice("num_channels", (3,), 3)
    size, patch = vision.count("image_size", 224), vision.count("patch_size", 16)
    tokens = (size // patch) ** 2
    if size % patch or image.count("image_seq_length", tokens) != tokens:
        raise ModelError(
            f"{top.where}: image_size {size} and patch_size {patch} do not give the tokens of a "
            f"picture, {image.get('image_seq_length', tokens)} in {image.where}; expected a square "
            "of patches, each a token"
        )
    return PaliGemmaVision(
        vit=vit,
        patch=patch,
        text_width=text.count("hidden_size", 2048, maximum=MAX_WIDTH),
        resolution=read_fixed_square(
            image, size, tokens, read_normalize(image), crops=False, ground=None
        ),
    )
