"""Requests in the form of Anthropic's Messages API: docs.claude.com/en/api/messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError, to_json

from mtmd import ToolCall
from mtmd.thinking.request import Effort
from mtmd.tools.tool import TOOLS_MAX
from mtmd.web.answering.answer import Asked, Turn
from mtmd.web.interfaces.fields import (
    MOST_MESSAGES,
    MOST_PARTS,
    Loose,
    MaxTokens,
    ModelName,
    Request,
    Schema,
    Stops,
    Temperature,
    TopK,
    TopP,
    given,
    kind,
    refuse_unsupported,
    text_or_list,
)
from mtmd.web.interfaces.tools import tool_options
from mtmd.web.answering.tools import GivenTools, given_tools
from mtmd.web.interfaces.openai_requests import promised
from mtmd.web.interfaces.thinking import Thinking
from mtmd.web.errors import TAG, ApiError
from mtmd.web.intake.long_texts import PictureText, as_data_url
from mtmd.web.intake.media import Reference

_BILLING = "x-anthropic-billing-header:"


class Source(Loose):
    """`media_type` does not matter: the first bytes decide."""

    type: Literal["base64", "url", "file"]
    data: PictureText = ""
    url: PictureText = ""
    file_id: str = ""

    def reference(self, place: str) -> Reference:
        data = as_data_url(self.data, "image/unknown")
        urls = {"base64": data, "url": self.url, "file": self.file_id}
        return Reference(f"{place}.{self.type}", urls[self.type])


class TextBlock(Loose):
    type: Literal["text"]
    text: str


class ImageBlock(Loose):
    type: Literal["image"]
    source: Source


class ThinkingBlock(Loose):
    """What the assistant thought. The signature is not looked at; what is redacted is left out."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


class ToolUse(Loose):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict)


class DocumentBlock(Loose):
    """A text as a file."""

    type: Literal["document"]
    source: dict[str, Any]
    title: str | None = None

    @field_validator("source")
    @classmethod
    def _is_text(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value.get("type") != "text" or not isinstance(value.get("data"), str):
            raise PydanticCustomError(
                "document",
                "expected a document of plain text, with a source of the type text; others, such "
                "as PDF, cannot be read: send their pages as pictures",
            )
        return value

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.source["data"])))


class SearchResultBlock(Loose):
    """What the client has found."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock] = Field(max_length=MOST_PARTS)

    @property
    def text(self) -> str:
        return "\n".join((self.title, self.source, *(block.text for block in self.content)))


class ToolReference(Loose):
    """A tool that the client has found for the model, which knows all tools anyway."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return self.tool_name


class OtherBlock(Loose):
    """Of a tool that a server runs; left out."""

    type: str


_OTHERS = re.compile(r"server_tool_use|mcp_tool_use|\w+_tool_result")


def _block(value: Any) -> str | None:
    found = kind(value)
    return f"{TAG}other" if found and _OTHERS.fullmatch(found.removeprefix(TAG)) else found


Shown: TypeAlias = Annotated[
    Annotated[TextBlock, Tag(f"{TAG}text")]
    | Annotated[ImageBlock, Tag(f"{TAG}image")]
    | Annotated[DocumentBlock, Tag(f"{TAG}document")]
    | Annotated[SearchResultBlock, Tag(f"{TAG}search_result")]
    | Annotated[ToolReference, Tag(f"{TAG}tool_reference")],
    Discriminator(
        kind,
        custom_error_type="block",
        custom_error_message="the type of a block in a result has to be text, image, document, "
        "search_result or tool_reference",
    ),
]
Result: TypeAlias = Annotated[
    Annotated[str, Tag(f"{TAG}text")]
    | Annotated[list[Shown], Tag(f"{TAG}parts"), Field(max_length=MOST_PARTS, fail_fast=True)],
    Discriminator(
        text_or_list,
        custom_error_type="content",
        custom_error_message="expected a text or a list of blocks",
    ),
]


class ToolResult(Loose):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Result | None = None
    is_error: bool | None = None


Block: TypeAlias = Annotated[
    Annotated[TextBlock, Tag(f"{TAG}text")]
    | Annotated[ImageBlock, Tag(f"{TAG}image")]
    | Annotated[ThinkingBlock, Tag(f"{TAG}thinking")]
    | Annotated[ThinkingBlock, Tag(f"{TAG}redacted_thinking")]
    | Annotated[ToolUse, Tag(f"{TAG}tool_use")]
    | Annotated[ToolResult, Tag(f"{TAG}tool_result")]
    | Annotated[DocumentBlock, Tag(f"{TAG}document")]
    | Annotated[SearchResultBlock, Tag(f"{TAG}search_result")]
    | Annotated[OtherBlock, Tag(f"{TAG}other")],
    Discriminator(
        _block,
        custom_error_type="block",
        custom_error_message="the type of a block has to be text, image, document, search_result, "
        "tool_use or tool_result",
    ),
]
Content: TypeAlias = Annotated[
    Annotated[str, Tag(f"{TAG}text")]
    | Annotated[list[Block], Tag(f"{TAG}parts"), Field(max_length=MOST_PARTS, fail_fast=True)],
    Discriminator(
        text_or_list,
        custom_error_type="content",
        custom_error_message="expected a text or a list of blocks",
    ),
]
System: TypeAlias = Annotated[
    Annotated[str, Tag(f"{TAG}text")]
    | Annotated[list[TextBlock], Tag(f"{TAG}parts"), Field(max_length=MOST_PARTS, fail_fast=True)],
    Discriminator(
        text_or_list,
        custom_error_type="content",
        custom_error_message="expected a text or a list of blocks of text",
    ),
]


