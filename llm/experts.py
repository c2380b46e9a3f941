"""Mixtures of experts, as configurations say them and checkpoints hold them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings

MAX_EXPERTS = 1 << 14


@dataclass(frozen=True)
class Experts:
    """E experts of FFN width F, `top_k` for each token, their weights scaled to a sum of 1 if
    `normalize`, in the layers `at`; and, where `shared` is not 0, one of that width which reads
    every token.
    """

    count: int
    ffn: int
    top_k: int
    normalize: bool
    at: frozenset[int]
    shared: int = 0


def read_experts(c: Settings, layers: int, normalize: bool | None = None) -> Experts:
    """Read it from a text_config with transformers' usual keys. `normalize`: whatever the settings
    say of it.
    """
    count = c.count(
        "num_local_experts" if c.get("num_local_experts", None) is not None else "num_experts",
        maximum=MAX_EXPERTS,
    )
    step = c.count("decoder_sparse_step", 1)
    dense: object = c.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise ModelError(f"{c.where}: mlp_only_layers is {dense!r:.40}, expected a list of layers")
    shared = "shared_expert_intermediate_size"
    return Experts(
        count=count,
        ffn=c.count("moe_intermediate_size", maximum=MAX_WIDTH),
        top_k=c.count("num_experts_per_tok", maximum=count),
        normalize=c.flag("norm_topk_prob", False) if normalize is None else normalize,
        at=frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
        shared=c.count(shared, maximum=MAX_WIDTH) if c.get(shared, 0) else 0,
    )


def expert_parameters(
    at: str, sources: tuple[str, ...], experts: Experts, width: int, *, turned: bool = False
) -> dict[str, Parameter]:
    """The router and the experts of one layer, for width D; `sources` are the prefixes of their
    names, such as "model.layers.0.mlp.".

    Checkpoints hold experts one by one, or all of them in one: gate_up_proj [E, 2 F, D] and
    down_proj [E, D, F], as transformers 5 has them, or, with `turned`, under the same names [E, D,
    2 F] and [E, F, D], as published ones of some models do. GGUF may have gate and up in one too.
    """
    e, f = experts.count, experts.ffn
    parameters = {
        f"{at}.ffn_gate_inp.weight": Parameter(
            (e, width), tuple(f"{source}gate.weight" for source in sources)
        )
    }
    for part, shape, fused, parts, which in (
        ("gate", (f, width), "gate_up", 2, 0),
        ("up", (f, width), "gate_up", 2, 1),
        ("down", (width, f), "down", 1, 0),
    ):
        whole = (e, parts * shape[0], shape[1])
        ways = []
        for source in sources:
            one = (f"{source}experts.{fused}_proj",)
            ways.append(
                Stored(
                    tuple(f"{source}experts.{i}.{part}_proj.weight" for i in range(e)),
                    shape,
                    _stack,
                    picks_rows=True,
                )
            )
            ways.append(Stored(one, whole, partial(_part, which, parts), picks_rows=True))
            if turned:
                ways.append(Stored(one, (e, shape[1], whole[1]), partial(_turned, which, parts)))
        name, both = f"{at}.ffn_{part}_exps.weight", f"{at}.ffn_{fused}_exps.weight"
        gguf = (
            Stored((name,), (e, *shape)),
            Stored((both,), whole, partial(_part, which, parts), picks_rows=True),
        )
        parameters[name] = Parameter((e, *shape), (), others=tuple(ways), gguf=gguf[:parts])
    return (
        parameters | _shared_parameters(at, sources, experts.shared, width)
        if experts.shared
        else parameters
    )


def _shared_parameters(
    at: str, sources: tuple[str, ...], ffn: int, width: int
) -> dict[str, Parameter]:
    gate, shapes = (
        f"{at}.ffn_gate_inp_shexp.weight",
        {"gate": (ffn, width), "up": (ffn, width), "down": (width, ffn)},
    )
    parameters = {
        f"{at}.ffn_{part}_shexp.weight": Parameter(
            shape, tuple(f"{source}shared_expert.{part}_proj.weight" for source in sources)
        )
        for part, shape in shapes.items()
    }
    # llama.cpp's quantizer writes a matrix of one row as a vector.
    parameters[gate] = Parameter(
        (1, width),
        tuple(f"{source}shared_expert_gate.weight" for source in sources),
        gguf=(Stored((gate,), (1, width)), Stored((gate,), (width,), _one_row)),
    )
    return parameters


def _one_row(vector: Tensor) -> Tensor:
    return vector.unsqueeze(0)


def _part(which: int, parts: int, experts: Tensor) -> Tensor:
    """One of the matrices that lie one after another in each expert."""
    return experts.chunk(parts, 1)[which]


def _turned(which: int, parts: int, experts: Tensor) -> Tensor:
    return _part(which, parts, experts.transpose(1, 2))


def _stack(*experts: Tensor) -> Tensor:
    return torch.stack(experts)
