"""Training batches: pictures with dense labels, and conversations packed into rows.

A row holds conversations about one picture, two or three, or one little video. Conversations that
begin alike, with the same pictures, share that beginning: each sees it and itself only, with
positions that continue from it, so that every one trains as if it were alone.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from io import BytesIO
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from conversations import SYSTEMS, Turn, careless, system
from films import FRAMES_MAX, FRAMES_MIN, Clip, ask_clip, film, parts, plan, whole
from model import GRID, IMAGE_SIZE, IMAGE_TOKENS, PATCH
from PIL import Image
from several import ask_boxes, ask_several, draw_several
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from world import CANVAS, COLORS, SHAPES, SIZES, WORDS, Facts, Question, ask, ask_left_right, draw

SPECIAL = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<image_soft_token>",
    "<end_of_image>",
)
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
TEXTS = (*WORDS, *map(str, range(100)))
TEXT_SHARE = 0.4
NO_IMAGE = "I see no image. Please add one."
NOT_MY_WORLD = "I only know simple pictures with shapes, colors, words and numbers."
SMALL_TALK = (
    "Hello",
    "Hi",
    "Hello!",
    "Who are you?",
    "How are you?",
    "What is this?",
    "Thank you",
    "What can you do?",
    "Help",
)
OFF_TOPIC = (
    "Who are you?",
    "Tell me a joke.",
    "What is the weather like?",
    "Write a poem.",
    "How old is the person?",
    "What time is it?",
    "Translate this to French.",
    "Who took this photo?",
    "What is the capital of France?",
    "Solve the equation.",
    "Sing a song.",
    "Why is the sky blue?",
    "Where was this taken?",
    "What breed is it?",
    "How tall is the building?",
    "Explain the meme.",
    "Is the man happy?",
    "What brand is it?",
    "Write a story about this.",
    "Summarize the document.",
    "What can you do?",
    "How are you?",
    "Give me a recipe.",
    "Write some code.",
    "What is two plus two?",
    "Who painted this?",
)
INTRODUCTIONS = (
    "Look at this.",
    "Here is a picture:",
    "This is my picture.",
    "Look at this image:",
)
CAPTIONS = (
    ("First picture:", "Second picture:", "Third picture:"),
    ("Picture 1:", "Picture 2:", "Picture 3:"),
    ("Image 1:", "Image 2:", "Image 3:"),
    ("This is the first picture.", "This is the second picture.", "This is the third picture."),
)


def train_tokenizer(vocabulary: int = 512) -> Tokenizer:
    """A byte-level BPE of the world's sentences: most of its words are one token, any other text is
    bytes.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    sentences = [s for _ in range(6000) for q in ask(draw(rng)[1], rng) for s in (q.text, q.answer)]
    sentences += [*WORDS, "model", "user", NO_IMAGE, NOT_MY_WORLD] * 2000
    special = [AddedToken(s, special=True, normalized=False) for s in SPECIAL]
    tokenizer.train_from_iterator(
        sentences,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def grow_tokenizer(tokenizer: Tokenizer, tokens: int, samples: int = 1500) -> Tokenizer:
    """The same with up to `tokens` more, merges learnt from the sentences about several pictures,
    boxes and videos. They come last: what was one token stays one.
    """
    grown = json.loads(tokenizer.to_str())
    vocabulary, merges = grown["model"]["vocab"], grown["model"]["merges"]
    words: Counter[tuple[str, ...]] = Counter()
    for text, count in Counter(_sentences(samples, random.Random(0))).items():
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text):
            words[tuple(t.value for t in tokenizer.model.tokenize(word))] += count
    for _ in range(tokens):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = max(pairs, key=lambda p: (pairs[p], p))
        merges.append(list(best))
        vocabulary["".join(best)] = len(vocabulary)
        words = Counter({_merged(w, best): c for w, c in words.items()})
    return Tokenizer.from_str(json.dumps(grown))


def _merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    made: list[str] = []
    for token in word:
        if made and (made[-1], token) == pair:
            made[-1] += token
        else:
            made.append(token)
    return tuple(made)


