"""Requests in the form of OpenAI's Responses API: the reference at platform.openai.com/docs."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from mtmd import ToolCall
from mtmd.web.answering.request import AnswerRequest, Piece, Turn, closest, continues, conversation
from mtmd.web.answering.tools import (
    GivenTools,
    chosen_tool,
    given_tools,
    in_namespace,
    text_arguments,
    tool_options,
)
from mtmd.web.errors import TAG, ApiError
from mtmd.web.intake.long_texts import PictureText
from mtmd.web.intake.media import Reference
from mtmd.web.intake.typed_body import Loose, Request
from mtmd.web.interfaces.fields import (
    MAX_MESSAGES,
    MAX_PARTS,
    Fraction,
    FrameCount,
    FramesPerSecond,
    MaxTokens,
    ModelName,
    Schema,
    Seconds,
    Several,
    Task,
    Temperature,
    Text,
    Tools,
    by_type,
    given,
    kind,
    of_file_data,
    pieces,
    promised,
    text_or,
)
from mtmd.web.interfaces.thinking import Reasoning

_LOGPROBS = "message.output_text.logprobs"


class TextPart(Loose):
    type: Literal["input_text", "output_text", "text"]
    text: str

    def piece(self, _: str) -> Piece:
        return self.text


class RefusalPart(Loose):
    type: Literal["refusal"]
    refusal: str

    def piece(self, _: str) -> Piece:
        return self.refusal


class ImagePart(Loose):
    type: Literal["input_image"]
    image_url: PictureText | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None

    def piece(self, location: str) -> Piece:
        if self.image_url is not None:
            return Reference(f"{location}.image_url", self.image_url)
        if self.file_id is None:
            raise _missing(location, "expected an image_url or a file_id")
        return Reference(f"{location}.file_id", self.file_id)


class VideoPart(Loose):
    """Not OpenAI's: as its pictures."""

    type: Literal["input_video"]
    video_url: PictureText | None = None
    file_id: str | None = None
    fps: FramesPerSecond | None = None
    max_frames: FrameCount | None = None
    start: Seconds | None = None
    end: Seconds | None = None
    no_sound: bool | None = None

    def piece(self, location: str) -> Piece:
        url = self.video_url if self.video_url is not None else self.file_id
        if url is None:
            raise _missing(location, "expected a video_url or a file_id", "invalid_video")
        span = {"start": self.start, "end": self.end, "no_sound": self.no_sound}
        frames = given(fps=self.fps, max_frames=self.max_frames, **span)
        return Reference(f"{location}.video_url", url, "video", frames)


class FilePart(Loose):
    """A picture, video or audio as a file."""

    type: Literal["input_file"]
    file_data: PictureText | None = None
    file_url: PictureText | None = None
    file_id: str | None = None

    def piece(self, location: str) -> Piece:
        data = None if self.file_data is None else of_file_data(self.file_data)
        urls = (("file_data", data), ("file_url", self.file_url), ("file_id", self.file_id))
        for name, url in urls:
            if url is not None:
                return Reference(f"{location}.{name}", url, None)
        raise _missing(
            location,
            "expected file_data, such as data:image/png;base64,..., a file_url or a file_id",
        )


def _missing(location: str, expected: str, code: str = "invalid_image") -> ApiError:
    return ApiError(400, f"{location}: {expected}", param=location, code=code)


Part: TypeAlias = Annotated[
    Annotated[TextPart, Tag(f"{TAG}input_text")]
    | Annotated[TextPart, Tag(f"{TAG}output_text")]
    | Annotated[TextPart, Tag(f"{TAG}text")]
    | Annotated[RefusalPart, Tag(f"{TAG}refusal")]
    | Annotated[ImagePart, Tag(f"{TAG}input_image")]
    | Annotated[VideoPart, Tag(f"{TAG}input_video")]
    | Annotated[FilePart, Tag(f"{TAG}input_file")],
    by_type(
        "part",
        "the type of a part has to be input_text, input_image, input_video, input_file, "
        "output_text or refusal",
    ),
]
Content: TypeAlias = Annotated[Text | Several[Part], text_or("parts")]


