"""Building blocks of families: a model's parameters by canonical name, and the ops that use
them.
"""

from __future__ import annotations

import torch

from mtmd.kernels import ops
from mtmd.kernels.dtype import name_of
from mtmd.kernels.graph import Node, WeightSource, weight


class Weights:
    """Parameters as nodes, in the types their ops want. `dtype` is the compute type."""

    def __init__(self, source: WeightSource, dtype: torch.dtype):
        self.source, self.dtype = source, dtype

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Node:
        """A parameter by its full name, in the compute type unless `dtype` says otherwise."""
        return weight(name, self.source, dtype or self.dtype)

    def linear(self, x: Node, at: str, *, bias: bool = False, name: str = "") -> Node:
        """x @ W.T (+ b)

        x [..., K], at.weight [N, K], quantized or not, at.bias [N] -> [..., N]
        """
        return ops.matmul(
            x,
            self.tensor(f"{at}.weight"),
            self.tensor(f"{at}.bias") if bias else None,
            **self._quant(f"{at}.weight"),
            name=name or at,
        )

    def embed(self, tokens: Node, at: str, scale: float = 1.0) -> Node:
        """Rows of a table times `scale`

        tokens [T], at.weight [V, D], quantized or not -> [T, D]
        """
        quant = self._quant(f"{at}.weight")
        attrs = {**quant, "dtype": name_of(self.dtype)} if quant else {}
        return ops.embed(tokens, self.tensor(f"{at}.weight"), scale=scale, **attrs, name=at)

    def rms_norm(self, x: Node, at: str, eps: float) -> Node:
        return ops.rms_norm(x, self.tensor(f"{at}.weight", torch.float32), eps=eps, name=at)

    def layer_norm(self, x: Node, at: str, eps: float, *, bias: bool = True) -> Node:
        return ops.layer_norm(
            x,
            self.tensor(f"{at}.weight"),
            self.tensor(f"{at}.bias") if bias else None,
            eps=eps,
            name=at,
        )

    def quant(self, name: str) -> str | None:
        """The block type in which a parameter is kept, None for plain numbers."""
        return self.source.quant(name)

    def _quant(self, name: str) -> dict[str, str]:
        kind = self.quant(name)
        return {"quant": kind} if kind else {}
