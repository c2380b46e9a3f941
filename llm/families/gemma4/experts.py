"""Experts beside a dense feed-forward layer: each branch normed by itself, the router on a norm of
its own (transformers' Gemma 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node
from mtmd.kernels.layers import Weights
from mtmd.kernels.ops.moe import Routing
from mtmd.llm.blocks import moe_ffn
from mtmd.llm.experts import MAX_EXPERTS, Experts, expert_parameters


@dataclass(frozen=True)
class ExpertBranch:
    """Experts of every layer, for decoder width D. What an expert gives is multiplied by a number
    of its own.
    """

    experts: Experts
    width: int
    eps: float

    def parameters(
        self, at: str, prefix: str, source: Callable[[str], tuple[str, ...]]
    ) -> Mapping[str, Parameter]:
        """Return the parameters of the layer `at`; `source(prefix + "router.scale")` lists the
        names it may have in a checkpoint.
        """
        count, width = self.experts.count, self.width
        parameters = expert_parameters(at, source(prefix), self.experts, width)
        for ours, theirs, shape in (
            ("ffn_gate_inp.weight", "router.proj.weight", (count, width)),
            ("ffn_gate_inp.scale", "router.scale", (width,)),
            ("ffn_down_exps.scale", "router.per_expert_scale", (count,)),
            ("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight", (width,)),
            ("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight", (width,)),
            ("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight", (width,)),
        ):
            parameters[f"{at}.{ours}"] = Parameter(shape, source(prefix + theirs))
        return parameters

    def add(self, dense: Node, x: Node, at: str, w: Weights) -> Node:
        """Return what the dense layer makes of x, and what the experts make of it

        dense, x [T, D] -> [T, D]
        """
        router_input = ops.rms_norm(
            x,
            w.tensor(f"{at}.ffn_gate_inp.scale", torch.float32),
            eps=self.eps,
            name=f"{at}.ffn_gate_norm",
        )
        router_input = ops.scale(
            router_input, factor=self.width**-0.5, name=f"{at}.ffn_gate_norm.scaled"
        )
        y = moe_ffn(
            w.rms_norm(x, f"{at}.pre_ffw_norm_2", self.eps),
            at,
            w,
            self.experts,
            router_input=router_input,
            shares=w.tensor(f"{at}.ffn_down_exps.scale", torch.float32),
            act="gelu_tanh",
        )
        dense, y = (
            w.rms_norm(part, f"{at}.post_ffw_norm_{i}", self.eps)
            for i, part in ((1, dense), (2, y))
        )
        return ops.add(dense, y, name=f"{at}.ffn_sum")


def read_expert_branch(c: Settings, layers: int, width: int, eps: float) -> ExpertBranch | None:
    """Read it from a text_config with transformers' keys, None where there are no experts."""
    if not c.flag("enable_moe_block", False):
        return None
    count = c.count("num_experts", maximum=MAX_EXPERTS)
    experts = Experts(
        count=count,
        ffn=c.count("moe_intermediate_size", maximum=MAX_WIDTH),
        routing=Routing(c.count("top_k_experts", maximum=count), normalize=True),
        at=frozenset(range(layers)),
    )
    return ExpertBranch(experts, width, eps)
