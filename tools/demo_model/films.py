"""Little videos of the demo model's world: a shape moves, grows, changes its color, comes or goes.

`film(rng)` makes the frames of one and what happens in them, `ask_clip(clip, rng)` questions with
their exact answers; both depend on the random generator alone.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image, ImageDraw
from world import (
    ALIKE,
    CANVAS,
    COLORS,
    COUNTS,
    SHAPES,
    Facts,
    Question,
    Thing,
    article,
    jitter,
    join,
    sentence,
    stamp,
)

FRAMES_MIN, FRAMES_MAX = 3, 8
STORIES = ("move", "appear", "size", "color", "disappear", "still")
SHARES = (36, 24, 18, 8, 8, 6)
STEPS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 1, 1, 1, 1, 1, 1, 1.5, 2)  # seconds
WAYS = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}
CLIP_KINDS = (
    "describe clip",
    "clip background",
    "way",
    "what moves",
    "size change",
    "first",
    "after",
    "last",
    "number at the end",
    "disappears",
    "new color",
    "when",
)


@dataclass(frozen=True)
class Clip:
    """What happens, frame by frame. `seconds` are the frames' times; `scenes` what each shows;
    `actor` the place among the first scene's things of what moves or changes (-1 for none).
    `cast` are all things, in order of appearance where they appear; `at` are the frames in which
    something comes, goes or changes its color.
    """

    story: str
    background: str
    seconds: tuple[float, ...]
    scenes: tuple[tuple[Thing, ...], ...]
    cast: tuple[Thing, ...]
    actor: int = -1
    result: str = ""  # a way, "bigger" or "smaller", a color
    at: tuple[int, ...] = ()

    def facts(self, frame: int) -> Facts:
        return Facts(self.background, self.scenes[frame])


def film(
    rng: random.Random,
    frames: int | None = None,
    story: str | None = None,
    step: float | None = None,
) -> tuple[list[Image.Image], Clip]:
    """RGB frames of CANVAS x CANVAS, `step` seconds apart or as it comes, and what happens in
    them.
    """
    clip = plan(rng, frames or rng.randint(FRAMES_MIN, FRAMES_MAX), story, step)
    paper = jitter(COLORS[clip.background], rng, 6)
    inks = [rng.getrandbits(32) for _ in clip.cast]
    return [_draw_scene(clip, scene, paper, inks) for scene in clip.scenes], clip


def plan(
    rng: random.Random, frames: int, story: str | None = None, step: float | None = None
) -> Clip:
    """What happens in a clip of so many frames."""
    story = story or rng.choices(STORIES, SHARES)[0]
    background = rng.choice(("white", "white", "white", *COLORS))
    seconds = tuple(i * step for i in range(frames)) if step else times(rng, frames)
    return _STORIES[story](background, seconds, rng)


def times(rng: random.Random, count: int) -> tuple[float, ...]:
    """Of frames sampled from a clip: mostly even steps, to a tenth of a second."""
    step = rng.choice(STEPS)
    uneven = rng.random() < 0.3
    seconds, t = [], 0.0
    for _ in range(count):
        seconds.append(round(t, 1))
        t = max(seconds[-1] + 0.1, t + step * (rng.uniform(0.7, 1.3) if uneven else 1))
    return tuple(seconds)


def _draw_scene(
    clip: Clip, scene: tuple[Thing, ...], paper: tuple[int, ...], inks: list[int]
) -> Image.Image:
    image = Image.new("RGB", (CANVAS, CANVAS), paper)
    pen = ImageDraw.Draw(image)
    for thing in scene:
        # A thing's ink is the same in all frames; its color alone may change.
        owner = next(i for i, c in enumerate(clip.cast) if c.shape == thing.shape)
        ink = jitter(COLORS[thing.color], random.Random(inks[owner]), 14)
        stamp(pen, thing.shape, *thing.center, thing.radius, ink, paper)
    return image


# ------------------------------------------------------------------ stories


def _colors(background: str) -> list[str]:
    return [c for c in COLORS if c != background and {c, background} not in ALIKE]


def _thing(shape: str, color: str, x: float, y: float, radius: float) -> Thing:
    column, row = (min(2, max(0, round((v - 43) / 85))) for v in (x, y))
    return Thing(
        shape, color, "large" if radius > 25 else "small", 3 * row + column, (x, y), radius
    )


def _radius(rng: random.Random) -> float:
    return rng.uniform(30, 36) if rng.random() < 0.4 else rng.uniform(15, 22)


def _in_cells(background: str, cells: list[int], rng: random.Random) -> list[Thing]:
    """Things of different shapes in these cells."""
    shapes = rng.sample(SHAPES, len(cells))
    return [
        _thing(
            shape,
            rng.choice(_colors(background)),
            43 + 85 * (cell % 3) + rng.uniform(-6, 6),
            43 + 85 * (cell // 3) + rng.uniform(-6, 6),
            _radius(rng),
        )
        for shape, cell in zip(shapes, cells, strict=True)
    ]


def _move(background: str, seconds: tuple[float, ...], rng: random.Random) -> Clip:
    way = rng.choice(tuple(WAYS))
    lane = rng.randrange(3)
    horizontal = way in ("left", "right")
    free = [c for c in range(9) if (c // 3 if horizontal else c % 3) != lane]
    others = _in_cells(background, rng.sample(free, rng.choice((0, 0, 0, 1, 1, 2))), rng)
    shape = rng.choice([s for s in SHAPES if s not in {t.shape for t in others}])
    color, radius = rng.choice(_colors(background)), _radius(rng)
    across = 43 + 85 * lane + rng.uniform(-8, 8)
    low, high = rng.uniform(36, 80), rng.uniform(176, 220)
    drift = rng.uniform(-6, 6)
    if way in ("left", "up"):
        low, high = high, low
    scenes = []
    for second in seconds:
        share = second / seconds[-1]
        along, alongside = low + share * (high - low), across + share * drift
        x, y = (along, alongside) if horizontal else (alongside, along)
        scenes.append((_thing(shape, color, x, y, radius), *others))
    return Clip("move", background, seconds, tuple(scenes), scenes[0], 0, way)


def _size(background: str, seconds: tuple[float, ...], rng: random.Random) -> Clip:
    cells = rng.sample(range(9), rng.choice((1, 1, 1, 2, 2)))
    first, *others = _in_cells(background, cells, rng)
    small, large = rng.uniform(12, 18), rng.uniform(30, 37)
    result = rng.choice(("bigger", "smaller"))
    start, end = (small, large) if result == "bigger" else (large, small)
    scenes = []
    for second in seconds:
        radius = start + (end - start) * second / seconds[-1]
        scenes.append((_thing(first.shape, first.color, *first.center, radius), *others))
    return Clip("size", background, seconds, tuple(scenes), scenes[0], 0, result)


def _color(background: str, seconds: tuple[float, ...], rng: random.Random) -> Clip:
    first, *others = _in_cells(background, rng.sample(range(9), rng.choice((1, 1, 2))), rng)
    possible = [
        c for c in _colors(background) if c != first.color and {c, first.color} not in ALIKE
    ]
    result, at = rng.choice(possible), rng.randint(1, len(seconds) - 1)
    scenes = [
        (first if i < at else replace(first, color=result), *others) for i in range(len(seconds))
    ]
    return Clip("color", background, seconds, tuple(scenes), scenes[0], 0, result, (at,))


def _appear(background: str, seconds: tuple[float, ...], rng: random.Random) -> Clip:
    count = rng.randint(2, min(4, len(seconds)))
    cast = _in_cells(background, rng.sample(range(9), count), rng)
    late = count < len(seconds) and rng.random() < 0.2  # nothing in the first frame
    pool = range(1, len(seconds))
    at = sorted(rng.sample(pool, count)) if late else [0, *sorted(rng.sample(pool, count - 1))]
    scenes = [
        tuple(t for t, start in zip(cast, at, strict=True) if start <= i)
        for i in range(len(seconds))
    ]
    return Clip("appear", background, seconds, tuple(scenes), tuple(cast), -1, "", tuple(at))


def _disappear(background: str, seconds: tuple[float, ...], rng: random.Random) -> Clip:
    cast = _in_cells(background, rng.sample(range(9), rng.randint(1, 4)), rng)
    actor, at = rng.randrange(len(cast)), rng.randint(1, len(seconds) - 1)
    scenes = [
        tuple(t for k, t in enumerate(cast) if k != actor or i < at) for i in range(len(seconds))
    ]
    return Clip("disappear", background, seconds, tuple(scenes), tuple(cast), actor, "", (at,))


def _still(background: str, seconds: tuple[float, ...], rng: random.Random) -> Clip:
    cast = tuple(_in_cells(background, rng.sample(range(9), rng.randint(1, 3)), rng))
    return Clip("still", background, seconds, (cast,) * len(seconds), cast)


_STORIES = {
    "move": _move,
    "appear": _appear,
    "size": _size,
    "color": _color,
    "disappear": _disappear,
    "still": _still,
}

# ------------------------------------------------------------------ questions


def describe_clip(clip: Clip) -> str:
    """What happens, in one sentence."""
    ground = f"on {article(clip.background)} background."
    if clip.story == "still":
        return "Nothing changes."
    if clip.story == "appear":
        names = join([article(t.name) for t in clip.cast])
        return sentence(f"{names} appear {ground}")
    actor = clip.cast[clip.actor]
    if clip.story == "color":
        return sentence(
            f"{article(actor.shape)} turns from {actor.color} to {clip.result} {ground}"
        )
    what = {
        "move": f"moves {_way(clip)}",
        "size": f"gets {clip.result}",
        "disappear": "disappears",
    }[clip.story]
    return sentence(f"{article(actor.name)} {what} {ground}")


def _way(clip: Clip) -> str:
    return clip.result if clip.result in ("up", "down") else f"to the {clip.result}"


def ask_clip(clip: Clip, rng: random.Random) -> list[Question]:
    """Every kind of question that this clip can answer with certainty, in random wording."""
    questions = [
        _question(
            "describe clip",
            describe_clip(clip),
            rng,
            "What happens?",
            "What happens in the video?",
            "Describe the video.",
            "Describe this video.",
            "What happens in this clip?",
            "Describe the image.",
            "What do you see?",
        ),
        _question(
            "clip background",
            f"{clip.background.capitalize()}.",
            rng,
            "What color is the background?",
            "What is the background color?",
        ),
    ]
    moves = clip.story == "move"
    name = sentence(f"{article(clip.cast[clip.actor].name)}.") if clip.actor >= 0 else ""
    if moves or (clip.story in ("still", "size", "color") and rng.random() < 0.4):
        questions.append(
            _question(
                "what moves",
                name if moves else "Nothing.",
                rng,
                "What moves?",
                "What is moving?",
                "Which shape moves?",
            )
        )
    for i, thing in enumerate(clip.scenes[0]):
        if i == clip.actor or (clip.story in ("move", "size", "still") and rng.random() < 0.5):
            questions += _ask_change(clip, thing, i == clip.actor, rng)
    if clip.story == "appear":
        questions += _ask_order(clip, rng)
    if clip.story == "color":
        shape = clip.cast[clip.actor].shape
        questions += [
            _question(
                "new color",
                f"{clip.result.capitalize()}.",
                rng,
                f"What color does the {shape} become?",
                f"Which color does the {shape} turn?",
                f"What color is the {shape} at the end?",
            ),
            _when(clip.seconds[clip.at[0]], rng, f"When does the {shape} change its color?"),
        ]
    if clip.story == "disappear":
        shape = clip.cast[clip.actor].shape
        questions += [
            _question("disappears", name, rng, "What disappears?", "Which shape disappears?"),
            _when(clip.seconds[clip.at[0]], rng, f"When does the {shape} disappear?"),
        ]
    if rng.random() < (0.8 if clip.story in ("appear", "disappear") else 0.15):
        questions.append(
            _question(
                "number at the end",
                f"{COUNTS[len(clip.scenes[-1])].capitalize()}.",
                rng,
                "How many shapes are there at the end?",
                "How many objects are there at the end?",
            )
        )
    return questions


def _ask_change(clip: Clip, thing: Thing, acts: bool, rng: random.Random) -> list[Question]:
    """Where it goes and whether it grows, for stories in which shapes stay."""
    if clip.story not in ("move", "size", "still"):
        return []
    way, grows = "It does not move.", "It stays the same."
    if acts and clip.story == "move":
        way = sentence(f"{_way(clip)}.")
    if acts and clip.story == "size":
        grows = sentence(f"{clip.result}.")
    noun = rng.choice((thing.shape, thing.shape, thing.name))
    requested = []
    if clip.story == "move" or rng.random() < 0.4:
        requested.append(
            _question(
                "way",
                way,
                rng,
                f"Which way does the {noun} move?",
                f"Which way does the {noun} go?",
                f"Where does the {noun} move?",
                f"In which direction does the {noun} move?",
            )
        )
    if clip.story == "size" or rng.random() < 0.3:
        requested.append(
            _question(
                "size change",
                grows,
                rng,
                f"Does the {noun} get bigger or smaller?",
                f"Does the {noun} become bigger or smaller?",
                f"Does the {noun} grow or shrink?",
            )
        )
    return requested


def _ask_order(clip: Clip, rng: random.Random) -> list[Question]:
    names = [sentence(f"{article(t.name)}.") for t in clip.cast]
    questions = [
        _question("first", names[0], rng, "What appears first?", "Which shape appears first?"),
        _question("last", names[-1], rng, "What appears last?", "Which shape appears last?"),
    ]
    for i, thing in enumerate(clip.cast):
        following = names[i + 1] if i + 1 < len(names) else "Nothing."
        noun = rng.choice((thing.shape, thing.shape, thing.name))
        questions += [
            _question(
                "after",
                following,
                rng,
                f"What appears after the {noun}?",
                f"What comes after the {noun}?",
                f"Which shape appears after the {noun}?",
            ),
            _when(clip.seconds[clip.at[i]], rng, f"When does the {noun} appear?"),
        ]
    return questions


def _when(second: float, rng: random.Random, *wordings: str) -> Question:
    return _question("when", f"At {second:.1f} s.", rng, *wordings)


def _question(kind: str, answer: str, rng: random.Random, *wordings: str) -> Question:
    return Question(kind, rng.choice(wordings), answer)


def parts(
    seconds: tuple[float, ...], text: str, first: int = 0, text_first: bool = False
) -> tuple[str | int, ...]:
    """A clip and a question as parts of a message: each frame, pictures from number `first`,
    behind its time.
    """
    result: list[str | int] = []
    for i, second in enumerate(seconds):
        result += [f"Frame at {second:.1f} s:", first + i]
    return (text, *result) if text_first else (*result, text)


def whole(
    seconds: tuple[float, ...], text: str, first: int = 0, text_first: bool = False
) -> tuple[str | int, ...]:
    """The same as one text with pictures in it, a line a frame, as mtmd shows a video to a model
    that has none of its own.
    """
    result: list[str | int] = []
    for i, second in enumerate(seconds):
        before = (text if text_first else "") if i == 0 else "\n"
        result += [f"{before}Frame at {second:.1f} s: ", first + i]
    return tuple(result) if text_first else (*result, f"\n{text}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Film a video of the demo model's world (MP4, H.264) and print its questions. "
        "Needs PyAV."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--story", choices=STORIES)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--fps", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    args = parser.parse_args()
    import av

    rng = random.Random(args.seed)
    frames, clip = film(rng, round(args.seconds * args.fps), args.story, 1 / args.fps)
    with av.open(str(args.out), "w", options={"movflags": "faststart"}) as file:
        stream = file.add_stream("libx264", rate=args.fps, options={"crf": "20"})
        stream.width = stream.height = CANVAS
        stream.pix_fmt = "yuv420p"
        for image in frames:
            file.mux(stream.encode(av.VideoFrame.from_image(image)))
        file.mux(stream.encode())
    for question in ask_clip(clip, rng):
        print(f"{question.kind:<17} {question.text}  {question.answer}")


if __name__ == "__main__":
    main()
