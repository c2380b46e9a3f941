"""Dual encoders: a tower for pictures and one for texts, whose vectors lie in one space, and the
table of families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from mtmd.base.errors import ModelError
from mtmd.clip.dual.text_tower import TextTower
from mtmd.clip.family import Tower
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import Settings

# model_type in a config.json -> the file of its family
FAMILIES = {
    "clip": "mtmd.clip.dual.families.clip",
    "siglip": "mtmd.clip.dual.families.siglip",
    "siglip2": "mtmd.clip.dual.families.siglip",
}


@dataclass(frozen=True)
class DualFamily:
    """`width`: numbers in a vector. The probability that a text belongs to a picture comes from
    `scale` x cosine (+ `bias`): a softmax over texts where they are `exclusive`, else a sigmoid for
    each. `unused`: patterns of tensors that checkpoints may hold and that nothing needs.

    Texts are made lower case where `lower`; they lose their punctuation where the checkpoint's
    tokenizer is of the class `bare_with`.
    """

    image: Tower
    text: TextTower
    width: int
    exclusive: bool
    unused: tuple[str, ...]
    lower: bool = False
    bare_with: str | None = None

    def parameters(self) -> Mapping[str, Parameter]:
        """Canonical names and the checkpoint's."""
        shape = () if self.exclusive else (1,)
        scores = {"logit_scale": Parameter(shape, ("logit_scale",))}
        if not self.exclusive:
            scores["logit_bias"] = Parameter(shape, ("logit_bias",))
        return {**self.image.parameters(), **self.text.parameters(), **scores}


def is_dual(config: Settings) -> bool:
    """Return whether a config.json is that of a dual encoder."""
    kind = config.get("model_type", None)
    return isinstance(kind, str) and kind in FAMILIES


def dual_family(config: Settings, image: Settings) -> DualFamily:
    """The family of a checkpoint; `image` are its image processor's settings. Raises ModelError for
    one we do not know, naming those we do.
    """
    kind = config.get("model_type", None)
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(
            f"{config.where}: model_type is {kind!r:.60}, expected a dual encoder's: "
            f"{', '.join(FAMILIES)}"
        )
    family: DualFamily = import_module(FAMILIES[kind]).read(config, image)
    return family
