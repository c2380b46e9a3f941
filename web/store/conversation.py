"""A conversation, the messages of its tree, the pictures shown in them: what the store keeps, as
plain records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

TITLE_LENGTH = 60  # of a title made from a message; people may give longer ones
RUNNING, COMPLETE, STOPPED, FAILED = "running", "complete", "stopped", "failed"


@dataclass(frozen=True)
class PictureTotals:
    """Totals of all pictures that are stored, and of those that no message has shown yet."""

    count: int
    bytes: int
    unsent: int
    unsent_bytes: int


@dataclass(frozen=True)
class StoredImage:
    """`sha256` of the file's bytes, `kind` its media type; width and height in pixels as shown,
    upright, 0 of audio. Of a video and of audio: how many `seconds` it has, and of these what a
    message shows of a video, from `start` to `end`; None for all.
    """

    sha256: str
    kind: str
    bytes: int
    width: int
    height: int
    name: str = ""
    seconds: float | None = None
    start: float | None = None
    end: float | None = None

    @property
    def is_video(self) -> bool:
        return self.kind.startswith("video/")

    @property
    def is_audio(self) -> bool:
        return self.kind.startswith("audio/")

    @property
    def is_still(self) -> bool:
        """Return whether it is a picture."""
        return not (self.is_video or self.is_audio)


@dataclass(frozen=True)
class Message:
    """One message of a tree. An answer has the `options` it was asked for with, and its `receipt`
    or `error` at its end.
    """

    id: str
    conversation: str
    parent: str | None
    role: str
    text: str
    state: str
    images: tuple[StoredImage, ...]
    options: dict[str, Any] | None
    receipt: dict[str, Any] | None
    error: str | None
    created: float


@dataclass(frozen=True)
class Conversation:
    """`head`: the last message of the branch that is shown. Times are seconds since 1970. One that
    is `pinned` stands before those that are not.
    """

    id: str
    title: str
    head: str | None
    created: float
    changed: float
    pinned: bool = False

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Hit:
    """A conversation that a search gives, with the words `around` the first match and the id of
    the message that has it; empty where the title matches.
    """

    conversation: Conversation
    around: str
    message: str = ""


def title_from(text: str, images: Sequence[StoredImage]) -> str:
    """The title that a conversation gets from its first message: the beginning of its text, up to
    the first block of code, else the name of its first picture.
    """
    words = " ".join(text.partition("\n```")[0].split())
    if len(words) > TITLE_LENGTH:
        saved, space, _ = words[:TITLE_LENGTH].rpartition(" ")
        words = f"{(saved if space else words)[: TITLE_LENGTH - 1].rstrip(' .,;:')}…"
    return words or (images[0].name if images else "") or "Picture"


def branch(messages: dict[str, Message], last: str | None) -> list[Message]:
    """Return the branch from the first message to `last`, by id, along the parents."""
    path = []
    while last is not None:
        path.append(messages[last])
        last = messages[last].parent
    return path[::-1]
