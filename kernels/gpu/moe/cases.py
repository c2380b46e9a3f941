"""Describes what the experts' kernels are tested, measured and listed with. No Triton."""

from __future__ import annotations

from typing import Any

import torch

from mtmd.kernels.gpu.quant_matmul.cases import OTHERS, random_blocks
from mtmd.kernels.gpu.triton_kernel import Case, Problem, case, given
from mtmd.kernels.ops.moe import Routing

PLAIN = "plain"  # the kernels' constant for a table that is not quantized

# Largest mean square error against the reference in fp32, relative to the result's: in 16 bits the
# gated units and the result are rounded, and decoded values of quantized tables.
NMSE = {torch.float32: 1e-10, torch.float16: 2.0**-18, torch.bfloat16: 2.0**-12}


@case
def problem(
    rng: torch.Generator,
    tokens: int,
    experts: int,
    top: int,
    width: int,
    ffn: int,
    dtype: torch.dtype = torch.float32,
    kinds: tuple[str, str, str] = ("", "", ""),
    act: str = "silu",
    normalize: bool = True,
    shares: bool = False,
    few: int | None = None,
    biased: bool = False,
    routing: Routing | None = None,
    unread: int = 0,
) -> Problem:
    """T tokens of D values, `top` of E experts of F values. `kinds`: block types of gate, up and
    down, "" for plain numbers. `few`: all tokens choose among so many experts. No two ratings of a
    token are equal: which of them goes first would be anybody's choice. `routing`: in place
    of `top` and `normalize`. `unread`: no expert reads every how many-th token.
    """
    x = torch.randn(tokens, width, generator=rng)
    if any(kinds):
        x *= 0.01  # so that fp16 can hold the products
    order = [torch.randperm(experts, generator=rng) for _ in range(tokens)]
    router = (torch.stack(order).float() if order else torch.zeros(0, experts)) * 0.25
    if few:
        router[:, :few] += 32
    tables = []
    for number, (kind, (outer, inner)) in enumerate(
        zip(kinds, ((ffn, width), (ffn, width), (width, ffn)), strict=True)
    ):
        if kind:
            blocks = random_blocks(kind, experts * outer, inner, rng.initial_seed() + number)
            tables.append(blocks.view(experts, outer, -1))
        else:
            one = torch.randn(experts, outer, inner, generator=rng)
            tables.append(one.mul_(inner**-0.5).to(dtype))
    shared = torch.rand(experts, generator=rng) if shares else None
    names = "gate_quant", "up_quant", "down_quant"
    bias = torch.rand(experts, generator=rng) if biased else None
    reads = (torch.arange(tokens) % unread != 0).int() if unread else None
    options: dict[str, Any] = {"routing": routing or Routing(top, normalize), "act": act}
    options |= {name: kind for name, kind in zip(names, kinds, strict=True) if kind}
    return given(x.to(dtype), router.to(dtype), *tables, shared, bias, reads, **options)


_B, _H = torch.bfloat16, torch.float16
_ON_INPUT = Routing(1, normalize=False, score="sigmoid", on_input=True)


def _of_other_types() -> list[Case]:
    """Few rows an expert, three types at a time; and more, of a type that has a table."""
    cases = []
    for at in range(0, len(OTHERS), 3):
        kinds = OTHERS[at], OTHERS[at + 1], OTHERS[at + 2]
        cases.append(problem(1, 2, 1, 256, 256, _B, kinds))
    return [*cases, problem(34, 1, 1, 256, 256, _H, ("IQ2_XS", "NV4_128", "IQ1_M"))]


