"""Training batches: pictures with dense labels, and questions packed behind one image.

One row is one picture. Its prompt prefix (turn start and image) is followed by as many questions as
fit; each question is a segment that sees the prefix and itself only, with positions that continue
from the prefix, so that every question trains as the first turn of a chat. Some segments hold
several turns, and some see no image at all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from model import GRID, IMAGE_SIZE, IMAGE_TOKENS, PATCH
from PIL import Image
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


class Segment(NamedTuple):
    tokens: list[int]
    labels: list[int]  # -100 where nothing is to be learnt, else the token itself
    sees_image: bool


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


class Teacher:
    """An endless stream of batches of `rows` pictures with `length` tokens each.

    What is hard comes more often than in the world: pictures of text, and comparing two places.
    """

    def __init__(self, tokenizer: Tokenizer, rows: int, length: int, seed: int):
        self.tokenizer, self.rows, self.length, self.seed = tokenizer, rows, length, seed
        self.encode = lru_cache(200_000)(
            lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        )
        start = self.encode("<bos><start_of_turn>user\n\n\n<start_of_image>")
        self.image_at = len(start)
        self.prefix = (
            start
            + [tokenizer.token_to_id("<image_soft_token>")] * IMAGE_TOKENS
            + self.encode("<end_of_image>\n\n")
        )

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rng = random.Random(self.seed)
        while True:
            yield self.batch(rng)

    def pictures(self, rng: random.Random) -> tuple[list[Facts], dict[str, Tensor]]:
        drawn = [draw(rng, TEXT_SHARE) for _ in range(self.rows)]
        facts = [f for _, f in drawn]
        return facts, {
            "pixels": torch.from_numpy(np.stack([pixels(i) for i, _ in drawn])),
            "patches": torch.from_numpy(np.stack([patch_labels(f) for f in facts])),
            "text": torch.tensor([text_label(f) for f in facts]),
        }

    def batch(self, rng: random.Random) -> dict[str, Tensor]:
        facts, batch = self.pictures(rng)
        rows = [self._row(self._segments(f, rng)) for f in facts]
        return batch | {name: torch.stack([r[name] for r in rows]) for name in rows[0]}

    def _segments(self, facts: Facts, rng: random.Random) -> Iterator[Segment]:
        questions = [q for _ in range(2) for q in ask(facts, rng)] + [
            q for _ in range(3) for q in ask_left_right(facts.things, rng)
        ]
        unique = list(
            {"describe" if q.kind == "describe" else q.text: q for q in questions}.values()
        )
        rng.shuffle(unique)
        if rng.random() < 0.5:  # a description is the longest answer: make sure that it fits
            unique.sort(key=lambda q: q.kind != "describe")
        while unique:
            if rng.random() < 0.04:
                yield self._segment(
                    [Question("no image", rng.choice((*SMALL_TALK, unique[0].text)), NO_IMAGE)],
                    False,
                    rng,
                )
            if rng.random() < 0.04:
                yield self._segment(
                    [Question("off topic", rng.choice(OFF_TOPIC), NOT_MY_WORLD)], True, rng
                )
            turns = 1 if rng.random() < 0.85 else rng.randint(2, 4)
            yield self._segment(unique[:turns], True, rng)
            del unique[:turns]

    def _segment(self, turns: list[Question], sees_image: bool, rng: random.Random) -> Segment:
        tokens: list[int] = [] if sees_image else list(self.encode("<bos><start_of_turn>user\n"))
        labels = [-100] * len(tokens)
        for i, turn in enumerate(turns):
            prompt = (
                ("" if i == 0 else "\n<start_of_turn>user\n")
                + _careless(turn.text, rng)
                + "<end_of_turn>\n<start_of_turn>model\n"
            )
            asked, answered = self.encode(prompt), self.encode(f"{turn.answer}<end_of_turn>")
            tokens += asked + answered
            labels += [-100] * len(asked) + answered
        return Segment(tokens, labels, sees_image)

    def _row(self, segments: Iterator[Segment]) -> dict[str, Tensor]:
        tokens, labels = list(self.prefix), [-100] * len(self.prefix)
        positions, owner, reads = (
            list(range(len(self.prefix))),
            [0] * len(self.prefix),
            [True] * len(self.prefix),
        )
        for number, segment in enumerate(segments, 1):
            if len(tokens) + len(segment.tokens) > self.length:
                continue
            start = len(self.prefix) if segment.sees_image else 0
            positions += range(start, start + len(segment.tokens))
            owner += [number] * len(segment.tokens)
            reads += [segment.sees_image] * len(segment.tokens)
            tokens += segment.tokens
            labels += segment.labels
        blank = self.length - len(tokens)
        owned = np.array(owner + [-1] * blank)
        sees = owned[:, None] == owned[None]
        sees |= np.array(reads + [False] * blank)[:, None] & (owned == 0)[None]
        sees &= np.tri(self.length, dtype=bool)
        sees[
            self.image_at : self.image_at + IMAGE_TOKENS,
            self.image_at : self.image_at + IMAGE_TOKENS,
        ] = True
        following = labels[1:] + [-100] * (blank + 1)
        return {
            "tokens": torch.tensor(tokens + [0] * blank),
            "labels": torch.tensor(following),
            "positions": torch.tensor(positions + [0] * blank),
            "sees": torch.from_numpy(sees),
        }


def _careless(text: str, rng: random.Random) -> str:
    """As people type it, now and then: no capital, no full stop."""
    if rng.random() < 0.1:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.1:
        text = text.rstrip(".?")
    return text
