"""Exact answers of the demo model on generated questions, by kind; the last line is the total in
percent.

    python tools/demo_model/evaluate.py --seed 1000001 -n 1000

Training draws its pictures from seeds below 100; any other seed is new to the model. One question a
picture, picked at random among all that `world.ask` makes of it. The answer has to match to the
letter.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from pathlib import Path

from PIL import Image
from world import ask, draw

from mtmd import load

DEMO_MODEL = Path(__file__).parents[2] / "mtmd" / "demo_model"


class Peer:
    """The same checkpoint in transformers, fp32, greedy."""

    def __init__(self, folder: Path):
        import torch
        from transformers import (
            Gemma3ForConditionalGeneration,
            Gemma3Processor,
            PreTrainedTokenizerFast,
        )
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        self.model = Gemma3ForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        images = Gemma3ImageProcessorPil.from_pretrained(folder)
        self.processor = Gemma3Processor(
            images,
            PreTrainedTokenizerFast.from_pretrained(folder),
            image_seq_length=images.image_seq_length,
            chat_template=(folder / "chat_template.jinja").read_text(),
        )

    def answer(self, image: Image.Image, question: str) -> str:
        messages = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
        ]
        text = self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        inputs = self.processor(
            text=text, images=[[image]], return_tensors="pt", add_special_tokens=False
        )
        tokens = self.model.generate(**inputs, max_new_tokens=256, do_sample=False)[
            0, inputs["input_ids"].shape[1] :
        ]
        said: str = self.processor.tokenizer.decode(tokens, skip_special_tokens=True)
        return said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1_000_001)
    parser.add_argument("-n", type=int, default=1000, help="questions (default: %(default)s)")
    parser.add_argument(
        "-m", "--model", type=Path, help="a checkpoint folder (default: the demo model)"
    )
    parser.add_argument("--flash-attn", default="auto")
    parser.add_argument(
        "--refuse",
        action="append",
        default=[],
        metavar="RULE",
        help="as in `mtmd warmup`; gives mixed flash attention",
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--transformers",
        action="store_true",
        help="ask transformers too, from the same files, and count equal answers",
    )
    parser.add_argument("--wrong", action="store_true", help="print every wrong answer")
    parser.add_argument("--answers", type=Path, help="write one answer a line, to compare runs")
    args = parser.parse_args()
    if args.seed < 100:
        sys.exit("seeds below 100 are those of the training pictures; choose another")
    model = load(args.model, flash_attn=args.flash_attn, refuse=args.refuse, threads=args.threads)
    print(
        f"flash attention: {', '.join(f'{f.graph} {f.state}' for f in model.warmup_report.flash)}"
    )
    rng = random.Random(args.seed)
    right: dict[str, list[bool]] = defaultdict(list)
    answers = []
    peer = Peer(args.model or DEMO_MODEL) if args.transformers else None
    agreed = 0
    for _ in range(args.n):
        image, facts = draw(rng)
        question = rng.choice(ask(facts, rng))
        answer = model.describe(image, question.text)
        answers.append(answer)
        agreed += peer is not None and peer.answer(image, question.text) == answer
        right[question.kind].append(answer == question.answer)
        if args.wrong and answer != question.answer:
            print(
                f"{question.kind}: {question.text}\n  found    {answer}\n  expected "
                f"{question.answer}"
            )
    if args.answers:
        args.answers.write_text("\n".join(answers) + "\n")
    if peer:
        print(f"transformers gives the same answer to {agreed} of {args.n}")
    for kind, results in sorted(right.items()):
        print(
            f"{kind:<15} {sum(results):4d} of {len(results):4d}  "
            f"{100 * sum(results) / len(results):5.1f} %"
        )
    total = [r for results in right.values() for r in results]
    print(f"{100 * sum(total) / len(total):.1f}")


if __name__ == "__main__":
    main()
