"""The encoder's warm-up: ask the backends, decide flash attention, predict memory, then run once and look at every op.

Asking happens when an `Encoder` is made (`mtmd.kernels.flash.choose`); this module reports it, and checks it by running.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtmd.clip.encoder import Encoder
from mtmd.kernels.executor import Executor, Observer
from mtmd.kernels.graph import Node
from mtmd.kernels.ops import OPS
from mtmd.kernels.report import Check, GraphFacts, Placement, graph_facts, op_times, placement

LIMITS = {torch.float32: 1e-9, torch.bfloat16: 1e-4, torch.float16: 1e-5}  # NMSE of one op against fp32, per compute type
ROWS = 256  # rows of an attention node that are checked: the reference's scores are rows x keys
STEADY_RUNS = 3


def encoder_placement(encoder: Encoder) -> Placement:
    """What the preferred backend takes and refuses, at the warm-up size and at the largest; nothing is run."""
    plans = tuple(encoder.plan(batch, tile.shape) for batch, tile in encoder.sizes().values())
    return placement("encoder", encoder.flash, plans, encoder.backends[0].name)


def encoder_graphs(encoder: Encoder) -> list[GraphFacts]:
    """Splits, copies and predicted memory at both sizes; nothing is run or allocated."""
    return [graph_facts("encoder", label, _size(batch, tile), encoder.plan(batch, tile.shape))
            for label, (batch, tile) in encoder.sizes().items()]


def run_check(encoder: Encoder) -> Check:
    """Encode one picture at the warm-up size: for its times, for NaN, and for each op's distance from its reference."""
    batch, tile = encoder.sizes()["warm-up"]
    pixels = torch.from_numpy(_test_picture(batch, tile.shape)).to(encoder.dtype)
    executor = Executor(encoder.plan(batch, tile.shape), encoder.residency)
    synchronize = _synchronizer(encoder)
    first = _timed(executor, pixels, synchronize)
    timeline: dict[str, list[tuple[Node, float]]] = {}
    steady = min(_timed(executor, pixels, synchronize) for _ in range(STEADY_RUNS))
    executor.run(pixels, _Stopwatch(timeline, synchronize))
    judge = _Judge()
    Executor(encoder.plan(batch, tile.shape, overwrite=False), encoder.residency).run(pixels, judge)
    worst = sorted(((op, node, error) for op, (error, node) in judge.worst.items()), key=lambda row: -row[2])
    return Check(judge.first_nan, tuple(worst), LIMITS[encoder.dtype], first * 1e3, steady * 1e3, op_times(timeline))


class _Judge:
    """An observer that compares each node with the reference on the same inputs, in fp32."""

    def __init__(self) -> None:
        self.first_nan: str | None = None
        self.worst: dict[str, tuple[float, str]] = {}

    def __call__(self, node: Node, value: Tensor, inputs: list[Tensor | None]) -> None:
        if self.first_nan is None and not bool(torch.isfinite(value).all()):
            self.first_nan = node.name
        if node.op == "copy" or node.alias:
            return
        if node.op == "attention":
            value, inputs = _some_rows(node, value, inputs)
        expected = OPS[node.op].reference(*[i.float() if i is not None and i.is_floating_point() else i for i in inputs], **node.attrs)
        power = float(expected.double().square().sum())
        error = float((value.double() - expected.double()).square().sum()) / power if power else float(value.double().square().sum())
        if not error <= self.worst.get(node.op, (-1.0, ""))[0]:
            self.worst[node.op] = error, node.name


def _some_rows(node: Node, value: Tensor, inputs: list[Tensor | None]) -> tuple[Tensor, list[Tensor | None]]:
    """Attention over fewer rows, spread over all: rows do not depend on each other where nothing limits what they see."""
    q, k, v, mask, bounds = (*inputs, None, None)[:5]
    assert q is not None
    if q.shape[1] <= ROWS or mask is not None or bounds is not None or node.attrs.get("causal") or node.attrs.get("window"):
        return value, inputs
    step = -(-q.shape[1] // ROWS)
    return value[:, ::step], [q[:, ::step], k, v]


class _Stopwatch:
    """An observer that notes how long each node took."""

    def __init__(self, timeline: dict[str, list[tuple[Node, float]]], synchronize: Callable[[], None]):
        self.timeline, self.synchronize = timeline, synchronize
        self.last = time.perf_counter()

    def __call__(self, node: Node, value: Tensor, inputs: list[Tensor | None]) -> None:  # noqa: ARG002
        self.synchronize()
        now = time.perf_counter()
        if node.op != "copy":
            self.timeline.setdefault(node.op, []).append((node, now - self.last))
        self.last = time.perf_counter()


def _timed(executor: Executor, pixels: Tensor, synchronize: Callable[[], None], observe: Observer | None = None) -> float:
    synchronize()
    start = time.perf_counter()
    executor.run(pixels, observe)
    synchronize()
    return time.perf_counter() - start


def _synchronizer(encoder: Encoder) -> Callable[[], None]:
    device = encoder.backends[0].device
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None


def _test_picture(batch: int, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Smooth waves with grain: every patch different, values in -1..1."""
    rows, columns = np.mgrid[0:1:shape[1] * 1j, 0:1:shape[2] * 1j]
    channels = [np.sin(2 * np.pi * (3 * rows + (c + 1) * columns)) * 0.7 for c in range(shape[0])]
    grain = np.random.default_rng(0).uniform(-0.3, 0.3, (batch, *shape))
    return (np.stack(channels)[None] + grain).astype(np.float32)


def _size(batch: int, tile: Any) -> str:
    return f"{batch} x {tile.shape[2]} x {tile.shape[1]} px"
