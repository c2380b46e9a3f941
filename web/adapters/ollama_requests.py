"""Requests in the form of Ollama: github.com/ollama/ollama, docs/api.md."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mtmd.web.adapters.door import Asked, Turn
from mtmd.web.adapters.fields import (
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOKENS,
    Additive,
    Loose,
    MinP,
    ModelName,
    Penalty,
    Schema,
    Seed,
    Stops,
    Temperature,
    TopP,
    given,
    refuse_unsupported,
)
from mtmd.web.adapters.tools import check_history, check_tools
from mtmd.web.errors import ApiError
from mtmd.web.intake.media import Reference

# option -> values that ask for nothing
_OPTIONS: dict[str, tuple[Any, ...]] = {"typical_p": (1, 0), "tfs_z": (1, 0), "mirostat": (0,)}
_DATA = "data:image/unknown;base64,"

Images = Annotated[list[str], Field(max_length=MOST_PARTS)]


class Options(Loose):
    """`num_predict` below 0 is for as many as there is room for. What says how to load a model
    (`num_ctx`, `num_gpu`, ...) was settled when the server was started, and is left aside.
    """

    num_predict: int | None = Field(default=None, ge=-2, le=MOST_TOKENS)
    temperature: Temperature | None = None
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    top_p: TopP | None = None
    min_p: MinP | None = None
    repeat_penalty: Penalty | None = None
    seed: Seed | Literal[-1] | None = None
    stop: Stops | None = None
    presence_penalty: Additive | None = None
    frequency_penalty: Additive | None = None
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


class Message(Loose):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: Images | None = None
    tool_calls: Any = None


class Answered(Loose):
    """What requests for answers have in common. `keep_alive` is left aside: the model stays."""

    model: ModelName
    format: Schema | Literal["json", ""] | None = None
    options: Options | None = None
    stream: bool | None = None
    think: Any = None
    logprobs: Any = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def chosen(self) -> dict[str, Any]:
        """The fields of AnswerOptions that were given. Raises ApiError."""
        refuse_unsupported({"think": self.think, "logprobs": self.logprobs}, _NEITHER)
        schema = {"type": "object"} if self.format == "json" else self.format or None
        return (self.options.chosen() if self.options else {}) | given(json_schema=schema)


_NEITHER: dict[str, tuple[Any, ...]] = {"think": (False,), "logprobs": (False,)}


class ChatRequest(Answered):
    messages: list[Message] = Field(default=[], max_length=MOST_MESSAGES, fail_fast=True)
    tools: Any = None

    def asked(self) -> Asked:
        check_tools(self.tools)
        turns = []
        for i, message in enumerate(self.messages):
            place = f"messages[{i}]"
            check_history(f"{place}.tool_calls", message.tool_calls)
            check_history(f"{place}.role", message.role if message.role == "tool" else None)
            pictures = _pictures(message.images, f"{place}.images")
            turns.append(Turn(message.role, (*pictures, message.content)))
        return Asked(turns, self.chosen())


class GenerateRequest(Answered):
    """`prompt` is what the user says: the model's chat template is put around it."""

    prompt: str = ""
    system: str = ""
    images: Images | None = None
    suffix: Any = None
    template: Any = None
    context: Any = None
    raw: Any = None

    def asked(self) -> Asked:
        refuse_unsupported({name: getattr(self, name) for name in _GENERATE}, _GENERATE)
        system = [Turn("system", (self.system,))] if self.system else []
        parts: tuple[str | Reference, ...] = (*_pictures(self.images, "images"), self.prompt)
        return Asked([*system, Turn("user", parts)], self.chosen())


_GENERATE: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "template": ("",),
    "context": ([],),
    "raw": (False,),
}


class ShowRequest(Loose):
    """Older clients call the model `name`."""

    model: ModelName | None = None
    name: ModelName | None = None


def _pictures(images: list[str] | None, place: str) -> list[Reference]:
    """Ollama's are base64 alone; a data URL or the id of an upload is taken too. The media type of
    a data URL does not matter: the first bytes decide.
    """
    return [
        Reference(f"{place}[{i}]", text if text.startswith(("data:", "file-")) else _DATA + text)
        for i, text in enumerate(images or ())
    ]
