"""What a vision family tells the encoder, and the table of families."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from mtmd.kernels.errors import ModelError
from mtmd.kernels.flash import AttentionForm
from mtmd.kernels.graph import Node, Type, WeightSource
from mtmd.kernels.settings import Settings
from mtmd.kernels.weights.canonical import Parameter

FAMILIES = {"gemma3": "mtmd.clip.families.gemma3"}


@dataclass(frozen=True)
class ImagePlan:
    """How one picture goes in: pixel tiles for the encoder and the text around them.

    `tiles` are fp32 [3, Y, X], normalised. `prompt` is the text that stands for the picture, in which each of the `tokens` image
    tokens is written as the family's image token.
    """
    tiles: tuple[np.ndarray, ...]
    sizes: tuple[tuple[int, int], ...]
    tokens: int
    prompt: str


class VisionFamily(Protocol):
    """One picture model. A tile's type decides its graph; tiles of equal type are encoded as one batch."""
    marker: str
    """What the chat template writes where a picture belongs."""
    image_token: str
    """The token whose place the picture's embeddings take."""
    bidirectional: bool
    """Whether the tokens of one picture see each other in both directions."""
    unused: tuple[str, ...]
    """Patterns of tensors that checkpoints may hold and that answering does not need."""

    def parameters(self) -> Mapping[str, Parameter]:
        """Canonical names and the checkpoint's."""

    def prepare(self, pixels: np.ndarray) -> ImagePlan:
        """From uint8 [Y, X, 3]."""

    def most_tokens(self) -> int:
        """The most tokens that one picture takes."""

    def tile_type(self) -> Type:
        """The tile the warm-up asks about."""

    def largest_tile_type(self) -> Type:
        """The largest tile that any picture can lead to."""

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] in the compute type -> embeddings [B, T, D]"""


def vision_family(model_type: str, config: Mapping[str, Any], image: Settings) -> VisionFamily:
    """The family of a checkpoint; `image` are its image processor's settings. Raises ModelError for one we do not know, naming those we do.
    """
    if model_type not in FAMILIES:
        raise ModelError(f"architecture {model_type!r} is not known; this version reads {', '.join(sorted(FAMILIES))}")
    family: VisionFamily = import_module(FAMILIES[model_type]).read(config, image)
    return family
