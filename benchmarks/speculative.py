"""Decoding with tokens proposed out of prompt and answer (`--speculate auto`) against decoding
without: tokens a second in tasks that copy and in tasks that do not, alternating in one run.

    python benchmarks/speculative.py                          the demo model
    python benchmarks/speculative.py -m model.gguf --dtype bf16 --threads 2 --rounds 7
    python benchmarks/speculative.py --batch 4                four answers at once

What is answered is given, as a model would that does the task: so any weights do, random ones too.
Texts are those of this checkout. The last task draws from the model's own probabilities at
temperature 1. Ratios above 1 mean that proposals gain: of medians, of the best, and of medians by
processor time, which another process on the machine does not change.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from mtmd import load
from mtmd.bench.forced import Forced
from mtmd.llm.engine.engine import Engine
from mtmd.llm.engine.prompt import Prompt
from mtmd.llm.engine.spans import Span
from mtmd.llm.sampling.sampler import Sampler, Sampling

ROOT = Path(__file__).parents[1]
MODES = ("off", "auto")
ITEMS = ("screws", "nails", "hinges", "brackets", "washers", "anchors", "hooks", "bolts")


def table() -> str:
    rows = [
        f"| {item} {size} mm | {17 * i + size} | {(31 * i + 7 * size) % 90}.{(13 * i) % 100:02} |"
        for i, item in enumerate(ITEMS)
        for size in (12, 25)
    ]
    return "\n".join(["| article | pieces | price |", "|---|---|---|", *rows])


def between(path: str, first: int, last: int) -> str:
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    return "\n".join(lines[first:last])


def tasks() -> list[tuple[str, str, str]]:
    """(name, prompt, answer)"""
    code, page = between("llm/engine/pages.py", 20, 75), between("docs/LOG.md", 4, 20)
    edited = code.replace("number", "count").replace("IndexError", "MemoryError")
    fields = {f"{item}_{i}": 1000 + 37 * i for i, item in enumerate(ITEMS)}
    form = "\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in fields.items())
    return [
        ("table read out", f"Read out this table.\n{table()}", f"Here it is:\n{table()}"),
        ("code edited", f"Rename number to count.\n{code}", edited),
        ("page transcribed", f"Repeat the text.\n{page}", page),
        ("form into JSON", f"As JSON.\n{form}", json.dumps(fields, indent=2)),
        ("prose, new", "What did not work?", page),
        ("code, new", "Write a page table.", code),
        ("summary", f"Sum up.\n{between('docs/LOG.md', 4, 12)}", between("docs/LOG.md", 20, 40)),
    ]


def answers(engine: Engine, prompts: list[Prompt]) -> tuple[float, float, int, int]:
    """Tokens a second after the first, of wall time and of processor time; tokens proposed and
    accepted.
    """
    sequences = [engine.submit(prompt) for prompt in prompts]
    start = None
    while engine.busy:
        engine.step()
        if start is None and all(sequence.first for sequence in sequences):
            start = time.process_time()
    assert start is not None
    cpu_seconds = time.process_time() - start
    for sequence in sequences:
        if sequence.error:
            raise sequence.error
    tokens = sum(len(s.tokens) - 1 for s in sequences)
    seconds = max(s.decode_ms for s in sequences) / 1e3
    return (
        tokens / seconds,
        tokens / cpu_seconds,
        sum(s.proposed for s in sequences),
        sum(s.accepted for s in sequences),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", help="(default: the demo model)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=160, help="of an answer (%(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="answers at once (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    args = parser.parse_args()
    context = None if args.model is None else 2048
    model = load(
        args.model,
        device=args.device,
        dtype=args.dtype,
        threads=args.threads,
        parallel=args.batch,
        context=context,
    )
    model.exclusively(lambda: measure(model, args))


def measure(model: Any, args: argparse.Namespace) -> None:
    tokenizer, runner = model.checkpoint.tokenizer, model.runner
    engines = {mode: Engine(runner, speculate=mode) for mode in MODES}

    def given(prompt: str, answer: str) -> list[Prompt]:
        read, written = tokenizer.encode(prompt), tokenizer.encode(answer)[: args.tokens]
        return [
            Prompt(
                [Span((read[0], *read, 5 + i))],
                Sampler(Sampling()),
                max_tokens=len(written),
                constraint=Forced(written),
            )
            for i in range(args.batch)
        ]

    def drawn(number: int) -> list[Prompt]:
        read = tuple(tokenizer.encode("Tell a story."))
        return [
            Prompt([Span(read)], Sampler(Sampling(temperature=1.0, seed=seed)), max_tokens=100)
            for seed in range(number * args.batch, (number + 1) * args.batch)
        ]

    rates: dict[str, dict[str, list[tuple[float, float]]]] = {}
    counts: dict[str, tuple[int, int]] = {}
    for number in range(args.rounds + 1):
        for name, *task in [*tasks(), ("drawn, temperature 1",)]:
            for mode in MODES if number % 2 else reversed(MODES):
                prompts = given(*task) if task else drawn(number)
                wall, cpu, proposed, accepted = answers(engines[mode], prompts)
                if number:  # the first round makes plans
                    rates.setdefault(name, {}).setdefault(mode, []).append((wall, cpu))
                    if mode == "auto":
                        counts[name] = proposed, accepted
    print(
        f"{model.name}, {runner.backends[0].name}, {args.threads} threads, batch {args.batch}, "
        f"{args.rounds} rounds; steps of "
        + ", ".join(f"{rows} rows cost {cost:.2f}" for rows, cost in runner.pace.measured())
    )
    print(
        f"{'tokens/s, median':<22} {'off':>8} {'auto':>8} {'ratio':>7} {'best':>7} {'by CPU':>7}  "
        "accepted of proposed"
    )
    for name, result in rates.items():
        off, auto = ([wall for wall, _ in result[mode]] for mode in MODES)
        by_cpu = [statistics.median(cpu for _, cpu in result[mode]) for mode in MODES]
        medians = statistics.median(off), statistics.median(auto)
        print(
            f"{name:<22} {medians[0]:8.1f} {medians[1]:8.1f} {medians[1] / medians[0]:7.3f} "
            f"{max(auto) / max(off):7.3f} {by_cpu[1] / by_cpu[0]:7.3f}  "
            f"{counts[name][1]} of {counts[name][0]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
