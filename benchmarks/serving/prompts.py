"""How long short prompts take, read at once, sixteen rows at a time, and as the engine chooses; and
how long a step of answers takes beside rows of prompts, in one batch with them and in two.

    python benchmarks/serving/prompts.py [--shape smolvlm-256m --weights Q8_0] [--threads 1]

Without a shape, the demo model. Processor time, in one process, the ways in turn.
"""

from __future__ import annotations

import argparse
import time
from random import Random
from statistics import median

from mtmd import load
from mtmd.bench.shapes import random_checkpoint
from mtmd.llm.batch import FEW
from mtmd.llm.engine.engine import Engine
from mtmd.llm.engine.prompt import Prompt
from mtmd.llm.engine.spans import Span
from mtmd.llm.sampling.sampler import Sampler, Sampling
from mtmd.model import Model
from mtmd.options.by_name import options
from mtmd.options.load import LoadOptions

LENGTHS = (24, 48, 100, 200)
ROUNDS = 12  # prompts read in each way
ALONGSIDE = ((8, 1500), (14, 60))  # answers, and tokens of each
ROWS = (8, 16, 56)  # of prompts beside them
STEPS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--shape", help="of a model, with random weights (the demo model)")
    parser.add_argument("--weights", default="Q8_0", help="their type (Q8_0)")
    parser.add_argument("--threads", type=int, default=1)
    requested = parser.parse_args()
    chosen = {"parallel": 16, "context": 2048, "threads": requested.threads}
    if requested.shape is None:
        model = load(**chosen)
    else:
        checkpoint = random_checkpoint(requested.shape, requested.weights)
        model = Model(checkpoint, options(LoadOptions, chosen))
    print(model, flush=True)
    print("\n| prompt | at once, ms | 16 at a time | as chosen |\n|---|---|---|---|")
    for length in LENGTHS:
        print(f"| {length} | {' | '.join(short_prompts(model, length))} |", flush=True)
    print(
        "\n| answers, tokens of each | rows beside them | one batch, ms | two |\n|---|---|---|---|"
    )
    for count, tokens in ALONGSIDE:
        for rows in ROWS:
            result = " | ".join(f"{1e3 * each:.1f}" for each in steps(model, count, tokens, rows))
            print(f"| {count}, {tokens} | {rows} | {result} |", flush=True)


def request(length: int, seed: int, tokens: int) -> Prompt:
    rng = Random(seed)
    ids = tuple(rng.randrange(20, 300) for _ in range(length))
    return Prompt([Span(ids)], Sampler(Sampling(temperature=0)), max_tokens=tokens)


def short_prompts(model: Model, length: int) -> list[str]:
    engine = Engine(model.runner)
    scheduler, maximum = engine.scheduler, engine.scheduler.tokens
    result: list[list[float]] = [[], [], []]
    ways = (maximum, None), (FEW, FEW), (maximum, FEW)
    for number in range(ROUNDS):
        for (tokens, few), times in zip(ways, result, strict=True):
            scheduler.tokens, scheduler.in_place_rows = tokens, few
            sequence, start = engine.submit(request(length, number, 1)), time.process_time()
            while sequence.finish is None:
                engine.step()
            times.append(time.process_time() - start)
            engine.reset()  # else the next prompt like it is cached
            scheduler = engine.scheduler
    return [f"{1e3 * median(times[ROUNDS // 2 :]):.1f}" for times in result]


def steps(model: Model, count: int, tokens: int, rows: int) -> list[float]:
    """Seconds of a step in one batch, and in two."""
    engine, result = Engine(model.runner), list[float]()
    for number in range(count):
        engine.submit(request(tokens, number, 400))
    scheduler = engine.scheduler
    while scheduler.waiting or not all(s.decoding for s in scheduler.running):
        engine.step()
    scheduler.mixed_rows = count + rows
    for few in (None, FEW):
        scheduler.in_place_rows = few
        late, times = engine.submit(request(1900, 100 + (few or 0), 1)), list[float]()
        while len(times) < STEPS and late.finish is None:
            start = time.process_time()
            engine.step()
            times.append(time.process_time() - start)
        engine.cancel(late)
        result.append(median(times[3:]))
    return result


if __name__ == "__main__":
    main()
