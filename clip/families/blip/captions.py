"""BLIP that writes captions (arXiv:2201.12086): a vision transformer, to whose states a decoder
attends, which was trained on captions and continues one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtmd.base.errors import ModelError, PromptError
from mtmd.clip.families.blip.tower import BlipTower, read_tower
from mtmd.clip.image.pixels import read_normalize
from mtmd.clip.pictures_first import pictures_first
from mtmd.clip.resolution.fixed_square import FixedSquare, read_fixed_square
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

# The token that begins a text is none of BERT's, and published tokenizers do not have it.
BEGIN, END = "[DEC]", "[SEP]"
READS = "BlipForConditionalGeneration"
DESCRIBE = "Describe the image."
TASKS = {"caption": DESCRIBE}
TEMPLATE = pictures_first("{% if not loop.first %}{{ ' ' }}{% endif %}{{ text }}")


@dataclass(frozen=True)
class BlipVision:
    tower: BlipTower
    resolution: FixedSquare

    marker, image_token = "<image>", BEGIN
    around = ("", "")
    bidirectional = False
    separator = None
    video = None
    pictures = 1
    bare_prompt = True
    template = TEMPLATE
    tasks = TASKS
    end = END
    control = ()
    begin_key = "bos_token_id"
    unused = ()

    def real_rows(self, plan: ImagePlan) -> int:  # noqa: ARG002
        return self.tower.tokens

    def parameters(self) -> Mapping[str, Parameter]:
        return self.tower.parameters()

    def prompt(self, plan: ImagePlan) -> str:  # noqa: ARG002
        return self.image_token

    def rewritten(self, text: str) -> str:
        """Return the prompt without the words that ask for a caption. Raises PromptError where
        there is no picture.
        """
        _, begin, words = text.rpartition(self.image_token)
        if not begin:
            raise PromptError("this model writes captions of pictures, found none; send one")
        return begin if words.strip() == DESCRIBE else begin + words

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] -> states [B, 1 + P, C]"""
        return self.tower.features(tiles, Weights(weights, tiles.dtype), attention)


def read(top: Settings, image: Settings) -> BlipVision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed, and for a model that does not write captions.
    """
    stated = top.get("architectures", [READS])
    if stated != [READS]:
        raise ModelError(
            f"{top.where}: architectures is {stated!r:.60}, expected {READS}: of BLIP, models that "
            "write captions are read"
        )
    tower = read_tower(
        top.part("vision_config"),
        layers=12,
        width=768,
        ffn=3072,
        heads=12,
        size=384,
        patch=16,
        eps=1e-5,
    )
    usual = {"size": {"height": 384, "width": 384}}
    square = read_fixed_square(
        Settings(usual | {**image.values}, image.where),
        tower.image_size,
        1,
        read_normalize(image),
        crops=False,
        ground=None,
    )
    return BlipVision(tower, square)
