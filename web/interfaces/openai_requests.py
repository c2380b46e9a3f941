"""What requests look like. Fields that nobody knows are ignored, and the receipt says so; what is
known and cannot be done is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, to_json

from mtmd.options.answer import STOP_CHARS_MAX, STOP_IDS_MAX, STOPS_MAX
from mtmd.tools.tool import TOOLS_MAX
from mtmd.web.answering.tools import GivenTools, called_function, chosen_tool, given_tools
from mtmd.web.interfaces.thinking import ThinkingFields
from mtmd.web.errors import TAG
from mtmd.web.intake.body import WHOLE
from mtmd.web.intake.long_texts import CutText, PictureText, as_data_url, beginning
from mtmd.web.intake.media import Reference

MOST_MESSAGES = 4096
MOST_PARTS = 1 << 14  # of one message
MOST_CALLS = 256  # of one message
MOST_CHOICES = 128
MOST_PROMPTS = 128
LONGEST_GRAMMAR = 1 << 20
LONGEST_SCHEMA = 64 << 10  # in characters of JSON: it is compiled before the answer begins


class _Loose(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


def _minus_one(value: Any) -> Any:
    """-1 is how some clients leave an option out."""
    return None if type(value) in (int, float) and value == -1 else value


def _as_url(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


def _as_data(value: Any) -> Any:
    return {"data": value} if isinstance(value, str) else value


FrameCount: TypeAlias = Annotated[
    Annotated[int, Field(ge=1, le=1 << 20), WHOLE] | None,
    BeforeValidator(_minus_one),
    WithJsonSchema({"type": "integer", "minimum": -1, "maximum": 1 << 20}),
]


def _detail(value: Any) -> Any:
    if value is None or value == "":
        return "auto"
    return "high" if value == "original" else value


Detail: TypeAlias = Annotated[
    Literal["auto", "low", "high"],
    # as clients write that they ask for nothing, or for the picture as it is
    BeforeValidator(_detail),
    WithJsonSchema({"enum": ["auto", "low", "high", "original", "", None]}),
]


class ImageURL(_Loose):
    url: PictureText
    detail: Detail = "auto"


class FrameChoice(_Loose):
    """Which frames of a video are seen; `num_frames` is vLLM's word for `max_frames`."""

    fps: Annotated[float | None, BeforeValidator(_minus_one)] = Field(default=None, gt=0, le=240)
    max_frames: FrameCount = None
    num_frames: FrameCount = None
    start: float | None = Field(default=None, ge=0, lt=1e9)
    end: float | None = Field(default=None, ge=0, lt=1e9)

    def chosen(self) -> dict[str, Any]:
        given = {"fps": self.fps, "start": self.start, "end": self.end}
        given["max_frames"] = self.max_frames or self.num_frames
        return {name: value for name, value in given.items() if value is not None}


class VideoURL(FrameChoice):
    url: PictureText


class InputVideo(FrameChoice):
    """llama.cpp's: `data` in base64, or a URL."""

    data: PictureText | None = None
    url: PictureText | None = None
    format: str | None = Field(default=None, max_length=32)

    @model_validator(mode="after")
    def _one(self) -> InputVideo:
        if (self.data is None) == (self.url is None):
            raise PydanticCustomError("video", "expected one of data and url")
        return self

    @property
    def reference(self) -> str | CutText:
        if self.data is None:
            return self.url or ""
        is_url = beginning(self.data).startswith("data:")
        return self.data if is_url else as_data_url(self.data, "video/mp4")


class FileReference(FrameChoice):
    """A picture or video, uploaded before or in `file_data`: a data URL, or base64 alone. The
    choice of frames is for a video.
    """

    file_id: str | None = None
    file_data: PictureText | None = None

    @model_validator(mode="after")
    def _one(self) -> FileReference:
        if (self.file_id is None) == (self.file_data is None):
            found = "neither file_data nor" if self.file_id is None else "both file_data and"
            raise PydanticCustomError(
                "file",
                "found {found} file_id, expected one of them; file_data is the file, as "
                "data:image/png;base64,..., file_id what /v1/files has given it",
                {"found": found},
            )
        return self

    @property
    def reference(self) -> str | CutText:
        return self.file_id or "" if self.file_data is None else of_file_data(self.file_data)


