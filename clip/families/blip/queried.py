"""A vision transformer, a Q-Former whose queries become a picture's tokens, and a linear layer, as
BLIP-2 and InstructBLIP have them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import biased_parameters, checkpoint_names, learned_queries
from mtmd.clip.families.blip.tower import BlipTower, read_tower
from mtmd.clip.qformer import QFormer, read_qformer
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

QFORMER, QUERIES = "mm.qformer", "mm.queries"
MAX_QUERIES = 4096  # published models have 32


@dataclass(frozen=True)
class QueriedTower:
    tower: BlipTower
    qformer: QFormer
    queries: int
    text_width: int

    @property
    def unused(self) -> tuple[str, ...]:
        """Patterns of what the last layer would do with a text, from which nothing is read."""
        last = self.qformer.layers - 1
        return (rf"qformer\.encoder\.layer\.{last}\.(intermediate|output)\..*",)

    def parameters(self) -> dict[str, Parameter]:
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

    def embeddings(
        self, seen: Node, w: Weights, attention: AttentionForm, ids: Node | None = None
    ) -> Node:
        """Features [B, 1 + P, C], a text's tokens int64 [N] -> embeddings [B, Q, D]"""
        text = None if ids is None else self.qformer.text(ids, QFORMER, w)
        x = learned_queries(QUERIES, seen.shape[0], w)
        x = self.qformer.graph(x, seen, QFORMER, self._blocks, w, attention, text)
        return w.linear(x, "mm.fc", bias=True)


def _qformer(name: str) -> tuple[str, ...]:
    return (f"qformer.{name}",)


def read_queried(top: Settings, image: Settings, *, reads_text: bool = False) -> QueriedTower:
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
        top.part("qformer_config"),
        layers=12,
        every=2,
        width=768,
        heads=12,
        seen=seen,
        reads_text=reads_text,
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
    # As transformers does, whatever the settings say
    return QueriedTower(tower, replace(qformer, seen=seen), queries, width)
