"""Answers of the demo model to generated questions, by group and kind; the last line is the total
in percent.

    python tools/demo_model/evaluate.py --seed 1000001 -n 1000
    python tools/demo_model/evaluate.py --only boxes --only videos -n 200 --transformers

Training draws its pictures from seeds below 100; any other seed is new to the model. Each question
is picked at random among all that its pictures can answer. An answer has to match to the letter; a
box is right where its overlap with what was drawn (intersection over union) is at least 0.5.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from conversations import SYSTEMS, UNSEEN_SYSTEMS, Turn, messages
from films import ask_clip, film, whole
from PIL import Image
from several import ask_boxes, ask_several, draw_several
from world import Question, ask, draw

from mtmd import Model, VideoInput, load
from mtmd.display.grounding import find_regions
from mtmd.events import Answer, Finished

DEMO_MODEL = Path(__file__).parents[2] / "mtmd" / "demo_model"
GOOD_OVERLAP = 0.5
EVERY_FRAME = 240.0  # a second: all that there are


@dataclass(frozen=True)
class Case:
    """A conversation with its pictures, the last turn to be answered; or the frames of a video, of
    these `seconds`, and a question about it.
    """

    kind: str
    turns: Sequence[Turn]
    images: Sequence[Image.Image]
    system: str | None = None
    seconds: tuple[float, ...] = ()

    @property
    def expected(self) -> str:
        return self.turns[-1].answer

    @property
    def messages(self) -> list[dict[str, Any]]:
        """With pictures by their number; a video as what mtmd writes for it, in one text."""
        if not self.seconds:
            return messages(self.turns, self.system)
        shown = whole(self.seconds, str(self.turns[0].parts[0]))
        words = [part if isinstance(part, str) else "<start_of_image>" for part in shown]
        return [{"role": "user", "content": [{"type": "text", "text": "".join(words)}]}]


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

    def answer(self, case: Case) -> str:
        text = self.processor.apply_chat_template(
            case.messages, add_generation_prompt=True, tokenize=False
        )
        inputs = self.processor(
            text=text, images=[list(case.images)], return_tensors="pt", add_special_tokens=False
        )
        tokens = self.model.generate(**inputs, max_new_tokens=256, do_sample=False)[
            0, inputs["input_ids"].shape[1] :
        ]
        stated: str = self.processor.tokenizer.decode(tokens, skip_special_tokens=True)
        return stated


# ------------------------------------------------------------------ groups


def picture_first(rng: random.Random) -> Case:
    image, facts = draw(rng)
    question = rng.choice(ask(facts, rng))
    return Case(question.kind, [Turn((0, question.text), question.answer)], [image])


def text_first(rng: random.Random) -> Case:
    image, facts = draw(rng)
    question = rng.choice(ask(facts, rng))
    return Case(question.kind, [Turn((question.text, 0), question.answer)], [image])


def system_prompt(rng: random.Random) -> Case:
    """Half of the system prompts are not those of the training."""
    case = rng.choice((picture_first, text_first))(rng)
    reported = rng.choice((rng.choice(UNSEEN_SYSTEMS), rng.choice(SYSTEMS)))
    order = "picture first" if case.turns[0].parts[0] == 0 else "text first"
    kind = f"{order}, {'new' if reported in UNSEEN_SYSTEMS else 'known'} system"
    return Case(kind, case.turns, case.images, reported)


def later_turn(rng: random.Random) -> Case:
    """A second or third question about the same picture."""
    image, facts = draw(rng)
    chosen = ask(facts, rng)
    while len(chosen) < 3:
        chosen += ask(facts, rng)
    count = rng.choice((2, 2, 3))
    questions = rng.sample(chosen, count)
    first_parts = (0, questions[0].text) if rng.random() < 0.5 else (questions[0].text, 0)
    turns = [Turn(first_parts, questions[0].answer)]
    turns += [Turn((q.text,), q.answer) for q in questions[1:]]
    return Case(f"{'second' if count == 2 else 'third'} question", turns, [image])


def several(count: int) -> Callable[[random.Random], Case]:
    def case(rng: random.Random) -> Case:
        drawn = draw_several(rng, count)
        images, numbers = [i for i, _ in drawn], tuple(range(count))
        facts = [f for _, f in drawn]
        layout = rng.choice(("together", "together", "text first", "one by one"))
        questions = ask_several(facts, rng)
        kinds = sorted({q.kind for q in questions})
        if layout == "one by one":
            kinds.remove("describe all") if "describe all" in kinds else None
        kind = rng.choice(kinds)
        question = rng.choice([q for q in questions if q.kind == kind])
        if layout == "together":
            turns = [Turn((*numbers, question.text), question.answer)]
        elif layout == "text first":
            turns = [Turn((question.text, *numbers), question.answer)]
        else:
            turns = []
            for number in numbers[:-1]:
                before = rng.choice(ask(facts[number], rng))
                turns.append(Turn((number, before.text), before.answer))
            if rng.random() < 0.4:
                question = rng.choice(ask(facts[-1], rng))
                kind = "the latest"
            turns.append(Turn((numbers[-1], question.text), question.answer))
        return Case(f"{layout}: {kind}", turns, images)

    return case


def boxes(rng: random.Random) -> Case:
    questions: list[Question] = []
    while not questions:
        image, facts = draw(rng)
        questions = ask_boxes(facts, rng)
    question = rng.choice(questions)
    shown = rng.random() < 0.5
    turn = Turn((0, question.text) if shown else (question.text, 0), question.answer)
    sort = "missing" if question.kind == "no box" else "text" if facts.text else "shape"
    return Case(f"{sort}, {'picture' if shown else 'text'} first", [turn], [image])


def videos(rng: random.Random) -> Case:
    frames, clip = film(rng)
    questions = ask_clip(clip, rng)
    kind = rng.choice(sorted({q.kind for q in questions}))
    question = rng.choice([q for q in questions if q.kind == kind])
    turns = [Turn((question.text,), question.answer)]
    return Case(kind, turns, frames, seconds=clip.seconds)


GROUPS: dict[str, Callable[[random.Random], Case]] = {
    "picture first": picture_first,
    "text first": text_first,
    "system prompt": system_prompt,
    "later turn": later_turn,
    "two pictures": several(2),
    "three pictures": several(3),
    "boxes": boxes,
    "videos": videos,
}


def cases(group: str, seed: int, count: int) -> Iterator[Case]:
    """The same for a seed, whatever the other groups are."""
    rng = random.Random(seed)
    for _ in range(count):
        yield GROUPS[group](rng)


# ------------------------------------------------------------------ answers


def overlap(result: str, expected: str) -> float:
    """Intersection over union of the two answers' boxes; 0 where there is none, or a label is
    another.
    """
    mine, real = find_regions(result), find_regions(expected)
    if mine is None or real is None or len(mine.regions) != 1:
        return 0.0
    (a,), (b,) = mine.regions, real.regions
    if a.label != b.label or mine.scale != real.scale:
        return 0.0
    sides = [
        max(0.0, min(a.values[i + 2], b.values[i + 2]) - max(a.values[i], b.values[i]))
        for i in (0, 1)
    ]
    areas = [(r.values[2] - r.values[0]) * (r.values[3] - r.values[1]) for r in (a, b)]
    common = sides[0] * sides[1]
    return common / (sum(areas) - common)


class Answerer:
    """mtmd with a loaded model."""

    def __init__(self, model: Model):
        self.model = model

    def finished(self, case: Case, max_tokens: int = 256) -> Answer:
        shown: list[dict[str, Any]] = []
        if case.seconds:
            frames = np.stack([np.asarray(image.convert("RGB")) for image in case.images])
            video = VideoInput(frames, fps=EVERY_FRAME, times=case.seconds)
            requested = {"type": "text", "text": str(case.turns[0].parts[0])}
            shown = [{"role": "user", "content": [{"type": "video", "video": video}, requested]}]
        for message in [] if case.seconds else case.messages:
            content = message["content"]
            if not isinstance(content, str):
                content = [
                    {**p, "image": case.images[p["image"]]} if p["type"] == "image" else p
                    for p in content
                ]
            shown.append({**message, "content": content})
        *_, last = self.model.stream(shown, max_tokens=max_tokens)
        assert isinstance(last, Finished)
        return last.answer

    def answer(self, case: Case) -> str:
        return self.finished(case).text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1_000_001)
    parser.add_argument(
        "-n", type=int, default=1000, help="questions of each group (default: %(default)s)"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=tuple(GROUPS),
        metavar="GROUP",
        help=f"a group, more than once if need be (default: all): {', '.join(GROUPS)}",
    )
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
    flash = model.warmup_report.flash
    print(f"flash attention: {', '.join(f'{f.graph} {f.state}' for f in flash)}")
    answerer = Answerer(model)
    peer = Peer(args.model or DEMO_MODEL) if args.transformers else None
    answers: list[str] = []
    total: list[bool] = []
    for group in args.only or GROUPS:
        right: dict[str, list[bool]] = defaultdict(list)
        overlaps: list[float] = []
        agreed = 0
        for case in cases(group, args.seed, args.n):
            answer = answerer.answer(case)
            answers.append(answer)
            good = answer == case.expected
            if case.expected.startswith("{"):
                overlaps.append(overlap(answer, case.expected))
                good = overlaps[-1] >= GOOD_OVERLAP
            agreed += peer is not None and peer.answer(case) == answer
            right[case.kind].append(good)
            if args.wrong and not good:
                requested = " | ".join(str(p) for turn in case.turns for p in turn.parts)
                print(f"{group}, {case.kind}: {requested}\n  found    {answer}")
                print(f"  expected {case.expected}")
        every = [r for results in right.values() for r in results]
        total += every
        print(_line(group, every), end="")
        print(f"  mean overlap {sum(overlaps) / len(overlaps):.3f}" if overlaps else "", end="")
        print(f"  transformers the same {agreed} of {args.n}" if peer else "", flush=True)
        for kind, results in sorted(right.items()):
            print(_line(f"  {kind}", results))
    if args.answers:
        args.answers.write_text("\n".join(answers) + "\n")
    print(f"{100 * sum(total) / len(total):.1f}")


def _line(name: str, results: list[bool]) -> str:
    return (
        f"{name:<36} {sum(results):4d} of {len(results):4d}  "
        f"{100 * sum(results) / len(results):5.1f} %"
    )


if __name__ == "__main__":
    main()
