"""Describes what requests for vectors look like: OpenAI's, with pictures as vLLM's clients
(`messages`) and Jina's (`{"image": ...}`) send them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mtmd.web.answering.request import Piece
from mtmd.web.errors import TAG
from mtmd.web.intake.long_texts import CutText, PictureText, as_data_url, beginning
from mtmd.web.intake.media import Reference
from mtmd.web.intake.typed_body import Loose, Request
from mtmd.web.interfaces.fields import MAX_PARTS, ModelName, pieces
from mtmd.web.interfaces.openai_messages import Message

MAX_INPUTS = 2048
LONGEST_TEXT = 1 << 16
_SCHEMES = ("data:", "http:", "https:", "file:")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Text: TypeAlias = Annotated[str, Field(max_length=LONGEST_TEXT)]


class TextInput(_Strict):
    text: Text


class ImageInput(_Strict):
    """A URL, the id of an upload, or base64 alone."""

    image: PictureText

    @property
    def url(self) -> str | CutText:
        begin = beginning(self.image)
        known = begin[:6].lower().startswith(_SCHEMES) or begin.startswith("file-")
        return self.image if known else as_data_url(self.image, "image/unknown")


def _kind(value: Any) -> str | None:
    if isinstance(value, str):
        return f"{TAG}plain"
    if isinstance(value, (TextInput, ImageInput)):
        return f"{TAG}text" if isinstance(value, TextInput) else f"{TAG}image"
    if isinstance(value, dict):
        return next((f"{TAG}{name}" for name in ("text", "image") if name in value), None)
    return None


Input: TypeAlias = Annotated[
    Annotated[Text, Tag(f"{TAG}plain")]
    | Annotated[TextInput, Tag(f"{TAG}text")]
    | Annotated[ImageInput, Tag(f"{TAG}image")],
    Discriminator(
        _kind,
        custom_error_type="input",
        custom_error_message='expected a text, {{"text": ...}} or {{"image": ...}}; ids of tokens '
        "are another model's (LangChain: check_embedding_ctx_length=False)",
    ),
]
_ONE_SCHEMA = {
    "anyOf": [
        {"type": "string", "maxLength": LONGEST_TEXT},
        {"$ref": "#/components/schemas/TextInput"},
        {"$ref": "#/components/schemas/ImageInput"},
    ]
}


def _several(value: Any) -> Any:
    return [value] if isinstance(value, (str, dict)) else value


class NamedModel(Loose):
    """All that is read of a request where the models give no vectors."""

    model: ModelName | None = None


class EmbeddingRequest(Request):
    """`input`: texts and pictures, one vector for each; or `messages`, with one text or picture in
    all. `truncate`: whether the end of a text that is too long is left out, which the receipt says.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "dimensions": (),
        "truncate_prompt_tokens": (),
        "late_chunking": (False,),
        "embed_dtype": ("float32",),
        "return_multivector": (False,),
        "add_special_tokens": (True,),
    }
    harmless: ClassVar[frozenset[str]] = frozenset(
        ["user", "input_type", "task", "priority", "request_id"]
    )

    model: ModelName | None = None
    input: (
        Annotated[
            list[Input],
            Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True),
            BeforeValidator(_several),
            WithJsonSchema(
                {"anyOf": [_ONE_SCHEMA, {"type": "array", "items": _ONE_SCHEMA, "minItems": 1}]}
            ),
        ]
        | None
    ) = None
    messages: list[Message] | None = Field(
        default=None, min_length=1, max_length=MAX_PARTS, fail_fast=True
    )
    encoding_format: Literal["float", "base64"] | None = None
    embedding_type: Literal["float", "base64"] | None = None
    normalize: bool | None = None
    normalized: bool | None = None
    truncate: bool | None = None

    @property
    def is_base64(self) -> bool:
        return "base64" in (self.encoding_format, self.embedding_type)

    @property
    def of_length_one(self) -> bool:
        return self.normalize is not False and self.normalized is not False

    @model_validator(mode="after")
    def _can_be_done(self) -> EmbeddingRequest:
        if (self.input is None) == (self.messages is None):
            raise PydanticCustomError(
                "input", "{param}: expected either input or messages", {"param": "input"}
            )
        if self.messages is not None and len(list(self._of_messages())) != 1:
            raise PydanticCustomError(
                "messages",
                "{param}: expected one text or one picture in all, as a vector stands for one; "
                "give several by input",
                {"param": "messages"},
            )
        return self

    def inputs(self) -> Sequence[Piece]:
        """Return it in order."""
        return list(self._of_messages() if self.input is None else self._of_input())

    def _of_input(self) -> Iterator[Piece]:
        for i, item in enumerate(self.input or ()):
            if isinstance(item, ImageInput):
                yield Reference(f"input[{i}].image", item.url)
            else:
                yield item if isinstance(item, str) else item.text

    def _of_messages(self) -> Iterator[Piece]:
        """Texts without words, which clients send beside a picture, are left out."""
        for i, message in enumerate(self.messages or ()):
            for piece in pieces(message.content, f"messages[{i}].content"):
                if isinstance(piece, str):
                    yield from (piece,) if piece.strip() else ()
                elif piece.kind in ("image", None):
                    yield replace(piece, kind="image")
