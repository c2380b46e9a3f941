"""Small pictures of unequal sizes: one after another, and in packs, by the clock.

    python benchmarks/packing/on_cpu.py lfm2-vl-450m qwen3-vl-4b --rounds 5

Random weights in the shape of the models, bf16. Plans are made anew in each round, as for sizes
that nobody has seen yet; the two ways alternate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from mtmd.bench.shapes import random_checkpoint
from mtmd.clip.encoder import Encoder
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.plan.executor import finish

PICTURES = {  # (height, width) in pixels, rounded to tokens
    "about 224 px": ((224, 224), (256, 192), (192, 288), (224, 256), (160, 256)),
    "about 336 px": ((336, 336), (288, 352), (320, 384), (352, 320)),
    "160 to 448 px": ((224, 224), (448, 320), (160, 160), (384, 256)),
}


def encoder_of(name: str) -> Encoder:
    checkpoint = random_checkpoint(name, "BF16")
    assert checkpoint.vision is not None and checkpoint.vision_weights is not None
    return Encoder(
        checkpoint.vision, checkpoint.vision_weights, [Cpu(), Reference()], dtype=torch.bfloat16
    )


def alone(encoder: Encoder, tiles: list[np.ndarray]) -> int:
    encoder._plan.cache_clear()
    encoder._executor.cache_clear()
    for tile in tiles:
        finish(encoder.steps([tile]))
    return len(tiles)


def packed(encoder: Encoder, tiles: list[np.ndarray]) -> int:
    encoder._pack_plan.cache_clear()
    encoder._pack_executor.cache_clear()
    left, runs = list(tiles), 0
    while left:
        chosen = encoder.pack_of([tile.shape for tile in left]) or [0]
        finish(encoder.steps([left[i] for i in chosen]))
        left, runs = [tile for i, tile in enumerate(left) if i not in chosen], runs + 1
    return runs


def timed(
    way: Callable[[Encoder, list[np.ndarray]], int], encoder: Encoder, tiles: list[np.ndarray]
) -> tuple[float, int]:
    """ms, and runs of the tower."""
    start = time.perf_counter()
    runs = way(encoder, tiles)
    return (time.perf_counter() - start) * 1e3, runs


def compare(name: str, rounds: int) -> None:
    encoder = encoder_of(name)
    assert encoder.strip is not None and encoder.why_no_packs is None
    cells = encoder.strip.cells
    for label, sizes in PICTURES.items():
        rng = np.random.default_rng(0)
        shapes = [[3, *(max(round(s / cells.side), 1) * cells.side for s in hw)] for hw in sizes]
        tiles = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        alone(encoder, tiles)
        packed(encoder, tiles)
        times: tuple[list[float], list[float]] = [], []
        runs = 0
        for _ in range(rounds):
            for way, result in zip((alone, packed), times, strict=True):
                spent, runs = timed(way, encoder, tiles)
                result.append(spent)
        patches = [shape[1] * shape[2] // cells.patch**2 for shape in shapes]
        one, pack = times
        print(
            f"{name}, {label}: {len(tiles)} pictures of {min(patches)} to {max(patches)} patches; "
            f"alone best {min(one):.0f} ms, median {np.median(one):.0f}; in {runs} packs best "
            f"{min(pack):.0f}, median {np.median(pack):.0f}; {min(one) / min(pack):.2f} and "
            f"{np.median(one) / np.median(pack):.2f} times as fast",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="shapes of `mtmd bench --random-weights`")
    parser.add_argument("--rounds", type=int, default=5)
    requested = parser.parse_args()
    for name in requested.models:
        compare(name, requested.rounds)


if __name__ == "__main__":
    main()
