"""Conversations as one JSON file, their pictures inside as base64, and back. What is read is
checked like anything from outside.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from mtmd import PromptError, Receipt
from mtmd.web.native_threads import in_thread
from mtmd.web.store.conversation import RUNNING, STOPPED, Conversation, Message, StoredImage
from mtmd.web.store.store import Store

FORMAT, VERSION = "mtmd conversations", 1
# of one file; each is far above what a person writes, and keeps what is read within 200 MB
MAX_VALUES, MAX_CONVERSATIONS, MAX_MESSAGES, MAX_PICTURES = 500_000, 10_000, 50_000, 10_000
MAX_TEXT = 20_000_000  # characters: nobody else can write for the seconds that they are indexed
MAX_FIELDS, MAX_SHOWN = 16, 100  # of one message: fields, pictures
MAX_RECEIPT_BYTES = 10_000  # values: frames of videos have six each
Text = Annotated[str, Field(max_length=1 << 22)]
Short = Annotated[str, Field(max_length=400)]
Seconds = Annotated[float, Field(ge=0, le=1e11)]
Whole = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
AddPicture = Callable[
    [bytes, str], StoredImage
]  # checks that the bytes are a picture, and stores them under a name


Model = TypeVar("Model", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Image(_Strict):
    sha256: Short
    name: Short = ""
    start: Seconds | None = None
    end: Seconds | None = None


class _Options(_Strict):
    """Describes what an answer was asked for with; what another version knows besides is left
    aside.
    """

    model_config = ConfigDict(extra="ignore")

    system: Text = ""
    table: bool | None = None
    max_tokens: Whole | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: Whole | None = None
    detail: Short | None = None
    no_sound: bool | None = None


class _Message(_Strict):
    """Message without its receipt, which is read by itself."""

    id: Short
    parent: Short | None
    role: Literal["user", "assistant"]
    text: Text
    state: Literal["running", "complete", "stopped", "failed"]
    images: Annotated[list[_Image], Field(max_length=MAX_SHOWN), FailFast()] = []
    options: _Options | None = None
    error: Text | None = None
    created: Seconds


class _Conversation(_Strict):
    """Conversation without its messages, which are read one by one."""

    title: Short
    head: Short | None
    created: Seconds
    changed: Seconds


@dataclass(frozen=True)
class _Tree:
    conversation: _Conversation
    messages: list[tuple[_Message, dict[str, Any] | None]]  # with their receipts


@dataclass(frozen=True)
class ExportedFile:
    """One that was read and checked. `pictures` by SHA-256: base64, or bytes."""

    trees: list[_Tree]
    pictures: dict[str, object]


def export_file(store: Store, conversations: Iterable[Conversation]) -> Iterator[str]:
    """The text of the file in pieces: one conversation, or one picture, is in memory at a time."""
    yield f'{{"format": {json.dumps(FORMAT)}, "version": {VERSION}, "conversations": ['
    shown: dict[str, None] = {}
    for number, conversation in enumerate(conversations):
        messages = store.messages(conversation.id)
        shown |= dict.fromkeys(i.sha256 for m in messages for i in m.images)
        head = {k: v for k, v in conversation.asdict().items() if k not in ("id", "pinned")}
        yield (",\n" if number else "\n") + json.dumps(
            head | {"messages": [_message(m) for m in messages]},
            ensure_ascii=False,
            allow_nan=False,
        )
    yield '\n], "images": {'
    written = 0
    for sha256 in shown:
        if (data := store.image_bytes(sha256)) is not None:
            encoded = in_thread(base64.b64encode, data).decode()
            yield f'{"," if written else ""}\n"{sha256}": "{encoded}"'
            written += 1
    yield "\n}}\n"


def _message(message: Message) -> dict[str, Any]:
    """An answer still being written is, in the file, one that was stopped there."""
    return {
        "id": message.id,
        "parent": message.parent,
        "role": message.role,
        "text": message.text,
        "state": STOPPED if message.state == RUNNING else message.state,
        "images": [_shown(i) for i in message.images],
        "options": message.options,
        "receipt": message.receipt,
        "error": message.error,
        "created": message.created,
    }


def _shown(image: StoredImage) -> dict[str, Any]:
    """Return which part of a video is named where it is not all of it, so that files of pictures
    are as they were.
    """
    part = {"start": image.start, "end": image.end}
    named = {"sha256": image.sha256, "name": image.name}
    return named | {name: value for name, value in part.items() if value is not None}


def import_file(
    store: Store, owner: str, file: ExportedFile, add_picture: AddPicture
) -> list[Conversation]:
    """Add its conversations, all or none, as new ones. Raises PromptError for a picture that is
    not in it, and what `add_picture` raises for its pictures.
    """
    trees, pictures = file.trees, file.pictures
    for tree in trees:
        _check_tree(tree)
    needed = {i.sha256: i.name for t in trees for m, _ in t.messages for i in m.images}
    saved = {
        name: add_picture(_decode(pictures, name), shown_as) for name, shown_as in needed.items()
    }
    made = []
    with store.change() as db:
        for tree in trees:
            source, ids = tree.conversation, {m.id: uuid.uuid4().hex for m, _ in tree.messages}
            new = Conversation(
                uuid.uuid4().hex,
                source.title,
                ids.get(source.head or ""),
                source.created,
                source.changed,
            )
            store.insert_conversation(db, owner, new)
            for m, receipt in tree.messages:
                images = tuple(
                    replace(saved[i.sha256], name=i.name, start=i.start, end=i.end)
                    for i in m.images
                )
                store.insert(
                    db,
                    Message(
                        ids[m.id],
                        new.id,
                        ids.get(m.parent or ""),
                        m.role,
                        m.text,
                        STOPPED if m.state == RUNNING else m.state,
                        images,
                        m.options.model_dump(exclude_unset=True) if m.options else None,
                        receipt,
                        m.error,
                        m.created,
                    ),
                )
            made.append(new)
    return made


def read_file(
    text: str | bytes, picture: Callable[[str], str | bytes] = lambda text: text
) -> ExportedFile:
    """Checked piece by piece, up to the first thing that is wrong: a list of all that is wrong with
    a large file would be larger than the file. Numbers are finite: browsers read no others.
    `picture`: what stands for one in `text`, as base64 or bytes. Raises PromptError for a file that
    is not one of ours.
    """
    if (text.count(",") if isinstance(text, str) else text.count(b",")) > MAX_VALUES:
        raise _not_ours(f"found more than {MAX_VALUES} values; import it in parts")
    try:
        file = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise _not_ours(f"it cannot be read as JSON: {str(error)[:100]}") from error
    fields = _object(file, "the file", {"format", "version", "conversations", "images"})
    if (fields["format"], fields["version"]) != (FORMAT, VERSION):
        raise _not_ours(f"format and version are not {FORMAT!r} and {VERSION}")
    pictures = fields["images"]
    if not isinstance(pictures, dict) or len(pictures) > MAX_PICTURES:
        raise _not_ours(f"images: found no object of at most {MAX_PICTURES} pictures")
    trees, left = [], MAX_MESSAGES
    conversations = _list(fields["conversations"], "conversations", MAX_CONVERSATIONS)
    for number, conversation in enumerate(conversations):
        where = f"conversations.{number}"
        named = _object(conversation, where, {*_Conversation.model_fields, "messages"})
        messages = _list(named.pop("messages"), f"{where}.messages", left)
        left -= len(messages)
        head = _checked(_Conversation, named, where)
        trees.append(
            _Tree(head, [_message_of(m, f"{where}.messages.{i}") for i, m in enumerate(messages)])
        )
    if sum(len(m.text) for t in trees for m, _ in t.messages) > MAX_TEXT:
        raise _not_ours(f"found more than {MAX_TEXT} characters of text; import it in parts")
    made = {name: picture(p) if isinstance(p, str) else p for name, p in pictures.items()}
    return ExportedFile(trees, made)


def _message_of(value: object, where: str) -> tuple[_Message, dict[str, Any] | None]:
    if not isinstance(value, dict) or len(value) > MAX_FIELDS:
        raise _not_ours(f"{where}: found no object of at most {MAX_FIELDS} fields")
    receipt = value.pop("receipt", None)
    return _checked(_Message, value, where), _receipt(receipt)


def _object(value: object, where: str, names: set[str]) -> dict[str, object]:
    if not isinstance(value, dict) or set(value) != names:
        raise _not_ours(f"{where}: found no object of {', '.join(sorted(names))}")
    return value


def _list(value: object, where: str, maximum: int) -> list[object]:
    if not isinstance(value, list) or len(value) > maximum:
        raise _not_ours(f"{where}: found no list of at most {maximum}")
    return value


def _checked(kind: type[Model], value: dict[str, object], where: str) -> Model:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        location = ".".join((where, *map(str, first["loc"])))[:80]
        raise _not_ours(f"{location}: {first['msg'][:100]}") from error


def _not_ours(result: str) -> PromptError:
    return PromptError(f"import: {result}; expected a file exported from here")


def _check_tree(tree: _Tree) -> None:
    """Parents stand before their children, names are unique, the branch shown exists."""
    seen: set[str] = set()
    for message, _ in tree.messages:
        if message.id in seen or (message.parent is not None and message.parent not in seen):
            raise _not_ours(
                f"message {message.id[:40]!r} is there twice, or not below its parent "
                f"{(message.parent or '')[:40]!r}"
            )
        seen.add(message.id)
    head = tree.conversation.head
    if head is not None and head not in seen:
        raise _not_ours(f"head {head[:40]!r} names no message")


def _receipt(data: object) -> dict[str, Any] | None:
    """A receipt as this version writes them. One that is otherwise, of another version, is left
    out: its numbers would not mean what they say here.
    """
    if data is None or not _is_small(data):
        return None
    try:
        receipt = TypeAdapter(Receipt).validate_python(data).asdict()
        json.dumps(receipt, allow_nan=False)
    except ValueError:  # pydantic's is one
        return None
    return receipt


def _is_small(data: object) -> bool:
    left, waiting = MAX_RECEIPT_BYTES, [data]
    while waiting and left > 0:
        value = waiting.pop()
        inside = value.values() if isinstance(value, dict) else value
        if isinstance(inside, str) or not isinstance(inside, Iterable):
            continue
        left -= len(value) if isinstance(value, (dict, list)) else 1
        if left > 0:
            waiting.extend(inside)
    return left > 0


def _decode(pictures: dict[str, object], name: str) -> bytes:
    data = pictures.get(name)
    if isinstance(data, bytes):
        return data
    try:
        if isinstance(data, str):
            return base64.b64decode(data, validate=True)
    except ValueError:
        pass
    raise _not_ours(f"picture {name[:40]!r} is missing or not base64")
