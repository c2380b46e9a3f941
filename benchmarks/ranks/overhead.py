"""What sharing a model out among ranks costs on one machine: decoding and prefill by N ranks of one
thread against one process of N threads, which have the same arithmetic to do.

    python benchmarks/ranks/overhead.py [--shape qwen3-1.7b] [--weights Q8_0] [--ranks 2]

Both take turns (one, ranks, one, ranks); the least of the medians is told, and what the first rank
spends in collectives, waiting for the others included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mtmd  # noqa: F401  # before torch, whose threads else wait in another way than answers' do

# isort: split
import torch

from mtmd.bench.shapes import random_checkpoint
from mtmd.kernels.parallel.distributed import DistributedGroup
from mtmd.kernels.resources.threads import ask_threads
from mtmd.llm.engine.spans import Span
from mtmd.model import Model
from mtmd.options.load import LoadOptions

PROMPT, STEPS, CONTEXT = 128, 24, 512
T = TypeVar("T")


@dataclass
class Times:
    """Milliseconds: of a prefill, of a step, and of its collectives, which are `count`."""

    prefill: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    collectives: list[float] = field(default_factory=list)
    count: int = 0


@contextmanager
def watched(group: DistributedGroup, seconds: list[float]) -> Iterator[None]:
    """Seconds of each sum and gather."""
    own = group._together

    def timed(collective: Callable[[Any], T]) -> T:
        start = time.perf_counter()
        result = own(collective)
        seconds.append(time.perf_counter() - start)
        return result

    group._together = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        del group._together


def measured(shape: str, weights: str, ranks: int, threads: int) -> Times:
    checkpoint = random_checkpoint(shape, weights)
    options = LoadOptions(
        tp=ranks, threads=threads, speculate="off", context=CONTEXT, parallel=1, dtype="bf16"
    )
    model, result = Model(checkpoint, options), Times()
    group = model.loaded.ranks.group if model.loaded.ranks else None
    try:
        with torch.inference_mode():
            cache = model.runner.new_cache()
            for turn in range(3):
                cache.clear(0)
                sequence = model.runner.begin(cache, 0)
                start = time.perf_counter()
                model.runner.prefill([Span(tuple(range(PROMPT)))], cache, sequence)
                result.prefill.append((time.perf_counter() - start) * 1e3)
                for _ in range(STEPS if turn else 4):
                    spent: list[float] = []
                    with watched(group, spent) if group else watched_nothing():
                        start = time.perf_counter()
                        model.runner.read([(sequence, [Span((7,))])], cache)
                        result.step.append((time.perf_counter() - start) * 1e3)
                    result.collectives.append(sum(spent) * 1e3)
                    result.count = len(spent)
            result.prefill, result.step = result.prefill[1:], result.step[4:]
            result.collectives = result.collectives[4:]
        return result
    finally:
        model.close()
        ask_threads(None)


@contextmanager
def watched_nothing() -> Iterator[None]:
    yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="qwen3-1.7b")
    parser.add_argument("--weights", default="Q8_0")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    best: dict[int, Times] = {}
    for _ in range(args.turns):
        for ranks in (1, args.ranks):
            times = measured(args.shape, args.weights, ranks, args.ranks // ranks)
            if ranks not in best or statistics.median(times.step) < statistics.median(
                best[ranks].step
            ):
                best[ranks] = times
    one, many = best[1], best[args.ranks]
    print(f"{args.shape}, {args.weights}, {PROMPT} tokens, then {STEPS} twice; bf16, {CONTEXT}")
    print(f"{'':<34}{'prefill, ms':>12}{'a token, ms':>13}")
    for name, times in (
        (f"one process, {args.ranks} threads", one),
        (f"{args.ranks} ranks, one thread each", many),
    ):
        print(f"{name:<34}{min(times.prefill):>12.1f}{statistics.median(times.step):>13.2f}")
    ratios = (
        min(many.prefill) / min(one.prefill),
        statistics.median(many.step) / statistics.median(one.step),
    )
    print(f"{'ranks / threads':<34}{ratios[0]:>11.2f}x{ratios[1]:>12.2f}x")
    spent = statistics.median(many.collectives)
    each = spent / many.count * 1e3
    print(f"{many.count} collectives a token: {spent:.2f} ms of the first rank, {each:.0f} us each")


if __name__ == "__main__":
    main()
