"""Requests in the form of OpenAI's Responses API: the reference at platform.openai.com/docs."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from mtmd import ToolCall
from mtmd.tools.tool import TOOLS_MAX
from mtmd.web.answering.answer import Turn
from mtmd.web.interfaces.fields import (
    MOST_MESSAGES,
    MOST_PARTS,
    Loose,
    MaxTokens,
    ModelName,
    Request,
    Schema,
    Temperature,
    TopP,
    given,
    kind,
    refuse_unsupported,
    text_or_list,
)
from mtmd.web.interfaces.tools import tool_options
from mtmd.web.answering.tools import GivenTools, chosen_tool, given_tools, text_arguments
from mtmd.web.interfaces.openai_requests import of_file_data, promised
from mtmd.web.interfaces.thinking import Reasoning
from mtmd.web.errors import TAG, ApiError
from mtmd.web.intake.body import WHOLE
from mtmd.web.intake.long_texts import PictureText
from mtmd.web.intake.media import Reference

_LOGPROBS = "message.output_text.logprobs"


class TextPart(Loose):
    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(Loose):
    type: Literal["refusal"]
    refusal: str


class ImagePart(Loose):
    type: Literal["input_image"]
    image_url: PictureText | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None


class VideoPart(Loose):
    """Not OpenAI's: as its pictures."""

    type: Literal["input_video"]
    video_url: PictureText | None = None
    file_id: str | None = None
    fps: float | None = Field(default=None, gt=0, le=240)
    max_frames: Annotated[int, Field(ge=1, le=1 << 20), WHOLE] | None = None
    start: float | None = Field(default=None, ge=0, lt=1e9)
    end: float | None = Field(default=None, ge=0, lt=1e9)


class FilePart(Loose):
    """A picture or video as a file."""

    type: Literal["input_file"]
    file_data: PictureText | None = None
    file_url: PictureText | None = None
    file_id: str | None = None


Part: TypeAlias = Annotated[
    Annotated[TextPart, Tag(f"{TAG}input_text")]
    | Annotated[TextPart, Tag(f"{TAG}output_text")]
    | Annotated[TextPart, Tag(f"{TAG}text")]
    | Annotated[RefusalPart, Tag(f"{TAG}refusal")]
    | Annotated[ImagePart, Tag(f"{TAG}input_image")]
    | Annotated[VideoPart, Tag(f"{TAG}input_video")]
    | Annotated[FilePart, Tag(f"{TAG}input_file")],
    Discriminator(
        kind,
        custom_error_type="part",
        custom_error_message="the type of a part has to be input_text, input_image, input_video, "
        "input_file, output_text or refusal",
    ),
]
Content: TypeAlias = Annotated[
    Annotated[str, Tag(f"{TAG}text")]
    | Annotated[list[Part], Tag(f"{TAG}parts"), Field(max_length=MOST_PARTS, fail_fast=True)],
    Discriminator(
        text_or_list,
        custom_error_type="content",
        custom_error_message="expected a text or a list of parts",
    ),
]


class MessageItem(Loose):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ReasoningText(Loose):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningItem(Loose):
    """What the assistant thought before the item after it. Of another server's, whose content is
    encrypted, the summary is read.
    """

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = Field(default=None, max_length=MOST_PARTS)
    summary: list[ReasoningText] | None = Field(default=None, max_length=MOST_PARTS)
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
    arguments: str


