"""Conversations as one JSON file, their pictures inside as base64, and back. What is read is
checked like anything from outside.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mtmd import PromptError, Receipt
from mtmd.web.store.conversation import RUNNING, STOPPED, Conversation, Message, StoredImage
from mtmd.web.store.store import Store

FORMAT, VERSION = "mtmd conversations", 1
Text = Annotated[str, Field(max_length=1 << 22)]
Short = Annotated[str, Field(max_length=400)]
Seconds = Annotated[float, Field(ge=0, le=1e11)]
AddPicture = Callable[
    [bytes, str], StoredImage
]  # checks that the bytes are a picture, and stores them under a name


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Image(_Strict):
    sha256: Short
    name: Short = ""


class _Message(_Strict):
    id: Short
    parent: Short | None
    role: Literal["user", "assistant"]
    text: Text
    state: Literal["running", "complete", "stopped", "failed"]
    images: list[_Image] = []
    options: dict[str, Any] | None = None
    receipt: dict[str, Any] | None = None
    error: Text | None = None
    created: Seconds


class _Conversation(_Strict):
    title: Short
    head: Short | None
    created: Seconds
    changed: Seconds
    messages: list[_Message]


class _File(_Strict):
    format: Literal["mtmd conversations"]
    version: Literal[1]
    conversations: list[_Conversation]
    images: dict[str, str]


def export_file(store: Store, conversations: Iterable[Conversation]) -> Iterator[str]:
    """The text of the file in pieces: one conversation, or one picture, is in memory at a time."""
    yield f'{{"format": {json.dumps(FORMAT)}, "version": {VERSION}, "conversations": ['
    shown: dict[str, None] = {}
    for number, conversation in enumerate(conversations):
        messages = store.messages(conversation.id)
        shown |= dict.fromkeys(i.sha256 for m in messages for i in m.images)
        head = {k: v for k, v in conversation.asdict().items() if k != "id"}
        yield (",\n" if number else "\n") + json.dumps(
            head | {"messages": [_message(m) for m in messages]}, ensure_ascii=False
        )
    yield '\n], "images": {'
    written = 0
    for sha256 in shown:
        if (data := store.image_bytes(sha256)) is not None:
            yield f'{"," if written else ""}\n"{sha256}": "{base64.b64encode(data).decode()}"'
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
        "images": [{"sha256": i.sha256, "name": i.name} for i in message.images],
        "options": message.options,
        "receipt": message.receipt,
        "error": message.error,
        "created": message.created,
    }


def import_file(
    store: Store, owner: str, text: str | bytes, add_picture: AddPicture
) -> list[Conversation]:
    """Add the conversations of an exported file, all or none, as new ones. Raises PromptError for a
    file that is not one of ours, and what `add_picture` raises for its pictures.
    """
    try:
        file = _File.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"])[:80] or "the file"
        raise PromptError(
            f"import: {where}: {first['msg'][:100]}; expected a file exported from here"
        ) from error
    for conversation in file.conversations:
        _check_tree(conversation)
    needed = {i.sha256: i.name for c in file.conversations for m in c.messages for i in m.images}
    kept = {
        name: add_picture(_decode(file.images, name), shown_as) for name, shown_as in needed.items()
    }
    made = []
    with store.change() as db:
        for source in file.conversations:
            ids = {m.id: uuid.uuid4().hex for m in source.messages}
            new = Conversation(
                uuid.uuid4().hex,
                source.title,
                ids.get(source.head or ""),
                source.created,
                source.changed,
            )
            store.insert_conversation(db, owner, new)
            for m in source.messages:
                images = tuple(replace(kept[i.sha256], name=i.name) for i in m.images)
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
                        m.options,
                        _receipt(m.receipt),
                        m.error,
                        m.created,
                    ),
                )
            made.append(new)
    return made


def _check_tree(conversation: _Conversation) -> None:
    """Parents stand before their children, names are unique, the branch shown exists."""
    seen: set[str] = set()
    for message in conversation.messages:
        if message.id in seen or (message.parent is not None and message.parent not in seen):
            raise PromptError(
                f"import: message {message.id[:40]!r} is there twice, or not below its parent "
                f"{(message.parent or '')[:40]!r}; expected a file exported from here"
            )
        seen.add(message.id)
    if conversation.head is not None and conversation.head not in seen:
        raise PromptError(
            f"import: head {conversation.head[:40]!r} names no message; expected a file exported "
            "from here"
        )


def _receipt(data: dict[str, Any] | None) -> dict[str, Any] | None:
    """A receipt as this version writes them. One that is otherwise, of another version, is left
    out: its numbers would not mean what they say here.
    """
    try:
        return None if data is None else TypeAdapter(Receipt).validate_python(data).asdict()
    except ValidationError:
        return None


def _decode(images: dict[str, str], name: str) -> bytes:
    try:
        return base64.b64decode(images[name], validate=True)
    except (KeyError, ValueError) as error:
        raise PromptError(
            f"import: picture {name[:40]!r} is missing or not base64; expected a file exported "
            "from here"
        ) from error
