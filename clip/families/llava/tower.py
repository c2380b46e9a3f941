"""A vision transformer whose features come from inside, perhaps from several depths, and the two
layers that bring them to the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

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
    no feature. `bias`, `gelu`, `text_width` and `norm_eps`, that of a norm before it, are the
    projection's. `at` begins the names of the tower's parameters, `module` those in checkpoints.
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
    norm_eps: float | None = None
    at: str = "v"
    module: str = "vision_tower"

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
            *(rf"(model\.)?{self.module}\.(vision_model\.)?{name}" for name in names),
            rf"{self.at}\.blk\.{beyond}",
            rf"{self.at}\.post_ln\..*",
        )

    def parameters(self) -> Mapping[str, Parameter]:
        return {**self.tower_parameters(), **self._projection()}

    def tower_parameters(self) -> dict[str, Parameter]:
        """The parameters without the projection's."""
        at, width = self.at, self.vit.width
        names = partial(tower_names, module=self.module)
        parameters = vit_parameters(self.vit, names, f"{at}.blk")
        parameters[f"{at}.patch_embd.weight"] = Parameter(
            (width, 3, self.patch, self.patch), names("embeddings.patch_embedding.weight")
        )
        rows = self.grid**2 + self.class_token
        parameters[f"{at}.position_embd.weight"] = Parameter(
            (rows, width), names("embeddings.position_embedding.weight")
        )
        if self.class_token:
            parameters[f"{at}.class_embd"] = Parameter(
                (width,), names("embeddings.class_embedding")
            )
            parameters |= biased_parameters(
                {f"{at}.pre_ln": ("pre_layrnorm", (width,))}, names
            )  # spelled so
        else:
            parameters[f"{at}.patch_embd.bias"] = Parameter(
                (width,), names("embeddings.patch_embedding.bias")
            )
        return parameters

    def _projection(self) -> dict[str, Parameter]:
        width, text = self.vit.width * len(self.features), self.text_width
        ends = {"mm.0": ("linear_1", (text, width)), "mm.2": ("linear_2", (text, text))}
        norm = {} if self.norm_eps is None else {"mm.norm": ("projector_layernorm", (width,))}
        projection = biased_parameters(
            {**ends, **norm}, lambda name: checkpoint_names(f"multi_modal_projector.{name}")
        )
        return {
            name: parameter
            for name, parameter in projection.items()
            if self.bias or name not in ("mm.0.bias", "mm.2.bias")
        }

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] in the compute type -> embeddings [B, T, D]"""
        w = Weights(weights, tiles.dtype)
        return self.projected(self.seen(tiles, w, attention), w)

    def seen(self, tiles: Node, w: Weights, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] in the compute type -> features [B, T, C times their number]"""
        at, states = self.at, self.states(tiles, w, attention)
        x = states[self.features[0]]
        for part, layers in enumerate(self.features[1:], 1):
            x = ops.concat(x, states[layers], axis=2, name=f"{at}.features.{part}")
        return self.without_first(x, f"{at}.patches") if self.skip_first else x

    def without_first(self, x: Node, name: str) -> Node:
        """[B, 1 + P, C] -> [B, P, C]"""
        rest = graph_input(
            "inp.patches", (self.tokens,), torch.int64, lambda _: torch.arange(1, self.tokens + 1)
        )
        return ops.take_rows(x, rest, name=name)

    def states(self, tiles: Node, w: Weights, attention: AttentionForm) -> list[Node]:
        """tiles [B, 3, Y, X] in the compute type -> the hidden states before and after each layer,
        [B, 1 + P, C], or [B, P, C] without a class token
        """
        at = self.at
        bias = None if self.class_token else w.tensor(f"{at}.patch_embd.bias")
        x = ops.patch_embed(
            tiles, w.tensor(f"{at}.patch_embd.weight"), bias, name=f"{at}.patch_embd"
        )
        if self.class_token:
            x = ops.prepend(x, w.tensor(f"{at}.class_embd"), name=f"{at}.class_embd.first")
        x = ops.add(x, w.tensor(f"{at}.position_embd.weight"), name=f"{at}.position_embd")
        states = [w.layer_norm(x, f"{at}.pre_ln", self.vit.eps) if self.class_token else x]
        for index in range(self.vit.layers):
            states.append(
                vit_block(states[-1], index, self.vit, w, attention=attention, blocks=f"{at}.blk")
            )
        return states

    def projected(self, x: Node, w: Weights) -> Node:
        """Features [B, T, C times their number] -> embeddings [B, T, D]"""
        if self.norm_eps is not None:
            x = w.layer_norm(x, "mm.norm", self.norm_eps)
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
