"""Describes what a comparison of two models tells, and how values are compared: by NMSE, sum((a -
b)^2) / sum(a^2) in fp64.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# values of a node: a prime, so that the steps between them meet every column of a matrix
SAVED = 65_521


@dataclass(frozen=True)
class SideFacts:
    """Describes what one of the two models is, by graph: the stored types of its weights, most
    bytes first, and whether flash attention is on.
    """

    name: str
    device: str
    device_name: str
    dtype: str
    types: dict[str, tuple[str, ...]]
    flash: dict[str, str]


@dataclass(frozen=True)
class PromptDifference:
    """Prompt token ids; `first` is the place of the first that differs, with both ids, None for one
    that is over, or nothing.
    """

    tokens_a: int
    tokens_b: int
    first: tuple[int, int | None, int | None] | None


@dataclass(frozen=True)
class ImageDifference:
    """One picture. NMSE is None where sizes differ: then there is nothing to compare value by
    value.
    """

    tiles_a: tuple[tuple[int, int], ...]
    tiles_b: tuple[tuple[int, int], ...]
    tokens_a: int
    tokens_b: int
    pixel_nmse: float | None
    embedding_nmse: float | None


@dataclass(frozen=True)
class LogitDifference:
    """Logits after the prompt: NMSE, and the most probable token of each. `worst_nmse` is the
    largest of all `steps` of which both have read the same tokens.
    """

    nmse: float | None
    worst_nmse: float | None
    steps: int
    top_a: int
    top_b: int


@dataclass(frozen=True)
class NodeDifference:
    """One node: its values as far as they were kept, `values` of `total`; norms are of those. NMSE
    is None for different shapes.
    """

    graph: str
    name: str
    occurrence: int
    op: str
    dtype_a: str
    dtype_b: str
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    values: int
    total: int
    norm_a: float
    norm_b: float
    nmse: float | None


@dataclass(frozen=True)
class OneSided:
    """Nodes that only one run has: how many, and the first one's graph, name and op."""

    count: int
    first: tuple[str, str, str] | None


@dataclass(frozen=True)
class ModelComparison:
    """Describes what `mtmd compare` tells. `tolerance` are NMSE for "pixels" and for the nodes of
    each graph, embeddings and logits among them. `first` is the first node, in the order of the
    run, beyond its tolerance; `largest` the one with the largest NMSE. Of `in_part` nodes not all
    values were compared.
    """

    a: SideFacts
    b: SideFacts
    tolerance: dict[str, float]
    prompt: PromptDifference
    images: tuple[ImageDifference, ...]
    logits: LogitDifference
    tokens_a: tuple[int, ...]
    tokens_b: tuple[int, ...]
    texts: tuple[str, str]
    compared: int
    in_part: int
    only_a: OneSided
    only_b: OneSided
    first: NodeDifference | None
    largest: NodeDifference | None

    @property
    def agreed(self) -> int:
        """Greedy tokens that are the same, from the first on."""
        return agreed(self.tokens_a, self.tokens_b)

    @property
    def differences(self) -> tuple[str, ...]:
        """Return what differs beyond the tolerance, in the order of the run. Tokens alone do not
        count: values within it may make a near tie.
        """
        result = ["prompt token ids"] if self.prompt.first else []
        for n, image in enumerate(self.images, 1):
            result += (
                [f"pixels of image {n}"]
                if beyond(image.pixel_nmse, self.tolerance["pixels"])
                else []
            )
            result += (
                [f"embeddings of image {n}"]
                if beyond(image.embedding_nmse, self.tolerance["encoder"])
                else []
            )
        result += [f"node {self.first.name}"] if self.first else []
        result += ["logits"] if beyond(self.logits.worst_nmse, self.tolerance["decoder"]) else []
        return tuple(result)

    def asdict(self) -> dict[str, Any]:
        """Numbers that JSON does not have, infinity for one, as None."""
        result: dict[str, Any] = _plain(
            dataclasses.asdict(self) | {"agreed": self.agreed, "differences": self.differences}
        )
        return result


def saved(value: Tensor) -> Tensor:
    """Return it at most `SAVED` values, evenly spread in row-major order, in fp32 on the CPU."""
    flat, total = value.reshape(-1), value.numel()
    return to_fp32(
        flat if total <= SAVED else flat[torch.arange(SAVED, device=flat.device) * total // SAVED]
    )


def nmse(result: Tensor, expected: Tensor) -> float:
    """sum((found - expected)^2) / sum(expected^2); where one is infinite or no number the other has
    to be the same, else infinite.
    """
    result, expected = result.double().flatten(), expected.double().flatten()
    finite = result.isfinite() & expected.isfinite()
    if not (finite | (result == expected) | (result.isnan() & expected.isnan())).all():
        return math.inf
    error, power = (
        float((result - expected)[finite].square().sum()),
        float(expected[finite].square().sum()),
    )
    return error / power if power else math.inf if error else 0.0


def to_fp32(value: Tensor) -> Tensor:
    """A copy on the CPU: what it is taken from may be overwritten."""
    return value.to("cpu", torch.float32, copy=True)


def agreed(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many are the same, from the first on."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def beyond(error: float | None, tolerance: float) -> bool:
    """Also where there is nothing to compare, or NaN."""
    return error is None or not error <= tolerance


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