class CustomItem(Loose):
    """A call of a tool that takes a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class OtherItem(Loose):
    """Of a tool that a server runs; left out."""

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
    found = kind(value) or f"{TAG}message"
    return f"{TAG}other" if _OTHERS.fullmatch(found.removeprefix(TAG)) else found


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
    Annotated[str, Tag(f"{TAG}text")]
    | Annotated[
        list[Item],
        Tag(f"{TAG}parts"),
        Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True),
    ],
    Discriminator(
        text_or_list,
        custom_error_type="input",
        custom_error_message="expected a text or a list of items",
    ),
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
    Discriminator(
        kind,
        custom_error_type="format",
        custom_error_message="expected type text, json_object or json_schema",
    ),
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
    top_p: TopP | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = Field(default=None, max_length=128)
    metadata: Metadata | None = None
    reasoning: Reasoning | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=TOOLS_MAX)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    background: Any = None
    conversation: Any = None
    prompt: Any = None
    top_logprobs: Any = None
    include: list[str] | None = Field(default=None, max_length=64)

    @property
    def is_kept(self) -> bool:
        return self.store is not False

    def check(self) -> None:
        """Raises ApiError for what cannot be done."""
        refuse_unsupported(
            {name: getattr(self, name) for name in self.unsupported}, self.unsupported
        )
        if _LOGPROBS in (self.include or ()):
            raise ApiError(
                400,
                f"include: {_LOGPROBS} is not supported here; chat completions have logprobs",
                param="include",
                code="unsupported_parameter",
            )

    @cached_property
    def given_tools(self) -> GivenTools:
        return given_tools(self.tools)

    @property
    def unknown(self) -> list[str]:
        items = enumerate(self.input if not isinstance(self.input, str) else ())
        others = [f"input[{i}] ({x.type[:60]})" for i, x in items if isinstance(x, OtherItem)]
        return [*super().unknown, *self.given_tools.left_out, *others]

    def turns(self) -> list[Turn]:
        """What is said in this request, without its instructions."""
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
                call = ToolCall(item.call_id, item.name, arguments)
                turns[-1] = replace(turns[-1], calls=(*turns[-1].calls, call))
            elif isinstance(item, OutputItem):
                parts = _parts(item.output, f"input[{i}].output")
                turns.append(Turn("tool", parts, answers=item.call_id))
            elif isinstance(item, MessageItem):
                role = "system" if item.role == "developer" else item.role
                parts, of_it = _parts(item.content, f"input[{i}].content"), thought
                turns.append(Turn(role, parts, thought=of_it if role == "assistant" else ""))
                thought = ""
        return turns

    @property
    def thinking_options(self) -> dict[str, Any]:
        """The fields of AnswerOptions about thoughts that were given."""
        return self.reasoning.options() if self.reasoning else {}

    @property
    def wants_encoded(self) -> bool:
        return "reasoning.encrypted_content" in (self.include or ())

    def tool_options(self) -> dict[str, Any]:
        """The fields of AnswerOptions that say which tools there are."""
        tools, choice = self.given_tools.tools, chosen_tool(self.tool_choice)
        return tool_options(tools, choice, self.parallel_tool_calls)

    def details(self) -> list[str]:
        """How closely pictures are to be looked at: "original" is as they are."""
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

    def chosen(self) -> dict[str, Any]:
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
        )


def _parts(content: str | list[Any], place: str) -> tuple[str | Reference, ...]:
    if isinstance(content, str):
        return (content,)
    return tuple(
        part.text
        if isinstance(part, TextPart)
        else part.refusal
        if isinstance(part, RefusalPart)
        else _video(part, f"{place}[{i}]")
        if isinstance(part, VideoPart)
        else _file(part, f"{place}[{i}]")
        if isinstance(part, FilePart)
        else _picture(part, f"{place}[{i}]")
        for i, part in enumerate(content)
    )


def _video(part: VideoPart, place: str) -> Reference:
    url = part.video_url if part.video_url is not None else part.file_id
    if url is None:
        raise ApiError(
            400, f"{place}: expected a video_url or a file_id", param=place, code="invalid_video"
        )
    chosen = part.model_dump(include={"fps", "max_frames", "start", "end"}, exclude_none=True)
    return Reference(f"{place}.video_url", url, True, chosen)


def _file(part: FilePart, place: str) -> Reference:
    data = None if part.file_data is None else of_file_data(part.file_data)
    for name, url in (("file_data", data), ("file_url", part.file_url), ("file_id", part.file_id)):
        if url is not None:
            return Reference(f"{place}.{name}", url, None)
    raise ApiError(
        400,
        f"{place}: expected file_data, such as data:image/png;base64,..., a file_url or a file_id",
        param=place,
        code="invalid_image",
    )


def _picture(part: ImagePart, place: str) -> Reference:
    url = part.image_url if part.image_url is not None else part.file_id
    if url is None:
        raise ApiError(
            400, f"{place}: expected an image_url or a file_id", param=place, code="invalid_image"
        )
    return Reference(
        f"{place}.image_url" if part.image_url is not None else f"{place}.file_id", url
    )
