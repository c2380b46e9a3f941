"""Parts of conformers (arXiv:2005.08100): half a feed-forward layer before and behind attention, a
gated convolution over time whose batch norm is a factor and an offset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mtmd.clip.blocks import biased_parameters, checkpoint_names
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.graph import Node, Shape
from mtmd.kernels.layers import Weights

EPS = 1e-5  # of its norms; settings do not say
MAX_KERNEL = 1024


@dataclass(frozen=True)
class Convolution:
    """Names in a checkpoint of the convolution's parts, and whether they have biases beside those
    of the projections; `width` channels become `inner` ones, of `kernel` positions each.
    """

    width: int
    inner: int
    kernel: int
    names: tuple[str, str, str, str]
    bias: bool = False

    def parameters(self, at: str, theirs: str) -> dict[str, Parameter]:
        up, depthwise, down, normed = (f"{theirs}.{name}" for name in self.names)
        inner, result = self.inner, dict[str, Parameter]()
        for part, source, shape in (
            ("conv_pw1", up, (2 * inner, self.width)),
            ("conv_pw2", down, (self.width, inner)),
        ):
            result[f"{at}.{part}.weight"] = Parameter(
                shape,
                checkpoint_names(f"{source}.weight"),
                (*shape, 1),
                lambda kernel: kernel[..., 0],
            )
            result[f"{at}.{part}.bias"] = Parameter(shape[:1], checkpoint_names(f"{source}.bias"))
        result[f"{at}.conv_dw.weight"] = Parameter(
            (inner, 1, 1, self.kernel),
            checkpoint_names(f"{depthwise}.weight"),
            (inner, 1, self.kernel),
            lambda kernel: kernel[:, None],
            gguf=(
                Stored(
                    (f"{at}.conv_dw.weight",),
                    (inner, self.kernel),
                    lambda kernel: kernel[:, None, None],
                    invert=lambda kernel: (kernel[:, 0, 0],),
                ),
            ),
        )
        if self.bias:
            result[f"{at}.conv_dw.bias"] = Parameter(
                (inner,), checkpoint_names(f"{depthwise}.bias")
            )
        kinds: tuple[tuple[str, tuple[str, ...], Callable[..., torch.Tensor]], ...] = (
            ("weight", ("weight", "running_var"), _factor),
            ("bias", ("weight", "bias", "running_mean", "running_var"), _offset),
        )
        for kind, parts, fold in kinds:
            name = f"{at}.conv_norm.{kind}"
            ways = zip(*(checkpoint_names(f"{normed}.{part}") for part in parts), strict=True)
            # llama.cpp's converter has had both names
            result[name] = Parameter(
                (inner,),
                (),
                others=tuple(Stored(names, (inner,), fold) for names in ways),
                gguf=tuple(
                    Stored((one,), (inner,), invert=lambda value: (value,))
                    for one in (name, f"{at}.conv_norm_var.{kind}")
                ),
            )
        return result

    def graph(self, x: Node, at: str, w: Weights) -> Node:
        """Add the gated convolution of each channel          x [B, T, C] -> [B, T, C]"""
        y = w.linear(w.layer_norm(x, f"{at}.norm_conv", EPS), f"{at}.conv_pw1", bias=True)
        y, gate = (
            ops.columns(
                y, start=i * self.inner, stop=(i + 1) * self.inner, name=f"{at}.conv_{part}"
            )
            for i, part in enumerate(("value", "gate"))
        )
        before = self.kernel // 2
        y = ops.conv2d(
            ops.sigmoid_gate(y, gate, name=f"{at}.conv_gated"),
            w.tensor(f"{at}.conv_dw.weight"),
            w.tensor(f"{at}.conv_dw.bias") if self.bias else None,
            grid=(1, x.shape[1]),
            padding=(0, 0, before, self.kernel - 1 - before),
            groups=self.inner,
            name=f"{at}.conv_dw",
        )
        y = ops.mul(y, w.tensor(f"{at}.conv_norm.weight"), name=f"{at}.conv_scaled")
        y = ops.add(y, w.tensor(f"{at}.conv_norm.bias"), name=f"{at}.conv_normed")
        y = w.linear(ops.silu(y, name=f"{at}.conv_silu"), f"{at}.conv_pw2", bias=True)
        return ops.add(y, x, name=f"{at}.conv_residual")


def _factor(weight: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """Return the factor of a batch norm."""
    return weight.float() / (variance.float() + EPS).sqrt()


def _offset(
    weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
) -> torch.Tensor:
    return bias.float() - mean.float() * _factor(weight, variance)


def half_feed_forward(x: Node, at: str, which: str, w: Weights) -> Node:
    """Add half of a feed-forward layer          [B, T, C] -> [B, T, C]"""
    y = w.layer_norm(x, f"{at}.ffn_norm{which}", EPS)
    y = ops.silu(w.linear(y, f"{at}.ffn_up{which}", bias=True), name=f"{at}.ffn_silu{which}")
    y = w.linear(y, f"{at}.ffn_down{which}", bias=True)
    y = ops.scale(y, factor=0.5, name=f"{at}.ffn_half{which}")
    return ops.add(y, x, name=f"{at}.ffn_residual{which}")


def biased(at: str, theirs: str, shape: Shape) -> dict[str, Parameter]:
    """.weight and .bias of a layer, by the name of it in a checkpoint."""
    return biased_parameters({at: (theirs, shape)}, checkpoint_names)


def by_frequency(channels: int, columns: torch.Tensor) -> torch.Tensor:
    """Columns of a channel's frequencies as those of a frequency's channels."""
    turned: torch.Tensor = columns.unflatten(1, (channels, -1))
    return turned.transpose(1, 2).flatten(1)


def by_channel(channels: int, columns: torch.Tensor) -> torch.Tensor:
    """The inverse of `by_frequency`."""
    turned: torch.Tensor = columns.unflatten(1, (-1, channels))
    return turned.transpose(1, 2).flatten(1)
