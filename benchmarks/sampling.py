"""What choosing a token costs on a CPU: one row of logits after the other, as the engine does it
for each sequence that is answered.

    python benchmarks/sampling.py
    python benchmarks/sampling.py --vocabulary 262144 --rows 1 64
    python benchmarks/sampling.py --together cpu        # or cuda

`--together` measures how tokens of several rows are chosen on a device in one go, with the largest
of each row in order, and with whole rows in order, in turns.

Microseconds of processor time of this thread, the least of some rounds: another process on the
machine changes them little; on a GPU of the clock. Logits are random, with some hundred tokens that
are more likely than all others; the last setting makes all about as likely.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from mtmd.llm.sampling.batch_sampler import HEAD, RowRequest, sample
from mtmd.llm.sampling.sampler import Sampler, Sampling

ROUNDS = 12
SEEN = 2000  # tokens of a prompt that a repetition penalty counts
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "0.7, top_k 40": {"temperature": 0.7, "top_k": 40},
    "0.7, top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "1, top_k 64, top_p 0.95": {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
    "1, min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "0.7, top_p 0.9, repetition 1.05": {
        "temperature": 0.7,
        "top_p": 0.9,
        "repetition_penalty": 1.05,
    },
    "50, top_p 0.9": {"temperature": 50.0, "top_p": 0.9},
}


def logits(rows: int, vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(rows, vocabulary, generator=generator) * 2.5
    values[:, :200] += torch.randn(rows, 200, generator=generator) * 4 + 3
    return values.to(dtype)


def min_us(settings: dict[str, Any], values: torch.Tensor, rows: int) -> float:
    samplers = [Sampler(Sampling(seed=row, **settings)) for row in range(rows)]
    seen = torch.randint(0, values.shape[1], (SEEN,)).tolist()
    times = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        for sampler, row in zip(samplers, values, strict=False):
            sampler(row, seen)
        times.append(time.thread_time() - start)
    return min(times) * 1e6


def min_us_together(
    settings: dict[str, Any], values: torch.Tensor, rows: int
) -> tuple[float, float]:
    """By the largest of each row, and by whole rows."""
    samplers = [Sampler(Sampling(seed=row, **settings)) for row in range(rows)]
    seen = torch.randint(0, values.shape[1], (SEEN,)).tolist()
    wishes = [
        RowRequest(s.sampling, seen, point=s.points(1)[0] if s.sampling.temperature else 0.0)
        for s in samplers
    ]
    clock = time.thread_time if values.device.type == "cpu" else time.perf_counter
    times: dict[int | None, list[float]] = {HEAD: [], None: []}
    for _ in range(ROUNDS):
        for head, result in times.items():
            start = clock()
            sample(values[:rows], wishes, head=head)
            result.append(clock() - start)
    return min(times[HEAD]) * 1e6, min(times[None]) * 1e6


def measured(settings: dict[str, Any], values: torch.Tensor, rows: int, device: str | None) -> str:
    if device is None:
        return f"{min_us(settings, values, rows):,.0f}"
    largest, whole = min_us_together(settings, values.to(device), rows)
    return f"{largest:,.0f}, whole {whole:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[50_000, 150_000])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--together", metavar="DEVICE", help="rows in one go, there")
    args = parser.parse_args()
    if args.together == "cpu":
        torch.set_num_threads(1)
    columns = " | ".join(f"{rows} row{'s' if rows > 1 else ''}" for rows in args.rows)
    for vocabulary in args.vocabulary:
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            print(
                f"\n| {vocabulary:,} tokens, {name} | {columns} |\n|---|{'---|' * len(args.rows)}"
            )
            values = logits(max(args.rows), vocabulary, dtype)
            for name, settings in SETTINGS.items():
                result = (measured(settings, values, rows, args.together) for rows in args.rows)
                print(f"| {name} | {' | '.join(result)} |", flush=True)


if __name__ == "__main__":
    main()
