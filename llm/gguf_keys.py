"""Keys of a GGUF's metadata that decoders of most architectures have: the inverse of
`common_keys` in `family.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.checkpoint.settings import MAX_LAYERS, Settings
from mtmd.llm.experts import Experts


@dataclass(frozen=True)
class GgufText:
    """A decoder as GGUF describes it: general.architecture, the keys below its name, and the
    rotary embedding whose keys and divisors come on top, None where there is none; the token that
    pads, where it matters; what of it such a file cannot have, "" where it can all be said; and the
    type of the projector that says the rest, where one does.
    """

    architecture: str
    keys: dict[str, Any]
    rotary: Rotary | None
    pad: int | None = None
    refused: str = ""
    projector: str | None = None


class Decoder(Protocol):
    """A decoder of grouped attention, as far as its keys go."""

    @property
    def width(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def head(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def eps(self) -> float: ...
    @property
    def layers(self) -> Sequence[Any]: ...


def decoder_keys(text: Decoder) -> dict[str, Any]:
    """Return the keys of grouped attention and a gated feed-forward layer."""
    return {
        "block_count": len(text.layers),
        "context_length": text.context,
        "embedding_length": text.width,
        "feed_forward_length": text.ffn,
        "attention.head_count": text.heads,
        "attention.head_count_kv": text.groups,
        "attention.key_length": text.head,
        "attention.value_length": text.head,
        "attention.layer_norm_rms_epsilon": text.eps,
        "vocab_size": text.vocabulary,
    }


PATTERN = "attention.sliding_window_pattern"


def sliding_layers(keys: Settings, default: int) -> list[bool]:
    """Return which layers have a window by the keys of a GGUF, by the rules of llama.cpp: a truth
    value for each layer, or every how many layers one has none.
    """
    depth, pattern = keys.count("block_count", maximum=MAX_LAYERS), keys.get(PATTERN, default)
    if isinstance(pattern, (list, tuple)) and len(pattern) == depth:
        return [bool(slides) for slides in pattern]
    every = keys.count(PATTERN, default, maximum=MAX_LAYERS)
    return [(layer + 1) % every != 0 for layer in range(depth)]


def groups_by_layer(keys: Settings) -> list[int]:
    """Return how many groups of keys each layer has by the keys of a GGUF: 0 where it does not
    attend, in all others the same. Raises ModelError.
    """
    layers = keys.count("block_count", maximum=MAX_LAYERS)
    groups: object = keys.get("attention.head_count_kv", None)
    if (
        not isinstance(groups, (list, tuple))
        or len(groups) != layers
        or {*map(type, groups)} != {int}
        or len({*groups} - {0}) != 1
    ):
        raise ModelError(
            f"{keys.where}: attention.head_count_kv is {groups!r:.60}, expected {layers} numbers, "
            "0 or all the same"
        )
    return list(groups)


GATING = {1: "softmax", 2: "sigmoid"}
"""Scores of experts by expert_gating_func (llama.cpp's llama_expert_gating_func_type)."""


def gating_key(experts: Experts) -> dict[str, int]:
    """Return the key of the scores that experts are chosen by."""
    score = experts.routing.score
    return {"expert_gating_func": next(n for n, name in GATING.items() if name == score)}


def expert_keys(experts: Experts | None) -> dict[str, Any]:
    """Return the keys of a mixture of experts."""
    if experts is None:
        return {}
    shared = {"expert_shared_feed_forward_length": experts.shared} if experts.shared else {}
    return {
        "expert_count": experts.count,
        "expert_used_count": experts.routing.top_k,
        "expert_feed_forward_length": experts.ffn,
        **shared,
    }


def routing_keys(experts: Experts | None, layers: int) -> dict[str, Any]:
    """Return the keys of a mixture of experts whose routing is in the file, too: scores, factor,
    groups, and how many of the first layers have none.
    """
    if experts is None:
        return {"leading_dense_block_count": layers}
    routing, shared = experts.routing, experts.shared // experts.ffn
    keys = expert_keys(replace(experts, shared=0)) | gating_key(experts)
    keys |= {
        "expert_shared_count": shared,
        "expert_weights_scale": routing.scale,
        "expert_weights_norm": routing.normalize,
        "leading_dense_block_count": layers - len(experts.at),
    }
    if routing.groups > 1:
        keys |= {
            "expert_group_count": routing.groups,
            "expert_group_used_count": routing.top_groups,
        }
    return keys
