"""What a text family tells the engine, and the table of families."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from mtmd.kernels.errors import ModelError
from mtmd.kernels.flash import AttentionForm
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.weights.canonical import Parameter
from mtmd.llm.inputs import TextInputs

FAMILIES = {"gemma3_text": "mtmd.llm.families.gemma3"}


@dataclass(frozen=True)
class KV:
    """A layer that keeps keys and values: groups G, head size K."""
    groups: int
    head: int


class TextFamily(Protocol):
    width: int
    vocabulary: int
    context: int
    """The longest sequence the checkpoint was made for, in tokens."""
    layers: Sequence[KV]
    """What each layer keeps of the past."""
    unused: tuple[str, ...]
    """Patterns of tensors that checkpoints may hold and that answering does not need."""

    def parameters(self) -> Mapping[str, Parameter]:
        """Canonical names and the checkpoint's."""

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        """-> logits [R, V] of the rows wanted"""


def text_family(model_type: str, config: Mapping[str, Any]) -> TextFamily:
    """The family of a checkpoint's text part. Raises ModelError for one we do not know, naming those we do."""
    if model_type not in FAMILIES:
        raise ModelError(f"text architecture {model_type!r} is not known; this version reads {', '.join(sorted(FAMILIES))}")
    family: TextFamily = import_module(FAMILIES[model_type]).read(config)
    return family