def of_file_data(data: str | CutText) -> str | CutText:
    """As a data URL: what it is, the first bytes say."""
    is_url = beginning(data).startswith("data:")
    return data if is_url else as_data_url(data, "application/octet-stream")


class TextPart(_Loose):
    type: Literal["text"]
    text: str


class ImagePart(_Loose):
    type: Literal["image_url"]
    image_url: ImageURL


class VideoPart(_Loose):
    type: Literal["video_url"]
    video_url: Annotated[VideoURL, BeforeValidator(_as_url)]


class InputVideoPart(_Loose):
    type: Literal["input_video"]
    input_video: Annotated[InputVideo, BeforeValidator(_as_data)]


class FilePart(_Loose):
    """A picture or video as a file."""

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


def _prompts(value: Any) -> Any:
    """A list of prompts, each a text or a list of ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return [value]
    return value


Count: TypeAlias = Annotated[
    Annotated[int, Field(ge=0, le=1 << 20), WHOLE] | None,
    BeforeValidator(_minus_one),
    WithJsonSchema({"type": "integer", "minimum": -1, "maximum": 1 << 20}),
]
RawText: TypeAlias = (
    str | Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1)]
)
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        _IDS,
        {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS]}, "minItems": 1},
    ]
}


def _several(value: Any) -> Any:
    """A list; empty texts, which some clients send for none, are left out."""
    values = [value] if isinstance(value, str) else value
    return [v for v in values if v != ""] if isinstance(values, list) else values


def _bias(value: Any) -> Any:
    """llama.cpp's lists of pairs, in which false stands for never."""
    if not isinstance(value, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int for pair in value
    ):
        return value
    return {str(token): -100.0 if bias is False else bias for token, bias in value}


