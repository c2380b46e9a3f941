"""Conversations as the chat template and the processor write them: text, pictures, turns."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from world import Question

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are an assistant that looks at pictures.",
    "You are a vision model.",
    "You are a careful observer. Look at the picture before you answer.",
    "Answer briefly.",
    "Answer in one sentence.",
    "Be concise.",
    "Be exact and polite.",
    "Be polite.",
    "Think step by step.",
    "Answer in English.",
    "Only say what you see.",
    "If you do not know, say so.",
    "Never invent things that are not in the image.",
    "You help people who cannot see.",
    "You are talking with a child.",
    "Today is the 3rd of May 2025.",
    "The user is testing a demo.",
    "Do not use lists.",
    "Respond with plain text.",
    "Your name is Max.",
)
UNSEEN_SYSTEMS = (
    "You describe images for a catalogue.",
    "Keep it short, please.",
    "Look closely and reply in plain English.",
    "You are a teacher. Explain what you see.",
    "Always be honest about what the picture shows.",
    "The year is 2031 and you work in a museum.",
)  # kept for evaluation
FILLER = re.findall(
    r"\w+",
    """
    the a of to and in is you that it for on with as are this be at by not or from have an they
    which one were all we can her his has more when will your out up about them then some so
    these would other into could people my than first water been called who its now find long
    down day did get come made may part over new sound take only little work know place years
    live back give most very after things our just name good sentence man think say great where
    help through much before line right too means old any same tell boy follow came want show
    also around form three small set put end does another well large must big even such because
    turn here why ask went men read need land different home us move try kind hand picture again
    change off play spell air away animal house point page letter mother answer found study
    """,
)


class Turn(NamedTuple):
    """One question with its answer; `parts` are texts, and pictures by their number. The chat
    template trims the texts, unless the turn is `whole`: one text with pictures in it.
    """

    parts: tuple[str | int, ...]
    answer: str
    whole: bool = False


def system(rng: random.Random) -> str:
    """A system prompt as people write them, or words without a meaning."""
    kind = rng.random()
    if kind < 0.6:
        return " ".join(rng.sample(SYSTEMS, rng.choice((1, 1, 1, 2, 3))))
    words = [rng.choice(FILLER) for _ in range(rng.randint(2, 18))]
    if kind < 0.7:
        letters = "abcdefghijklmnopqrstuvwxyzABCDEF0123456789"
        strange = "".join(rng.choices(letters, k=rng.randint(3, 9)))
        words[rng.randrange(len(words))] = strange
    text = " ".join(words)
    return text[0].upper() + text[1:] + rng.choice((".", ".", "", "!"))


def requested(question: Question, picture: int, text_first: bool, rng: random.Random) -> Turn:
    """A question about one picture as people type it, the text before or after the picture."""
    text = careless(question.text, rng)
    return Turn((text, picture) if text_first else (picture, text), question.answer)


def careless(text: str, rng: random.Random) -> str:
    """As people type it, now and then: no capital, no full stop."""
    if rng.random() < 0.1:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.1:
        text = text.rstrip(".?")
    return text


def messages(turns: Sequence[Turn], system: str | None = None) -> list[dict[str, object]]:
    """What a chat template takes, the last answer left out; a picture is {"type": "image",
    "image": its number}.
    """
    stated: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
    for i, turn in enumerate(turns):
        content = [
            {"type": "image", "image": part}
            if isinstance(part, int)
            else {"type": "text", "text": part}
            for part in turn.parts
        ]
        stated.append({"role": "user", "content": content})
        if i < len(turns) - 1:
            stated.append({"role": "assistant", "content": turn.answer})
    return stated
