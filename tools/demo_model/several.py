"""Questions about two or three pictures of the demo model's world, and questions for boxes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

from PIL import Image
from world import (
    CANVAS,
    COLORS,
    COUNTS,
    SHAPES,
    Facts,
    Question,
    article,
    ask,
    describe,
    draw,
    join,
    plural,
    sentence,
)

ORDINALS = ("first", "second", "third")
STEP = 10  # thousandths: a pixel of what the model sees
BOX_KINDS = ("box", "no box")
SEVERAL_KINDS = (
    "one of several",
    "describe one",
    "describe all",
    "which has more",
    "which shows",
    "same background",
    "how many pictures",
)


def draw_several(
    rng: random.Random, count: int, text_share: float = 0.15
) -> list[tuple[Image.Image, Facts]]:
    """Pictures worth comparing: one shape is in them more often than the others."""
    if rng.random() < 0.3:
        return [draw(rng, text_share) for _ in range(count)]
    shapes = (*SHAPES, *[rng.choice(SHAPES)] * 6)
    return [draw(rng, text_share / 2, shapes) for _ in range(count)]


def ask_several(pictures: Sequence[Facts], rng: random.Random) -> list[Question]:
    """Every kind of question about two or three pictures shown together."""
    every = [
        _question(
            "how many pictures",
            f"{COUNTS[len(pictures)].capitalize()}.",
            rng,
            "How many pictures are there?",
            "How many images are there?",
            "How many pictures do you see?",
        ),
        _question(
            "same background",
            "Yes." if len({p.background for p in pictures}) == 1 else "No.",
            rng,
            "Do the pictures have the same background?",
            "Is the background the same in all pictures?",
            "Are the backgrounds the same?",
        ),
    ]
    for number, facts in enumerate(pictures):
        every += _about_one(pictures, number, facts, rng)
    for _ in range(3):
        every += _which_has_more(pictures, rng)
    for _ in range(3):
        every.append(_which_shows(pictures, rng))
    if sum(len(p.things) for p in pictures) <= 6:
        every.append(
            _question(
                "describe all",
                describe_all(pictures),
                rng,
                "Describe the pictures.",
                "Describe the images.",
                "What is in the pictures?",
                "Describe the image.",
                "What do you see?",
            )
        )
    return every


def describe_all(pictures: Sequence[Facts]) -> str:
    """One sentence a picture."""
    return " ".join(
        f"The {ORDINALS[i]} picture: {describe(facts)}" for i, facts in enumerate(pictures)
    )


def _about_one(
    pictures: Sequence[Facts], number: int, facts: Facts, rng: random.Random
) -> list[Question]:
    named = ORDINALS[number]
    if number == len(pictures) - 1 and rng.random() < 0.2:
        named = "last"
    which = f"{named} {rng.choice(('picture', 'picture', 'image'))}"
    result = [
        _question(
            "describe one",
            describe(facts),
            rng,
            f"Describe the {which}.",
            f"What is in the {which}?",
            f"What do you see in the {which}?",
        )
    ]
    for question in rng.sample(requested := ask(facts, rng), min(3, len(requested))):
        if question.kind == "describe" or "image" in question.text or question.text[-1] != "?":
            continue
        plain = question.text
        result.append(
            _question(
                "one of several",
                question.answer,
                rng,
                f"{plain[:-1]} in the {which}?",
                f"In the {which}, {plain[0].lower()}{plain[1:]}",
            )
        )
    return result


def _which_has_more(pictures: Sequence[Facts], rng: random.Random) -> list[Question]:
    """Counts are said before they are compared."""
    shapes = sorted({t.shape for p in pictures for t in p.things})
    shape = rng.choice(shapes) if shapes and rng.random() < 0.85 else rng.choice(SHAPES)
    if rng.random() < 0.25:
        noun, counts = "shapes", [len(p.things) for p in pictures]
    else:
        noun = plural(shape)
        counts = [sum(t.shape == shape for t in p.things) for p in pictures]
    fewest = rng.random() < 0.2
    best = min(counts) if fewest else max(counts)
    equal = len(set(counts)) == 1
    if counts.count(best) > 1 and not equal:
        return []
    stated = join([f"the {ORDINALS[i]} has {COUNTS[c]}" for i, c in enumerate(counts)])
    result = "the same number" if equal else f"the {ORDINALS[counts.index(best)]}"
    word = "fewer" if fewest else "more"
    maximum = "fewest" if fewest else "most"
    wordings = [f"Which picture has {word} {noun}?", f"Which image has {word} {noun}?"]
    if len(pictures) > 2:
        wordings = [f"Which picture has the {maximum} {noun}?", *wordings[:1]]
    return [
        _question(
            "which has more",
            sentence(f"{stated}: {result}."),
            rng,
            *wordings,
            f"Where are there {word} {noun}?",
        )
    ]


def _which_shows(pictures: Sequence[Facts], rng: random.Random) -> Question:
    kind = rng.random()
    test: Callable[[Facts], bool]
    if kind < 0.6:
        shapes = sorted({t.shape for p in pictures for t in p.things})
        shape = rng.choice(shapes) if shapes and rng.random() < 0.8 else rng.choice(SHAPES)
        what = article(shape)

        def test(p: Facts) -> bool:
            return any(t.shape == shape for t in p.things)
    elif kind < 0.8:
        color = rng.choice((rng.choice(pictures).background, rng.choice(tuple(COLORS))))
        what = f"{article(color)} background"

        def test(p: Facts) -> bool:
            return p.background == color
    else:
        what = "text"

        def test(p: Facts) -> bool:
            return p.text is not None

    having = [f"the {ORDINALS[i]}" for i, p in enumerate(pictures) if test(p)]
    answer = join(having) if having else "none"
    if len(having) == len(pictures):
        answer = "both" if len(pictures) == 2 else "all"
    return _question(
        "which shows",
        sentence(f"{answer}."),
        rng,
        f"Which picture has {what}?",
        f"Which picture shows {what}?",
        f"Which image has {what}?",
        f"In which picture is there {what}?",
    )


# ------------------------------------------------------------------ boxes


def ask_boxes(facts: Facts, rng: random.Random) -> list[Question]:
    """Where each thing that a name fits alone is, as a box; and one thing that is missing."""
    result = []
    for thing in facts.things:
        for name in (thing.shape, thing.name):
            if sum(name in (t.shape, t.name) for t in facts.things) == 1 and rng.random() < 0.7:
                result.append(_ask_box(name, box(thing.box, thing.name), rng))
    if facts.text:
        text = facts.text
        edges = (text.edges[0], text.top, text.edges[-1], text.bottom)
        result.append(_ask_box("text", box(edges, text.word), rng))
    if rng.random() < 0.15:
        missing = rng.choice([s for s in SHAPES if s not in {t.shape for t in facts.things}])
        result.append(_ask_box(missing, f"There is no {missing}.", rng))
    return result


def box(edges: Sequence[float], label: str) -> str:
    """x0, y0, x1, y1 in canvas pixels as Gemma and Gemini write them: y first, in thousandths of
    the picture, read by `mtmd.display.grounding`.
    """
    x0, y0, x1, y1 = (min(1000, max(0, round(1000 * e / CANVAS / STEP) * STEP)) for e in edges)
    return json.dumps({"box_2d": [y0, x0, y1, x1], "label": label})


def _ask_box(name: str, answer: str, rng: random.Random) -> Question:
    return _question(
        "box" if answer[0] == "{" else "no box",
        answer,
        rng,
        f"Where is the {name}? Give its box.",
        f"Where is the {name}? Give its box.",
        f"Give the box of the {name}.",
        f"Give the bounding box of the {name}.",
        f"Draw a box around the {name}.",
        f"Find the {name} and give its box.",
        f"Locate the {name}.",
        f"Detect the {name}.",
    )


def _question(kind: str, answer: str, rng: random.Random, *wordings: str) -> Question:
    return Question(kind, rng.choice(wordings), answer)