def _sentences(samples: int, rng: random.Random) -> Iterator[str]:
    for _ in range(samples):
        clip = plan(rng, rng.randint(FRAMES_MIN, FRAMES_MAX))
        several = draw_several(rng, rng.choice((2, 3)))
        questions = ask_clip(clip, rng) + ask_several([f for _, f in several], rng)
        questions += ask_boxes(several[0][1], rng)
        for question in questions:
            yield from (question.text, question.answer)
        yield from (f"\n\n\n{p}\n\n" for p in parts(clip.seconds, "")[::2])
    for text in SYSTEMS:
        yield from [text] * 20


def pixels(image: Image.Image) -> np.ndarray:
    """uint8 [96, 96, 3], as the Gemma 3 image processor resizes: bilinear, antialiased."""
    return np.asarray(image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR))


def patch_labels(facts: Facts) -> np.ndarray:
    """int64 [5, 36]: what each patch shows: shape, color, size, character, cell. The last value of
    shape, size, character is "none".
    """
    scale = IMAGE_SIZE / CANVAS
    centers = (np.arange(GRID) + 0.5) * PATCH
    x, y = np.meshgrid(centers, centers)
    shape, size = np.full((GRID, GRID), len(SHAPES)), np.full((GRID, GRID), len(SIZES))
    color = np.full((GRID, GRID), list(COLORS).index(facts.background))
    character = np.full((GRID, GRID), len(CHARACTERS))
    for thing in facts.things:
        reach = max(thing.radius * scale, 9)
        inside = (abs(x - thing.center[0] * scale) < reach) & (
            abs(y - thing.center[1] * scale) < reach
        )
        shape[inside], size[inside] = SHAPES.index(thing.shape), SIZES.index(thing.size)
        color[inside] = list(COLORS).index(thing.color)
    if facts.text:
        for i, letter in enumerate(facts.text.word):
            inside = (x >= facts.text.edges[i] * scale - 4) & (
                x < facts.text.edges[i + 1] * scale + 4
            )
            inside &= (y >= facts.text.top * scale - 8) & (y <= facts.text.bottom * scale + 8)
            character[inside], color[inside] = (
                CHARACTERS.index(letter),
                list(COLORS).index(facts.text.color),
            )
    cell = (np.arange(GRID)[:, None] // 2) * 3 + np.arange(GRID)[None] // 2
    return np.stack([a.reshape(-1) for a in (shape, color, size, character, cell)])


def text_label(facts: Facts) -> int:
    """Index into TEXTS of what is written, len(TEXTS) for nothing."""
    return TEXTS.index(facts.text.word) if facts.text else len(TEXTS)


def box_labels(facts: Facts) -> np.ndarray:
    """float32 [9, 4]: for each cell the edges x0, y0, x1, y1 of the thing whose center it holds, in
    half cells from its own center; NaN where there is none.
    """
    result = np.full((IMAGE_TOKENS, 4), np.nan, np.float32)
    half = CANVAS / 6
    for thing in facts.things:
        column, row = (min(2, max(0, int(v / (2 * half)))) for v in thing.center)
        middle = np.array([2 * column + 1, 2 * row + 1] * 2) * half
        result[3 * row + column] = (np.array(thing.box) - middle) / half
    return result


class Conversation(NamedTuple):
    """Tokens; `labels` are -100 where nothing is to be learnt, else the token itself; `slots` are
    -1 for text, else IMAGE_TOKENS times the picture's number plus which of its tokens. The first
    `shared` tokens may be shared with others.
    """

    tokens: list[int]
    labels: list[int]
    slots: list[int]
    shared: int


class Row:
    """Conversations one after another, up to `length` tokens."""

    def __init__(self, length: int):
        self.length = length
        self.tokens: list[int] = []
        self.labels: list[int] = []
        self.slots: list[int] = []
        self.positions: list[int] = []
        self.trees: list[int] = []
        self.leaves: list[int] = []
        self._roots: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._trees = self._leaves = 0

    def add(self, c: Conversation) -> bool:
        """Whether it fits."""
        root = tuple(c.tokens[: c.shared]), tuple(c.slots[: c.shared])
        known = c.shared > 0 and root in self._roots
        start = c.shared if known else 0
        if len(self.tokens) + len(c.tokens) - start > self.length:
            return False
        if not known:
            self._trees += 1
        tree = self._roots[root] if known else self._trees
        if c.shared and not known:
            self._roots[root] = tree
        self._leaves += 1
        count = len(c.tokens)
        self.tokens += c.tokens[start:]
        self.labels += c.labels[start:]
        self.slots += c.slots[start:]
        self.positions += range(start, count)
        self.trees += [tree] * (count - start)
        self.leaves += [0] * (c.shared - start) + [self._leaves] * (count - c.shared)
        return True

    def tensors(self) -> dict[str, Tensor]:
        blank = self.length - len(self.tokens)
        tree, leaf = np.array(self.trees + [-1] * blank), np.array(self.leaves + [0] * blank)
        slots = np.array(self.slots + [-1] * blank)
        # The image tokens of a picture stand together; the same picture again is another block.
        block = np.cumsum(np.diff(slots // IMAGE_TOKENS, prepend=-1) != 0)
        sees = (tree[:, None] == tree[None]) & ((leaf == 0)[None] | (leaf[:, None] == leaf[None]))
        inside = (slots >= 0)[:, None] & (block[:, None] == block[None])
        sees &= np.tri(self.length, dtype=bool) | inside
        return {
            "tokens": torch.tensor(self.tokens + [0] * blank),
            "labels": torch.tensor((self.labels + [-100] * (blank + 1))[1:]),
            "positions": torch.tensor(self.positions + [0] * blank),
            "slots": torch.from_numpy(slots),
            "sees": torch.from_numpy(sees),
        }


class Teacher:
    """An endless stream of batches of rows with `length` tokens each, about single pictures,
    several, and videos, as many rows of each as `rows` says. Pictures that nothing is asked about
    fill a batch up to `pictures`, for their dense labels.

    What is hard comes more often than in the world: pictures of text, and comparing two places.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rows: tuple[int, int, int],
        length: int,
        seed: int,
        pictures: int = 0,
        text_share: float = TEXT_SHARE,
    ):
        self.tokenizer, self.rows, self.length, self.seed = tokenizer, rows, length, seed
        self.maximum, self.text_share = pictures, text_share
        self.encode = lru_cache(100_000)(
            lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        )
        self.image = tokenizer.token_to_id("<image_soft_token>")

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rng = random.Random(self.seed)
        while True:
            yield self.batch(rng)

    def pictures(self, count: int, rng: random.Random) -> dict[str, Tensor]:
        """Single pictures with their dense labels."""
        return _labelled([draw(rng, self.text_share) for _ in range(count)], rng)

    def batch(self, rng: random.Random) -> dict[str, Tensor]:
        shown: list[tuple[Image.Image, Facts]] = []
        rows = []
        singles, several, videos = self.rows
        for _ in range(singles):
            shown.append(draw(rng, self.text_share))
            rows.append(self._fill(self._about_one(shown[-1][1], len(shown) - 1, rng)))
        for count in _counts(several, 2, 3, rng):
            first = len(shown)
            shown += draw_several(rng, count)
            rows.append(self._fill(self._about_several([f for _, f in shown[first:]], first, rng)))
        for count in _counts(videos, FRAMES_MIN, FRAMES_MAX, rng):
            first = len(shown)
            frames, clip = film(rng, count)
            shown += [(image, clip.facts(n)) for n, image in enumerate(frames)]
            rows.append(self._fill(self._about_clip(clip, first, rng)))
        shown += [draw(rng, self.text_share) for _ in range(self.maximum - len(shown))]
        made = [row.tensors() for row in rows]
        batch = {name: torch.stack([r[name] for r in made]) for name in made[0]}
        # Of a fixed number of places, for a compiled model: few tokens are learnt.
        labels, maximum = batch.pop("labels").flatten(), len(rows) * self.length * 3 // 10
        learnt = (labels >= 0).nonzero()[:maximum, 0]
        batch["learnt"] = torch.zeros(maximum, dtype=torch.long)
        batch["learnt"][: len(learnt)] = learnt
        batch["labels"] = torch.full((maximum,), -100)
        batch["labels"][: len(learnt)] = labels[learnt]
        return _labelled(shown, rng) | batch

    def _fill(self, conversations: Iterator[Conversation]) -> Row:
        row, misses = Row(self.length), 0
        for conversation in conversations:
            misses += not row.add(conversation)
            if misses > 3 or len(row.tokens) > self.length - 12:
                break
        return row

    def _about_one(self, facts: Facts, picture: int, rng: random.Random) -> Iterator[Conversation]:
        questions = [q for _ in range(2) for q in ask(facts, rng)] + [
            q for _ in range(3) for q in ask_left_right(facts.things, rng)
        ]
        questions += ask_boxes(facts, rng) + ask_boxes(facts, rng)
        unique = list(
            {"describe" if q.kind == "describe" else q.text: q for q in questions}.values()
        )
        rng.shuffle(unique)
        # What has the longest answers: make sure that it fits.
        early = rng.choices(("describe", "box", ""), (30, 45, 25))[0]
        unique.sort(key=lambda q: q.kind != early)
        reported = system(rng) if rng.random() < 0.25 else None
        if rng.random() < 0.06:  # one long chat
            yield self.write(self._chat(unique, picture, rng.random() < 0.5, rng), reported)
        while unique:
            if rng.random() < 0.03:
                text = careless(rng.choice((*SMALL_TALK, unique[0].text)), rng)
                yield self.write(
                    [Turn((text,), NO_IMAGE)], system(rng) if rng.random() < 0.3 else None
                )
            text_first = rng.random() < 0.45
            if text_first and rng.random() < 0.7:
                other = system(rng) if rng.random() < 0.3 else None
            else:
                other = reported
            if rng.random() < 0.04:
                question = Question("off topic", rng.choice(OFF_TOPIC), NOT_MY_WORLD)
                yield self.write(self._chat([question], picture, text_first, rng), other)
            turns = 1 if rng.random() < 0.7 else rng.randint(2, 4)
            chat = self._chat(unique[:turns], picture, text_first, rng)
            yield self.write(chat, other)
            del unique[:turns]

    def _chat(
        self, questions: Sequence[Question], picture: int, text_first: bool, rng: random.Random
    ) -> list[Turn]:
        """Questions one after another, the picture shown with the first."""
        turns = [Turn((careless(q.text, rng),), q.answer) for q in questions]
        text, answer = str(turns[0].parts[0]), turns[0].answer
        if text_first:
            turns[0] = Turn((text, picture), answer)
        elif rng.random() < 0.06:
            turns[0] = Turn((rng.choice(INTRODUCTIONS), picture, text), answer)
        else:
            turns[0] = Turn((picture, text), answer)
        return turns

    def _about_several(
        self, pictures: list[Facts], first: int, rng: random.Random
    ) -> Iterator[Conversation]:
        numbers = tuple(range(first, first + len(pictures)))
        reported = system(rng) if rng.random() < 0.2 else None
        one_by_one = rng.random() < 0.3
        while True:
            if one_by_one:
                yield self.write(self._one_by_one(pictures, numbers, rng), reported)
                continue
            questions = _evenly(ask_several(pictures, rng), rng)
            while questions:
                count = 1 if rng.random() < 0.75 else rng.randint(2, 3)
                requested = questions[:count]
                del questions[:count]
                turns = [Turn((careless(q.text, rng),), q.answer) for q in requested]
                text, layout = str(turns[0].parts[0]), rng.random()
                shown: tuple[str | int, ...] = (*numbers, text)
                if layout < 0.25:
                    shown = (text, *numbers)
                elif layout < 0.35:
                    name = rng.choice(CAPTIONS)
                    shown = (*[p for i, n in enumerate(numbers) for p in (name[i], n)], text)
                turns[0] = Turn(shown, turns[0].answer)
                yield self.write(turns, reported)

    def _one_by_one(
        self, pictures: list[Facts], numbers: tuple[int, ...], rng: random.Random
    ) -> list[Turn]:
        """A chat in which each turn may show one picture more: "the picture" is the latest."""
        turns: list[Turn] = []
        for i, number in enumerate(numbers):
            for again in range(1 if rng.random() < 0.6 else 2):
                own = ask(pictures[i], rng) + ask_boxes(pictures[i], rng)
                both = [q for q in ask_several(pictures[: i + 1], rng) if q.kind != "describe all"]
                question = rng.choice(both if i and rng.random() < 0.5 else own)
                text = careless(question.text, rng)
                shown: tuple[str | int, ...] = (text,)
                if not again:
                    shown = (text, number) if rng.random() < 0.3 else (number, text)
                turns.append(Turn(shown, question.answer))
        return turns

    def _about_clip(self, clip: Clip, first: int, rng: random.Random) -> Iterator[Conversation]:
        reported = system(rng) if rng.random() < 0.2 else None
        frames = len(self.write([Turn(whole(clip.seconds, "", first), "", True)]).tokens)
        if reported and frames + len(self.encode(reported)) > self.length - 50:
            reported = None
        one_text = rng.random() < 0.75  # as mtmd writes it; a part for each text otherwise
        text_first = rng.random() < 0.12
        while True:
            questions = _evenly(ask_clip(clip, rng), rng)
            while questions:
                count = 1 if rng.random() < 0.8 else 2
                requested = questions[:count]
                del questions[:count]
                turns = [Turn((careless(q.text, rng),), q.answer) for q in requested]
                text, answer = str(turns[0].parts[0]), turns[0].answer
                show = whole if one_text else parts
                shown = show(clip.seconds, text, first, text_first)
                turns[0] = Turn(shown, answer, one_text)
                yield self.write(turns, reported)

    def write(self, turns: Sequence[Turn], reported: str | None = None) -> Conversation:
        """Tokens as the chat template and the image processor make them; `reported` is the system
        prompt.
        """
        tokens: list[int] = []
        labels: list[int] = []
        slots: list[int] = []
        shared = 0

        def say(text: str, learn: bool = False) -> None:
            ids = self.encode(text)
            tokens.extend(ids)
            labels.extend(ids if learn else [-100] * len(ids))
            slots.extend([-1] * len(ids))

        text = "<bos>"
        for i, turn in enumerate(turns):
            text += "<start_of_turn>user\n"
            if i == 0 and reported:
                text += f"{reported}\n\n"
            for part in turn.parts:
                if isinstance(part, str):
                    text += part if turn.whole else part.strip()
                    continue
                say(f"{text}\n\n<start_of_image>")
                tokens.extend([self.image] * IMAGE_TOKENS)
                labels.extend([-100] * IMAGE_TOKENS)
                slots.extend(range(part * IMAGE_TOKENS, (part + 1) * IMAGE_TOKENS))
                say("<end_of_image>")
                if i == 0:
                    shared = len(tokens)
                text = "\n\n"
            say(f"{text}<end_of_turn>\n<start_of_turn>model\n")
            say(f"{turn.answer}<end_of_turn>", learn=True)
            text = "\n"
        if turns[0].parts and isinstance(turns[0].parts[-1], int):
            shared = 0  # the question stands before the picture
        return Conversation(tokens, labels, slots, shared)


def _evenly(questions: Sequence[Question], rng: random.Random) -> list[Question]:
    """One of each kind in random order, then one more of each kind that there is more of."""
    left: dict[str, list[Question]] = {}
    for question in rng.sample(questions, len(questions)):
        left.setdefault(question.kind, []).append(question)
    result: list[Question] = []
    for i in range(max(map(len, left.values()))):
        result += [kind[i] for kind in rng.sample(list(left.values()), len(left)) if i < len(kind)]
    return result


def _counts(rows: int, minimum: int, maximum: int, rng: random.Random) -> list[int]:
    """So many random numbers whose sum is always the same."""
    total = (rows * (minimum + maximum) + 1) // 2
    while sum(result := [rng.randint(minimum, maximum) for _ in range(rows)]) != total:
        pass
    return result


def _labelled(shown: list[tuple[Image.Image, Facts]], rng: random.Random) -> dict[str, Tensor]:
    facts = [f for _, f in shown]
    return {
        "pixels": torch.from_numpy(np.stack([pixels(_blemished(i, rng)) for i, _ in shown])),
        "patches": torch.from_numpy(np.stack([patch_labels(f) for f in facts])),
        "boxes": torch.from_numpy(np.stack([box_labels(f) for f in facts])),
        "text": torch.tensor([text_label(f) for f in facts]),
    }


def _blemished(image: Image.Image, rng: random.Random) -> Image.Image:
    """Now and then as a camera's or a video's coder leaves it."""
    if rng.random() >= 0.1:
        return image
    saved = BytesIO()
    image.save(saved, "JPEG", quality=rng.randint(50, 95))
    return Image.open(saved).convert("RGB")
