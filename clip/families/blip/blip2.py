"""BLIP-2 (arXiv:2301.12597): a vision transformer, and a Q-Former whose queries become a picture's
tokens, for a decoder that was trained to answer one question.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtmd.clip.families.blip.queried import QueriedTower, read_queried
from mtmd.clip.image.pixels import read_normalize
from mtmd.clip.pictures_first import pictures_first
from mtmd.clip.resolution.fixed_square import FixedSquare, read_fixed_square
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

DESCRIBE = "Describe the image."
TASKS = {"caption": DESCRIBE}
QUESTION = "Question: {} Answer:"
# Words of a prompt in the authors' form, and of a caption that is to be continued
WRITTEN = ("Question:", "a photo of", "A photo of")
TEMPLATE = pictures_first(
    "{% if m.role == 'assistant' %}{{ ' ' + text + '. ' }}"
    "{% elif " + " or ".join(f"text[:{len(one)}] == '{one}'" for one in WRITTEN) + " %}{{ text }}"
    "{% elif text | trim %}{{ '" + QUESTION.format("' + text + '") + "' }}{% endif %}"
)


@dataclass(frozen=True)
class Blip2Vision:
    queried: QueriedTower
    resolution: FixedSquare

    marker = image_token = "<image>"
    around = ("", "")
    bidirectional = False
    separator = None
    video = None
    unused = ()
    template = TEMPLATE
    before_bos = True
    tasks = TASKS

    def parameters(self) -> Mapping[str, Parameter]:
        return self.queried.parameters()

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    def rewritten(self, text: str) -> str:
        """Return the prompt without the words that ask for a caption: one is what the model writes
        when it is asked nothing.
        """
        return text.replace(QUESTION.format(DESCRIBE), "")

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] -> embeddings [B, Q, D]"""
        w = Weights(weights, tiles.dtype)
        return self.queried.embeddings(
            self.queried.tower.features(tiles, w, attention), w, attention
        )


def read(top: Settings, image: Settings) -> Blip2Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    queried = read_queried(top, image)
    return Blip2Vision(queried, read_square(image, queried))


def read_square(image: Settings, queried: QueriedTower) -> FixedSquare:
    """Read the square of the tower, to which pictures are stretched."""
    side, normalize = queried.tower.image_size, read_normalize(image)
    return read_fixed_square(image, side, queried.queries, normalize, crops=False, ground=None)
