"""What every adapter does with a request once it is read: pictures opened, the service asked, the
answer handed out whole or as it is written, and all let go of when nobody waits any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from flask import Response, after_this_request, g

from mtmd import RawPrompt, Ticket, TokenCount, ToolCall
from mtmd.web import sse
from mtmd.web.interfaces.fields import Request
from mtmd.web.answering.delivery import Delivery, cancel
from mtmd.web.interfaces.openai import Api, Asking, ModelApi, unknown_field
from mtmd.web.auth import owner
from mtmd.web.errors import ApiError, as_api_error, response
from mtmd.web.intake.media import Reference

IGNORED = "X-Mtmd-Ignored"
_DETAILS = ("low", "auto", "high")


@dataclass(frozen=True)
class Turn:
    """What one message says: texts and pictures in order, then `calls` of tools. `answers`: the id
    of the call whose result this is, in a turn of the role "tool". `thought`: what the assistant
    thought before.
    """

    role: str
    parts: tuple[str | Reference, ...]
    calls: tuple[ToolCall, ...] = ()
    answers: str | None = None
    thought: str = ""

    @property
    def characters(self) -> int:
        texts = [part for part in self.parts if isinstance(part, str)]
        called = sum(len(call.arguments) for call in self.calls)
        return sum(map(len, texts)) + called + len(self.thought)

    @property
    def held_bytes(self) -> int:
        """What it takes to keep."""
        said = sum(len(p.encode()) if isinstance(p, str) else p.held_bytes for p in self.parts)
        called = sum(len(c.id) + len(c.name) + len(c.arguments.encode()) for c in self.calls)
        return said + called + len(self.answers or "") + len(self.thought.encode())


@dataclass(frozen=True)
class Asked:
    """A request in nobody's form. `options`: fields of AnswerOptions; `tools`: those of them that
    say which tools there are, and `thinking`: those about thoughts, which are part of the prompt.
    """

    turns: Sequence[Turn]
    options: Mapping[str, Any] = field(default_factory=dict)
    details: Sequence[str] = ()
    tools: Mapping[str, Any] = field(default_factory=dict)
    thinking: Mapping[str, Any] = field(default_factory=dict)


def error_response(error: Exception, form: Callable[[ApiError], Mapping[str, Any]]) -> Response:
    """Return the answer to an error in an adapter's own form."""
    return response(as_api_error(error, g.get("request_id", "req")), form)


class Door:
    """`api`: what OpenAI's routes work with; adapters are beside them, over the same service."""

    def __init__(self, api: Api) -> None:
        self.api, self.models = api, api.models

    def of(self, name: str | None) -> ModelDoor:
        """For the request that is being answered. Raises ApiError (404) for a model that is not
        here.
        """
        return ModelDoor(self.api.of(name))

    def answered(
        self,
        body: Asking,
        begin: Callable[[ModelDoor], Response],
        failed: Callable[[ApiError], str],
        beat: Callable[[], str] | None = None,
        mimetype: str = sse.MIMETYPE,
    ) -> Response:
        """As `Api.answered`."""
        return self.api.answered(
            body, lambda model: begin(ModelDoor(model)), failed, beat, mimetype
        )

    def check_fields(self, body: Request) -> None:
        """Fields that nobody knows are named in a header of the answer, or refused. Raises ApiError
        (400) for the first one then.
        """
        unknown = body.unknown
        if unknown and self.api.unknown_fields == "refuse":
            raise unknown_field(unknown[0])
        if unknown:
            names = ", ".join(ascii(name[:60])[1:-1] for name in unknown[:20])

            @after_this_request
            def name_them(response: Response) -> Response:
                response.headers[IGNORED] = names
                return response