class MessageItem(Loose):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ReasoningText(Loose):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningItem(Loose):
    """Describes what the assistant thought before the item after it. Of another server's, whose
    content is encrypted, the summary is read.
    """

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = Field(default=None, max_length=MAX_PARTS)
    summary: list[ReasoningText] | None = Field(default=None, max_length=MAX_PARTS)
    encrypted_content: str | None = None

    @property
    def thought(self) -> str:
        if self.content:
            return "\n\n".join(part.text for part in self.content)
        sealed = unsealed_thought(self.encrypted_content or "")
        return sealed or "\n\n".join(part.text for part in self.summary or ())


class CallItem(Loose):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomItem(Loose):
    """A call of a tool that takes a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class OtherItem(Loose):
    """Item of a tool that a server runs; left out."""

    type: str


class OutputItem(Loose):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content


# Items of tools that a server runs, and of what OpenAI's does beside an answer.
_OTHERS = re.compile(
    r"(?!function|custom_tool)\w+_call(_output)?|mcp_\w+|tool_search_output|additional_tools|"
    r"compaction\w*|context_compaction|program(_output)?"
)


def _item(value: Any) -> str | None:
    """Messages may come without a type."""
    result = kind(value) or f"{TAG}message"
    return f"{TAG}other" if _OTHERS.fullmatch(result.removeprefix(TAG)) else result


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag(f"{TAG}message")]
    | Annotated[ReasoningItem, Tag(f"{TAG}reasoning")]
    | Annotated[CallItem, Tag(f"{TAG}function_call")]
    | Annotated[CustomItem, Tag(f"{TAG}custom_tool_call")]
    | Annotated[OutputItem, Tag(f"{TAG}function_call_output")]
    | Annotated[OutputItem, Tag(f"{TAG}custom_tool_call_output")]
    | Annotated[OtherItem, Tag(f"{TAG}other")],
    Discriminator(
        _item,
        custom_error_type="item",
        custom_error_message="the type of an item has to be message, function_call or "
        "function_call_output; no other can be read here",
    ),
]
Input: TypeAlias = Annotated[
    Text
    | Annotated[
        list[Item], Tag(f"{TAG}parts"), Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ],
    text_or("items", "input"),
]


class PlainFormat(Loose):
    type: Literal["text", "json_object"]


class SchemaFormat(Loose):
    type: Literal["json_schema"]
    name: str = Field(default="answer", max_length=64)
    schema_: Schema = Field(alias="schema")
    strict: bool | None = None


Format: TypeAlias = Annotated[
    Annotated[PlainFormat, Tag(f"{TAG}text")]
    | Annotated[PlainFormat, Tag(f"{TAG}json_object")]
    | Annotated[SchemaFormat, Tag(f"{TAG}json_schema")],
    by_type("format", "expected type text, json_object or json_schema"),
]


class TextConfig(Loose):
    format: Format | None = None


# What a client that keeps conversations itself is given in place of OpenAI's encrypted content: the
# thought, readable to anybody who looks.
_ENCODED = "mtmd-base64:"


def sealed_thought(thought: str) -> str:
    return _ENCODED + base64.b64encode(thought.encode()).decode()


def unsealed_thought(text: str) -> str:
    """Nothing where it is another server's."""
    if not text.startswith(_ENCODED):
        return ""
    try:
        return base64.b64decode(text[len(_ENCODED) :], validate=True).decode()
    except ValueError:
        return ""


Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


