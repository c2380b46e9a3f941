"""Requests in the form of Ollama: github.com/ollama/ollama, docs/api.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import to_json

from mtmd import ToolCall
from mtmd.thinking.request import Effort
from mtmd.web.answering.request import AnswerRequest, Piece, Turn, continues, conversation
from mtmd.web.answering.tools import tool_options
from mtmd.web.errors import ApiError
from mtmd.web.intake.long_texts import CutText, PictureText, as_data_url, beginning
from mtmd.web.intake.media import Reference
from mtmd.web.intake.typed_body import WHOLE, Loose, Request
from mtmd.web.interfaces.fields import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOKENS,
    Additive,
    Fraction,
    ModelName,
    Penalty,
    Schema,
    Stops,
    Task,
    Temperature,
    Tools,
    given,
    promised,
    within,
)
from mtmd.web.interfaces.thinking import Budget

Images = Annotated[list[PictureText], Field(max_length=MAX_PARTS)]


class Options(Request):
    """`num_predict` below 0 is for as many as there is room for. What says how to load a model
    (`num_ctx`, `num_gpu`, ...) was settled when the server was started, and is left aside.
    `think_budget` is not Ollama's.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "typical_p": (1, 0),
        "tfs_z": (1, 0),
        "mirostat": (0,),
    }

    num_predict: Annotated[int, Field(ge=-2, le=MAX_TOKENS), WHOLE] | None = None
    temperature: Temperature | None = None
    top_k: Annotated[int, within("top_k", -1), WHOLE] | None = None
    top_p: Fraction | None = None
    min_p: Fraction | None = None
    repeat_penalty: Penalty | None = None
    seed: Annotated[int, within("seed", -1), WHOLE] | None = None
    stop: Stops | None = None
    presence_penalty: Additive | None = None
    frequency_penalty: Additive | None = None
    think_budget: Budget | None = None

    def chosen(self) -> dict[str, Any]:
        """The fields of AnswerOptions that were given."""
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
    tool_calls: list[MessageCall] | None = Field(default=None, max_length=MAX_CALLS)
    tool_name: str | None = None
    tool_call_id: str | None = None


class Answered(Request):
    """Describes what requests for answers have in common. Of `keep_alive` 0 alone means something,
    in a request that asks nothing: how long models stay is the server's choice. `task` is not
    Ollama's.
    """

    harmless: ClassVar[frozenset[str]] = frozenset(("keep_alive", "truncate", "shift"))
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"logprobs": (False,)}

    model: ModelName
    format: Schema | Literal["json", ""] | None = None
    options: Options | None = None
    stream: bool | None = None
    think: bool | Effort | None = None
    task: Task | None = None

    @property
    def unloads(self) -> bool:
        """Return whether the model is to be unloaded, where nothing is asked of it."""
        return (self.model_extra or {}).get("keep_alive") in (0, "0", "0s", "0m")

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def says(self) -> bool:
        """Return whether there is anything to answer; a request without it loads a model."""
        raise NotImplementedError

    def request(self, model: str) -> AnswerRequest:
        """`model`: its name as it is known here. Raises ApiError for what cannot be done."""
        raise NotImplementedError

    @property
    def thinking(self) -> dict[str, Any]:
        """The fields of AnswerOptions about thoughts that were given."""
        budget = self.options.think_budget if self.options else None
        return given(think=self.think, think_budget=budget)

    def chosen(self) -> dict[str, Any]:
        """The fields of AnswerOptions that were given. Raises ApiError."""
        schema = {"type": "object"} if self.format == "json" else promised(self.format or None)
        options = self.options.chosen() if self.options else {}
        return options | given(json_schema=schema, task=self.task)


class ChatRequest(Answered):
    messages: list[Message] = Field(default=[], max_length=MAX_MESSAGES, fail_fast=True)
    tools: Tools | None = None

    @property
    def says(self) -> bool:
        return bool(self.messages)

    def request(self, model: str) -> AnswerRequest:
        turns, open_calls = [], _OpenCalls()
        for i, message in enumerate(self.messages):
            pictures = _pictures(message.images, f"messages[{i}].images")
            parts: tuple[Piece, ...] = (*pictures, message.content or "")
            if message.role == "tool":
                turns.append(Turn("tool", parts, answers=open_calls.answered(message)))
            else:
                calls = message.tool_calls if message.role == "assistant" else None
                thought = (message.thinking if message.role == "assistant" else None) or ""
                made = open_calls.made(calls or ())
                turns.append(Turn(message.role, parts, made, thought=thought))
        return AnswerRequest(
            model,
            self.streams,
            turns=conversation(turns),
            options=self.chosen(),
            prompt_options={**continues(turns), **tool_options(self.tools), **self.thinking},
        )


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

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = Answered.unsupported | {
        "suffix": ("",),
        "template": ("",),
        "context": ([],),
    }

    prompt: str | None = None
    system: str | None = None
    images: Images | None = None
    raw: bool | None = None

    @property
    def says(self) -> bool:
        return bool(self.prompt or self.images)

    def request(self, model: str) -> AnswerRequest:
        if self.raw:
            self._check_raw()
            prompts = (self.prompt or "",)
            return AnswerRequest(model, self.streams, prompts=prompts, options=self.chosen())
        system = [Turn("system", (self.system,))] if self.system else []
        parts: tuple[Piece, ...] = (*_pictures(self.images, "images"), self.prompt or "")
        return AnswerRequest(
            model,
            self.streams,
            turns=conversation([*system, Turn("user", parts)]),
            options=self.chosen(),
            prompt_options=self.thinking,
        )

    def _check_raw(self) -> None:
        """Raises ApiError for pictures, which have no place in a prompt that is read as it is, a
        system message, and thinking, which the chat template opens.
        """
        for name in ("images", "system"):
            if getattr(self, name):
                raise ApiError(400, f"{name}: found with raw, expected one of them", param=name)
        for name, result in (
            ("think", self.think not in (None, False, "none")),
            ("options.think_budget", "think_budget" in self.thinking),
        ):
            if result:
                raise ApiError(
                    400,
                    f"{name}: found with raw, expected no thinking there: without a chat "
                    "template nothing opens a thought",
                    param=name,
                )


class EmbedRequest(Loose):
    """All that is read of it, as models that write answers give no vectors."""

    model: ModelName | None = None


class ShowRequest(Loose):
    """Older clients call the model `name`."""

    model: ModelName | None = None
    name: ModelName | None = None


def _pictures(images: list[str | CutText] | None, location: str) -> list[Reference]:
    """Ollama's are base64 alone; a data URL or the id of an upload is taken too. The media type of
    a data URL does not matter: the first bytes decide.
    """
    return [
        Reference(
            f"{location}[{i}]",
            text
            if beginning(text).startswith(("data:", "file-"))
            else as_data_url(text, "image/unknown"),
            None,  # audio stands among them, too
        )
        for i, text in enumerate(images or ())
    ]