CASES = (
    problem(3, 4, 2, 40, 24),
    problem(1, 1, 1, 16, 16, normalize=False),
    problem(1, 16, 3, 33, 17, _B, act="gelu_tanh", shares=True),
    problem(0, 4, 2, 16, 16),
    problem(3, 4, 2, 40, 24, _B, act="relu"),
    problem(17, 5, 5, 64, 33, _H),
    problem(40, 4, 2, 48, 40, _B, few=2),
    problem(70, 3, 1, 32, 64, _B, normalize=False, shares=True),
    problem(1, 2, 1, 256, 256, _B, ("Q4_K", "Q4_K", "Q6_K")),
    problem(1, 8, 2, 32, 64, torch.float32, ("Q4_0", "Q8_0", "")),
    problem(6, 33, 4, 16, 40, torch.float32, few=1 + 4),
    # Few rows of quantized experts: one each, some, of which experts have none or several blocks,
    # types that differ, and more rows than that.
    problem(1, 6, 3, 256, 32, _B, ("Q4_K", "Q4_K", "Q8_0"), shares=True),
    problem(1, 9, 3, 288, 32, _H, ("Q4_0", "Q4_0", "Q8_0"), act="gelu_tanh"),
    problem(16, 8, 2, 64, 96, _H, ("Q5_1", "Q5_1", "Q4_1"), few=3),
    problem(1, 2, 1, 512, 32, _B, ("IQ4_XS", "IQ4_XS", "Q5_0")),
    problem(1, 2, 1, 32, 256, _B, ("Q4_1", "Q4_1", "Q3_K")),
    problem(2, 4, 2, 32, 256, _H, ("Q8_0", "Q5_0", "Q6_K")),
    problem(5, 3, 2, 256, 32, _B, ("Q2_K", "Q2_K", "IQ4_NL"), normalize=False),
    problem(5, 3, 2, 32, 512, _H, ("Q8_0", "Q5_0", "Q5_K"), few=2),
    problem(40, 8, 2, 256, 64, _H, ("Q4_K", "Q6_K", "Q5_0"), few=5),
    problem(50, 2, 1, 160, 96, _B, ("IQ4_NL", "IQ4_NL", "Q4_0"), few=1),
    problem(67, 2, 1, 32, 64, _B, ("Q4_0", "Q4_0", "Q8_0")),
    problem(67, 2, 1, 256, 32, _B, ("Q5_K", "Q4_K", "Q8_0")),
    problem(3, 4, 2, 64, 32, _B, ("", "Q4_0", "Q8_0")),
    # Other ways of choosing: those of LFM2, DeepSeek V3 and V2, and Llama 4.
    problem(5, 6, 3, 16, 24, biased=True, routing=Routing(3, True, "sigmoid", 1e-6, 2.5)),
    problem(
        3, 12, 2, 16, 16, biased=True, routing=Routing(2, True, "sigmoid", groups=3, top_groups=2)
    ),
    problem(7, 12, 4, 17, 16, routing=Routing(4, False, groups=4, top_groups=2, group_best=1)),
    problem(9, 3, 1, 33, 20, routing=_ON_INPUT),
    problem(1, 8, 1, 64, 32, _B, ("Q4_0", "Q4_0", "Q8_0"), routing=_ON_INPUT),
    # Tokens that no expert reads: none of them, one of few, some of many.
    problem(1, 8, 2, 32, 24, unread=1),
    problem(3, 16, 2, 40, 24, _B, shares=True, unread=2),
    problem(40, 4, 2, 48, 33, biased=True, unread=3),
    problem(5, 3, 2, 256, 32, _B, ("Q2_K", "Q2_K", "IQ4_NL"), few=2, unread=2),
    problem(1, 6, 3, 256, 32, _B, ("Q4_K", "Q4_K", "Q8_0"), unread=1),
    *_of_other_types(),
)
USES = {
    "experts, decoding, 8 of 8, 2048 x 768": problem(1, 8, 8, 2048, 768, _B),
    "experts, decoding 16, 2 of 8, 2048 x 768": problem(16, 8, 2, 2048, 768, _B),
    "experts, prefill of 512, 2 of 8, 2048 x 768": problem(512, 8, 2, 2048, 768, _B),
    "experts, decoding, Q4_K and Q6_K, 2 of 8, 2048 x 768": problem(
        1, 8, 2, 2048, 768, _B, ("Q4_K", "Q4_K", "Q6_K")
    ),
    "experts, decoding 16, Q4_K and Q6_K, 2 of 8, 2048 x 768": problem(
        16, 8, 2, 2048, 768, _B, ("Q4_K", "Q4_K", "Q6_K")
    ),
}
