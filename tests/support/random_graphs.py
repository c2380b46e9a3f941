"""Random graphs and a small transformer, with their inputs; and what they mean, evaluated without a
plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from mtmd.kernels import ops
from mtmd.kernels.backends import Cpu, Limited
from mtmd.kernels.graph import Node, Type, graph_input, toposort, weight
from mtmd.kernels.ops import OPS
from mtmd.kernels.plan.flash_choice import AttentionForm

Batch = dict[str, Tensor]


class Source:
    """Weights by name, random and small, made as they are asked for; `reads` counts how often each
    was.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.reads: Counter[str] = Counter()

    def node(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
        self.shapes[name] = shape
        return weight(name, self, dtype)

    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        return Type.contiguous(self.shapes[name], dtype)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        self.reads[name] += 1
        values = torch.randn(
            self.shapes[name], generator=torch.Generator().manual_seed(sum(map(ord, name)))
        )
        return (values * self.shapes[name][-1] ** -0.5).to(dtype)

    def quant(self, name: str) -> str | None:  # noqa: ARG002
        return None

    def order(self, name: str) -> str | None:  # noqa: ARG002
        return None


def device(name: str, *rules: str) -> Limited:
    """A device of its own memory that refuses by `rules`."""
    limited = Limited(Cpu(native=False), rules)
    limited.name = limited.space = name
    return limited


def given(name: str, *shape: int, dtype: torch.dtype = torch.float32, state: bool = False) -> Node:
    """An input filled from a dictionary; its memory belongs to the run unless it is state."""
    if state:
        return Node(
            "input",
            (),
            Type.contiguous(shape, dtype),
            {"fill": lambda b: b[name], "state": True},
            name,
        )
    return graph_input(name, shape, dtype, lambda b: b[name].clone())


def evaluate(outputs: Sequence[Node], batch: Batch) -> list[Tensor]:
    """The outputs by every op's reference, each value in memory of its own; state is not written
    to.
    """
    fresh = {name: t.clone() for name, t in batch.items()}
    values: dict[Node, Tensor] = {}
    for node in toposort(*outputs):
        if node.op == "input":
            values[node] = node.attrs["fill"](fresh)
        elif node.op == "weight":
            values[node] = node.attrs["source"].read(node.name, node.dtype)
        else:
            values[node] = (
                OPS[node.op]
                .reference(
                    *[None if i is None else values[i].clone() for i in node.inputs], **node.attrs
                )
                .clone()
            )
    return [values[o] for o in outputs]


class RandomGraph:
    """Values [T, D], combined at random: in place or not, used again later or twice at once,
    through views, through a cache.
    """

    T, D = 6, 8

    def __init__(self, seed: int, steps: int = 24):
        self.rng, self.source, self.batch = Random(seed), Source(), {}
        self.values: list[Node] = [
            self._input("x0", self.T, self.D),
            self._input("x1", self.T, self.D),
        ]
        self.count = 0
        moves = [
            self._add,
            self._row,
            self._unary,
            self._gated,
            self._product,
            self._norm,
            self._view,
            self._taken,
            self._located,
            self._attention,
            self._explicit,
        ]
        for _ in range(steps):
            self.values.append(self.rng.choice(moves)())
        made = self.values[2:]
        self.outputs = [made[-1], *self.rng.sample(made, self.rng.randint(0, 2))]

    def _input(self, name: str, *shape: int, state: bool = False) -> Node:
        self.batch[name] = torch.randn(
            shape, generator=torch.Generator().manual_seed(self.rng.getrandbits(32))
        )
        return given(name, *shape, state=state)

    def _name(self) -> str:
        self.count += 1
        return f"n{self.count}"

    def _value(self) -> Node:
        """Any value so far, the latest most of the time, so that chains are long and some values
        live long.
        """
        return self.values[-1] if self.rng.random() < 0.5 else self.rng.choice(self.values)

    def _weight(self, *shape: int) -> Node:
        return self.source.node(f"w{self.rng.randint(0, 3)}.{'x'.join(map(str, shape))}", *shape)

    def _locations(self, count: int) -> Node:
        name = f"at{self._name()}"
        self.batch[name] = torch.tensor(self.rng.sample(range(self.T), count))
        return given(name, count, dtype=torch.int64)

    def _add(self) -> Node:
        return ops.add(self._value(), self._value(), name=self._name())

    def _row(self) -> Node:
        return ops.add(self._value(), self._weight(self.D), name=self._name())

    def _unary(self) -> Node:
        x = self._value()
        return self.rng.choice(
            (
                lambda: ops.gelu(x, approximate="tanh", name=self._name()),
                lambda: ops.softcap(x, cap=2.0, name=self._name()),
            )
        )()

    def _gated(self) -> Node:
        return ops.gelu_mul(self._value(), self._value(), approximate="none", name=self._name())

    def _product(self) -> Node:
        return ops.matmul(self._value(), self._weight(self.D, self.D), name=self._name())

    def _norm(self) -> Node:
        return ops.rms_norm(self._value(), self._weight(self.D), eps=1e-6, name=self._name())

    def _view(self) -> Node:
        turned = ops.reshape(self._value(), shape=(self.D, self.T), name=self._name())
        turned = (
            ops.gelu(turned, approximate="none", name=self._name())
            if self.rng.random() < 0.6
            else turned
        )
        return ops.reshape(turned, shape=(self.T, self.D), name=self._name())

    def _taken(self) -> Node:
        return ops.take_rows(self._value(), self._locations(self.T), name=self._name())

    def _located(self) -> Node:
        rows = ops.take_rows(self._value(), self._locations(2), name=self._name())
        return ops.place_rows(self._value(), rows, self._locations(2), name=self._name())

    def _heads(self, x: Node, batch: bool) -> Node:
        return ops.reshape(
            x, shape=(1, self.T, 2, 4) if batch else (self.T, 2, 4), name=self._name()
        )

    def _attention(self) -> Node:
        cache = self._input(f"cache{self._name()}", 2, 9, 2, 4, state=True)
        k, v = (self._heads(self._value(), False) for _ in range(2))
        kv = ops.kv_store(cache, k, v, self._locations(self.T), name=self._name())
        keys, values = (ops.kv_half(kv, which=i, name=self._name()) for i in (0, 1))
        mixed = ops.attention(
            self._heads(self._value(), True),
            keys,
            values,
            scale=0.5,
            causal=self.rng.random() < 0.5,
            name=self._name(),
        )
        return ops.reshape(mixed, shape=(self.T, self.D), name=self._name())

    def _explicit(self) -> Node:
        q, k, v = (self._heads(self._value(), True) for _ in range(3))
        scores = ops.attn_scores(q, k, scale=0.5, name=self._name())
        weights = ops.attn_softmax(scores, causal=True, name=self._name())
        return ops.reshape(
            ops.attn_mix(weights, v, name=self._name()), shape=(self.T, self.D), name=self._name()
        )


def transformer(
    source: Source,
    *,
    batch: int,
    rows: int,
    width: int,
    heads: int,
    ffn: int,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    attention: Callable[..., Any] = AttentionForm(),  # noqa: B008
) -> Node:
    """A pre-norm encoder          x [B, T, C] -> [B, T, C]"""
    x = given("x", batch, rows, width, dtype=dtype)
    for i in range(layers):

        def linear(y: Node, part: str, out: int, at: str = f"blk.{i}") -> Node:
            return ops.matmul(
                y,
                source.node(f"{at}.{part}.weight", out, y.shape[-1], dtype=dtype),
                source.node(f"{at}.{part}.bias", out, dtype=dtype),
                name=f"{at}.{part}",
            )

        def norm(y: Node, part: str, at: str = f"blk.{i}") -> Node:
            return ops.rms_norm(
                y, source.node(f"{at}.{part}.weight", width), eps=1e-6, name=f"{at}.{part}"
            )

        y = norm(x, "ln1")
        q, k, v = (
            ops.reshape(
                linear(y, part, width),
                shape=(batch, rows, heads, width // heads),
                name=f"blk.{i}.{part}.heads",
            )
            for part in ("attn_q", "attn_k", "attn_v")
        )
        mixed = ops.reshape(
            attention(q, k, v, scale=0.2, name=f"blk.{i}.attn"),
            shape=(batch, rows, width),
            name=f"blk.{i}.attn.flat",
        )
        x = ops.add(linear(mixed, "attn_out", width), x, name=f"blk.{i}.attn_residual")
        y = ops.gelu(
            linear(norm(x, "ln2"), "ffn_up", ffn), approximate="tanh", name=f"blk.{i}.ffn_gelu"
        )
        x = ops.add(linear(y, "ffn_down", width), x, name=f"blk.{i}.ffn_residual")
    return x
