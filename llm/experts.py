"""Mixtures of experts, as configurations say them and checkpoints hold them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.ops.moe import Routing

MAX_EXPERTS = 1 << 14


@dataclass(frozen=True)
class Experts:
    """E experts of FFN width F in the layers `at`, chosen for each token as `routing` says, and by
    ratings with a correction bias if `biased`; and, where `shared` is not 0, one of that width
    which reads every token, and of which, with `shared_gate`, a gate lets through a part. Experts
    that are not `gated` are two products with relu(y)^2 between.
    """

    count: int
    ffn: int
    routing: Routing
    at: frozenset[int]
    shared: int = 0
    shared_gate: bool = False
    biased: bool = False
    gated: bool = True


@dataclass(frozen=True)
class ExpertNames:
    """Names that checkpoints have for the tensors of a layer's experts: gate, up and down of each,
    gate and up, and down, of all in one, the router, the correction bias and the shared expert.
    """

    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    router: str = "gate"
    bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_expert"
    turned: bool = False


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
    normalize = c.flag("norm_topk_prob", False) if normalize is None else normalize
    return Experts(
        count=count,
        ffn=c.count("moe_intermediate_size", maximum=MAX_WIDTH),
        routing=Routing(c.count("num_experts_per_tok", maximum=count), normalize),
        at=frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
        shared=c.count(shared, maximum=MAX_WIDTH) if c.get(shared, 0) else 0,
        shared_gate=bool(c.get(shared, 0)),
    )


def read_grouped_experts(
    c: Settings, layers: int, *, score: str, group_best: int = 2, biased: bool = False
) -> Experts | None:
    """Read it from a text_config with the keys of DeepSeek's models (arXiv:2405.04434,
    arXiv:2412.19437), None where none has experts: groups, a factor for the weights, first layers
    without experts, shared experts that are one in their sum. Raises ModelError for what does not
    fit together.
    """
    given = ("n_routed_experts", "num_local_experts", "num_experts")
    key = next((k for k in given if c.get(k, None) is not None), None)
    first = c.get("first_k_dense_replace", 0)
    if type(first) is not int or first < 0:
        raise ModelError(
            f"{c.where}: first_k_dense_replace is {first!r:.40}, expected a number of layers"
        )
    if key is None or first >= layers:
        return None
    ffn = c.count("moe_intermediate_size", maximum=MAX_WIDTH)
    shared = "n_shared_experts"
    return Experts(
        count=c.count(key, maximum=MAX_EXPERTS),
        ffn=ffn,
        routing=read_routing(c, c.count(key, maximum=MAX_EXPERTS), score, 1e-20, group_best),
        at=frozenset(range(first, layers)),
        shared=ffn * c.count(shared, maximum=MAX_WIDTH // ffn) if c.get(shared, 0) else 0,
        biased=biased,
    )


def read_routing(c: Settings, count: int, score: str, eps: float, group_best: int = 2) -> Routing:
    """Read how `count` experts are chosen among; `eps` is added to the sum of weights. Raises
    ModelError where that cannot be done.
    """
    groups = c.count("n_group", 1, maximum=count)
    routing = Routing(
        c.count("num_experts_per_tok", maximum=count),
        c.flag("norm_topk_prob", False),
        score,
        eps=eps if c.flag("norm_topk_prob", False) else 0.0,
        scale=c.number("routed_scaling_factor", 1.0),
        groups=groups,
        top_groups=c.count("topk_group", 1, maximum=groups) if groups > 1 else 1,
        group_best=group_best,
    )
    if reason := routing.rejects(count):
        raise ModelError(
            f"{c.where}: {reason}; expected num_experts_per_tok, n_group and topk_group that fit"
        )
    return routing


def expert_parameters(
    at: str,
    sources: tuple[str, ...],
    experts: Experts,
    width: int,
    *,
    turned: bool = False,
    names: ExpertNames = ExpertNames(),
) -> dict[str, Parameter]:
    """The router and the experts of one layer, for width D; `sources` are the prefixes of their
    names, such as "model.layers.0.mlp.".

    Checkpoints hold experts one by one, or all of them in one: gate_up_proj [E, 2 F, D] and
    down_proj [E, D, F], as transformers 5 has them, or, with `turned`, under the same names [E, D,
    2 F] and [E, F, D], as published ones of some models do. MLX has gate, up and down, each of all
    experts in one. GGUF may have gate and up in one too.
    """
    e, f = experts.count, experts.ffn
    parameters = {
        f"{at}.ffn_gate_inp.weight": Parameter(
            (e, width), tuple(f"{source}{names.router}.weight" for source in sources)
        )
    }
    if experts.biased:
        name, row = f"{at}.exp_probs_b.bias", (1, e)  # some have a row of it
        biases = tuple(f"{source}{names.bias}" for source in sources)
        parameters[name] = Parameter(
            (e,),
            biases,
            others=tuple(Stored((bias,), row, _only_row) for bias in biases),
            gguf=(Stored((name,), (e,)), Stored((name,), row, _only_row)),
        )
    tables = [
        ("gate", names.parts[0], (f, width), names.fused[0], 2, 0),
        ("up", names.parts[1], (f, width), names.fused[0], 2, 1),
        ("down", names.parts[2], (width, f), names.fused[1], 1, 0),
    ]
    if not experts.gated:
        tables[:2] = [("up", names.parts[1], (f, width), "experts.up_proj", 1, 0)]
    for part, own, shape, fused, parts, which in tables:
        whole = (e, parts * shape[0], shape[1])
        ways = []
        for source in sources:
            one = (f"{source}{fused}",)
            ways.append(
                Stored(
                    tuple(f"{source}experts.{i}.{own}.weight" for i in range(e)),
                    shape,
                    _stack,
                    picks_rows=True,
                )
            )
            if not names.turned:
                ways.append(Stored(one, whole, partial(_part, which, parts), picks_rows=True))
            for stacked in ("switch_mlp", "experts.switch_glu"):  # MLX's
                ways.append(Stored((f"{source}{stacked}.{part}_proj.weight",), (e, *shape)))
            if turned or names.turned:
                turn, take = partial(_turned, which, parts), partial(_part, which, parts)
                ways.append(Stored(one, (e, shape[1], whole[1]), turn, turned=take))
        name, both = f"{at}.ffn_{part}_exps.weight", f"{at}.ffn_gate_up_exps.weight"
        gguf = (
            Stored((name,), (e, *shape)),
            Stored((both,), whole, partial(_part, which, parts), picks_rows=True),
        )
        parameters[name] = Parameter((e, *shape), (), others=tuple(ways), gguf=gguf[:parts])
    if experts.shared:
        parameters |= _shared_parameters(at, sources, experts, width, names)
    return parameters


def _shared_parameters(
    at: str, sources: tuple[str, ...], experts: Experts, width: int, names: ExpertNames
) -> dict[str, Parameter]:
    ffn, gate = experts.shared, f"{at}.ffn_gate_inp_shexp.weight"
    shapes = {"gate": (ffn, width), "up": (ffn, width), "down": (width, ffn)}
    parameters = {
        f"{at}.ffn_{part}_shexp.weight": Parameter(
            shape, tuple(f"{source}{names.shared}.{own}.weight" for source in sources)
        )
        for (part, shape), own in zip(shapes.items(), names.parts, strict=True)
        if experts.gated or part != "gate"
    }
    if experts.shared_gate:
        # llama.cpp's quantizer writes a matrix of one row as a vector.
        parameters[gate] = Parameter(
            (1, width),
            tuple(f"{source}{names.shared}_gate.weight" for source in sources),
            gguf=(Stored((gate,), (1, width)), Stored((gate,), (width,), _one_row)),
        )
    return parameters


def _only_row(matrix: Tensor) -> Tensor:
    return matrix[0]


def _one_row(vector: Tensor) -> Tensor:
    return vector.unsqueeze(0)


def _part(which: int, parts: int, experts: Tensor) -> Tensor:
    """One of the matrices that lie one after another in each expert."""
    return experts.chunk(parts, 1)[which]


def _turned(which: int, parts: int, experts: Tensor) -> Tensor:
    return _part(which, parts, experts.transpose(1, 2))


def _stack(*experts: Tensor) -> Tensor:
    return torch.stack(experts)
