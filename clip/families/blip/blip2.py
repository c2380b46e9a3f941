"""BLIP-2 (arXiv:2301.12597): a vision transformer, and a Q-Former whose queries become a picture's
tokens, for a decoder that was trained to answer one question.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import biased_parameters, checkpoint_names, learned_queries
from mtmd.clip.families.blip.tower import BlipTower, read_tower
from mtmd.clip.image.pixels import read_normalize
from mtmd.clip.pictures_first import pictures_first
from mtmd.clip.qformer import QFormer, read_qformer
from mtmd.clip.resolution.fixed_square import FixedSquare, read_fixed_square
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

QFORMER, QUERIES = "mm.qformer", "mm.queries"
MAX_QUERIES = 4096  # published models have 32
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
    tower: BlipTower
    qformer: QFormer
    queries: int
    text_width: int
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
        width = self.qformer.width
        projection = {"mm.fc": ("language_projection", (self.text_width, width))}
        return {
            **self.tower.parameters(),
            **self.qformer.parameters(QFORMER, self._blocks, _qformer),
            **biased_parameters(projection, checkpoint_names),
            QUERIES: Parameter(
                (self.queries, width), ("query_tokens",), (1, self.queries, width), lambda w: w[0]
            ),
        }

    @property
    def _blocks(self) -> list[str]:
        return [f"{QFORMER}.{index}" for index in range(self.qformer.layers)]

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
        seen = self.tower.features(tiles, w, attention)
        x = learned_queries(QUERIES, tiles.shape[0], w)
        x = self.qformer.graph(x, seen, QFORMER, self._blocks, w, attention)
        return w.linear(x, "mm.fc", bias=True)


def _qformer(name: str) -> tuple[str, ...]:
    return (f"qformer.{name}",)


def read(top: Settings, image: Settings) -> Blip2Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    tower = read_tower(
        top.part("vision_config"),
        layers=39,
        width=1408,
        ffn=6144,
        heads=16,
        size=224,
        patch=14,
        eps=1e-6,
    )
    seen = tower.vit.width
    qformer = read_qformer(
        top.part("qformer_config"), layers=12, every=2, width=768, heads=12, seen=seen
    )
    queries = top.count("num_query_tokens", 32, maximum=MAX_QUERIES)
    stated = image.part("processor").get("num_query_tokens", queries)
    if stated != queries:
        raise ModelError(
            f"processor_config.json: num_query_tokens is {stated!r:.40}, expected {queries}, as "
            f"{top.where} has it; they belong to different models, fetch both again"
        )
    text = top.part("text_config")
    width = text.count("hidden_size", 768, maximum=MAX_WIDTH)
    text.choice("word_embed_proj_dim", (width,), width)
    return Blip2Vision(
        tower=tower,
        qformer=replace(qformer, seen=seen),  # as transformers does, whatever the settings say
        queries=queries,
        text_width=width,
        resolution=read_fixed_square(
            image, tower.image_size, queries, read_normalize(image), crops=False, ground=None
        ),
    )