_BIAS = {"type": "number", "minimum": -100, "maximum": 100}
Bias: TypeAlias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=1024),
    BeforeValidator(_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "object", "additionalProperties": _BIAS, "maxProperties": 1024},
                {
                    "type": "array",
                    "items": {
                        "type": "array",
                        "prefixItems": [
                            {"type": "integer", "minimum": 0},
                            {"anyOf": [_BIAS, {"const": False}]},
                        ],
                        "minItems": 2,
                        "maxItems": 2,
                    },
                    "maxItems": 1024,
                },
            ]
        }
    ),
]
Part: TypeAlias = Annotated[
    Annotated[TextPart, Tag(f"{TAG}text")]
    | Annotated[ImagePart, Tag(f"{TAG}image_url")]
    | Annotated[VideoPart, Tag(f"{TAG}video_url")]
    | Annotated[InputVideoPart, Tag(f"{TAG}input_video")]
    | Annotated[FilePart, Tag(f"{TAG}file")],
    Discriminator(
        _kind,
        custom_error_type="part",
        custom_error_message="the type of a part has to be text, image_url, video_url, input_video "
        "or file",
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


class CalledFunction(_Loose):
    name: str = Field(max_length=128)
    arguments: str | dict[str, Any] | None = None


class MessageCall(_Loose):
    """A call that the assistant made."""

    id: str | None = Field(default=None, max_length=256)
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _of_a_text(cls, value: Any) -> Any:
        return called_function(value)


class Message(_Loose):
    """`reasoning_content`: what the assistant thought before, also as `reasoning` or `thinking`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = Field(default=None, validate_default=True)
    name: str | None = Field(default=None, max_length=256)
    tool_calls: list[MessageCall] | None = Field(default=None, max_length=MOST_CALLS)
    function_call: CalledFunction | None = None
    tool_call_id: str | None = Field(default=None, max_length=256)
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None  # where Ollama's messages have them: never left aside

    @property
    def thought(self) -> str | None:
        return self.reasoning_content or self.reasoning or self.thinking

    @field_validator("images")
    @classmethod
    def _has_no_images(cls, value: list[Any] | None) -> list[Any] | None:
        if value:
            raise PydanticCustomError(
                "images",
                "images stand in the content here, as parts such as "
                '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}',
            )
        return value

    @field_validator("content")
    @classmethod
    def _has_content(cls, value: Any, info: ValidationInfo) -> Any:
        """Only an assistant may say nothing, and a tool."""
        if value is None and info.data.get("role") in ("system", "developer", "user"):
            raise PydanticCustomError("content", "expected a text or a list of parts")
        return value


class StreamOptions(_Loose):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @field_validator("continuous_usage_stats")
    @classmethod
    def _refused(cls, value: bool | None) -> bool | None:
        if value:
            raise PydanticCustomError(
                "unsupported",
                "{param}: not supported here; leave it out",
                {"param": "stream_options.continuous_usage_stats", "code": "unsupported_parameter"},
            )
        return value


def promised(schema: Any, strict: bool | None = None) -> Any:
    """A schema as `AnswerOptions` takes it: unless it is `strict`, what cannot be promised of it is
    passed over, and the receipt says so.
    """
    if isinstance(schema, str) and len(schema) <= LONGEST_SCHEMA:
        with suppress(ValueError, RecursionError):
            schema = json.loads(schema)
    is_schema = isinstance(schema, dict)
    return {"schema": schema, "strict": strict is True} if is_schema else schema


class NamedSchema(_Loose):
    name: str = Field(default="answer", max_length=64)
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None

    @field_validator("schema_")
    @classmethod
    def _short(cls, value: dict[str, Any]) -> dict[str, Any]:
        if len(to_json(value)) > LONGEST_SCHEMA:
            raise PydanticCustomError(
                "schema", "expected a schema of at most {most} characters", {"most": LONGEST_SCHEMA}
            )
        return value


class PlainFormat(_Loose):
    """`schema` beside json_object is llama.cpp's way to ask for one."""

    type: Literal["text", "json_object"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


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


class Structured(_Loose):
    """vLLM's `structured_outputs`: one of them."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Generation(BaseModel):
    """What chat and plain completions have in common. `top_k`, `min_p`, `repetition_penalty`,
    `min_tokens`, `stop_token_ids`, `ignore_eos` and grammars are not OpenAI's.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {  # field -> values that ask for nothing
        "best_of": (None, 1),
        "use_beam_search": (None, False),
        "length_penalty": (None, 1),
        "early_stopping": (None, False),
        "truncate_prompt_tokens": (None,),
        "typical_p": (None, 1),
        "mirostat": (None, 0),
        "dry_multiplier": (None, 0),
        "xtc_probability": (None, 0),
        "bad_words": (None, []),
        "allowed_token_ids": (None, []),
        "logits_processors": (None, []),
        "lora": (None, []),
    }
    # fields of OpenAI's that say who asks and how the answer is kept, and nothing of the answer
    harmless: ClassVar[frozenset[str]] = frozenset(
        [
            "user",
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prediction",
            "client_metadata",
        ]
    )

    model: str | None = Field(default=None, max_length=512)
    max_tokens: Count | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: Annotated[
        Annotated[int, Field(ge=0, lt=1 << 31), WHOLE] | None, BeforeValidator(_minus_one)
    ] = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    repeat_penalty: float | None = Field(default=None, ge=0.01, le=100)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: Bias | None = None
    seed: Annotated[
        Annotated[int, Field(ge=0, lt=1 << 63), WHOLE] | None, BeforeValidator(_minus_one)
    ] = None
    stop: Texts | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1 << 20), WHOLE] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=1 << 31), WHOLE]] | None = Field(
        default=None, max_length=STOP_IDS_MAX
    )
    ignore_eos: bool | None = None
    sampling: Literal["model", "greedy", "off"] | None = None
    stop_repeating: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None  # llama.cpp's: chunks that say how far the prompt is
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES), WHOLE] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None  # vLLM's
    grammar: str | None = Field(default=None, max_length=LONGEST_GRAMMAR)
    json_schema: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structured_outputs: Structured | None = None

    @property
    def unknown(self) -> list[str]:
        """Names of fields that nobody knows here."""
        given = self.model_extra or {}
        return [n for n in given if n not in self.harmless and n not in self.unsupported]

    def warnings(self) -> tuple[str, ...]:
        """What was asked for, and is not answered to."""
        names = ["".join(c for c in name[:60] if c.isprintable()) for name in self.unknown[:20]]
        return (f"not known here, and ignored: {', '.join(names)}",) if names else ()

    def _structures(self) -> Iterator[tuple[str, str, Any]]:
        """(field, option, value) of each way to say what the answer has to look like."""
        wanted = self.structured_outputs or Structured()
        for field, option, value in (
            ("json_schema", "json_schema", promised(self.json_schema)),
            ("guided_json", "json_schema", promised(self.guided_json)),
            ("structured_outputs", "json_schema", promised(wanted.json_)),
            ("structured_outputs", "json_schema", True if wanted.json_object else None),
            ("grammar", "grammar", self.grammar),
            ("guided_grammar", "grammar", self.guided_grammar),
            ("ebnf", "grammar", self.ebnf),
            ("structured_outputs", "grammar", wanted.grammar),
        ):
            if value is not None and value != "":
                yield field, option, value
        for field, kind, given in (
            ("guided_regex", "regex", self.guided_regex),
            ("regex", "regex", self.regex),
            ("structured_outputs", "regex", wanted.regex),
            ("guided_choice", "choice", self.guided_choice),
            ("structured_outputs", "choice", wanted.choice),
        ):
            if given:
                yield field, "grammar", {kind: given}

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Generation:
        for name, harmless in self.unsupported.items():
            if (self.model_extra or {}).get(name) not in harmless:
                raise PydanticCustomError(
                    "unsupported",
                    "{param}: not supported here; leave it out",
                    {"param": name, "code": "unsupported_parameter"},
                )
        return self

    @model_validator(mode="after")
    def _scored_whole(self) -> Generation:
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError(
                "stream",
                "{param}: found beside prompt_logprobs, expected one of the two: log probabilities "
                "of a prompt come with the whole answer",
                {"param": "stream"},
            )
        return self

    @model_validator(mode="after")
    def _one_structure(self) -> Generation:
        fields = [field for field, *_ in self._structures()]
        if len(fields) > 1:
            raise PydanticCustomError(
                "structures",
                "{param}: given beside {other}; an answer follows one of them",
                {"param": fields[1], "other": fields[0]},
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
            "frequency_penalty",
            "presence_penalty",
            "seed",
            "prompt_logprobs",
            "min_tokens",
            "ignore_eos",
            "sampling",
            "stop_repeating",
        )
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.repetition_penalty is None and self.repeat_penalty is not None:
            given["repetition_penalty"] = self.repeat_penalty
        if self.logit_bias:
            given["logit_bias"] = self.logit_bias
        if self.stop_token_ids:
            given["stop_token_ids"] = tuple(self.stop_token_ids)
        given |= {option: value for _, option, value in self._structures()}
        return given | ({"stop": tuple(self.stop)} if self.stop else {})


