"""Requests in the form of Anthropic's Messages API: docs.claude.com/en/api/messages."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from mtmd.web.adapters.door import Asked, Turn
from mtmd.web.adapters.fields import (
    MOST_MESSAGES,
    MOST_PARTS,
    Loose,
    MaxTokens,
    ModelName,
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
from mtmd.web.adapters.tools import check_history, check_tools
from mtmd.web.errors import TAG
from mtmd.web.intake.media import Reference


class Source(Loose):
    """`media_type` does not matter: the first bytes decide."""

    type: Literal["base64", "url", "file"]
    data: str = ""
    url: str = ""
    file_id: str = ""

    def reference(self, place: str) -> Reference:
        data = f"data:image/unknown;base64,{self.data}"
        urls = {"base64": data, "url": self.url, "file": self.file_id}
        return Reference(f"{place}.{self.type}", urls[self.type])


class TextBlock(Loose):
    type: Literal["text"]
    text: str


class ImageBlock(Loose):
    type: Literal["image"]
    source: Source


class ThinkingBlock(Loose):
    """Of an answer of another model; left out."""

    type: Literal["thinking", "redacted_thinking"]


class ToolBlock(Loose):
    type: Literal["tool_use", "tool_result"]


Block: TypeAlias = Annotated[
    Annotated[TextBlock, Tag(f"{TAG}text")]
    | Annotated[ImageBlock, Tag(f"{TAG}image")]
    | Annotated[ThinkingBlock, Tag(f"{TAG}thinking")]
    | Annotated[ThinkingBlock, Tag(f"{TAG}redacted_thinking")]
    | Annotated[ToolBlock, Tag(f"{TAG}tool_use")]
    | Annotated[ToolBlock, Tag(f"{TAG}tool_result")],
    Discriminator(
        kind,
        custom_error_type="block",
        custom_error_message="the type of a block has to be text or image; "
        "documents cannot be read",
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


class Thinking(Loose):
    type: Literal["enabled", "disabled", "adaptive"]


class CountRequest(Loose):
    """What matters for how many tokens a conversation takes."""

    model: ModelName
    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    system: System | None = None
    tools: Any = None
    tool_choice: Any = None
    thinking: Thinking | None = None

    def asked(self) -> Asked:
        check_tools(self.tools, self.tool_choice)
        thinking = self.thinking.type if self.thinking else None
        refuse_unsupported({"thinking": thinking}, {"thinking": ("disabled", "adaptive")})
        turns = [Turn("system", _parts(self.system, "system"))] if self.system else []
        turns += [
            Turn(message.role, _parts(message.content, f"messages[{i}].content"))
            for i, message in enumerate(self.messages)
        ]
        return Asked(turns, self.chosen())

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
    output_config: OutputConfig | None = None
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
            json_schema=written.schema_ if written else None,
        )


def _parts(content: str | list[Any], place: str) -> tuple[str | Reference, ...]:
    if isinstance(content, str):
        return (content,)
    parts: list[str | Reference] = []
    for i, block in enumerate(content):
        if isinstance(block, TextBlock):
            parts.append(block.text)
        elif isinstance(block, ImageBlock):
            parts.append(block.source.reference(f"{place}[{i}].source"))
        elif isinstance(block, ToolBlock):
            check_history(f"{place}[{i}]", block.type)
    return tuple(parts)
