"""The pictures, and a video, that an empty chat offers, with what to ask about them. Their files
are in `static/samples/`, the same as in the repository's `examples/`.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from mtmd.web.page.assets import FOLDER


@dataclass(frozen=True)
class Sample:
    """`asks` are questions that the demo model was trained for, `asks_any` those for a model that
    knows more; `poster` is the picture that stands for a video.
    """

    file: str
    shows: str
    width: int
    height: int
    asks: tuple[str, ...]
    asks_any: tuple[str, ...]
    poster: str | None = None


SAMPLES = (
    Sample(
        "shapes.png",
        "Three shapes on white",
        256,
        256,
        ("Describe the image.", "Where is the cross? Give its box."),
        ("Describe the image.", "Which shapes are here, and where?"),
    ),
    Sample(
        "four.png",
        "Four shapes on purple",
        256,
        256,
        ("How many shapes are there?", "What color is the triangle?"),
        ("How many shapes are there?", "Which colors do you see?"),
    ),
    Sample(
        "word.png",
        "A word on yellow",
        256,
        256,
        ("What does the text say?", "What color is the text?"),
        ("What does the text say?", "Describe the picture in one sentence."),
    ),
    Sample(
        "moves.mp4",
        "Five seconds, in which something moves",
        256,
        256,
        ("What happens in the video?", "Which way does the circle move?"),
        ("What happens in the video?", "Which shape moves, and where to?"),
        poster="moves.png",
    ),
)


def offered(demo: bool, videos: bool) -> list[dict[str, Any]]:
    """Return samples as the page draws them, with the SHA-256 that each file has once it is
    uploaded; with what moves where `videos` can be read.
    """
    offers = []
    for sample in (s for s in SAMPLES if videos or s.poster is None):
        fields = asdict(sample)
        general, own = fields.pop("asks_any"), fields.pop("asks")
        offers.append(fields | {"asks": own if demo else general, "sha256": _sha256(sample.file)})
    return offers


@cache
def _sha256(file: str) -> str:
    return hashlib.sha256((FOLDER / "samples" / file).read_bytes()).hexdigest()
