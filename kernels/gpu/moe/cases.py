"""What the experts' kernels are tested, measured and listed with. No Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.quant_matmul.cases import random_blocks

PLAIN = "plain"  # the kernels' constant for a table that is not quantized

# Largest mean square error against the reference in fp32, relative to the result's: in 16 bits the
# gated units and the result are rounded, and decoded values of quantized tables.
NMSE = {torch.float32: 1e-10, torch.float16: 2.0**-18, torch.bfloat16: 2.0**-12}


@dataclass(frozen=True)
class Case:
    """One problem: T tokens of D values, `top` of E experts of F values. `kinds`: block types of
    gate, up and down, "" for plain numbers. `few`: all tokens choose among so many experts.
    """

    tokens: int
    experts: int
    top: int
    width: int
    ffn: int
    dtype: torch.dtype = torch.float32
    kinds: tuple[str, str, str] = ("", "", "")
    act: str = "silu"
    normalize: bool = True
    shares: bool = False
    few: int | None = None

    def __str__(self) -> str:
        text = f"T{self.tokens} {self.top} of {self.experts} D{self.width} F{self.ffn}"
        text += f" {name_of(self.dtype)} {self.act}"
        text += f" {'/'.join(k or '-' for k in self.kinds)}" if any(self.kinds) else ""
        text += f" few {self.few}" if self.few else ""
        return text + " normalized" * self.normalize + " shares" * self.shares

    @property
    def options(self) -> dict[str, Any]:
        names = "gate_quant", "up_quant", "down_quant"
        quants = {n: k for n, k in zip(names, self.kinds, strict=True) if k}
        return {"top_k": self.top, "normalize": self.normalize, "act": self.act, **quants}

    def inputs(
        self, device: str | torch.device = "cpu", seed: int = 0
    ) -> tuple[Tensor | None, ...]:
        """x, router, gate, up, down, shares. No two ratings of a token are equal: which of them
        goes first would be anybody's choice.
        """
        rng = torch.Generator().manual_seed(seed)
        x = torch.randn(self.tokens, self.width, generator=rng)
        if any(self.kinds):
            x *= 0.01  # so that fp16 can hold the products
        ratings = (
            torch.stack(
                [torch.randperm(self.experts, generator=rng) for _ in range(self.tokens)]
            ).float()
            if self.tokens
            else torch.zeros(0, self.experts)
        )
        router = ratings * 0.25
        if self.few:
            router[:, : self.few] += 32
        shapes = ((self.ffn, self.width), (self.ffn, self.width), (self.width, self.ffn))
        tables = []
        for number, (kind, (outer, inner)) in enumerate(zip(self.kinds, shapes, strict=True)):
            if kind:
                blocks = random_blocks(kind, self.experts * outer, inner, seed + number)
                table = blocks.view(self.experts, outer, -1)
            else:
                one = torch.randn(self.experts, outer, inner, generator=rng)
                table = one.mul_(inner**-0.5).to(self.dtype)
            tables.append(table.to(device))
        shares = torch.rand(self.experts, generator=rng).to(device) if self.shares else None
        return x.to(self.dtype).to(device), router.to(self.dtype).to(device), *tables, shares


_B, _H = torch.bfloat16, torch.float16

CASES = (
    Case(3, 4, 2, 40, 24),
    Case(1, 1, 1, 16, 16, normalize=False),
    Case(1, 16, 3, 33, 17, _B, act="gelu_tanh", shares=True),
    Case(0, 4, 2, 16, 16),
    Case(17, 5, 5, 64, 33, _H),
    Case(40, 4, 2, 48, 40, _B, few=2),
    Case(70, 3, 1, 32, 64, _B, normalize=False, shares=True),
    Case(1, 2, 1, 256, 256, _B, ("Q4_K", "Q4_K", "Q6_K")),
    Case(1, 8, 2, 32, 64, torch.float32, ("Q4_0", "Q8_0", "")),
    Case(6, 33, 4, 16, 40, torch.float32, few=1 + 4),
    # Few rows of quantized experts: one each, some, of which experts have none or several blocks,
    # types that differ, and more rows than that.
    Case(1, 6, 3, 256, 32, _B, ("Q4_K", "Q4_K", "Q8_0"), shares=True),
    Case(1, 9, 3, 288, 32, _H, ("Q4_0", "Q4_0", "Q8_0"), act="gelu_tanh"),
    Case(16, 8, 2, 64, 96, _H, ("Q5_1", "Q5_1", "Q4_1"), few=3),
    Case(1, 2, 1, 512, 32, _B, ("IQ4_XS", "IQ4_XS", "Q5_0")),
    Case(1, 2, 1, 32, 256, _B, ("Q4_1", "Q4_1", "Q3_K")),
    Case(2, 4, 2, 32, 256, _H, ("Q8_0", "Q5_0", "Q6_K")),
    Case(5, 3, 2, 256, 32, _B, ("Q2_K", "Q2_K", "IQ4_NL"), normalize=False),
    Case(5, 3, 2, 32, 512, _H, ("Q8_0", "Q5_0", "Q5_K"), few=2),
    Case(40, 8, 2, 256, 64, _H, ("Q4_K", "Q6_K", "Q5_0"), few=5),
    Case(50, 2, 1, 160, 96, _B, ("IQ4_NL", "IQ4_NL", "Q4_0"), few=1),
    Case(67, 2, 1, 32, 64, _B, ("Q4_0", "Q4_0", "Q8_0")),
    Case(67, 2, 1, 256, 32, _B, ("Q5_K", "Q4_K", "Q8_0")),
    Case(3, 4, 2, 64, 32, _B, ("", "Q4_0", "Q8_0")),
)
USES = {
    "experts, decoding, 8 of 8, 2048 x 768": Case(1, 8, 8, 2048, 768, _B),
    "experts, decoding 16, 2 of 8, 2048 x 768": Case(16, 8, 2, 2048, 768, _B),
    "experts, prefill of 512, 2 of 8, 2048 x 768": Case(512, 8, 2, 2048, 768, _B),
    "experts, decoding, Q4_K and Q6_K, 2 of 8, 2048 x 768": Case(
        1, 8, 2, 2048, 768, _B, ("Q4_K", "Q4_K", "Q6_K")
    ),
    "experts, decoding 16, Q4_K and Q6_K, 2 of 8, 2048 x 768": Case(
        16, 8, 2, 2048, 768, _B, ("Q4_K", "Q4_K", "Q6_K")
    ),
}
