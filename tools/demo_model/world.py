"""The demo model's little world: pictures, and questions whose answers are certain.

A picture is one of three kinds: up to four coloured shapes in the cells of a 3 x 3 grid, one short
word or number, or nothing but a background. `draw(rng)` makes one and the facts about it;
`ask(facts, rng)` makes questions with their exact answers. Both depend on the random generator
alone, so a seed is a data set.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

CANVAS = 256  # pixels, square

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "orange": (245, 140, 30),
    "purple": (140, 50, 180),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
}
SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross", "ring")
REACH = {
    "circle": (1.0, 1.0, 1.0, 1.0),
    "square": (0.88, 0.88, 0.88, 0.88),
    "triangle": (0.953, 0.95, 0.953, 0.7),
    "star": (1.094, 1.15, 1.094, 0.93),
    "diamond": (0.75, 1.1, 0.75, 1.1),
    "cross": (1.0, 1.0, 1.0, 1.0),
    "ring": (1.0, 1.0, 1.0, 1.0),
}  # how far `stamp` goes to the left, up, right and down, in radii
SIZES = ("small", "large")
ALIKE = (
    {"white", "yellow"},
    {"yellow", "orange"},
    {"orange", "red"},
    {"blue", "purple"},
)  # too close to read one on the other
LOCATIONS = (
    "top left",
    "top",
    "top right",
    "left",
    "center",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)
COUNTS = ("zero", "one", "two", "three", "four")
WORDS = (
    "cat",
    "dog",
    "sun",
    "tree",
    "car",
    "house",
    "apple",
    "fish",
    "bird",
    "moon",
    "star",
    "milk",
    "book",
    "lamp",
    "ship",
    "rain",
    "hat",
    "key",
    "bus",
    "cup",
    "hello",
    "open",
    "stop",
    "go",
    "exit",
    "sale",
)
KINDS = (
    "describe",
    "background",
    "read",
    "text color",
    "count",
    "count shape",
    "color",
    "where",
    "shape",
    "what at",
    "is there shape",
    "is there color",
    "left right",
)


@dataclass(frozen=True)
class Thing:
    """One shape; `center` and `radius` in canvas pixels, `cell` 0..8 in reading order."""

    shape: str
    color: str
    size: str
    cell: int
    center: tuple[float, float]
    radius: float

    @property
    def box(self) -> tuple[float, float, float, float]:
        """x0, y0, x1, y1 of what is drawn, in canvas pixels."""
        (x, y), r = self.center, self.radius
        left, top, right, bottom = REACH[self.shape]
        return x - left * r, y - top * r, x + right * r, y + bottom * r

    @property
    def name(self) -> str:
        return f"{self.color} {self.shape}"

    @property
    def full_name(self) -> str:
        return f"{self.size} {self.name}"


@dataclass(frozen=True)
class Text:
    """One written word or number; `edges` are the x of each character's borders, `top`/`bottom` its
    y, in canvas pixels.
    """

    word: str
    color: str
    edges: tuple[float, ...]
    top: float
    bottom: float


@dataclass(frozen=True)
class Facts:
    """What is true of a picture. Things are in reading order."""

    background: str
    things: tuple[Thing, ...] = ()
    text: Text | None = None


@dataclass(frozen=True)
class Question:
    kind: str
    text: str
    answer: str


# ------------------------------------------------------------------ pictures


def draw(
    rng: random.Random, text_share: float = 0.22, shapes: Sequence[str] = SHAPES
) -> tuple[Image.Image, Facts]:
    """One RGB picture of CANVAS x CANVAS and its facts: a share of text, 2 % empty, else some of
    `shapes`.
    """
    background = rng.choice(("white", "white", "white", *COLORS))
    paper = jitter(COLORS[background], rng, 6)
    image = Image.new("RGB", (CANVAS, CANVAS), paper)
    pen = ImageDraw.Draw(image)
    kind = rng.random()
    if kind < text_share:
        return image, Facts(background, text=_draw_text(pen, background, rng))
    if kind < text_share + 0.02:
        return image, Facts(background)
    cells = sorted(rng.sample(range(9), rng.choice((1, 1, 2, 2, 3, 3, 4, 4))))
    return image, Facts(
        background, tuple(_draw_thing(pen, paper, background, cell, shapes, rng) for cell in cells)
    )


def _draw_thing(
    pen: ImageDraw.ImageDraw,
    paper: tuple[int, ...],
    background: str,
    cell: int,
    shapes: Sequence[str],
    rng: random.Random,
) -> Thing:
    color = rng.choice([c for c in COLORS if c != background])
    shape, size = rng.choice(shapes), rng.choice(SIZES)
    radius = rng.uniform(30, 36) if size == "large" else rng.uniform(15, 19)
    row, column = divmod(cell, 3)
    x, y = 43 + 85 * column + rng.uniform(-6, 6), 43 + 85 * row + rng.uniform(-6, 6)
    stamp(pen, shape, x, y, radius, jitter(COLORS[color], rng, 14), paper)
    return Thing(shape, color, size, cell, (x, y), radius)


def stamp(
    pen: ImageDraw.ImageDraw,
    shape: str,
    x: float,
    y: float,
    r: float,
    ink: tuple[int, ...],
    paper: tuple[int, ...],
) -> None:
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=ink)
    elif shape == "square":
        pen.rectangle((x - 0.88 * r, y - 0.88 * r, x + 0.88 * r, y + 0.88 * r), fill=ink)
    elif shape == "triangle":
        pen.polygon(_points(x, y + 0.15 * r, [1.1 * r], 3), fill=ink)
    elif shape == "star":
        pen.polygon(_points(x, y, [1.15 * r, 0.48 * r], 5), fill=ink)
    elif shape == "diamond":
        pen.polygon(
            [(x, y - 1.1 * r), (x + 0.75 * r, y), (x, y + 1.1 * r), (x - 0.75 * r, y)], fill=ink
        )
    elif shape == "cross":
        pen.rectangle((x - 0.36 * r, y - r, x + 0.36 * r, y + r), fill=ink)
        pen.rectangle((x - r, y - 0.36 * r, x + r, y + 0.36 * r), fill=ink)
    else:  # ring
        pen.ellipse((x - r, y - r, x + r, y + r), fill=ink)
        pen.ellipse((x - 0.52 * r, y - 0.52 * r, x + 0.52 * r, y + 0.52 * r), fill=paper)


def _points(x: float, y: float, radii: list[float], corners: int) -> list[tuple[float, float]]:
    """The polygon whose corners alternate between `radii`, first corner up."""
    n = corners * len(radii)
    return [
        (
            x + radii[i % len(radii)] * math.sin(2 * math.pi * i / n),
            y - radii[i % len(radii)] * math.cos(2 * math.pi * i / n),
        )
        for i in range(n)
    ]


def _draw_text(pen: ImageDraw.ImageDraw, background: str, rng: random.Random) -> Text:
    word = rng.choice(WORDS) if rng.random() < 0.5 else str(rng.randint(0, 99))
    color = rng.choice([c for c in COLORS if c != background and {c, background} not in ALIKE])
    points = rng.randint(76, 108)
    font = ImageFont.load_default(points)
    left, top, right, bottom = pen.textbbox((0, 0), word, font=font)
    if right - left > 240:
        font = ImageFont.load_default(int(points * 240 / (right - left)))
        left, top, right, bottom = pen.textbbox((0, 0), word, font=font)
    x = rng.uniform(6, max(7, 250 - (right - left))) - left
    y = rng.uniform(6, max(7, 250 - (bottom - top))) - top
    pen.text((x, y), word, font=font, fill=jitter(COLORS[color], rng, 14))
    edges = tuple(x + font.getlength(word[:i]) for i in range(len(word) + 1))
    return Text(word, color, edges, y + top, y + bottom)


def jitter(color: tuple[int, ...], rng: random.Random, by: int) -> tuple[int, ...]:
    return tuple(max(0, min(255, c + rng.randint(-by, by))) for c in color)


# ------------------------------------------------------------------ questions


def describe(facts: Facts) -> str:
    """The full sentence that answers "Describe the image."."""
    ground = f"on {article(facts.background)} background."
    if facts.text:
        sort = "number" if facts.text.word.isdigit() else "word"
        return f'The {sort} "{facts.text.word}" in {facts.text.color} {ground}'
    if not facts.things:
        return f"Nothing {ground}"
    return sentence(
        f"{join([f'{article(t.full_name)} at the {LOCATIONS[t.cell]}' for t in facts.things])} "
        f"{ground}"
    )


def ask(facts: Facts, rng: random.Random) -> list[Question]:
    """Every kind of question this picture can answer with certainty, in random wording."""
    questions = [
        _question(
            "describe",
            describe(facts),
            rng,
            "Describe the image.",
            "Describe this picture.",
            "What is in this image?",
            "What do you see?",
            "Describe the picture.",
            "What is in the picture?",
        ),
        _question(
            "background",
            f"{facts.background.capitalize()}.",
            rng,
            "What color is the background?",
            "What is the background color?",
            "Which color is the background?",
        ),
    ]
    questions += _ask_text(facts, rng) if facts.text else _ask_things(facts, rng)
    return questions


def _ask_text(facts: Facts, rng: random.Random) -> list[Question]:
    assert facts.text
    return [
        _read(f"{facts.text.word}.", rng),
        _question(
            "text color",
            f"{facts.text.color.capitalize()}.",
            rng,
            "What color is the text?",
            "Which color is the text?",
        ),
        _count(0, rng),
        _is_there_shape(facts, rng.choice(SHAPES), rng),
    ]


def _ask_things(facts: Facts, rng: random.Random) -> list[Question]:
    things = facts.things
    questions = [_count(len(things), rng)]
    if rng.random() < 0.2:
        questions.append(_read("There is no text.", rng))
    for thing in rng.sample(things, min(2, len(things))):
        questions += _ask_thing(facts, thing, rng)
    if len(things) < 4 and rng.random() < 0.3:
        missing = rng.choice([s for s in SHAPES if s not in {t.shape for t in things}])
        kind, wordings = rng.choice(
            (("color", _color_wordings(missing)), ("where", _where_wordings(missing)))
        )
        questions.append(_question(kind, f"There is no {missing}.", rng, *wordings))
    if rng.random() < 0.3:
        empty = rng.choice([c for c in range(9) if c not in {t.cell for t in things}])
        questions.append(_what_at(empty, "Nothing.", rng))
    requested = rng.choice(SHAPES) if rng.random() < 0.5 or not things else rng.choice(things).shape
    number = sum(t.shape == requested for t in things)
    questions.append(
        _question(
            "count shape",
            f"{COUNTS[number].capitalize()}.",
            rng,
            f"How many {plural(requested)} are there?",
            f"Count the {plural(requested)}.",
        )
    )
    questions.append(
        _is_there_shape(
            facts,
            rng.choice(things).shape if things and rng.random() < 0.5 else rng.choice(SHAPES),
            rng,
        )
    )
    color = (
        rng.choice(things).color
        if things and rng.random() < 0.5
        else rng.choice([c for c in COLORS if c != facts.background])
    )
    questions.append(
        _question(
            "is there color",
            _yes(any(t.color == color for t in things)),
            rng,
            f"Is there {article(color)} shape?",
            f"Is there {article(color)} object?",
        )
    )
    return questions + ask_left_right(things, rng)


def _ask_thing(facts: Facts, thing: Thing, rng: random.Random) -> list[Question]:
    questions = [_what_at(thing.cell, sentence(f"{article(thing.full_name)}."), rng)]
    if sum(t.shape == thing.shape for t in facts.things) == 1:
        questions.append(
            _question("color", f"{thing.color.capitalize()}.", rng, *_color_wordings(thing.shape))
        )
        questions.append(
            _question(
                "where", f"At the {LOCATIONS[thing.cell]}.", rng, *_where_wordings(thing.shape)
            )
        )
    elif sum(t.name == thing.name for t in facts.things) == 1:
        questions.append(
            _question(
                "where", f"At the {LOCATIONS[thing.cell]}.", rng, *_where_wordings(thing.name)
            )
        )
    if sum(t.color == thing.color for t in facts.things) == 1:
        questions.append(
            _question(
                "shape",
                f"{article(thing.shape).capitalize()}.",
                rng,
                f"What shape is the {thing.color} object?",
                f"Which shape is {thing.color}?",
            )
        )
    return questions


def ask_left_right(things: tuple[Thing, ...], rng: random.Random) -> list[Question]:
    """One question about two things in different columns, if there are such; none otherwise."""
    names = [t.name for t in things]
    unique = [t for t in things if names.count(t.name) == 1]
    pairs = [(a, b) for a in unique for b in unique if a.cell % 3 != b.cell % 3]
    if not pairs:
        return []
    a, b = rng.choice(pairs)
    side = rng.choice(("left", "right"))
    true = (a.cell % 3 < b.cell % 3) == (side == "left")
    return [
        _question(
            "left right",
            _yes(true),
            rng,
            f"Is the {a.name} to the {side} of the {b.name}?",
            f"Is the {a.name} {side} of the {b.name}?",
        )
    ]


def _is_there_shape(facts: Facts, shape: str, rng: random.Random) -> Question:
    return _question(
        "is there shape",
        _yes(any(t.shape == shape for t in facts.things)),
        rng,
        f"Is there {article(shape)}?",
        f"Do you see {article(shape)}?",
    )


def _read(answer: str, rng: random.Random) -> Question:
    return _question(
        "read", answer, rng, "What does the text say?", "Read the text.", "What is written here?"
    )


def _count(number: int, rng: random.Random) -> Question:
    return _question(
        "count",
        f"{COUNTS[number].capitalize()}.",
        rng,
        "How many shapes are there?",
        "Count the shapes.",
        "How many objects are in the image?",
        "How many objects are there?",
    )


def _what_at(cell: int, answer: str, rng: random.Random) -> Question:
    return _question(
        "what at",
        answer,
        rng,
        f"What is at the {LOCATIONS[cell]}?",
        f"What do you see at the {LOCATIONS[cell]}?",
    )


def _color_wordings(noun: str) -> tuple[str, ...]:
    return f"What color is the {noun}?", f"Which color is the {noun}?"


def _where_wordings(noun: str) -> tuple[str, ...]:
    return f"Where is the {noun}?", f"Where do you see the {noun}?"


def _question(kind: str, answer: str, rng: random.Random, *wordings: str) -> Question:
    return Question(kind, rng.choice(wordings), answer)


def article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def plural(shape: str) -> str:
    return "crosses" if shape == "cross" else f"{shape}s"


def _yes(fact: bool) -> str:
    return "Yes." if fact else "No."


def join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Draw pictures of the demo model's world and print their questions."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-n", type=int, default=6, help="number of pictures")
    parser.add_argument("--out", type=Path, required=True, help="folder to write PNG files to")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)
    for i in range(args.n):
        image, facts = draw(rng)
        image.save(args.out / f"{i}.png")
        for question in ask(facts, rng):
            print(f"{i}.png  {question.kind:<15} {question.text}  {question.answer}")


if __name__ == "__main__":
    main()
