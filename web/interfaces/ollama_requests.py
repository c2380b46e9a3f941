"""Requests in the form of Ollama: github.com/ollama/ollama, docs/api.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import to_json

from mtmd import RawPrompt, ToolCall
from mtmd.thinking.request import Effort
from mtmd.tools.tool import TOOLS_MAX
from mtmd.web.answering.answer import Asked, Turn
from mtmd.web.interfaces.fields import (
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOKENS,
    Additive,
    Loose,
    MinP,
    ModelName,
    Penalty,
    Request,
    Schema,
    Stops,
    Temperature,
    TopP,
    given,
    refuse_unsupported,
)
from mtmd.web.interfaces.tools import tool_options
from mtmd.web.interfaces.openai_requests import promised
from mtmd.web.interfaces.thinking import Budget
from mtmd.web.errors import ApiError
from mtmd.web.intake.body import WHOLE
from mtmd.web.intake.long_texts import CutText, PictureText, as_data_url, beginning
from mtmd.web.intake.media import Reference

# option -> values that ask for nothing
_OPTIONS: dict[str, tuple[Any, ...]] = {"typical_p": (1, 0), "tfs_z": (1, 0), "mirostat": (0,)}

MOST_CALLS = 256  # of one message

Images = Annotated[list[PictureText], Field(max_length=MOST_PARTS)]


class Options(Loose):
    """`num_predict` below 0 is for as many as there is room for. What says how to load a model
    (`num_ctx`, `num_gpu`, ...) was settled when the server was started, and is left aside.
    `think_budget` is not Ollama's.
    """

    num_predict: Annotated[int, Field(ge=-2, le=MOST_TOKENS), WHOLE] | None = None
    temperature: Temperature | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31), WHOLE] | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    repeat_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-1, lt=1 << 63), WHOLE] | None = None
    stop: Stops | None = None
    presence_penalty: Additive | None = None
    frequency_penalty: Additive | None = None
    think_budget: Budget | None = None
    typical_p: Any = None
    tfs_z: Any = None
    mirostat: Any = None

    def chosen(self) -> dict[str, Any]:
        """The fields of AnswerOptions that were given."""
        refuse_unsupported({name: getattr(self, name) for name in _OPTIONS}, _OPTIONS)
        if self.num_predict == 0:
            raise ApiError(
                400,
                "options.num_predict: found 0, expected at least 1, or -1 for as many as there is "
                "room for",
                param="options.num_predict",
            )
        return given(
            max_tokens=self.num_predict if (self.num_predict or -1) > 0 else None,
            temperature=self.temperature,
            top_k=None if self.top_k is None else max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=None if self.seed == -1 else self.seed,
            stop=tuple(self.stop) if self.stop else None,
        )


class CalledFunction(Loose):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class MessageCall(Loose):
    """Older versions of the interface give calls no id."""

    id: str | None = None
    function: CalledFunction


class Message(Loose):
    """`tool_name`, or `tool_call_id`: whose result it is, in a message of the role "tool"."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = ""
    thinking: str | None = None
    images: Images | None = None
    tool_calls: list[MessageCall] | None = Field(default=None, max_length=MOST_CALLS)
    tool_name: str | None = None
    tool_call_id: str | None = None


class Answered(Request):
    """What requests for answers have in common. Of `keep_alive` 0 alone means something, in a
    request that asks nothing: how long models stay is the server's choice.
    """

    harmless: ClassVar[frozenset[str]] = frozenset(("keep_alive", "truncate", "shift"))

    model: ModelName
    format: Schema | Literal["json", ""] | None = None
    options: Options | None = None
    stream: bool | None = None
    think: bool | Effort | None = None
    logprobs: Any = None

    @property
    def unloads(self) -> bool:
        """Whether the model is to be unloaded, where nothing is asked of it."""
        return (self.model_extra or {}).get("keep_alive") in (0, "0", "0s", "0m")

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def thinking(self) -> dict[str, Any]:
        """The fields of AnswerOptions about thoughts that were given."""
        budget = self.options.think_budget if self.options else None
        return given(think=self.think, think_budget=budget)

    def chosen(self) -> dict[str, Any]:
        """The fields of AnswerOptions that were given. Raises ApiError."""
        refuse_unsupported({"logprobs": self.logprobs}, {"logprobs": (False,)})
        schema = {"type": "object"} if self.format == "json" else promised(self.format or None)
        return (self.options.chosen() if self.options else {}) | given(json_schema=schema)


