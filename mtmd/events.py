"""Describes what a caller is told while an answer is made."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, Protocol, TypeAlias

from mtmd.prompt_logprobs import PromptLogprobs as PromptLogprobs
from mtmd.prompt_logprobs import PromptTokenInfo as PromptTokenInfo
from mtmd.receipt import Receipt
from mtmd.tools.tool import ToolCall


@dataclass(frozen=True)
class Progress:
    """Work before the first token: `stage` is "encode" (in tiles) or "prefill" (in tokens)."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class TokenInfo:
    """A token of the answer: its log probability, and (text, log probability) of the most probable
    ones there.
    """

    id: int
    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]

    def asdict(self) -> dict[str, Any]:
        """Return the asdict of JSON types."""
        top = [{"text": text, "logprob": logprob} for text, logprob in self.top]
        return {"id": self.id, "text": self.text, "logprob": self.logprob, "top": top}


@dataclass(frozen=True)
class TextPiece:
    """More of the answer; whole characters only. `tokens` are told where `logprobs` was asked
    for.
    """

    text: str
    tokens: tuple[TokenInfo, ...] = ()


@dataclass(frozen=True)
class ThinkingPiece:
    """More of what a model thinks before it answers, without the marks around it; `tokens` as of
    `TextPiece`.
    """

    text: str
    tokens: tuple[TokenInfo, ...] = ()


@dataclass(frozen=True)
class ToolCallPiece:
    """More of a tool call: `index` tells which of the answer's, in order; the first piece of each
    has its `id` and `name`, all joined have its `arguments`, JSON text.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class Box:
    """A part of the picture that an answer is about, in pixels of the picture, rotated upright."""

    label: str
    left: float
    top: float
    right: float
    bottom: float


class View(Protocol):
    """The pictures of an answer: how it looks in a notebook, and where in them its boxes lie."""

    def html(self, answer: Answer) -> str: ...

    def boxes(self, answer: Answer) -> tuple[Box, ...]: ...


@dataclass(frozen=True)
class Answer:
    """Describes what a model said to a prompt; `str()` of it is the text, and a notebook shows it
    with its pictures, boxes and receipt.

    `text` is without special tokens; `output_token_ids` are all of the answer, the end-of-answer
    token left out; `receipt` tells what the model saw, where it ran and how long each part took
    (`receipt.finish`: "stop", "length", "cancelled"). `tool_calls` are those that the model wrote,
    not part of the text. `stop`: the text of the option's before which it ended, None where it
    ended otherwise. `logprobs`: each token of the answer with its log probability, where the option
    asked for them. `thinking` is what the model thought before, not part of the text either.
    `prompt_logprobs`: a sequence of `PromptTokenInfo`, one for each token of the prompt, where the
    option asked for them; all answers to one prompt share it. `end`: the token
    that ended the answer, where one did and `logprobs` were asked for.
    """

    text: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    receipt: Receipt
    tool_calls: tuple[ToolCall, ...] = ()
    stop: str | None = None
    logprobs: tuple[TokenInfo, ...] = ()
    thinking: str = ""
    view: View | None = field(default=None, repr=False, compare=False)
    prompt_logprobs: PromptLogprobs | tuple[PromptTokenInfo, ...] = ()
    end: TokenInfo | None = None

    def __str__(self) -> str:
        return self.text

    def __format__(self, spec: str) -> str:
        return format(self.text, spec)

    @property
    def finish_reason(self) -> str:
        """Why it ended, as clients of OpenAI's interface read it: "stop", "length", "tool_calls" or
        "cancelled".
        """
        return self.receipt.finish

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Return those that its text gives, in any notation of vision-language models. Of an answer
        about one picture: of several, none says which one is meant.
        """
        return self.view.boxes(self) if self.view else ()

    def _repr_html_(self) -> str:
        """Return the HTML for notebooks."""
        return self.view.html(self) if self.view else f"<p>{escape(self.text)}</p>"

    def asdict(self) -> dict[str, Any]:
        """Return the asdict of JSON types; `thinking` where there is some, `logprobs` where they
        were asked for, `boxes` where there are any, `stop` where the answer ended before one.
        """
        reported: dict[str, Any] = {}
        if self.thinking:
            reported["thinking"] = self.thinking
        if self.logprobs:
            reported["logprobs"] = [token.asdict() for token in self.logprobs]
        if self.prompt_logprobs:
            reported["prompt_logprobs"] = [token.asdict() for token in self.prompt_logprobs]
        if boxes := self.boxes:
            reported["boxes"] = [asdict(box) for box in boxes]
        if self.stop is not None:
            reported["stop"] = self.stop
        return {
            "text": self.text,
            "prompt_token_ids": list(self.prompt_token_ids),
            "output_token_ids": list(self.output_token_ids),
            "receipt": self.receipt.asdict(),
            "tool_calls": [call.asdict() for call in self.tool_calls],
            **reported,
        }


@dataclass(frozen=True)
class Finished:
    """The last event of a stream."""

    answer: Answer


Event: TypeAlias = "Progress | ThinkingPiece | TextPiece | ToolCallPiece | Finished"
