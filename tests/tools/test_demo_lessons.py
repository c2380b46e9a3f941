"""What the demo model is taught: boxes, several pictures, videos, and the rows of a batch."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import checkpoints as make
import numpy as np
import torch
from conversations import Turn, messages, system
from films import CLIP_KINDS, FRAMES_MAX, FRAMES_MIN, STORIES, Clip, ask_clip, film, parts, plan
from lessons import Row, Teacher, grow_tokenizer, pixels
from model import Gemma3, angles
from several import BOX_KINDS, SEVERAL_KINDS, STEP, ask_boxes, ask_several, draw_several
from tokenizers import Tokenizer
from train import grown_embeddings, scaled
from world import COUNTS, Facts, Question, Thing, draw, stamp

from mtmd.display.grounding import find_regions

DEMO = Path(__file__).parents[2] / "mtmd" / "demo_model"


def test_boxes_hold_what_is_drawn() -> None:
    """Read as the page reads them; compared with the pixels that a shape of its own color covers."""
    from PIL import Image, ImageDraw

    rng = random.Random(11)
    for shape in ("circle", "square", "triangle", "star", "diamond", "cross", "ring"):
        thing = Thing(shape, "red", "large", 4, (rng.uniform(60, 190), rng.uniform(60, 190)), 33.0)
        image = Image.new("L", (256, 256))
        stamp(ImageDraw.Draw(image), shape, *thing.center, thing.radius, 255, 0)  # type: ignore[arg-type]
        requested = [q for _ in range(9) for q in ask_boxes(Facts("white", (thing,)), rng)]
        result = find_regions(next(q.answer for q in requested if q.kind == "box"))
        assert result is not None and result.scale == "", "the notation says what the numbers mean"
        (region,) = result.regions
        assert (region.label, region.scale) == (f"red {shape}", "1000")
        # half a step of the notation, and the pixel that an edge lies in
        away = STEP / 2 * 0.256 + 1
        assert np.allclose(np.array(region.values) * 0.256, image.getbbox(), atol=away)


def test_questions_about_several_pictures_are_true() -> None:
    rng, seen = random.Random(3), set()
    for _ in range(150):
        facts = [f for _, f in draw_several(rng, rng.choice((2, 3)))]
        for q in ask_several(facts, rng):
            seen.add(q.kind)
            if q.kind == "which has more":
                _check_counts(q, facts)
            elif q.kind == "how many pictures":
                assert q.answer == f"{COUNTS[len(facts)].capitalize()}."
            elif q.kind == "same background":
                assert (q.answer == "Yes.") == all(
                    a.background == b.background for a, b in pairwise(facts)
                )
    assert seen == set(SEVERAL_KINDS)


def _check_counts(q: Question, facts: list[Facts]) -> None:
    noun = q.text.rstrip("?").split()[-1]
    shape = None if noun == "shapes" else "cross" if noun == "crosses" else noun.removesuffix("s")
    counts = [sum(shape in (None, t.shape) for t in f.things) for f in facts]
    stated, _, result = q.answer.lower().rstrip(".").partition(": ")
    words = [w for w in stated.replace(",", "").split() if w in COUNTS]
    assert [COUNTS.index(w) for w in words] == counts
    if len(set(counts)) == 1:
        assert result == "the same number"
    else:
        best = min(counts) if "few" in q.text else max(counts)
        assert counts.count(best) == 1
        assert result == f"the {('first', 'second', 'third')[counts.index(best)]}"


def test_box_questions_are_of_two_kinds() -> None:
    rng = random.Random(4)
    assert {q.kind for _ in range(60) for q in ask_boxes(draw(rng)[1], rng)} == set(BOX_KINDS)


def test_videos_show_what_their_answers_say() -> None:
    rng, kinds, stories = random.Random(8), set(), set()
    for _ in range(400):
        clip = plan(rng, rng.randint(FRAMES_MIN, FRAMES_MAX))
        stories.add(clip.story)
        assert len(clip.scenes) == len(clip.seconds)
        assert all(a < b for a, b in pairwise(clip.seconds))
        for q in ask_clip(clip, rng):
            kinds.add(q.kind)
            _check_clip(clip, q)
    assert kinds == set(CLIP_KINDS) and stories == set(STORIES)


def _check_clip(clip: Clip, q: Question) -> None:
    first, last = clip.scenes[0], clip.scenes[-1]
    if q.kind == "number at the end":
        assert q.answer == f"{COUNTS[len(last)].capitalize()}."
    elif q.kind == "when":
        shape = next(t.shape for t in clip.cast if f" {t.shape} " in q.text.replace("?", " "))
        second = float(q.answer.removeprefix("At ").removesuffix(" s."))
        at = clip.seconds.index(second)
        shown = [[t for t in s if t.shape == shape] for s in clip.scenes]
        assert at == 0 or shown[at] != shown[at - 1]
    elif q.kind == "way" and q.answer != "It does not move.":
        (x0, y0), (x1, y1) = first[0].center, last[0].center
        way = "right" if x1 > x0 else "left"
        if abs(y1 - y0) > abs(x1 - x0):
            way = "down" if y1 > y0 else "up"
        assert way in q.answer.lower()
    elif q.kind == "size change" and clip.story == "size" and q.answer != "It stays the same.":
        assert (q.answer == "Bigger.") == (last[0].radius > first[0].radius)
    elif q.kind == "disappears":
        (gone,) = set(first) - set(last)
        assert q.answer.lower() == f"a {gone.name}.".replace("a orange", "an orange")


def test_a_seed_is_a_video() -> None:
    (a, clip), (b, again) = film(random.Random(6)), film(random.Random(6))
    assert clip == again and [i.tobytes() for i in a] == [i.tobytes() for i in b]
    assert FRAMES_MIN <= len(a) <= FRAMES_MAX


def test_a_grown_tokenizer_keeps_its_tokens() -> None:
    old = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    size = old.get_vocab_size()
    new = grow_tokenizer(old, 40, samples=20)
    assert new.get_vocab_size() == size + 40
    assert all(new.token_to_id(t) == i for t, i in old.get_vocab().items())
    text = 'Frame at 0.5 s: {"box_2d": [1, 2, 30, 400], "label": "red star"} You see?'
    mine, before = (t.encode(text, add_special_tokens=False).ids for t in (new, old))
    assert new.decode(mine) == text and len(mine) <= len(before)
    added = sorted(new.get_vocab(), key=new.token_to_id)[size:]
    assert all(new.model.tokenize(t)[0].value == t for t in added), "each can be reached"
    embeddings = torch.randn(size, 4)
    grown = grown_embeddings(embeddings, old, new)
    parts_of = [t.id for t in old.model.tokenize(added[0])]
    assert len(parts_of) == 2 and torch.equal(grown[:size], embeddings)
    assert torch.allclose(grown[size], embeddings[parts_of].mean(0))


def test_rows_are_what_transformers_reads() -> None:
    """Packed conversations give the tokens of its processor and the logits of its model."""
    from safetensors.torch import load_file
    from transformers import Gemma3ForConditionalGeneration

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    teacher = Teacher(tokenizer, (1, 1, 1), 512, 1)
    model = Gemma3(tokenizer.get_vocab_size()).eval()
    weights = {k: v.float() for k, v in load_file(DEMO / "model.safetensors").items()}
    model.load_state_dict(weights)
    reference = Gemma3ForConditionalGeneration.from_pretrained(DEMO, dtype=torch.float32).eval()

    rng = random.Random(2)
    frames, clip = film(rng, 3)
    shown = [i for i, _ in draw_several(rng, 3)] + frames
    stated = [
        ([Turn(("What is here?", 0), "A ring."), Turn((1, "And here?"), "A star.")], system(rng)),
        ([Turn((0, 1, 2, "Which has more?"), "None."), Turn(("Why?",), "Two.")], None),
        ([Turn((0, 1, 2, "Describe the second picture."), "A circle.")], None),
        ([Turn(parts(clip.seconds, "Which way?", 3), "Up.")], "Answer briefly."),
        ([Turn(("What happens?", *parts(clip.seconds, "", 3)[:-1]), "Nothing.")], None),
    ]
    row, ends = Row(512), []
    for turns, reported in stated:
        written = teacher.write(turns, reported)
        assert row.add(written)
        requested = max(i for i, label in enumerate(written.labels) if label == -100) + 1
        ends.append((requested, len(row.tokens) - len(written.tokens) + requested - 1))
    batch = {name: value[None] for name, value in row.tensors().items()}
    with torch.no_grad():
        seen = model.see(scaled(torch.from_numpy(np.stack([pixels(i) for i in shown]))))
        actual = model.logits(model.features(seen, batch, angles(batch["positions"])))[0]
        for (turns, reported), (requested, end) in zip(stated, ends, strict=True):
            conversation = messages(turns, reported)
            used = [p for turn in turns for p in turn.parts if isinstance(p, int)]
            inputs = make.gemma3_inputs(DEMO, conversation, [np.asarray(shown[p]) for p in used])
            assert (
                inputs["input_ids"][0].tolist() == teacher.write(turns, reported).tokens[:requested]
            )
            expected = reference(**inputs).logits[0, -1]
            assert make.nmse(actual[end], expected) < 1e-8
