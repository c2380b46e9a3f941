"""What requests look like. Fields that are not known are left aside, as OpenAI's servers do; what
cannot be done is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, to_json

from mtmd.config import STOP_CHARS_MAX, STOPS_MAX
from mtmd.web.errors import TAG

MOST_MESSAGES = 4096
MOST_PARTS = 1 << 14  # of one message
LONGEST_SCHEMA = 64 << 10  # in characters of JSON: it is compiled before the answer begins


class _Loose(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class ImageURL(_Loose):
    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class FileReference(_Loose):
    file_id: str


class TextPart(_Loose):
    type: Literal["text"]
    text: str


class ImagePart(_Loose):
    type: Literal["image_url"]
    image_url: ImageURL


class FilePart(_Loose):
    """A picture uploaded before."""

    type: Literal["file"]
    file: FileReference


def _kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"{TAG}{kind}" if isinstance(kind, str) else None


def _text_or_list(value: Any) -> str | None:
    return (
        f"{TAG}text"
        if isinstance(value, str)
        else f"{TAG}parts"
        if isinstance(value, (list, tuple))
        else None
    )


def _several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Part: TypeAlias = Annotated[
    Annotated[TextPart, Tag(f"{TAG}text")]
    | Annotated[ImagePart, Tag(f"{TAG}image_url")]
    | Annotated[FilePart, Tag(f"{TAG}file")],
    Discriminator(
        _kind,
        custom_error_type="part",
        custom_error_message="the type of a part has to be text, image_url or file; "
        "sound and video cannot be understood",
    ),
]
Content: TypeAlias = Annotated[
    Annotated[str, Tag(f"{TAG}text")]
    | Annotated[
        list[Part], Tag(f"{TAG}parts"), Field(min_length=1, max_length=MOST_PARTS, fail_fast=True)
    ],
    Discriminator(
        _text_or_list,
        custom_error_type="content",
        custom_error_message="expected a text or a list of parts",
    ),
]
Texts: TypeAlias = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]],
    Field(max_length=STOPS_MAX, fail_fast=True),
    BeforeValidator(_several),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": STOP_CHARS_MAX},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": STOP_CHARS_MAX},
                    "maxItems": STOPS_MAX,
                },
            ]
        }
    ),
]


class Message(_Loose):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class StreamOptions(_Loose):
    include_usage: bool = False


class NamedSchema(_Loose):
    name: str = Field(default="answer", max_length=64)
    schema_: dict[str, Any] = Field(alias="schema")

    @field_validator("schema_")
    @classmethod
    def _short(cls, value: dict[str, Any]) -> dict[str, Any]:
        if len(to_json(value)) > LONGEST_SCHEMA:
            raise PydanticCustomError(
                "schema", "expected a schema of at most {most} characters", {"most": LONGEST_SCHEMA}
            )
        return value


class PlainFormat(_Loose):
    type: Literal["text", "json_object"]


class SchemaFormat(_Loose):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat: TypeAlias = Annotated[
    Annotated[PlainFormat, Tag(f"{TAG}text")]
    | Annotated[PlainFormat, Tag(f"{TAG}json_object")]
    | Annotated[SchemaFormat, Tag(f"{TAG}json_schema")],
    Discriminator(
        _kind,
        custom_error_type="format",
        custom_error_message="expected type text, json_object or json_schema",
    ),
]


class Generation(_Loose):
    """What chat and plain completions have in common. `top_k`, `min_p`, `repetition_penalty` and
    `ignore_eos` are not OpenAI's.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {  # field -> values that ask for nothing
        "n": (None, 1),
        "logit_bias": (None, {}),
        "frequency_penalty": (None, 0),
        "presence_penalty": (None, 0),
    }

    model: str | None = Field(default=None, max_length=512)
    max_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=1 << 31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    stop: Texts | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Any = None
    logit_bias: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Generation:
        for name, harmless in self.unsupported.items():
            if getattr(self, name) not in harmless:
                raise PydanticCustomError(
                    "unsupported",
                    "{param}: not supported here; leave it out",
                    {"param": name, "code": "unsupported_parameter"},
                )
        return self

    def options(self) -> dict[str, Any]:
        """The fields of AnswerOptions that were given."""
        names = (
            "max_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "seed",
            "ignore_eos",
        )
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return given | ({"stop": tuple(self.stop)} if self.stop else {})


class ChatRequest(Generation):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = Generation.unsupported | {
        "tools": (None, []),
        "functions": (None, []),
        "audio": (None,),
        "modalities": (None, [], ["text"]),
        "web_search_options": (None,),
    }

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Any = None
    functions: Any = None
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None

    @model_validator(mode="after")
    def _need_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(
                "top_logprobs",
                "{param}: given without logprobs; set logprobs to true",
                {"param": "top_logprobs"},
            )
        return self

    def options(self) -> dict[str, Any]:
        given = super().options()
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        if isinstance(self.response_format, SchemaFormat):
            given["json_schema"] = self.response_format.json_schema.schema_
        elif self.response_format is not None and self.response_format.type == "json_object":
            given["json_schema"] = {"type": "object"}
        return given

    def images(self) -> Iterator[tuple[str, str, str]]:
        """(place in the request, URL or id of an upload, detail) of each picture, in order."""
        for i, message in enumerate(self.messages):
            for j, part in enumerate(
                message.content if not isinstance(message.content, str) else ()
            ):
                place = f"messages[{i}].content[{j}]"
                if isinstance(part, ImagePart):
                    yield f"{place}.image_url", part.image_url.url, part.image_url.detail
                elif isinstance(part, FilePart):
                    yield f"{place}.file", part.file.file_id, "auto"

    def text_length(self) -> int:
        """Characters of all texts."""
        texts = (
            [m.content]
            if isinstance(m.content, str)
            else [p.text for p in m.content if isinstance(p, TextPart)]
            for m in self.messages
        )
        return sum(len(text) for some in texts for text in some)


class CompletionRequest(Generation):
    """`prompt` is what the user says: the model's chat template is put around it."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = Generation.unsupported | {
        "best_of": (None, 1),
        "echo": (None, False),
        "suffix": (None, ""),
    }

    prompt: Annotated[
        str,
        BeforeValidator(lambda v: v[0] if isinstance(v, list) and len(v) == 1 else v),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1},
                ]
            }
        ),
    ]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: Any = None
    echo: Any = None
    suffix: Any = None

    def options(self) -> dict[str, Any]:
        return super().options() | ({} if self.logprobs is None else {"logprobs": self.logprobs})