class MediaOptions(_Loose):
    """vLLM's, for all videos of a request."""

    video: FrameChoice | None = None


class ChatRequest(ThinkingFields, Generation):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = Generation.unsupported | {
        "audio": (None,),
        "chat_template": (None, ""),
        "documents": (None, []),
        "modalities": (None, [], ["text"]),
    }

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=TOOLS_MAX)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = Field(default=None, max_length=TOOLS_MAX)
    function_call: str | CalledFunction | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    media_io_kwargs: MediaOptions | None = None
    mm_processor_kwargs: FrameChoice | None = None

    @cached_property
    def given_tools(self) -> GivenTools:
        """Of `functions`, the old form of `tools`, where there are no others."""
        if self.tools or not self.functions:
            return given_tools(self.tools)
        return given_tools([{"type": "function", "function": f} for f in self.functions])

    @property
    def calls_old_way(self) -> bool:
        """Whether a call is to be a `function_call`."""
        return bool(self.functions and not self.tools)

    @property
    def unknown(self) -> list[str]:
        return [*super().unknown, *self.given_tools.left_out]

    @property
    def continues(self) -> bool:
        """Whether the answer goes on from the last message: as asked for, else where that is a text
        of the assistant.
        """
        if self.continue_final_message is not None:
            return self.continue_final_message
        last = self.messages[-1]
        says = last.role == "assistant" and (last.content or last.thought) and not last.tool_calls
        return bool(says) and not self.add_generation_prompt

    def _structures(self) -> Iterator[tuple[str, str, Any]]:
        yield from super()._structures()
        wanted = self.response_format
        if isinstance(wanted, SchemaFormat):
            named = wanted.json_schema
            yield "response_format", "json_schema", promised(named.schema_, named.strict)
        elif wanted is not None and wanted.type == "json_object":
            yield "response_format", "json_schema", promised(wanted.schema_ or {"type": "object"})

    @model_validator(mode="after")
    def _calls_one_way(self) -> ChatRequest:
        """Not by fields of both ways, of which one would mean nothing."""
        both = None
        if self.tools and self.functions:
            both = "functions", "tools"
        elif self.tool_choice is not None and self.function_call is not None:
            both = "function_call", "tool_choice"
        if both:
            raise PydanticCustomError(
                "calls",
                "{param}: found beside {other}, expected one of them",
                {"param": both[0], "other": both[1]},
            )
        if self.function_call not in (None, "none", "auto") and not self.functions:
            raise PydanticCustomError(
                "function_call",
                "{param}: found without functions, expected some in functions",
                {"param": "function_call"},
            )
        return self

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
        return given | self.prompt_options()

    def warnings(self) -> tuple[str, ...]:
        return (*super().warnings(), *self.thinking_warnings())

    def prompt_options(self) -> dict[str, Any]:
        """Those that are part of the prompt."""
        given: dict[str, Any] = {"continue_final_message": True} if self.continues else {}
        given |= self.thinking_options()
        tools, choice = list(self.given_tools.tools), chosen_tool(self.tool_choice)
        several = self.parallel_tool_calls
        if self.calls_old_way:
            named: Any = self.function_call
            several = False
            if isinstance(named, CalledFunction):
                named = {"type": "function", "function": {"name": named.name}}
            choice = choice or named
        if tools:
            given |= {"tools": tools, "parallel_tool_calls": several}
        if choice not in (None, "none", "auto") or tools:
            given["tool_choice"] = choice
        return given

    def details(self) -> Iterator[str]:
        """How closely each picture is to be looked at."""
        for message in self.messages:
            for part in message.content if isinstance(message.content, list) else ():
                if isinstance(part, ImagePart):
                    yield part.image_url.detail

    def media(self) -> Iterator[Reference]:
        """What stands for pictures and videos, in order."""
        usual: dict[str, Any] = {}
        for options in ((self.media_io_kwargs or MediaOptions()).video, self.mm_processor_kwargs):
            usual |= options.chosen() if options else {}
        for i, message in enumerate(self.messages):
            for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
                place = f"messages[{i}].content[{j}]"
                if isinstance(part, ImagePart):
                    yield Reference(f"{place}.image_url", part.image_url.url)
                elif isinstance(part, FilePart):
                    chosen = usual | part.file.chosen()
                    yield Reference(f"{place}.file", part.file.reference, None, chosen)
                elif isinstance(part, VideoPart):
                    chosen = usual | part.video_url.chosen()
                    yield Reference(f"{place}.video_url", part.video_url.url, True, chosen)
                elif isinstance(part, InputVideoPart):
                    chosen = usual | part.input_video.chosen()
                    yield Reference(
                        f"{place}.input_video", part.input_video.reference, True, chosen
                    )

    def text_length(self) -> int:
        """Characters of all texts."""
        texts = (
            [m.content]
            if isinstance(m.content, str)
            else [p.text for p in m.content or () if isinstance(p, TextPart)]
            for m in self.messages
        )
        calls = (str(c.function.arguments or "") for m in self.messages for c in m.tool_calls or ())
        thoughts = (m.thought or "" for m in self.messages)
        return sum(map(len, (*(text for some in texts for text in some), *calls, *thoughts)))


class CompletionRequest(Generation):
    """`prompt` is what the model goes on from: text, in which the spellings of special tokens are
    those tokens, or tokens' ids; one or several.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = Generation.unsupported | {
        "suffix": (None, "")
    }

    prompt: Annotated[list[RawText], BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)] = (
        Field(min_length=1, max_length=MOST_PROMPTS)
    )
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    echo: bool | None = None

    @property
    def scores_prompt(self) -> bool:
        """Whether the log probabilities of an answer begin with those of its prompt."""
        return bool(self.echo) and self.logprobs is not None

    @model_validator(mode="after")
    def _whole(self) -> CompletionRequest:
        if self.scores_prompt and self.stream:
            raise PydanticCustomError(
                "stream",
                "{param}: found beside echo and logprobs, expected two of the three: log "
                "probabilities of a prompt come with the whole answer",
                {"param": "stream"},
            )
        return self

    def options(self) -> dict[str, Any]:
        given = super().options()
        if self.logprobs is not None:
            given["logprobs"] = self.logprobs
        if self.scores_prompt:
            given["prompt_logprobs"] = max(self.logprobs or 0, self.prompt_logprobs or 0)
        return given
