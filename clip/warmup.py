"""The encoder's warm-up: ask the backends, decide flash attention, predict memory, then run once
and look at every op.

Asking happens when an `Encoder` is made (`mtmd.kernels.plan.flash_choice.choose`); this module
reports it, and checks it by running.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mtmd.clip.encoder import AudioEncoder, Encoder, TowerEncoder
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels.graph import Type
from mtmd.kernels.report.check import run_check
from mtmd.kernels.report.facts import Check, GraphFacts, Placement, PreprocessingFacts
from mtmd.kernels.report.from_plans import graph_facts, placement

PICTURE = (1920, 1080)  # pixels, that is made tiles of in two ways


def encoder_placement(encoder: TowerEncoder) -> Placement:
    """Return what the preferred backend takes and refuses, at every size that was asked about and
    at those used since; nothing is run.
    """
    plans = [encoder.plan(batch, tile.shape) for batch, tile in encoder.sizes().values()]
    plans += encoder.weight_plans()
    return placement(
        encoder.name,
        encoder.flash,
        (*plans, *encoder.fallbacks.values()),
        (encoder.backends[0].name,),
    )


def encoder_graphs(encoder: TowerEncoder) -> list[GraphFacts]:
    """Splits, copies and predicted memory, at the warm-up size, at the largest and of the largest
    pack of unequal pictures; nothing is run or allocated.
    """
    result = [
        graph_facts(
            encoder.name, label, _size(encoder, batch, tile), encoder.plan(batch, tile.shape)
        )
        for label, (batch, tile) in encoder.sizes().items()
    ]
    if (strip := encoder.strip) is not None and encoder.why_no_packs is None:
        tokens = strip.sizes[-1]
        size = f"pictures of {tokens * strip.cells.patches} patches in all"
        result.append(graph_facts(encoder.name, "pack", size, encoder.pack_plan(tokens)))
    if isinstance(encoder, Encoder) and (reader := encoder.reader) is not None:
        tokens = reader.family.instruction.tokens
        size = f"{tokens} tokens of the prompt"
        result.append(graph_facts("Q-Former", "largest", size, reader.plan(tokens)))
    return result


def check_encoder(encoder: TowerEncoder) -> Check:
    """Encode one picture, or one window of audio, at the warm-up size."""
    batch, tile = encoder.sizes()["warm-up"]
    pixels = torch.from_numpy(_test_picture(batch, tile.shape)).to(encoder.dtype)
    return run_check(
        encoder.name,
        f"one {encoder.noun} encoded",
        encoder.plan(batch, tile.shape),
        encoder.residency,
        encoder.dtype,
        pixels,
    )


def preprocessing_facts(encoder: TowerEncoder, check: bool) -> PreprocessingFacts | None:
    """Return where pictures become tiles; None where there is no choice. With `check`, which needs
    the device, one is made tiles of on both, and where they differ everything is done on the host
    from now on.
    """
    if encoder.side is None:
        return None
    ways, where = encoder.preprocessing, encoder.backends[0].name
    if not check or ways.why_host is not None:
        return PreprocessingFacts(where, ways.setting, ways.why_host)
    width, height = PICTURE
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)

    def timed(make: Callable[[], ImagePlan]) -> tuple[ImagePlan, float]:
        start = time.perf_counter()
        return make(), (time.perf_counter() - start) * 1e3

    def on_host() -> ImagePlan:
        return encoder.family.resolution.prepare(pixels)

    ways.prepare(on_host)  # which finds out whether the device does as Pillow, and warms up
    before = ways.resized_there
    (plan, device_ms), (expected, host_ms) = timed(lambda: ways.prepare(on_host)), timed(on_host)
    resized = ways.resized_there - before
    same = expected.tokens == plan.tokens and all(
        np.array_equal(a, b) for a, b in zip(encoder.numbers(plan), expected.tiles, strict=True)
    )
    if not same:
        ways.why_host = "the device's tiles are not the host's"
        return PreprocessingFacts(where, ways.setting, ways.why_host, notes=plan.notes)
    return PreprocessingFacts(
        where, ways.setting, None, PICTURE, host_ms, device_ms, resized, plan.notes
    )


def _test_picture(batch: int, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Smooth waves with grain: every patch different, values in -1..1."""
    rows, columns = np.mgrid[0 : 1 : shape[1] * 1j, 0 : 1 : shape[2] * 1j]
    channels = [np.sin(2 * np.pi * (3 * rows + (c + 1) * columns)) * 0.7 for c in range(shape[0])]
    grain = np.random.default_rng(0).uniform(-0.3, 0.3, (batch, *shape))
    return (np.stack(channels)[None] + grain).astype(np.float32)


def _size(encoder: TowerEncoder, batch: int, tile: Type) -> str:
    if isinstance(encoder, AudioEncoder):
        return f"{batch} x {tile.shape[1]} frames"
    return f"{batch} x {tile.shape[2]} x {tile.shape[1]} px"