class ChatRequest(Answered):
    messages: list[Message] = Field(default=[], max_length=MOST_MESSAGES, fail_fast=True)
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=TOOLS_MAX)

    def asked(self) -> Asked:
        turns, open_calls = [], _OpenCalls()
        for i, message in enumerate(self.messages):
            pictures = _pictures(message.images, f"messages[{i}].images")
            parts: tuple[str | Reference, ...] = (*pictures, message.content or "")
            if message.role == "tool":
                turns.append(Turn("tool", parts, answers=open_calls.answered(message)))
            else:
                calls = message.tool_calls if message.role == "assistant" else None
                thought = (message.thinking if message.role == "assistant" else None) or ""
                made = open_calls.made(calls or ())
                turns.append(Turn(message.role, parts, made, thought=thought))
        tools = tool_options(self.tools)
        return Asked(turns, self.chosen(), tools=tools, thinking=self.thinking)


class _OpenCalls:
    """Calls that have no result yet. Those that came without an id are given one, as chat templates
    may tell by it which result is whose.
    """

    def __init__(self) -> None:
        self._open: list[ToolCall] = []
        self._count = 0

    def made(self, calls: Sequence[MessageCall]) -> tuple[ToolCall, ...]:
        made = []
        for call in calls:
            self._count += 1
            arguments = to_json(call.function.arguments).decode()
            made.append(ToolCall(call.id or f"call{self._count:05}", call.function.name, arguments))
        self._open += made
        return tuple(made)

    def answered(self, message: Message) -> str:
        """The id of the call that a result belongs to: the one it names, or the first without a
        result that it can be of.
        """
        for call in self._open:
            by_id = message.tool_call_id in (None, call.id)
            if by_id and message.tool_name in (None, "", call.name):
                self._open.remove(call)
                return call.id
        return message.tool_call_id or ""


class GenerateRequest(Answered):
    """`prompt` is what the user says: the model's chat template is put around it, unless it is
    `raw`.
    """

    prompt: str | None = None
    system: str | None = None
    images: Images | None = None
    suffix: Any = None
    template: Any = None
    context: Any = None
    raw: bool | None = None

    def raw_prompt(self) -> RawPrompt | None:
        """What is read as it is, without a chat template. Raises ApiError for pictures, which have
        no place in it, a system message, and thinking, which the template opens.
        """
        if not self.raw:
            return None
        refuse_unsupported({name: getattr(self, name) for name in _GENERATE}, _GENERATE)
        for name in ("images", "system"):
            if getattr(self, name):
                raise ApiError(400, f"{name}: found beside raw, expected one of them", param=name)
        for name, found in (
            ("think", self.think not in (None, False, "none")),
            ("options.think_budget", "think_budget" in self.thinking),
        ):
            if found:
                raise ApiError(
                    400,
                    f"{name}: found beside raw, expected no thinking there: without a chat "
                    "template nothing opens a thought",
                    param=name,
                )
        return RawPrompt(self.prompt or "")

    def asked(self) -> Asked:
        refuse_unsupported({name: getattr(self, name) for name in _GENERATE}, _GENERATE)
        system = [Turn("system", (self.system,))] if self.system else []
        parts: tuple[str | Reference, ...] = (*_pictures(self.images, "images"), self.prompt or "")
        return Asked([*system, Turn("user", parts)], self.chosen(), thinking=self.thinking)


_GENERATE: dict[str, tuple[Any, ...]] = {"suffix": ("",), "template": ("",), "context": ([],)}


class EmbedRequest(Loose):
    """All that is read of it, as models that write answers give no vectors."""

    model: ModelName | None = None


class ShowRequest(Loose):
    """Older clients call the model `name`."""

    model: ModelName | None = None
    name: ModelName | None = None


def _pictures(images: list[str | CutText] | None, place: str) -> list[Reference]:
    """Ollama's are base64 alone; a data URL or the id of an upload is taken too. The media type of
    a data URL does not matter: the first bytes decide.
    """
    return [
        Reference(
            f"{place}[{i}]",
            text
            if beginning(text).startswith(("data:", "file-"))
            else as_data_url(text, "image/unknown"),
        )
        for i, text in enumerate(images or ())
    ]
