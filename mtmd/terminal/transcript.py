"""A conversation as it is kept between turns and in files: what was asked about which pictures, and
what was answered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtmd.base.errors import ImageError, MtmdError
from mtmd.clip.image.decode import Picture
from mtmd.prompt.audio_input import Recording, kind_of, load_audio
from mtmd.prompt.conversation import Message
from mtmd.prompt.fetch_url import RemoteMedia
from mtmd.prompt.load_image import load_image
from mtmd.prompt.picture_paths import check_path, user_path
from mtmd.prompt.url_kinds import is_address, is_url, url_identity
from mtmd.prompt.video_input import Footage, load_video

FORMAT = "mtmd chat"
VERSION = 1
FILE_BYTES_MAX = 64 << 20


class TranscriptError(MtmdError):
    """A file that holds no conversation, or cannot be read or written."""


@dataclass(frozen=True)
class Attachment:
    """A picture, decoded once, a video or audio, and the file that it was read from, or its URL."""

    path: Path | str
    picture: Picture | Footage | Recording
    reported: str
    """Its size, of a video and of audio its length."""
    kind: str = "image"

    @property
    def name(self) -> str:
        """Name to be shown."""
        return url_identity(self.path) if isinstance(self.path, str) else str(self.path)

    @property
    def part(self) -> dict[str, Any]:
        return {"type": self.kind, self.kind: self.picture}


@dataclass
class Turn:
    question: str
    images: tuple[Attachment, ...] = ()
    answer: str = ""
    receipt: Mapping[str, Any] | None = None
    thought: str = ""
    """What the model thought before its answer."""


@dataclass
class Transcript:
    system: str = ""
    turns: list[Turn] = field(default_factory=list)

    def messages(self) -> list[Message]:
        """Return messages as `Service.submit` takes them. The answer of the last turn, which is to
        be made, is left out.
        """
        result: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            images = [i.part for i in turn.images]
            result.append(
                {
                    "role": "user",
                    "content": [*images, {"type": "text", "text": turn.question}]
                    if images
                    else turn.question,
                }
            )
            if turn is not self.turns[-1]:
                stated = {"role": "assistant", "content": turn.answer}
                result.append(
                    stated | ({"reasoning_content": turn.thought} if turn.thought else {})
                )
        return result

    def to_json(self, model: str, options: Mapping[str, Any]) -> str:
        turns = [
            {
                "question": t.question,
                "images": [{"path": str(i.path), "sha256": i.picture.sha256} for i in t.images],
                "answer": t.answer,
                "receipt": t.receipt,
                **({"thinking": t.thought} if t.thought else {}),
            }
            for t in self.turns
        ]
        return (
            json.dumps(
                {
                    "format": FORMAT,
                    "version": VERSION,
                    "model": model,
                    "options": dict(options),
                    "system": self.system,
                    "turns": turns,
                },
                indent=1,
                ensure_ascii=False,
            )
            + "\n"
        )

    def to_markdown(self, model: str) -> str:
        parts = [f"# Conversation with {model}"]
        if self.system:
            parts.append(_quoted(self.system))
        for turn in self.turns:
            parts += [f"![{_title(i)}](<{i.path}>)" for i in turn.images]
            parts += [f"**You:** {turn.question}", turn.answer]
        return "\n\n".join(parts) + "\n"


def _title(image: Attachment) -> str:
    return image.path.name if isinstance(image.path, Path) else image.name


def attach(source: Path | str, remote: bool = False) -> Attachment:
    """A file, a data URL, or, where `remote` ones are fetched, an address of the web. Raises
    ImageError.
    """
    if isinstance(source, str) and is_url(source):
        return _attach_url(source, remote)
    path = Path(user_path(str(source)))
    if (kind := kind_of(path)) != "image":
        return Attachment(path.absolute(), *_opened(path, kind))
    picture = load_image(path)
    return Attachment(path.absolute(), picture, f"{picture.size[0]} x {picture.size[1]}")


def _opened(source: Path | str, kind: str, **how: Any) -> tuple[Footage | Recording, str, str]:
    """A video, or audio, what is told of it, and its kind. Raises ImageError."""
    if kind == "audio":
        recording = load_audio(source, **how)
        return recording, f"{recording.check().seconds:.1f} s", kind
    footage = load_video(source, **how)
    with footage.opened() as reader:
        facts = reader.facts
    return footage, f"{facts.width} x {facts.height}, {facts.seconds:.1f} s", kind


def _attach_url(url: str, remote: bool) -> Attachment:
    if is_address(url) and not remote:
        check_path(url)
    fetch = RemoteMedia() if remote else None
    if (kind := kind_of(url)) != "image":
        return Attachment(url, *_opened(url, kind, unnamed=url_identity(url), remote=fetch))
    picture = load_image(url, unnamed=url_identity(url), remote=fetch)
    return Attachment(url, picture, f"{picture.size[0]} x {picture.size[1]}")


def read_transcript(
    path: Path, remote: bool = False
) -> tuple[Transcript, dict[str, Any], list[str]]:
    """A conversation that `to_json` wrote, its answer options, and what has changed since, in
    words. `remote`: as of `attach`.

    Raises TranscriptError for a file that is none, ImageError for a picture that is gone.
    """
    values = _read_object(path)
    notes: list[str] = []
    try:
        turns = [
            Turn(
                _text(t["question"]),
                tuple(_reattach(i, notes, remote) for i in _list(t["images"])),
                _text(t["answer"]),
                t.get("receipt"),
                _text(t.get("thinking", "")),
            )
            for t in _list(values["turns"])
        ]
        return Transcript(_text(values["system"]), turns), dict(values["options"]), notes
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__} {error}"
        raise TranscriptError(
            f"{path}: found a broken conversation ({reason}), expected one as /save writes it"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a text in one piece: a file that was there stays as it is until the new one is whole.
    Raises TranscriptError.
    """
    made = path.with_name(path.name + ".new")
    try:
        made.write_text(text, encoding="utf-8", errors="backslashreplace")
        made.replace(path)
    except (OSError, ValueError) as error:
        raise TranscriptError(
            f"{path}: cannot be written ({getattr(error, 'strerror', None) or error}); name "
            "another file"
        ) from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise TranscriptError(
                f"{path}: found more than {FILE_BYTES_MAX >> 20} MiB, the maximum; is it "
                "a conversation?"
            )
        values = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not JSON"
        raise TranscriptError(
            f"{path}: cannot be read ({reason}), expected a conversation as /save FILE.json writes "
            "it"
        ) from error
    if not isinstance(values, dict) or (values.get("format"), values.get("version")) != (
        FORMAT,
        VERSION,
    ):
        raise TranscriptError(
            f"{path}: found no conversation of version {VERSION}, expected one as /save FILE.json "
            "writes it"
        )
    return values


def _reattach(saved: Mapping[str, Any], notes: list[str], remote: bool) -> Attachment:
    try:
        result = attach(_text(saved["path"]), remote)
    except ImageError as error:
        raise ImageError(f"a picture of the conversation is not there any more: {error}") from error
    if result.picture.sha256 != saved["sha256"]:
        notes.append(f"{result.name} is another picture now than when the conversation was saved")
    return result


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} where a text should be")
    return value


def _list(value: object) -> Sequence[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.40} where a list should be")
    return value


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines())
