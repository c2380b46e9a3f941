"""Exact answers of the demo model on generated questions, by kind; the last line is the total in percent.

    python tools/demo_model/evaluate.py --seed 1000001 -n 1000

Training draws its pictures from seeds below 100; any other seed is new to the model. One question a picture, picked at random among
all that `world.ask` makes of it. The answer has to match to the letter.
"""
from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from pathlib import Path

from world import ask, draw

from mtmd import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1_000_001)
    parser.add_argument("-n", type=int, default=1000, help="questions (default: %(default)s)")
    parser.add_argument("-m", "--model", type=Path, help="a checkpoint folder (default: the demo model)")
    parser.add_argument("--flash-attn", default="auto")
    parser.add_argument("--refuse", action="append", default=[], metavar="RULE", help="as in `mtmd warmup`; gives mixed flash attention")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--wrong", action="store_true", help="print every wrong answer")
    parser.add_argument("--answers", type=Path, help="write one answer a line, to compare runs")
    args = parser.parse_args()
    if args.seed < 100:
        sys.exit("seeds below 100 are those of the training pictures; choose another")
    model = load(args.model, flash_attn=args.flash_attn, refuse=args.refuse, threads=args.threads)
    print(f"flash attention: {', '.join(f'{f.graph} {f.state}' for f in model.warmup_report.flash)}")
    rng = random.Random(args.seed)
    right: dict[str, list[bool]] = defaultdict(list)
    answers = []
    for _ in range(args.n):
        image, facts = draw(rng)
        question = rng.choice(ask(facts, rng))
        answer = model.describe(image, question.text)
        answers.append(answer)
        right[question.kind].append(answer == question.answer)
        if args.wrong and answer != question.answer:
            print(f"{question.kind}: {question.text}\n  found    {answer}\n  expected {question.answer}")
    if args.answers:
        args.answers.write_text("\n".join(answers) + "\n")
    for kind, results in sorted(right.items()):
        print(f"{kind:<15} {sum(results):4d} of {len(results):4d}  {100 * sum(results) / len(results):5.1f} %")
    total = [r for results in right.values() for r in results]
    print(f"{100 * sum(total) / len(total):.1f}")


if __name__ == "__main__":
    main()