class Message(Loose):
    role: Literal["user", "assistant", "system"]
    content: Content


class JsonFormat(Loose):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(Loose):
    format: JsonFormat | None = None
    effort: Effort | None = None


class Choice(Loose):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def chosen(self) -> str | dict[str, Any]:
        """As OpenAI's interface says it."""
        if self.type == "tool":
            return {"type": "function", "name": self.name}
        return "required" if self.type == "any" else self.type


class CountRequest(Request):
    """What matters for how many tokens a conversation takes."""

    harmless: ClassVar[frozenset[str]] = frozenset(
        ("metadata", "service_tier", "inference_geo", "cache_control", "betas", "speed")
    )

    model: ModelName
    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    system: System | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=TOOLS_MAX)
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def asked(self) -> Asked:
        system = _system(self.system)
        turns = [Turn("system", system)] if system else []
        for i, message in enumerate(self.messages):
            turns += _turns(message, f"messages[{i}].content")
        thinking = self.output_effort | (self.thinking.options() if self.thinking else {})
        return Asked(turns, self.chosen(), tools=self._tools(), thinking=thinking)

    @property
    def output_effort(self) -> dict[str, Any]:
        """How much to think, as an option."""
        effort = self.output_config.effort if self.output_config else None
        return given(think=effort)

    @cached_property
    def given_tools(self) -> GivenTools:
        return given_tools(self.tools, "custom")

    @property
    def unknown(self) -> list[str]:
        blocks = [
            f"messages[{i}].content[{j}] ({block.type[:60]})"
            for i, message in enumerate(self.messages)
            for j, block in enumerate(
                message.content if not isinstance(message.content, str) else ()
            )
            if isinstance(block, OtherBlock)
        ]
        return [*super().unknown, *self.given_tools.left_out, *blocks]

    def _tools(self) -> dict[str, Any]:
        tools = self.given_tools.tools
        choice = self.tool_choice or Choice(type="auto")
        if choice.type == "any" and not tools:
            raise ApiError(
                400, "tool_choice.type: found 'any' without tools", param="tool_choice.type"
            )
        several = False if choice.disable_parallel_tool_use else None
        return tool_options(tools, choice.chosen(), several)

    def chosen(self) -> dict[str, Any]:
        """The fields of AnswerOptions that were given."""
        return {}


class MessagesRequest(CountRequest):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"container": (), "mcp_servers": ([],)}

    max_tokens: MaxTokens
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    stop_sequences: Stops | None = None
    stream: bool | None = None
    output_format: JsonFormat | None = None
    container: Any = None
    mcp_servers: Any = None

    def chosen(self) -> dict[str, Any]:
        refuse_unsupported(
            {name: getattr(self, name) for name in self.unsupported}, self.unsupported
        )
        written = (self.output_config and self.output_config.format) or self.output_format
        return given(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stop=tuple(self.stop_sequences) if self.stop_sequences else None,
            json_schema=promised(written.schema_) if written else None,
        )


def _system(value: str | Sequence[TextBlock] | None) -> tuple[str, ...]:
    """Without what Claude Code writes first for who counts what it costs: it is another one with
    every request, and nothing after it would be known from the last.
    """
    texts = [value] if isinstance(value, str) else [block.text for block in value or ()]
    said = (t.partition("\n")[2] if t.startswith(_BILLING) else t for t in texts)
    return tuple(text for text in said if text)


def _turns(message: Message, place: str) -> Iterator[Turn]:
    """Results of tools, which stand in messages of the user, are turns of their own, and come
    first: right after the calls.
    """
    if isinstance(message.content, str):
        yield Turn(message.role, (message.content,))
        return
    said: list[tuple[str, Any]] = []
    calls: list[ToolCall] = []
    results, thoughts = False, list[str]()
    for i, block in enumerate(message.content):
        at = f"{place}[{i}]"
        if isinstance(block, ToolUse):
            _check_role(message, "assistant", at)
            calls.append(ToolCall(block.id, block.name, to_json(block.input).decode()))
        elif isinstance(block, ToolResult):
            _check_role(message, "user", at)
            yield Turn("tool", _result(block, at), answers=block.tool_use_id)
            results = True
        elif isinstance(block, ThinkingBlock):
            thoughts += [block.thinking] if message.role == "assistant" and block.thinking else []
        else:
            said.append((at, block))
    if said or calls or not results:
        yield Turn(message.role, _parts(said), tuple(calls), thought="\n\n".join(thoughts))


def _check_role(message: Message, role: str, place: str) -> None:
    if message.role != role:
        raise ApiError(
            400,
            f"{place}: found in a message of the {message.role}, expected in one of the {role}",
            param=place,
        )


def _result(block: ToolResult, place: str) -> tuple[str | Reference, ...]:
    """What failed says so: chat templates have no other place for it."""
    if isinstance(block.content, str):
        parts: tuple[str | Reference, ...] = (block.content,)
    else:
        shown = enumerate(block.content or ())
        parts = _parts([(f"{place}.content[{i}]", part) for i, part in shown])
    if not block.is_error or str(parts[0] if parts else "").lower().startswith("error"):
        return parts
    if parts and isinstance(parts[0], str):
        return (f"Error: {parts[0]}", *parts[1:])
    return ("Error: ", *parts)


def _parts(blocks: Sequence[tuple[str, Any]]) -> tuple[str | Reference, ...]:
    """Texts and pictures of blocks, each with its place."""
    parts: list[str | Reference] = []
    for place, block in blocks:
        if isinstance(block, (TextBlock, DocumentBlock, SearchResultBlock, ToolReference)):
            parts.append(block.text)
        elif isinstance(block, ImageBlock):
            parts.append(block.source.reference(f"{place}.source"))
    return tuple(parts)
