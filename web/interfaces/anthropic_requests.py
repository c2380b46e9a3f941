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
from mtmd.web.answering.request import AnswerRequest, Piece, Turn, continues, conversation
from mtmd.web.answering.tools import GivenTools, given_tools, tool_options
from mtmd.web.errors import TAG, ApiError
from mtmd.web.intake.long_texts import PictureText, as_data_url
from mtmd.web.intake.media import Reference
from mtmd.web.intake.typed_body import Loose, Request
from mtmd.web.interfaces.fields import (
    MAX_MESSAGES,
    MAX_PARTS,
    Fraction,
    MaxTokens,
    ModelName,
    Schema,
    Several,
    Stops,
    Task,
    Temperature,
    Text,
    Tools,
    TopK,
    by_type,
    given,
    kind,
    pieces,
    promised,
    text_or,
)
from mtmd.web.interfaces.thinking import Thinking

_BILLING = "x-anthropic-billing-header:"


class Source(Loose):
    """`media_type` does not matter: the first bytes decide."""

    type: Literal["base64", "url", "file"]
    data: PictureText = ""
    url: PictureText = ""
    file_id: str = ""

    def piece(self, location: str) -> Piece:
        data = as_data_url(self.data, "image/unknown")
        urls = {"base64": data, "url": self.url, "file": self.file_id}
        return Reference(f"{location}.{self.type}", urls[self.type])


class TextBlock(Loose):
    type: Literal["text"]
    text: str

    def piece(self, _: str) -> Piece:
        return self.text


class ImageBlock(Loose):
    type: Literal["image"]
    source: Source

    def piece(self, location: str) -> Piece:
        return self.source.piece(f"{location}.source")


class ThinkingBlock(Loose):
    """Describes what the assistant thought. The signature is not looked at; what is redacted is
    left out.
    """

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

    def piece(self, _: str) -> Piece:
        return "\n".join(filter(None, (self.title, self.source["data"])))


class SearchResultBlock(Loose):
    """Describes what the client has found."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock] = Field(max_length=MAX_PARTS)

    def piece(self, _: str) -> Piece:
        return "\n".join((self.title, self.source, *(block.text for block in self.content)))


class ToolReference(Loose):
    """A tool that the client has found for the model, which knows all tools anyway."""

    type: Literal["tool_reference"]
    tool_name: str

    def piece(self, _: str) -> Piece:
        return self.tool_name


class OtherBlock(Loose):
    """Block of a tool that a server runs; left out."""

    type: str


_OTHERS = re.compile(r"server_tool_use|mcp_tool_use|\w+_tool_result")


def _block(value: Any) -> str | None:
    result = kind(value)
    return f"{TAG}other" if result and _OTHERS.fullmatch(result.removeprefix(TAG)) else result


Shown: TypeAlias = Annotated[
    Annotated[TextBlock, Tag(f"{TAG}text")]
    | Annotated[ImageBlock, Tag(f"{TAG}image")]
    | Annotated[DocumentBlock, Tag(f"{TAG}document")]
    | Annotated[SearchResultBlock, Tag(f"{TAG}search_result")]
    | Annotated[ToolReference, Tag(f"{TAG}tool_reference")],
    by_type(
        "block",
        "the type of a block in a result has to be text, image, document, search_result or "
        "tool_reference",
    ),
]
Result: TypeAlias = Annotated[Text | Several[Shown], text_or("blocks")]


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
Content: TypeAlias = Annotated[Text | Several[Block], text_or("blocks")]
System: TypeAlias = Annotated[Text | Several[TextBlock], text_or("blocks of text")]


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
        """Return the choice as OpenAI's interface writes it."""
        if self.type == "tool":
            return {"type": "function", "name": self.name}
        return "required" if self.type == "any" else self.type


class CountRequest(Request):
    """Describes what matters for how many tokens a conversation takes."""

    harmless: ClassVar[frozenset[str]] = frozenset(
        ("metadata", "service_tier", "inference_geo", "cache_control", "betas", "speed")
    )

    model: ModelName
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    system: System | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def request(self) -> AnswerRequest:
        """Raises ApiError for what cannot be done."""
        system = _system(self.system)
        turns = [Turn("system", system)] if system else []
        for i, message in enumerate(self.messages):
            turns += _turns(message, f"messages[{i}].content")
        effort = given(think=self.output_config.effort if self.output_config else None)
        thinking = effort | (self.thinking.options() if self.thinking else {})
        return AnswerRequest(
            self.model,
            self.streams,
            turns=conversation(turns),
            options=self.options(),
            prompt_options={**continues(turns), **self._tools(), **thinking},
        )

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

    @property
    def streams(self) -> bool:
        return False

    def options(self) -> dict[str, Any]:
        """The fields of AnswerOptions that were given."""
        return {}


class MessagesRequest(CountRequest):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"container": (), "mcp_servers": ([],)}

    max_tokens: MaxTokens
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Fraction | None = None
    stop_sequences: Stops | None = None
    stream: bool | None = None
    output_format: JsonFormat | None = None
    task: Task | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    def options(self) -> dict[str, Any]:
        written = (self.output_config and self.output_config.format) or self.output_format
        return given(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stop=tuple(self.stop_sequences) if self.stop_sequences else None,
            json_schema=promised(written.schema_) if written else None,
            task=self.task,
        )


def _system(value: str | Sequence[TextBlock] | None) -> tuple[str, ...]:
    """Return it without what Claude Code writes first for who counts what it costs: it is another
    one with every request, and nothing after it would be known from the last.
    """
    texts = [value] if isinstance(value, str) else [block.text for block in value or ()]
    stated = (t.partition("\n")[2] if t.startswith(_BILLING) else t for t in texts)
    return tuple(text for text in stated if text)


def _turns(message: Message, location: str) -> Iterator[Turn]:
    """Results of tools, which stand in messages of the user, are turns of their own, and come
    first: right after the calls.
    """
    if isinstance(message.content, str):
        yield Turn(message.role, (message.content,))
        return
    stated: list[Piece] = []
    calls: list[ToolCall] = []
    results, others, thoughts = False, False, list[str]()
    for i, block in enumerate(message.content):
        at = f"{location}[{i}]"
        if isinstance(block, ToolUse):
            _check_role(message, "assistant", at)
            calls.append(ToolCall(block.id, block.name, to_json(block.input).decode()))
        elif isinstance(block, ToolResult):
            _check_role(message, "user", at)
            yield Turn("tool", _result(block, at), answers=block.tool_use_id)
            results = True
        elif isinstance(block, ThinkingBlock):
            thoughts += [block.thinking] if message.role == "assistant" and block.thinking else []
        elif isinstance(block, OtherBlock):
            others = True
        else:
            stated.append(block.piece(at))
    if stated or others or calls or not results:
        yield Turn(message.role, tuple(stated), tuple(calls), thought="\n\n".join(thoughts))


def _check_role(message: Message, role: str, location: str) -> None:
    if message.role != role:
        raise ApiError(
            400,
            f"{location}: found in a message of the {message.role}, expected in one of the {role}",
            param=location,
        )


def _result(block: ToolResult, location: str) -> tuple[Piece, ...]:
    """Return what failed says so: chat templates have no other place for it."""
    parts = pieces(block.content, f"{location}.content")
    if not block.is_error or str(parts[0] if parts else "").lower().startswith("error"):
        return parts
    if parts and isinstance(parts[0], str):
        return (f"Error: {parts[0]}", *parts[1:])
    return ("Error: ", *parts)
