"""Tokens drawn by machine code against the same in numpy, and what is no ordinary row."""

from __future__ import annotations

import itertools
import math
import threading

import numpy as np
import pytest
import torch

from mtmd.kernels.cpu.sampling import rows
from mtmd.kernels.cpu.sampling.draw import MAXIMUM
from mtmd.kernels.cpu.sampling.rows import draw
from mtmd.llm.sampling.host_filters import candidates, pick
from mtmd.llm.sampling.options import Sampling

POINTS = (0.0, 0.13, 0.5, 0.731, 0.97, math.nextafter(1.0, 0))


def row(size: int, spread: float, dtype: str = "f32") -> tuple[np.ndarray, np.ndarray]:
    """Logits as they are drawn from, and as fp32."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * spread
    values[::5] = -math.inf  # as a constraint has it
    values[size // 2] = 0.1
    if dtype == "f32":
        return values.numpy(), values.numpy()
    narrow = values.bfloat16()
    return narrow.view(torch.int16).numpy().view(np.uint16), narrow.float().numpy()


def check(stored: np.ndarray, values: np.ndarray, sampling: Sampling) -> None:
    """Each point's token is numpy's, or one whose edge it is by rounding."""
    tokens, weights = candidates(values.copy(), sampling)
    saved = np.arange(len(values)) if tokens is None else tokens
    edges = np.cumsum(weights, dtype=np.float64) / weights.sum(dtype=np.float64)
    filters = sampling.top_k, sampling.top_p, sampling.min_p
    for point in POINTS:
        token, peak = draw(stored, sampling.temperature, *filters, point)
        assert peak == values.max()
        if token is None:
            assert 0 < sampling.top_k < len(values), "only for that it may be left to others"
            continue
        expected = saved[pick(weights, point)]
        if token != expected:
            location = int(np.searchsorted(saved, min(token, expected)))
            assert abs(edges[location] - point) < 2e-5, (sampling, point, token, expected)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("size", [1, 7, 16, 37, 257, 2048, 5003])
def test_the_token_that_numpy_draws(size: int, dtype: str) -> None:
    for spread in (0.01, 1.5, 6.0):
        stored, values = row(size, spread, dtype)
        for chosen in itertools.product(
            [0.3, 1.0, 2.5], [0, 1, 7, 500], [1.0, 0.9, 0.3], [0.0, 0.05, 1.0]
        ):
            check(stored, values, Sampling(*chosen))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 50.0])
@pytest.mark.parametrize(
    ("top_p", "min_p"), [(0.9, 0.0), (0.5, 0.0), (0.99999, 0.0), (0.9, 0.3), (1.0, 0.01)]
)
def test_a_nucleus_of_thousands(temperature: float, top_p: float, min_p: float) -> None:
    stored, values = row(70_001, 1.0)
    if top_p < 1:
        tokens, _ = candidates(values.copy(), Sampling(temperature, 0, top_p))
        assert tokens is not None and len(tokens) > MAXIMUM
    check(stored, values, Sampling(temperature, 0, top_p, min_p))


def test_of_many_equal_ones_the_nucleus_has_the_first() -> None:
    values = np.zeros(4 * MAXIMUM, np.float32)
    actual = [draw(values, 1.0, 0, 0.5, 0.0, point)[0] for point in POINTS]
    expected = [int(point * 2 * MAXIMUM) for point in POINTS]
    assert actual == expected


def test_the_most_probable_token_is_the_first_of_equals() -> None:
    for size in (1, 15, 16, 17, 63, 64, 65, 1000):
        for location in {0, size // 3, size - 1}:
            values = np.full(size, -3.5, np.float32)
            values[location:] = 2.25
            assert draw(values, 0.0, 0, 1.0, 0.0, 0.0) == (location, 2.25)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_not_drawn_from(bad: float, temperature: float) -> None:
    for size, location in itertools.product((1, 17, 100), (0, -1)):
        values = np.zeros(size, np.float32)
        values[location] = bad
        token, peak = draw(values, temperature, 0, 0.9, 0.0, 0.5)
        assert token is None
        assert math.isnan(peak) if math.isnan(bad) else peak == bad
    values[:] = -math.inf
    assert draw(values, temperature, 0, 1.0, 0.0, 0.5) == (None, -math.inf)


def test_a_tiny_temperature_leaves_the_best() -> None:
    stored, values = row(2048, 3.0)
    for point in POINTS:
        assert draw(stored, 1e-6, 0, 1.0, 0.0, point)[0] == values.argmax()


def test_nothing_is_written_beside_the_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, made = 4096, list[np.ndarray]()

    def with_guard(size: int, _: type) -> np.ndarray:
        made.append(np.full(size + guard, 0xAB, np.uint8))
        return made[-1]

    for size in (1, 16, 255, 256, 257, 5003):
        with monkeypatch.context() as patched:
            patched.setattr(rows, "_own", threading.local())
            patched.setattr(rows.np, "empty", with_guard)
            for flat in (0.001, 8.0):
                values = row(size, flat)[0]
                for top_k, top_p in ((0, 1.0), (0, 0.9), (40, 0.9)):
                    draw(values, 1.0, top_k, top_p, 0.0, 0.5)
        assert (made[-1][-guard:] == 0xAB).all()
