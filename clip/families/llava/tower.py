"""A vision transformer whose features come from inside, perhaps from several depths, and the two
layers that bring them to the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    VitParams,
    biased_parameters,
    checkpoint_names,
    tower_names,
    vit_block,
    vit_parameters,
)
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Node, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

MAX_FEATURES = 16  # published models have at most 4


@dataclass(frozen=True)
class FeatureTower:
    """`features` are hidden states, named by the number of layers before them; `vit` has no layers
    beyond. `class_token`: it stands first, and a norm follows. `skip_first`: the first token gives
    no feature. `bias`, `gelu` and `text_width` are the projection's.
    """

    vit: VitParams
    image_size: int
    patch: int
    class_token: bool
    features: tuple[int, ...]
    skip_first: bool
    text_width: int
    bias: bool
    gelu: str

    @property
    def grid(self) -> int:
        return self.image_size // self.patch

    @property
    def saved(self) -> int:
        """Pixels a side that patches are cut from."""
        return self.grid * self.patch

    @property
    def tokens(self) -> int:
        return self.grid**2 + self.class_token - self.skip_first

    @property
    def unused(self) -> tuple[str, ...]:
        """Patterns of the tower's end, which no feature comes from."""
        used = "|".join(map(str, range(self.vit.layers)))
        beyond = rf"(?!(?:{used})\.)\d+\..*"
        names = (
            rf"encoder\.layers\.{beyond}",
            r"post_layernorm\..*",
            r"head\..*",
            r"embeddings\.position_ids",
        )
        return (
            *(rf"(model\.)?vision_tower\.(vision_model\.)?{name}" for name in names),
            rf"v\.blk\.{beyond}",
            r"v\.post_ln\..*",
        )

    def parameters(self) -> Mapping[str, Parameter]:
        width, text = self.vit.width, self.text_width
        parameters = vit_parameters(self.vit, tower_names)
        parameters["v.patch_embd.weight"] = Parameter(
            (width, 3, self.patch, self.patch), tower_names("embeddings.patch_embedding.weight")
        )
        rows = self.grid**2 + self.class_token
        parameters["v.position_embd.weight"] = Parameter(
            (rows, width), tower_names("embeddings.position_embedding.weight")
        )
        if self.class_token:
            parameters["v.class_embd"] = Parameter(
                (width,), tower_names("embeddings.class_embedding")
            )
            parameters |= biased_parameters(
                {"v.pre_ln": ("pre_layrnorm", (width,))}, tower_names
            )  # spelled so
        else:
            parameters["v.patch_embd.bias"] = Parameter(
                (width,), tower_names("embeddings.patch_embedding.bias")
            )
        ends = {
            "mm.0": ("linear_1", (text, width * len(self.features))),
            "mm.2": ("linear_2", (text, text)),
        }
        projection = biased_parameters(
            ends, lambda name: checkpoint_names(f"multi_modal_projector.{name}")
        )
        return parameters | {
            name: parameter
            for name, parameter in projection.items()
            if self.bias or name.endswith("weight")
        }

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] in the compute type -> embeddings [B, T, D]"""
        w = Weights(weights, tiles.dtype)
        bias = None if self.class_token else w.tensor("v.patch_embd.bias")
        x = ops.patch_embed(tiles, w.tensor("v.patch_embd.weight"), bias, name="v.patch_embd")
        if self.class_token:
            x = ops.prepend(x, w.tensor("v.class_embd"), name="v.class_embd.first")
        x = ops.add(x, w.tensor("v.position_embd.weight"), name="v.position_embd")
        states = [w.layer_norm(x, "v.pre_ln", self.vit.eps) if self.class_token else x]
        for index in range(self.vit.layers):
            states.append(vit_block(states[-1], index, self.vit, w, attention=attention))
        x = states[self.features[0]]
        for part, layers in enumerate(self.features[1:], 1):
            x = ops.concat(x, states[layers], axis=2, name=f"v.features.{part}")
        if self.skip_first:
            rest = graph_input(
                "inp.patches",
                (self.tokens,),
                torch.int64,
                lambda _: torch.arange(1, self.tokens + 1),
            )
            x = ops.take_rows(x, rest, name="v.patches")
        x = ops.gelu(w.linear(x, "mm.0", bias=self.bias), approximate=self.gelu, name="mm.gelu")
        return w.linear(x, "mm.2", bias=self.bias)


def read_features(top: Settings, layers: int, default: int = -2) -> tuple[int, ...]:
    """`vision_feature_layer`, a number or a list; below 0 they count from the last hidden state
    back. ModelError beyond `layers`.
    """
    setting = top.get("vision_feature_layer", default)
    given = setting if isinstance(setting, list) else [setting]
    if not 0 < len(given) <= MAX_FEATURES or any(
        type(f) is not int or not -layers - 1 <= f <= layers for f in given
    ):
        raise ModelError(
            f"{top.where}: vision_feature_layer is {setting!r:.60}, expected a number from "
            f"{-layers - 1} to {layers}, or a "
            f"list of up to {MAX_FEATURES} such"
        )
    return tuple(f if f >= 0 else layers + 1 + f for f in given)