class ResponsesRequest(Request):
    """`truncation` is "auto" or not: what is too long is refused, and never cut. `max_tool_calls`
    counts those that a server runs, of which there are none.
    """

    harmless: ClassVar[frozenset[str]] = frozenset(
        ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    ) | {"service_tier", "stream_options", "truncation", "max_tool_calls", "client_metadata"}
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (False,),
        "conversation": (),
        "prompt": (),
        "top_logprobs": (0,),
    }

    model: ModelName | None = None
    input: Input
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = Field(default=None, max_length=128)
    metadata: Metadata | None = None
    reasoning: Reasoning | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = Field(default=None, max_length=64)
    task: Task | None = None

    @property
    def is_saved(self) -> bool:
        return self.store is not False

    @cached_property
    def given_tools(self) -> GivenTools:
        return given_tools(self.tools)

    @property
    def unknown(self) -> list[str]:
        items = enumerate(self.input if not isinstance(self.input, str) else ())
        others = [f"input[{i}] ({x.type[:60]})" for i, x in items if isinstance(x, OtherItem)]
        return [*super().unknown, *self.given_tools.left_out, *others]

    def request(self, turns: Sequence[Turn]) -> AnswerRequest:
        """`turns`: what was said before, and in this request. Raises ApiError for what cannot be
        done.
        """
        if self.instructions:
            turns = [Turn("system", (self.instructions,)), *turns]
        thinking = self.reasoning.options() if self.reasoning else {}
        return AnswerRequest(
            self.model,
            bool(self.stream),
            turns=conversation(turns),
            options=self._options(),
            prompt_options={**continues(turns), **self._tool_options(), **thinking},
            detail=closest(self._details()),
            custom_tools=self.given_tools.custom,
        )

    def turns(self) -> list[Turn]:
        """Return what is said in this request, without its instructions. Raises ApiError."""
        if _LOGPROBS in (self.include or ()):
            raise ApiError(
                400,
                f"include: {_LOGPROBS} is not supported here; chat completions have logprobs",
                param="include",
                code="unsupported_parameter",
            )
        if isinstance(self.input, str):
            return [Turn("user", (self.input,))]
        turns: list[Turn] = []
        thought = ""
        for i, item in enumerate(self.input):
            if isinstance(item, ReasoningItem):
                thought = "\n\n".join(filter(None, (thought, item.thought)))
            elif isinstance(item, (CallItem, CustomItem)):
                if not turns or turns[-1].role != "assistant" or thought:
                    turns.append(Turn("assistant", (), thought=thought))
                    thought = ""
                arguments = (
                    item.arguments if isinstance(item, CallItem) else text_arguments(item.input)
                )
                name = in_namespace(item.namespace, item.name)
                call = ToolCall(item.call_id, name, arguments)
                turns[-1] = replace(turns[-1], calls=(*turns[-1].calls, call))
            elif isinstance(item, OutputItem):
                parts = pieces(item.output, f"input[{i}].output")
                turns.append(Turn("tool", parts, answers=item.call_id))
            elif isinstance(item, MessageItem):
                role = "system" if item.role == "developer" else item.role
                parts, of_it = pieces(item.content, f"input[{i}].content"), thought
                turns.append(Turn(role, parts, thought=of_it if role == "assistant" else ""))
                thought = ""
        return turns

    @property
    def needs_encoded(self) -> bool:
        return "reasoning.encrypted_content" in (self.include or ())

    def _tool_options(self) -> dict[str, Any]:
        """The fields of AnswerOptions that say which tools there are."""
        choice = chosen_tool(self.tool_choice, self.given_tools)
        return tool_options(self.given_tools.tools, choice, self.parallel_tool_calls)

    def _details(self) -> list[str]:
        """Return how closely pictures are to be looked at: "original" is as they are."""
        items = self.input if not isinstance(self.input, str) else ()
        contents = [
            item.content if isinstance(item, MessageItem) else item.output
            for item in items
            if isinstance(item, (MessageItem, OutputItem))
        ]
        return [
            {"original": "high"}.get(part.detail, part.detail)
            for content in contents
            if not isinstance(content, str)
            for part in content
            if isinstance(part, ImagePart) and part.detail is not None
        ]

    def _options(self) -> dict[str, Any]:
        """The fields of AnswerOptions that were given."""
        written = self.text.format if self.text else None
        schema: dict[str, Any] | None = None
        if isinstance(written, SchemaFormat):
            schema = promised(written.schema_, written.strict)
        elif written is not None and written.type == "json_object":
            schema = {"type": "object"}
        return given(
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            json_schema=schema,
            task=self.task,
        )
