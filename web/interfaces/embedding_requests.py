"""What requests for vectors look like: OpenAI's, with pictures as vLLM's clients (`messages`) and
Jina's (`{"image": ...}`) send them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

from mtmd.web.interfaces.openai_requests import MOST_PARTS, FilePart, ImagePart, Message, TextPart
from mtmd.web.errors import TAG
from mtmd.web.intake.long_texts import CutText, PictureText, as_data_url, beginning

MOST_INPUTS = 2048
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


@dataclass(frozen=True)
class Picture:
    """`url`: also the id of an upload."""

    place: str
    url: str | CutText


class NamedModel(BaseModel):
    """All that is read of a request where the models give no vectors."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    model: str | None = Field(default=None, max_length=512)


class EmbeddingRequest(BaseModel):
    """`input`: texts and pictures, one vector for each; or `messages`, with one text or picture in
    all. `truncate`: whether the end of a text that is too long is left out, which the receipt says.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {  # field -> values that ask for nothing
        "dimensions": (None,),
        "truncate_prompt_tokens": (None,),
        "late_chunking": (None, False),
        "embed_dtype": (None, "float32"),
        "return_multivector": (None, False),
        "add_special_tokens": (None, True),
    }
    harmless: ClassVar[frozenset[str]] = frozenset(
        ["user", "input_type", "task", "priority", "request_id"]
    )

    model: str | None = Field(default=None, max_length=512)
    input: (
        Annotated[
            list[Input],
            Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True),
            BeforeValidator(_several),
            WithJsonSchema(
                {"anyOf": [_ONE_SCHEMA, {"type": "array", "items": _ONE_SCHEMA, "minItems": 1}]}
            ),
        ]
        | None
    ) = None
    messages: list[Message] | None = Field(
        default=None, min_length=1, max_length=MOST_PARTS, fail_fast=True
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

    @property
    def unknown(self) -> list[str]:
        """Names of fields that nobody knows here."""
        given = self.model_extra or {}
        return [n for n in given if n not in self.harmless and n not in self.unsupported]

    @model_validator(mode="after")
    def _can_be_done(self) -> EmbeddingRequest:
        for name, harmless in self.unsupported.items():
            if (self.model_extra or {}).get(name) not in harmless:
                raise PydanticCustomError(
                    "unsupported",
                    "{param}: not supported here; leave it out",
                    {"param": name, "code": "unsupported_parameter"},
                )
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

    def inputs(self) -> Sequence[str | Picture]:
        """In order."""
        return list(self._of_messages() if self.input is None else self._of_input())

    def _of_input(self) -> Iterator[str | Picture]:
        for i, item in enumerate(self.input or ()):
            if isinstance(item, ImageInput):
                yield Picture(f"input[{i}].image", item.url)
            else:
                yield item if isinstance(item, str) else item.text

    def _of_messages(self) -> Iterator[str | Picture]:
        """Texts without words, which clients send beside a picture, are left out."""
        for i, message in enumerate(self.messages or ()):
            parts = message.content
            if isinstance(parts, str):
                parts = [TextPart(type="text", text=parts)]
            for j, part in enumerate(parts or ()):
                place = f"messages[{i}].content[{j}]"
                if isinstance(part, TextPart):
                    if part.text.strip():
                        yield part.text
                elif isinstance(part, ImagePart):
                    yield Picture(f"{place}.image_url", part.image_url.url)
                elif isinstance(part, FilePart):
                    yield Picture(f"{place}.file", part.file.reference)