class ModelDoor:
    """What a request works with, once its model is in memory."""

    def __init__(self, api: ModelApi) -> None:
        self.api, self.model, self.service = api, api.model, api.service

    def begin(self, asked: Asked, custom: frozenset[str] = frozenset()) -> Delivery:
        """Raises ApiError and MtmdError for what is wrong with it."""
        with ExitStack() as stack:
            messages = stack.enter_context(self._opened(asked.turns))
            chosen = _of_the_prompt(asked) | dict(asked.options)
            options = self.model.options(chosen, _detail(asked))
            ticket = self.service.submit(messages, tenant=owner(), **options)
            return Delivery([ticket], stack.pop_all(), custom)

    def begin_raw(self, prompts: Sequence[RawPrompt], options: Mapping[str, Any]) -> Delivery:
        """Of prompts without a chat template. Raises as `begin`."""
        tickets: list[Ticket] = []
        with ExitStack() as begun:
            for prompt in prompts:
                tickets.append(self.service.submit(prompt, tenant=owner(), **options))
                begun.callback(cancel, tickets[-1])
            begun.pop_all()
        return Delivery(tickets, ExitStack())

    def begin_text(self, prompt: RawPrompt, chosen: Mapping[str, Any]) -> Delivery:
        """Of one prompt, a text, without a chat template. Raises as `begin`."""
        self.check_length("prompt", len(prompt.text))
        return self.begin_raw([prompt], self.model.options(chosen))

    def count(self, asked: Asked) -> TokenCount:
        with self._opened(asked.turns) as messages:
            return self.service.count(
                messages, detail=_detail(asked), tenant=owner(), **_of_the_prompt(asked)
            )

    def check_length(self, where: str, characters: int) -> None:
        """Raises PromptError for a text that cannot fit."""
        self.api.check_length(where, characters)

    @contextmanager
    def _opened(self, turns: Sequence[Turn]) -> Iterator[list[dict[str, Any]]]:
        """The conversation as `Service.submit` takes it, its pictures decoded. System messages at
        its beginning are one: chat templates know one.
        """
        self.check_length("messages", sum(turn.characters for turn in turns))
        references = [p for turn in turns for p in turn.parts if isinstance(p, Reference)]
        with self.api.media.shown(references, owner()) as shown:
            left = iter(shown)
            names = {call.id: call.name for turn in turns for call in turn.calls}
            yield self.model.with_system(
                [
                    {"role": turn.role, "content": _content(turn, left)}
                    | ({"reasoning_content": turn.thought} if turn.thought else {})
                    | _tool_fields(turn, names)
                    for turn in _merged(turns)
                ]
            )


def _merged(turns: Sequence[Turn]) -> list[Turn]:
    count = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
    if count < 2:
        return list(turns)
    parts: list[str | Reference] = []
    for turn in turns[:count]:
        first, *more = turn.parts or ("",)
        is_text = bool(parts) and isinstance(first, str) and isinstance(parts[-1], str)
        if is_text:
            first = f"{parts.pop()}\n\n{first}"
        parts += [first, *more]
    return [Turn("system", tuple(parts)), *turns[count:]]


def _content(turn: Turn, shown: Iterator[Any]) -> str | list[dict[str, Any]]:
    """A text alone as it is. Several parts stay apart until it is known what the template reads."""
    if len(turn.parts) <= 1 and all(isinstance(part, str) for part in turn.parts):
        return "".join(part for part in turn.parts if isinstance(part, str))
    return [
        {"type": "text", "text": part} if isinstance(part, str) else next(shown).part
        for part in turn.parts
    ]


def _tool_fields(turn: Turn, names: Mapping[str, str]) -> dict[str, Any]:
    """What calls and results have beside their content. `names` of the functions by the calls'
    ids: some templates tell a result by it.
    """
    if turn.calls:
        return {"tool_calls": [call.asdict() for call in turn.calls]}
    if turn.answers is not None:
        return {"tool_call_id": turn.answers, "name": names.get(turn.answers)}
    return {}


def _of_the_prompt(asked: Asked) -> dict[str, Any]:
    """Options that it is written by. What the assistant says last is the beginning of the
    answer.
    """
    last = asked.turns[-1] if asked.turns else None
    goes_on = last is not None and last.role == "assistant" and not last.calls
    continued = {"continue_final_message": True} if goes_on else {}
    return {**continued, **asked.tools, **asked.thinking}


def _detail(asked: Asked) -> str:
    """One for all pictures: the closest look that any of them asks for."""
    return max(asked.details, key=_DETAILS.index, default="auto")
