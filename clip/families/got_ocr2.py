"""GOT-OCR 2 (arXiv:2409.01704): SAM's encoder over the whole page, two convolutions, one
projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import biased_parameters, checkpoint_names
from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD, read_normalize
from mtmd.clip.resolution.fixed_square import FixedSquare, read_fixed_square
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.sam import SamParams, read_sam, sam_features, sam_parameters
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

# As transformers' processor asks, whose checkpoints have no template.
TEMPLATE = (
    "<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}"
    "You should follow the instructions carefully and explain your answers in detail.{% endif %}"
    "<|im_end|>{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}{{ '<img><imgpad></img>\\n' }}{% elif 'text' in c %}{{ c.text }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Of formats the authors have one, Mathpix's Markdown.
FORMATTED = " OCR with format: "
TASKS = {"markdown": FORMATTED, "text": " OCR: ", "table": FORMATTED, "formula": FORMATTED}
CONVOLUTIONS = {
    "proj.conv1": "multi_modal_projector.conv_upsampler1",
    "proj.conv2": "multi_modal_projector.conv_upsampler2",
}


@dataclass(frozen=True)
class GotOcr2Vision:
    sam: SamParams
    text_width: int
    resolution: FixedSquare

    tasks = TASKS
    template = TEMPLATE
    marker = "<imgpad>"
    around = ("<img>", "</img>")
    image_token = "<imgpad>"
    bidirectional = False
    separator = None
    video = None
    unused = ()

    def parameters(self) -> Mapping[str, Parameter]:
        projection = {"mm.model.fc": ("multimodal_projector", (self.text_width, self.text_width))}
        return sam_parameters(self.sam, _names) | biased_parameters(
            projection, lambda name: checkpoint_names(f"multi_modal_projector.{name}")
        )

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] -> embeddings [B, T, D]"""
        w = Weights(weights, tiles.dtype)
        return w.linear(sam_features(tiles, self.sam, w, attention), "mm.model.fc", bias=True)


def _names(authors: str, transformers: str) -> tuple[str, ...]:  # noqa: ARG001
    part, _, kind = transformers.rpartition(".")
    if part in CONVOLUTIONS:
        return checkpoint_names(f"{CONVOLUTIONS[part]}.{kind}")
    return checkpoint_names(f"vision_tower.{transformers}")


def read(top: Settings, image: Settings) -> GotOcr2Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    vision = top.part("vision_config")
    text_width = top.part("text_config").count("hidden_size", 1024, maximum=MAX_WIDTH)
    neck = vision.count("output_channels", 256, maximum=MAX_WIDTH)
    sam = read_sam(vision, ends=(2 * neck, text_width))
    side = sam.side * sam.patch
    tokens, expected = sam.tokens_a_side(side) ** 2, 256
    if tokens != expected:
        raise ModelError(
            f"{vision.where}: pictures of {side} pixels give {tokens} tokens, expected {expected}, "
            "as the reference writes into prompts"
        )
    image.choice("crop_to_patches", (False,), False)
    normalize = read_normalize(image, CLIP_MEAN, CLIP_STD)
    resolution = read_fixed_square(image, side, tokens, normalize, crops=False, ground=None)
    return GotOcr2Vision(sam, text_width, resolution)
