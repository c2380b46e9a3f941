"""Gated delta nets (arXiv:2412.06464): layers that keep one matrix per head of all that they have
read, in place of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored, channels_last
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, Settings
from mtmd.kernels.graph import Node, Shape
from mtmd.kernels.layers import Weights
from mtmd.llm.blocks import carry_state, read_layer_types, split_heads
from mtmd.llm.inputs import TextInputs
from mtmd.llm.state import ConvWindow, MatrixState

LINEAR, FULL = KINDS = ("linear_attention", "full_attention")
MLX = "language_model.model."  # names of MLX's files begin so: norms and kernels lie otherwise
L2_EPS = 1e-6  # as in flash-linear-attention


@dataclass(frozen=True)
class DeltaNet:
    """G heads of keys of size K, H heads of values of size V, a convolution over the last W inputs
    of queries, keys and values.

    A head of keys serves H / G heads of values. They lie side by side, or, `tiled`, one in each run
    of G, as llama.cpp's converter puts them for models with separate projections. Models with a
    fused projection for queries, keys, values and gates are not tiled.
    """

    groups: int
    heads: int
    key: int
    value: int
    taps: int
    tiled: bool

    @property
    def states(self) -> tuple[ConvWindow, MatrixState]:
        return ConvWindow(self.taps - 1, self._channels), MatrixState(
            self.key, self.heads, self.value
        )

    @property
    def _keys(self) -> int:
        return self.groups * self.key

    @property
    def _values(self) -> int:
        return self.heads * self.value

    @property
    def _channels(self) -> int:
        return 2 * self._keys + self._values

    def parameters(self, at: str, sources: tuple[str, ...], width: int) -> dict[str, Parameter]:
        """Return the parameters of one layer for width D; `sources` are the prefixes of their names
        in a checkpoint, such as "model.layers.0.linear_attn.".
        """
        channels, taps = self._channels, self.taps

        def named(
            name: str, shape: Shape, convert: Callable[[Tensor], Tensor] | None, runs: int = 0
        ) -> Parameter:
            names = tuple(source + name for source in sources)
            return Parameter(shape, names, convert=convert, picks_rows=len(shape) > 1, runs=runs)

        kernels = [
            Stored((f"{source}conv1d.weight",), (channels, 1, taps), self._conv_layout)
            for source in sources
        ]
        others = [channels_last(k) for k in kernels if k.names[0].startswith(MLX)]
        parameters = {
            f"{at}.ssm_conv1d.weight": Parameter((channels, taps), (), others=(*kernels, *others)),
            f"{at}.ssm_a": named("A_log", (self.heads,), lambda a: self._layout(-a.float().exp())),
            f"{at}.ssm_dt.bias": named("dt_bias", (self.heads,), self._layout),
            f"{at}.ssm_norm.weight": named("norm.weight", (self.value,), None),
            f"{at}.ssm_out.weight": named(
                "out_proj.weight",
                (width, self._values),
                partial(self._layout, axis=1),
                runs=self.value,
            ),
        }
        if not self.tiled:
            return parameters | self._fused_parameters(at, sources, width)
        for part, name, rows in (
            ("attn_qkv", "qkv", channels),
            ("attn_gate", "z", self._values),
            ("ssm_beta", "b", self.heads),
            ("ssm_alpha", "a", self.heads),
        ):
            convert = self._qkv_layout if name == "qkv" else self._layout
            parameters[f"{at}.{part}.weight"] = named(
                f"in_proj_{name}.weight", (rows, width), convert
            )
        return parameters

    def _fused_parameters(
        self, at: str, sources: tuple[str, ...], width: int
    ) -> dict[str, Parameter]:
        """One projection has queries, keys, values and gates of each head of keys in turn, another
        strengths and decays. GGUF files may have them so too.
        """
        each, parameters = self.heads // self.groups, {}
        wide, narrow = (self.key, self.key, each * self.value, each * self.value), (each, each)
        for part, name, old, sizes, which in (
            ("attn_qkv", "in_proj_qkvz", "ssm_in", wide, (0, 1, 2)),
            ("attn_gate", "in_proj_qkvz", "ssm_in", wide, (3,)),
            ("ssm_beta", "in_proj_ba", "ssm_ba", narrow, (0,)),
            ("ssm_alpha", "in_proj_ba", "ssm_ba", narrow, (1,)),
        ):
            whole, pick = (
                (self.groups * sum(sizes), width),
                partial(_pick, self.groups, sizes, which),
            )
            shape = self.groups * sum(sizes[i] for i in which), width
            fused = (
                Stored((f"{at}.{part}.weight",), shape),
                Stored((f"{at}.{old}.weight",), whole, pick, picks_rows=True),
            )
            parameters[f"{at}.{part}.weight"] = Parameter(
                shape,
                (),
                others=tuple(
                    Stored((f"{source}{name}.weight",), whole, pick, picks_rows=True)
                    for source in sources
                ),
                gguf=fused[::-1] if sizes == narrow else fused,  # as llama.cpp reads them
            )
        return parameters

    def _layout(self, x: Tensor, axis: int = 0) -> Tensor:
        """An axis of all heads of values from a checkpoint's order into ours."""
        if not self.tiled:
            return x
        separate: Tensor = x.unflatten(axis, (self.groups, self.heads // self.groups, -1))
        return separate.transpose(axis, axis + 1).flatten(axis, axis + 2)

    def _qkv_layout(self, x: Tensor) -> Tensor:
        return torch.cat((x[: 2 * self._keys], self._layout(x[2 * self._keys :])))

    def _conv_layout(self, x: Tensor) -> Tensor:
        return self._qkv_layout(x.squeeze(1))

    def graph(self, x: Node, layer: int, inputs: TextInputs, w: Weights, *, eps: float) -> Node:
        """Return what the rule gives, RMS-normed, gated and projected; the states it leaves are
        stored

        [T, D] -> [T, D]
        """
        at, (window, matrices) = (
            f"blk.{layer}",
            (inputs.state(layer, state) for state in self.states),
        )
        packed = ops.short_conv(
            w.linear(x, f"{at}.attn_qkv"),
            w.tensor(f"{at}.ssm_conv1d.weight"),
            window,
            inputs.starts,
            inputs.sequence_slots,
            activation="silu",
            name=f"{at}.conv",
        )
        mixed = carry_state(packed, window, inputs, f"{at}.conv")
        q, k = (
            self._heads_of_keys(mixed, start, f"{at}.{part}", inputs)
            for part, start in (("q", 0), ("k", self._keys))
        )
        v = split_heads(
            ops.columns(mixed, start=2 * self._keys, stop=self._channels, name=f"{at}.v"),
            self.heads,
            f"{at}.v",
        )
        decay, beta = (
            self._decay(x, at, w),
            ops.sigmoid(_cast(w.linear(x, f"{at}.ssm_beta"), torch.float32), name=f"{at}.beta"),
        )
        packed = ops.linear_attention(
            q,
            k,
            v,
            decay,
            beta,
            matrices,
            inputs.starts,
            inputs.sequence_slots,
            scale=self.key**-0.5,
            name=f"{at}.delta",
        )
        y = _cast(
            w.rms_norm(carry_state(packed, matrices, inputs, f"{at}.delta"), f"{at}.ssm_norm", eps),
            w.dtype,
        )
        y = ops.silu_mul(
            split_heads(w.linear(x, f"{at}.attn_gate"), self.heads, f"{at}.attn_gate"),
            y,
            name=f"{at}.gated",
        )
        return w.linear(
            ops.reshape(y, shape=(x.shape[0], self._values), name=f"{at}.gated.flat"),
            f"{at}.ssm_out",
        )

    def _heads_of_keys(self, mixed: Node, start: int, name: str, inputs: TextInputs) -> Node:
        """Queries or keys, of length 1

        mixed [T, C] -> [T, G, K]; tiled, [T, H, K], repeated for the values that lie apart
        """
        x = ops.columns(mixed, start=start, stop=start + self._keys, name=name)
        x = ops.l2_norm(split_heads(x, self.groups, name), eps=L2_EPS, name=f"{name}.normed")
        if not self.tiled or self.groups == self.heads:
            return x
        return ops.take_rows(
            x,
            inputs.constant("inp.tiled", torch.arange(self.heads) % self.groups),
            name=f"{name}.tiled",
        )

    def _decay(self, x: Node, at: str, w: Weights) -> Node:
        """a softplus(W x + b), the logarithm of what each head keeps, fp32

        [T, D] -> [T, H]
        """
        y, bias = (
            _cast(w.linear(x, f"{at}.ssm_alpha"), torch.float32),
            w.tensor(f"{at}.ssm_dt.bias", torch.float32),
        )
        y = ops.softplus(ops.add(y, bias, name=f"{at}.ssm_dt"), name=f"{at}.ssm_dt.softplus")
        return ops.mul(y, w.tensor(f"{at}.ssm_a", torch.float32), name=f"{at}.decay")


def read_delta_net(c: Settings, tiled: bool) -> DeltaNet:
    """Read it from a text_config with transformers' keys. Raises ModelError for sizes that do not
    fit together.
    """
    groups, count = (
        c.count(f"linear_num_{part}_heads", default, maximum=MAX_HEADS)
        for part, default in (("key", 16), ("value", 32))
    )
    if count % groups:
        raise ModelError(
            f"{c.where}: linear_num_value_heads is {count}, expected a multiple of "
            f"linear_num_key_heads, {groups}"
        )
    if (taps := c.count("linear_conv_kernel_dim", 4, maximum=MAX_HEADS)) < 2:
        raise ModelError(
            f"{c.where}: linear_conv_kernel_dim is {taps}, expected 2 inputs of a convolution or "
            "more"
        )
    key, value = (
        c.count(f"linear_{part}_head_dim", 128, maximum=MAX_HEADS) for part in ("key", "value")
    )
    return DeltaNet(groups=groups, heads=count, key=key, value=value, taps=taps, tiled=tiled)


def read_kinds(c: Settings) -> tuple[str, ...]:
    """Read the kind of each layer from a text_config: delta nets but for every fourth, where it
    does not say otherwise.
    """
    layers, every = (
        c.count("num_hidden_layers", maximum=MAX_LAYERS),
        c.count("full_attention_interval", 4),
    )
    default = [KINDS[(layer + 1) % every == 0] for layer in range(layers)]
    return read_layer_types(c, layers, KINDS, default)


def gguf_delta_net(keys: Settings, layers: int) -> dict[str, Any]:
    """The same keys, of what a GGUF says of its first `layers` layers."""
    count, recurrent = (
        keys.count("ssm.time_step_rank"),
        keys.get("attention.recurrent_layers", None),
    )
    return {
        "linear_num_key_heads": keys.count("ssm.group_count"),
        "linear_num_value_heads": count,
        "linear_key_head_dim": keys.count("ssm.state_size"),
        "linear_value_head_dim": keys.count("ssm.inner_size") // count,
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
        "full_attention_interval": keys.get("full_attention_interval", None),
        "layer_types": [KINDS[not recurs] for recurs in recurrent[:layers]]
        if isinstance(recurrent, (list, tuple))
        else None,
    }


def _cast(x: Node, dtype: torch.dtype) -> Node:
    return x if x.dtype == dtype else ops.cast(x, dtype=dtype, name=f"{x.name}.cast")


def _pick(groups: int, sizes: tuple[int, ...], which: tuple[int, ...], fused: Tensor) -> Tensor:
    """Rows of a projection that holds, for each group in turn, parts of `sizes` rows: the parts
    `which`, each of all groups.
    """
    parts = fused.unflatten(0, (groups, -1)).split(sizes, 1)
    return torch.cat([parts[i].flatten(0, 1) for i in which])
