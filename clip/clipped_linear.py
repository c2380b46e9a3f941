"""Linear layers of encoders, whose inputs and outputs may be clipped to limits that the checkpoint
holds.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.graph import Node, Shape
from mtmd.kernels.layers import Weights

ENDS = ("input_min", "input_max", "output_min", "output_max")


def linear_parameters(
    at: str, shape: Shape, sources: tuple[str, ...], *, clipped: bool
) -> Mapping[str, Parameter]:
    """Parameters of a layer: its weight, and, if it is `clipped`, its limits. `sources` lists the
    names that its product may have in a checkpoint.
    """

    def limits(end: str) -> tuple[str, ...]:
        return tuple(f"{source.removesuffix('.linear')}.{end}" for source in sources)

    result = {f"{at}.weight": Parameter(shape, tuple(f"{source}.weight" for source in sources))}
    for end in ENDS if clipped else ():
        result[f"{at}.{end}"] = Parameter(
            shape=(1,),
            sources=limits(end),
            stored=(),
            convert=torch.atleast_1d,
            gguf=(Stored((f"{at}.{end}",), (1,)),),
        )
    return result


def clipped_linear(x: Node, at: str, w: Weights) -> Node:
    """x @ W.T, its input and output within their limits          [..., K] -> [..., N]"""
    min_in, max_in, min_out, max_out = (w.tensor(f"{at}.{end}") for end in ENDS)
    return ops.clamp(
        w.linear(ops.clamp(x, min_in, max_in, name=f"{at}.input"), at),
        min_out,
        max_out,
        name=f"{at}.clipped",
    )
