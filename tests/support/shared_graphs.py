"""Random decoders and towers of every kind of layer, to be shared out among ranks."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor

from mtmd.kernels import ops
from mtmd.kernels.checkpoint.rotary import rotary
from mtmd.kernels.gpu.quant_matmul.cases import random_blocks
from mtmd.kernels.graph import Node, Type, constant, graph_input, weight
from mtmd.kernels.ops.moe import Routing
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.kernels.quantization.blocks import BLOCKS

KINDS = ("Q8_0", "Q4_0")
VOCABULARY = 23


class Source:
    """Weights by name: random numbers, or random blocks."""

    def __init__(self) -> None:
        self.made: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> Node:
        self.made[name] = value
        return weight(name, self, value.dtype)

    def type_of(self, name: str, dtype: torch.dtype) -> Type:  # noqa: ARG002
        return Type.of(self.made[name])

    def read(self, name: str, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        return self.made[name]

    def quant(self, name: str) -> str | None:  # noqa: ARG002
        return None

    def order(self, name: str) -> str | None:  # noqa: ARG002
        return None


class Maker:
    """One random graph: its `outputs`, `batch` and weights."""

    def __init__(self, seed: int):
        self.rng, self.source = Random(seed), Source()
        self.generator = torch.Generator().manual_seed(seed)
        rng = self.rng
        self.tokens, self.width = rng.choice((1, 3, 5)), rng.choice((32, 64))
        self.saved: list[Node] = []
        self.batch: dict[str, Tensor] = {}
        self.quantized = rng.random() < 0.4
        self.counts = 0
        x = self._embedded() if rng.random() < 0.6 else self.given("x", self.tokens, self.width)
        for layer in range(rng.choice((1, 2))):
            kinds = (self._attention, self._dense, self._convolution, self._delta, self._experts)
            for part in rng.sample(kinds, rng.choice((1, 2))):
                x = self._joined(x, part, f"blk.{layer}.{part.__name__.strip('_')}")
        self.outputs = [*self.saved, self._end(x)]

    def given(self, name: str, *shape: int) -> Node:
        self.batch[name] = torch.randn(shape, generator=self.generator)
        return graph_input(name, shape, torch.float32, lambda b: b[name].clone())

    def locations(self, name: str, values: list[int]) -> Node:
        self.batch[name] = torch.tensor(values)
        return graph_input(name, (len(values),), torch.int64, lambda b: b[name])

    def state(self, name: str, *shape: int) -> Node:
        attrs = {"fill": lambda b: b[name], "state": True}
        return Node("input", (), Type.contiguous(shape, torch.float32), attrs, name)

    def tensor(self, name: str, *shape: int) -> Node:
        values = torch.randn(shape, generator=self.generator) * shape[-1] ** -0.5
        return self.source.add(name, values)

    def linear(self, x: Node, name: str, size: int, bias: bool | None = None) -> Node:
        inner = x.shape[-1]
        attrs: dict[str, Any] = {}
        kind = self.rng.choice(KINDS)
        if self.quantized and inner % BLOCKS[kind].values == 0:
            attrs["quant"] = kind
            table = random_blocks(kind, size, inner, self.rng.getrandbits(30))
            w = self.source.add(f"{name}.weight", table)
        else:
            w = self.tensor(f"{name}.weight", size, inner)
        biased = self.rng.random() < 0.3 if bias is None else bias
        b = self.tensor(f"{name}.bias", size) if biased else None
        y = ops.matmul(x, w, b, **attrs, name=name)
        if self.rng.random() < 0.3:  # with an adapter
            a, b = self.tensor(f"{name}.lora_a", 3, inner), self.tensor(f"{name}.lora_b", size, 3)
            scale = self.given(f"{name}.scale", *x.shape[:-1], 1)
            y = ops.lora(y, x, a, b, scale, name=f"{name}.lora")
        return y

    def norm(self, x: Node, name: str) -> Node:
        w = self.tensor(f"{name}.weight", x.shape[-1])
        if self.rng.random() < 0.5:
            return ops.layer_norm(x, w, eps=1e-5, name=name)
        return ops.rms_norm(x, w, eps=1e-5, name=name)

    def _embedded(self) -> Node:
        ids = self.locations("ids", [self.rng.randrange(VOCABULARY) for _ in range(self.tokens)])
        x = ops.embed(
            ids, self.tensor("token_embd", VOCABULARY, self.width), scale=2.0, name="embd"
        )
        if self.tokens > 1 and self.rng.random() < 0.4:
            rows = self.given("images", 2, self.width)
            x = ops.place_rows(x, rows, self.locations("image_at", [0, 2]), name="placed")
        return x

    def _joined(self, x: Node, part: Any, at: str) -> Node:
        """Residual around a part, or around two that read the same."""
        y = part(self.norm(x, f"{at}.norm"), at)
        if self.rng.random() < 0.3:
            y = self.norm(y, f"{at}.post_norm")
        x = ops.add(y, x, name=f"{at}.residual")
        if self.rng.random() < 0.3:
            other = self._dense(self.norm(y, f"{at}.beside_norm"), f"{at}.beside")
            x = ops.add(other, x, name=f"{at}.beside_residual")
        if self.rng.random() < 0.2:
            x = ops.mul(x, self.tensor(f"{at}.scale", 1), name=f"{at}.scaled")
        return ops.scale(x, factor=0.7, name=f"{at}.smaller") if self.rng.random() < 0.2 else x

    def _dense(self, x: Node, at: str) -> Node:
        rng, size = self.rng, self.rng.choice((7, 32, 64, 96, 128))
        up = self.linear(x, f"{at}.up", size)
        kind = rng.randrange(5)
        if kind == 0:
            y = ops.gelu(up, approximate="tanh", name=f"{at}.gelu")
        elif kind == 1:
            y = ops.relu(ops.silu(up, name=f"{at}.silu"), name=f"{at}.relu")
        elif kind == 2:
            y = ops.silu_mul(self.linear(x, f"{at}.gate", size), up, name=f"{at}.gated")
        elif kind == 3:
            own = self.given(f"{at}.own", self.tokens, size)
            y = ops.gelu_mul(up, own, approximate="none", name=f"{at}.gated")
        else:
            low, high = self.tensor(f"{at}.low", 1), self.tensor(f"{at}.high", 1)
            y = ops.clamp(ops.softcap(up, cap=3.0, name=f"{at}.capped"), low, high, name=f"{at}.cl")
        if kind in (2, 3) and rng.random() < 0.5:
            y = self.norm(y, f"{at}.gated_norm")
        return self.linear(y, f"{at}.down", self.width)

    def _attention(self, x: Node, at: str) -> Node:
        rng, size = self.rng, self.rng.choice((8, 16))
        groups = rng.choice((1, 2, 3, 4, 5))
        heads = groups * rng.choice((1, 2, 3, 4))
        tokens = self.tokens
        if rng.random() < 0.3:
            qkv = self.linear(x, f"{at}.qkv", (heads + 2 * groups) * size)
            edges = (0, heads * size, (heads + groups) * size, (heads + 2 * groups) * size)
            q, k, v = (
                ops.columns(qkv, start=a, stop=b, name=f"{at}.{n}")
                for n, a, b in zip("qkv", edges, edges[1:], strict=False)
            )
        else:
            q, k, v = (
                self.linear(x, f"{at}.{n}", count * size)
                for n, count in (("q", heads), ("k", groups), ("v", groups))
            )
        q, k, v = (
            ops.reshape(y, shape=(tokens, count, size), name=f"{at}.{n}.heads")
            for y, n, count in ((q, "q", heads), (k, "k", groups), (v, "v", groups))
        )
        if rng.random() < 0.3:  # queries and gates in turn
            twice = self.linear(x, f"{at}.q_gate", 2 * heads * size)
            both = ops.reshape(twice, shape=(tokens, 2 * heads, size), name=f"{at}.q_gate.heads")
            turns = torch.arange(2 * heads)
            q = ops.take_rows(both, constant(f"{at}.even", turns[::2]), name=f"{at}.even_heads")
        if rng.random() < 0.5:
            q = ops.rms_norm(q, self.tensor(f"{at}.q_norm", size), eps=1e-5, name=f"{at}.q_norm")
            turned = rotary(1e4, size)
            positions = graph_input(
                f"{at}.positions", (1, tokens), torch.int64, lambda _: torch.arange(tokens)[None]
            )
            angles = ops.rope_table(positions, None, rotary=turned, name=f"{at}.angles")
            q, k = (ops.rope(y, angles, name=f"{y.name}.rope") for y in (q, k))
        q = ops.reshape(q, shape=(1, tokens, heads, size), name=f"{at}.q.batch")
        if rng.random() < 0.6:
            cache = self.state(f"{at}.kv", 2, 8, groups, size)
            slots = self.locations(f"{at}.slots", list(range(tokens)))
            kv = ops.kv_store(cache, k, v, slots, name=f"{at}.kv_store")
            pages = self.locations(f"{at}.pages", [0])
            k, v = (
                ops.gather_pages(kv, pages, which=i, size=8, name=f"{at}.{n}.all")
                for i, n in enumerate("kv")
            )
        else:
            k, v = (
                ops.reshape(y, shape=(1, tokens, groups, size), name=f"{at}.{n}.batch")
                for y, n in ((k, "k"), (v, "v"))
            )
            if rng.random() < 0.4:  # a grid of one row, or lines of three with a table of each head
                rows, grid = rng.random() < 0.5, {"grid": (1, tokens)}
                tables = [self.tensor(f"{at}.{n}", c, size) for n, c in (("h", 1), ("w", 7))]
                if not rows:
                    grid = {"grid": (-(-tokens // 3), 3)}
                    table = self.linear(self.tensor(f"{at}.places", 5, 8), f"{at}.w", heads * size)
                    table = ops.reshape(table, shape=(5, heads, size), name=f"{at}.w.heads")
                    tables = [None, table]
                q = ops.relative_queries(q, *tables, **grid, scale=size**-0.5, name=f"{at}.q.far")
                k = ops.relative_keys(k, **grid, rows=rows, name=f"{at}.k.far")
        form = AttentionForm() if rng.random() < 0.6 else AttentionForm(all_explicit=True)
        mixed = form(q, k, v, bounds=self._bounds(at), scale=size**-0.5, name=f"{at}.attn")
        y = ops.reshape(mixed, shape=(tokens, heads * size), name=f"{at}.attn.flat")
        if rng.random() < 0.3:
            gate = ops.sigmoid(self.linear(x, f"{at}.gate", heads * size), name=f"{at}.gate.sig")
            y = ops.mul(y, gate, name=f"{at}.gated")
        return self.linear(y, f"{at}.out", self.width)

    def _bounds(self, at: str) -> Node:
        last = torch.arange(self.tokens, dtype=torch.int32)
        limits = torch.stack((torch.zeros_like(last), last), 1)
        return graph_input(f"{at}.bounds", (self.tokens, 2), torch.int32, lambda _: limits)

    def _sequences(self, at: str) -> tuple[Node, Node]:
        return self.locations(f"{at}.starts", [0, self.tokens]), self.locations(f"{at}.slots", [1])

    def _carried(self, packed: Node, state: Node, slots: Node, name: str) -> Node:
        after = ops.rows(packed, start=self.tokens, stop=packed.shape[0], name=f"{name}.after")
        self.saved.append(ops.state_store(state, after, slots, name=f"{name}.store"))
        return ops.rows(packed, start=0, stop=self.tokens, name=f"{name}.now")

    def _convolution(self, x: Node, at: str) -> Node:
        starts, slots = self._sequences(at)
        size = self.rng.choice((6, 32, 64))
        three = self.linear(x, f"{at}.in", 3 * size)
        a, b, c = (
            ops.columns(three, start=i * size, stop=(i + 1) * size, name=f"{at}.{n}")
            for i, n in enumerate("abc")
        )
        state = self.state(f"{at}.window", 2, 2, size)
        bias = self.tensor(f"{at}.conv.bias", size) if self.rng.random() < 0.5 else None
        packed = ops.short_conv(
            ops.mul(a, b, name=f"{at}.ab"),
            self.tensor(f"{at}.conv", size, 3),
            state,
            starts,
            slots,
            bias,
            activation="none",
            name=f"{at}.conv",
        )
        y = ops.mul(self._carried(packed, state, slots, at), c, name=f"{at}.gated")
        return self.linear(y, f"{at}.out", self.width)

    def _delta(self, x: Node, at: str) -> Node:
        starts, slots = self._sequences(at)
        groups, key, value = self.rng.choice((1, 2, 4)), 4, self.rng.choice((4, 8))
        heads, tokens = groups * self.rng.choice((1, 2, 3)), self.tokens
        edges = (0, groups * key, 2 * groups * key, 2 * groups * key + heads * value)
        state = self.state(f"{at}.conv_state", 2, 2, edges[3])
        packed = ops.short_conv(
            self.linear(x, f"{at}.qkv", edges[3], bias=False),
            self.tensor(f"{at}.conv", edges[3], 3),
            state,
            starts,
            slots,
            activation="silu",
            name=f"{at}.conv",
        )
        mixed = self._carried(packed, state, slots, f"{at}.conv")
        q, k, v = (
            ops.reshape(
                ops.columns(mixed, start=a, stop=b, name=f"{at}.{n}"),
                shape=(tokens, count, -1),
                name=f"{at}.{n}.heads",
            )
            for n, a, b, count in zip(
                "qkv", edges, edges[1:], (groups, groups, heads), strict=False
            )
        )
        q, k = (ops.l2_norm(y, eps=1e-6, name=f"{y.name}.normed") for y in (q, k))
        if groups < heads and self.rng.random() < 0.3:  # heads of one group lie apart
            tiles = constant(f"{at}.tiles", torch.arange(heads) % groups)
            q, k = (ops.take_rows(y, tiles, name=f"{y.name}.tiled") for y in (q, k))
        decay = ops.mul(
            ops.softplus(self.linear(x, f"{at}.alpha", heads, bias=False), name=f"{at}.plus"),
            self.source.add(f"{at}.a", -torch.rand(heads, generator=self.generator)),
            name=f"{at}.decay",
        )
        beta = ops.sigmoid(self.linear(x, f"{at}.beta", heads), name=f"{at}.beta.sig")
        matrices = self.state(f"{at}.delta", 2, key, heads, value)
        attrs = {"scale": key**-0.5, "delta": self.rng.random() < 0.5, "name": f"{at}.rule"}
        packed = ops.linear_attention(q, k, v, decay, beta, matrices, starts, slots, **attrs)
        y = self._carried(packed, matrices, slots, f"{at}.delta")
        return self.linear(
            ops.reshape(y, shape=(tokens, heads * value), name=f"{at}.flat"),
            f"{at}.out",
            self.width,
        )

    def _experts(self, x: Node, at: str) -> Node:
        rng, experts = self.rng, self.rng.choice((3, 4))
        size = rng.choice((6, 32, 64))
        shared = rng.random() < 0.4
        y = ops.moe(
            x,
            self.linear(x, f"{at}.router", experts, bias=False),
            self.tensor(f"{at}.gate", experts, size, self.width),
            self.tensor(f"{at}.up", experts, size, self.width),
            self.tensor(f"{at}.down", experts, self.width, size),
            routing=Routing(2, normalize=True),
            name=f"{at}.moe",
        )
        if not shared:
            return y
        gate = ops.sigmoid(self.linear(x, f"{at}.shared_gate", 1), name=f"{at}.shared_gate.sig")
        own = ops.mul(self._dense(x, f"{at}.shared"), gate, name=f"{at}.shared.gated")
        return ops.add(own, y, name=f"{at}.sum")

    def _end(self, x: Node) -> Node:
        rng = self.rng
        if rng.random() < 0.3:
            pair = ops.concat(x, x, axis=0, name="twice")
            x = ops.rows(pair, start=self.tokens, stop=2 * self.tokens, name="second")
        x = ops.take_rows(x, self.locations("wanted", [self.tokens - 1]), name="wanted")
        if rng.random() < 0.3:
            return x
        logits = self.linear(self.norm(x, "output_norm"), "logits", VOCABULARY)
        return ops.softcap(logits, cap=9.0, name="capped") if rng.random() < 0.3 else logits
