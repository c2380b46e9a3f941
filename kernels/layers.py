"""Building blocks of families: a model's parameters by canonical name, and the ops that use
them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.adapter import A, Adapter, B
from mtmd.kernels.dtype import name_of
from mtmd.kernels.graph import Node, Type, WeightSource, weight
from mtmd.kernels.quantization.blocks import BLOCKS

GROUP = 32  # numbers of a row that have a scale of their own where products round them


@dataclass(frozen=True)
class AppliedAdapter:
    """An adapter that changes products of a graph, `scale` times: fp32, of each row, [..., 1]."""

    adapter: Adapter
    scale: Node


@dataclass(frozen=True)
class AdaptedWeights:
    """Weights of a graph whose products are changed by adapters. `only`: the layers that the graph
    has, where it is made to see what they launch.
    """

    base: WeightSource
    applied: Sequence[AppliedAdapter]
    only: Collection[int] | None = None

    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        return self.base.type_of(name, dtype)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.base.read(name, dtype)

    def quant(self, name: str) -> str | None:
        return self.base.quant(name)

    def order(self, name: str) -> str | None:
        return self.base.order(name)


class Weights:
    """Parameters as nodes, in the types their ops want. `dtype` is the compute type."""

    def __init__(self, source: WeightSource, dtype: torch.dtype):
        self.dtype, self.source = dtype, source
        self.applied: Sequence[AppliedAdapter] = ()
        self.only: Collection[int] | None = None
        self._ordered: dict[tuple[Node, str], Node] = {}
        self._whole: dict[tuple[Node, str], Node] = {}
        if isinstance(source, AdaptedWeights):  # nodes of all graphs are of one source
            self.source, self.applied, self.only = source.base, source.applied, source.only

    def layers(self, count: int) -> Sequence[int]:
        """Return the numbers of the layers that the graph has, of so many."""
        return [n for n in range(count) if self.only is None or n in self.only]

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Node:
        """A parameter by its full name, in the compute type unless `dtype` says otherwise."""
        return weight(name, self.source, dtype or self.dtype)

    def linear(self, x: Node, at: str, *, bias: bool = False, name: str = "") -> Node:
        """x @ W.T (+ b)

        x [..., K], at.weight [N, K], quantized or not, at.bias [N] -> [..., N]
        """
        y = ops.matmul(
            self._filled(self._in_order(x, f"{at}.weight"), f"{at}.weight"),
            self.tensor(f"{at}.weight"),
            self.tensor(f"{at}.bias") if bias else None,
            **self._quant(f"{at}.weight"),
            name=name or at,
        )
        for one in self.applied:
            if one.adapter.changes_product(f"{at}.weight"):
                a, b = self._low_rank(one.adapter, f"{at}.weight")
                y = ops.lora(y, x, a, b, one.scale, name=f"{name or at}.lora.{one.adapter.name}")
        return y

    def heads(self, x: Node, at: str, *, turned: bool = False, name: str = "") -> Node:
        """The product of each head with a matrix of its own

        x [T, H, K], or [T, 1, K] for all heads, at.weight [H, N, K], quantized or not, `turned`
        [H, K, N] -> [T, H, N]
        """
        w, quant = self.tensor(f"{at}.weight"), self._quant(f"{at}.weight")
        return ops.head_matmul(x, w, turned=turned, **quant, name=name or at)

    def embed(self, tokens: Node, at: str, scale: float = 1.0) -> Node:
        """Rows of a table times `scale`

        tokens [T], at.weight [V, D], quantized or not -> [T, D]
        """
        quant = self._quant(f"{at}.weight")
        if self.source.order(f"{at}.weight"):
            raise ModelError(
                f"the columns of {at}.weight are in an order of their own, which is read for "
                "products alone; use the original checkpoint, or a GGUF of it"
            )
        attrs = {**quant, "dtype": name_of(self.dtype)} if quant else {}
        y = ops.embed(tokens, self.tensor(f"{at}.weight"), scale=scale, **attrs, name=at)
        for one in self.applied:
            if one.adapter.changes_table(f"{at}.weight"):
                name = f"{at}.lora.{one.adapter.name}"
                a, b = self._low_rank(one.adapter, f"{at}.weight")
                rows = ops.embed(tokens, a, scale=scale, name=f"{name}.rows")
                share = ops.cast(one.scale, dtype=self.dtype, name=f"{name}.scale")
                rows = ops.matmul(ops.mul(rows, share, name=f"{name}.scaled"), b, name=f"{name}.b")
                y = ops.add(y, rows, name=name)
        return y

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

    def _in_order(self, x: Node, name: str) -> Node:
        """x [..., K] with its columns in the order in which a parameter has them; once for all that
        have the same.
        """
        order = self.source.order(name)
        if order is None:
            return x
        if (x, order) not in self._ordered:
            columns = ops.reshape(x, shape=(*x.shape, 1), name=f"{x.name}.columns")
            at = weight(order, self.source, torch.int64)
            taken = ops.take_rows(columns, at, name=order)
            self._ordered[x, order] = ops.reshape(taken, shape=x.shape, name=f"{order}.rows")
        return self._ordered[x, order]

    def _filled(self, x: Node, name: str) -> Node:
        """x [..., K] up to whole blocks of a parameter, where its rows are filled up with zeros: by
        columns of its last group, again and again, which leave the group's largest value as it is.
        """
        kind = self.quant(name)
        if kind is None:
            return x
        block, width = BLOCKS[kind], x.shape[-1]
        count = self.source.type_of(name, self.dtype).shape[-1] // block.bytes * block.values
        more = count - width
        if not 0 < more < min(block.values, width):
            return x
        if (x, kind) not in self._whole:
            whole = x
            while (more := count - (width := whole.shape[-1])) > 0:
                start = width - min(more, width % GROUP or width)
                last = ops.columns(whole, start=start, stop=width, name=f"{x.name}.last")
                axis = len(x.shape) - 1
                whole = ops.concat(whole, last, axis=axis, name=f"{x.name}.whole")
            self._whole[x, kind] = whole
        return self._whole[x, kind]

    def _low_rank(self, adapter: Adapter, name: str) -> tuple[Node, Node]:
        return weight(name + A, adapter, self.dtype), weight(name + B, adapter, self.dtype)

    def quant(self, name: str) -> str | None:
        """The block type in which a parameter is kept, None for plain numbers."""
        return self.source.quant(name)

    def _quant(self, name: str) -> dict[str, str]:
        kind = self.quant(name)
        return {"quant": kind} if kind else {}
