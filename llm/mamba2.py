"""Mamba-2 layers (arXiv:2405.21060): a selective scan, which keeps one matrix per head of all that
it has read, behind a short convolution, and a gated norm.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored, channels_last
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node
from mtmd.kernels.layers import Weights
from mtmd.llm.blocks import carry_state, split_heads
from mtmd.llm.inputs import TextInputs
from mtmd.llm.state import ConvWindow, MatrixState


@dataclass(frozen=True)
class Mamba2:
    """H heads of values of size V, G groups of keys (B) and queries (C) of size K that they read, a
    convolution over the last W inputs of all three.
    """

    heads: int
    value: int
    groups: int
    key: int
    taps: int
    conv_bias: bool
    bias: bool  # of the projections

    @property
    def inner(self) -> int:
        return self.heads * self.value

    @property
    def states(self) -> tuple[ConvWindow, MatrixState]:
        return ConvWindow(self.taps - 1, self._channels), MatrixState(
            self.key, self.heads, self.value
        )

    @property
    def _channels(self) -> int:
        return self.inner + 2 * self.groups * self.key

    def parameters(self, at: str, sources: tuple[str, ...], width: int) -> dict[str, Parameter]:
        """Return the parameters of one layer for width D; `sources` are the prefixes of their names
        in a checkpoint, such as "model.layers.0.mamba.". They are as llama.cpp's converter has
        them, but for vectors that it writes as matrices.
        """
        heads, channels = self.heads, self._channels

        def named(*names: str) -> tuple[str, ...]:
            return tuple(source + name for source in sources for name in names)

        kernels = [
            Stored((name,), (channels, 1, self.taps), lambda kernel: kernel.squeeze(1))
            for name in named("conv1d.weight")
        ]
        rows = self.inner // self.groups
        parameters = {
            f"{at}.ssm_in.weight": Parameter(
                (self.inner + channels + heads, width), named("in_proj.weight")
            ),
            f"{at}.ssm_conv1d.weight": Parameter(
                (channels, self.taps), (), others=(*kernels, *map(channels_last, kernels))
            ),
            f"{at}.ssm_dt.bias": Parameter((heads,), named("dt_bias")),
            f"{at}.ssm_a": Parameter(
                (heads,),
                named("A_log"),
                convert=lambda a: -a.float().exp(),
                gguf=_as_matrix(f"{at}.ssm_a", (heads, 1)),
            ),
            f"{at}.ssm_d": Parameter(
                (heads, 1), named("D"), stored=(heads,), convert=lambda d: d.unsqueeze(1)
            ),
            f"{at}.ssm_norm.weight": Parameter(
                (self.inner,),
                named("norm.weight"),
                gguf=_as_matrix(f"{at}.ssm_norm.weight", (self.groups, rows)),
            ),
            f"{at}.ssm_out.weight": Parameter((width, self.inner), named("out_proj.weight")),
        }
        if self.conv_bias:
            parameters[f"{at}.ssm_conv1d.bias"] = Parameter((channels,), named("conv1d.bias"))
        if self.bias:
            for part, name in (("ssm_in", "in_proj"), ("ssm_out", "out_proj")):
                shape = parameters[f"{at}.{part}.weight"].shape[:1]
                parameters[f"{at}.{part}.bias"] = Parameter(shape, named(f"{name}.bias"))
        return parameters

    def graph(self, x: Node, layer: int, inputs: TextInputs, w: Weights, *, eps: float) -> Node:
        """Return what the scan gives and what it skips, gated, RMS-normed by groups and projected;
        the states it leaves are stored

        [T, D] -> [T, D]
        """
        at, tokens, keys = f"blk.{layer}", x.shape[0], self.groups * self.key
        window, matrices = (inputs.state(layer, state) for state in self.states)
        projected = w.linear(x, f"{at}.ssm_in", bias=self.bias)
        behind = self.inner + self._channels
        gate, mixed, step = (
            ops.columns(projected, start=start, stop=stop, name=f"{at}.ssm_in.{part}")
            for part, start, stop in (
                ("gate", 0, self.inner),
                ("mixed", self.inner, behind),
                ("step", behind, behind + self.heads),
            )
        )
        packed = ops.short_conv(
            mixed,
            w.tensor(f"{at}.ssm_conv1d.weight"),
            window,
            inputs.starts,
            inputs.sequence_slots,
            w.tensor(f"{at}.ssm_conv1d.bias") if self.conv_bias else None,
            activation="silu",
            name=f"{at}.conv",
        )
        mixed = carry_state(packed, window, inputs, f"{at}.conv")
        v, k, q = (
            split_heads(
                ops.columns(mixed, start=start, stop=stop, name=f"{at}.{part}"),
                count,
                f"{at}.{part}",
            )
            for part, start, stop, count in (
                ("x", 0, self.inner, self.heads),
                ("b", self.inner, self.inner + keys, self.groups),
                ("c", self.inner + keys, self._channels, self.groups),
            )
        )
        step = self._step(step, at, w)
        decay = ops.mul(step, w.tensor(f"{at}.ssm_a", torch.float32), name=f"{at}.decay")
        packed = ops.linear_attention(
            q,
            k,
            v,
            decay,
            step,
            matrices,
            inputs.starts,
            inputs.sequence_slots,
            scale=1.0,
            delta=False,
            name=f"{at}.scan",
        )
        y = carry_state(packed, matrices, inputs, f"{at}.scan")
        y = ops.reshape(y, shape=(tokens, self.inner), name=f"{at}.scan.flat")
        y = self._gated(self._skipped(v, y, at, w), gate, at, w, eps)
        return w.linear(y, f"{at}.ssm_out", bias=self.bias)

    def _step(self, x: Node, at: str, w: Weights) -> Node:
        """softplus(x + b), fp32          [T, H] -> [T, H]"""
        y = ops.add(
            _cast(x, torch.float32),
            w.tensor(f"{at}.ssm_dt.bias", torch.float32),
            name=f"{at}.ssm_dt",
        )
        return ops.softplus(y, name=f"{at}.ssm_dt.softplus")

    def _skipped(self, v: Node, y: Node, at: str, w: Weights) -> Node:
        """y + D v, a number D for each head, in the compute type

        v [T, H, V], y [T, H V] fp32 -> [T, H V]
        """
        skipped = ops.mul(v, w.tensor(f"{at}.ssm_d"), name=f"{at}.skip")
        skipped = ops.reshape(skipped, shape=y.shape, name=f"{at}.skip.flat")
        return ops.add(_cast(y, v.dtype), skipped, name=f"{at}.skipped")

    def _gated(self, y: Node, gate: Node, at: str, w: Weights, eps: float) -> Node:
        """The norm of silu(gate) y over the values of each group          [T, H V] -> [T, H V]"""
        y, tokens = ops.silu_mul(gate, y, name=f"{at}.gated"), y.shape[0]
        if self.groups == 1:
            return w.rms_norm(y, f"{at}.ssm_norm", eps)
        y = ops.reshape(y, shape=(tokens, self.groups, -1), name=f"{at}.gated.groups")
        y = ops.rms_norm(y, eps=eps, name=f"{at}.ssm_norm.groups")
        y = ops.reshape(y, shape=(tokens, self.inner), name=f"{at}.ssm_norm.flat")
        return ops.mul(y, w.tensor(f"{at}.ssm_norm.weight"), name=f"{at}.ssm_norm")


def read_mamba2(c: Settings, inner: int, names: Sequence[str]) -> Mamba2:
    """Read it from a text_config by the names of heads, head size, groups, state size, taps, and
    biases of the convolution and the projections; `inner` values have to be those of all heads.
    Raises ModelError for what does not fit, and for bounds of the step, which the reference keeps
    to while it reads a prompt and not while it answers.
    """
    heads, value, groups, key, taps = (c.count(name, maximum=MAX_HEADS) for name in names[:5])
    if heads * value != inner:
        raise ModelError(
            f"{c.where}: {names[0]} {heads} of {names[1]} {value}; expected a product of {inner}"
        )
    if heads % groups:
        raise ModelError(
            f"{c.where}: {names[0]} is {heads}, expected a multiple of {names[2]}, {groups}"
        )
    if taps < 2:
        raise ModelError(
            f"{c.where}: {names[4]} is {taps}, expected 2 inputs of a convolution or more"
        )
    limit: object = c.get("time_step_limit", None)
    if limit is not None and not _unlimited(limit):
        raise ModelError(
            f"{c.where}: time_step_limit is {limit!r:.60}, expected [0, Infinity]; other bounds "
            "are not supported"
        )
    return Mamba2(heads, value, groups, key, taps, *(c.flag(name, False) for name in names[5:]))


def mamba2_keys(mamba: Mamba2) -> dict[str, int]:
    """Return the keys of a GGUF that say the same."""
    return {
        "ssm.conv_kernel": mamba.taps,
        "ssm.state_size": mamba.key,
        "ssm.group_count": mamba.groups,
        "ssm.time_step_rank": mamba.heads,
        "ssm.inner_size": mamba.inner,
    }


def gguf_mamba2(keys: Settings, names: Collection[str]) -> tuple[int | bool, ...]:
    """Return what a GGUF says of its layers, in the order in which `read_mamba2` takes names."""
    heads = keys.count("ssm.time_step_rank", maximum=MAX_HEADS)
    return (
        heads,
        max(keys.count("ssm.inner_size", maximum=MAX_WIDTH) // heads, 1),
        keys.count("ssm.group_count", maximum=MAX_HEADS),
        keys.count("ssm.state_size", maximum=MAX_HEADS),
        keys.count("ssm.conv_kernel", maximum=MAX_HEADS),
        any(name.endswith(".ssm_conv1d.bias") for name in names),
        any(name.endswith(".ssm_in.bias") for name in names),
    )


def _unlimited(limit: object) -> bool:
    """Return whether it is 0 and infinity, the latter also as transformers 5 writes it."""
    if not isinstance(limit, (list, tuple)) or len(limit) != 2:
        return False
    return limit[0] == 0 and limit[1] in (inf, {"__float__": "Infinity"})


def _as_matrix(name: str, matrix: tuple[int, int]) -> tuple[Stored, ...]:
    """A vector that GGUF files have as a matrix, as llama.cpp's converter writes it."""

    def vector(stored: Tensor) -> Tensor:
        return stored.flatten()

    return (Stored((name,), matrix, vector, invert=lambda x: (x.reshape(matrix),)),)


def _cast(x: Node, dtype: torch.dtype) -> Node:
    return x if x.dtype == dtype else ops.cast(x, dtype=dtype, name=f"{x.name}.cast")
