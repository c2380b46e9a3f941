"""What every adapter does with a request once it is read: pictures opened, the service asked, the
answer handed out whole or as it is written, and all let go of when nobody waits any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from flask import Response, g, json, request

from mtmd import (
    Answer,
    Event,
    Finished,
    MtmdError,
    RawPrompt,
    TextPiece,
    Ticket,
    TokenCount,
    TokenInfo,
    ToolCall,
)
from mtmd.web.api.routes import Api
from mtmd.web.api.stream import SHUTTING_DOWN
from mtmd.web.auth import owner
from mtmd.web.errors import ApiError, as_api_error
from mtmd.web.intake.media import Reference
from mtmd.web.intake.watcher import give_up

_DETAILS = ("low", "auto", "high")


@dataclass(frozen=True)
class Turn:
    """What one message says: texts and pictures in order, then `calls` of tools. `answers`: the id
    of the call whose result this is, in a turn of the role "tool".
    """

    role: str
    parts: tuple[str | Reference, ...]
    calls: tuple[ToolCall, ...] = ()
    answers: str | None = None

    @property
    def characters(self) -> int:
        texts = [part for part in self.parts if isinstance(part, str)]
        return sum(map(len, texts)) + sum(len(call.arguments) for call in self.calls)

    @property
    def held_bytes(self) -> int:
        """What it takes to keep."""
        said = sum(len(p.encode()) if isinstance(p, str) else len(p.url) for p in self.parts)
        called = sum(len(c.id) + len(c.name) + len(c.arguments.encode()) for c in self.calls)
        return said + called + len(self.answers or "")


@dataclass(frozen=True)
class Asked:
    """A request in nobody's form. `options`: fields of AnswerOptions; `tools`: those of them that
    say which tools there are, and are part of the prompt.
    """

    turns: Sequence[Turn]
    options: Mapping[str, Any] = field(default_factory=dict)
    details: Sequence[str] = ()
    tools: Mapping[str, Any] = field(default_factory=dict)


def error_response(
    error: Exception, form: Callable[[ApiError], Mapping[str, Any]], **headers: str
) -> Response:
    """The answer to an error in an adapter's own form."""
    known = as_api_error(error, g.get("request_id", "req"))
    return Response(
        json.dumps(form(known)),
        known.status,
        {**known.headers, **headers},
        mimetype="application/json",
    )


class Door:
    """`api`: what OpenAI's routes work with; adapters are beside them, over the same service."""

    def __init__(self, api: Api) -> None:
        self.api, self.model, self.service = api, api.model, api.service

    def check_model(self, name: str | None) -> None:
        """Raises ApiError (404) for a model that is not here."""
        self.api.check_model(name)

    def begin(self, asked: Asked) -> Answering:
        """Raises ApiError and MtmdError for what is wrong with it."""
        with ExitStack() as stack:
            messages = stack.enter_context(self._opened(asked.turns))
            usual = {"max_tokens": self.model.context, "detail": _detail(asked)}
            options = usual | _of_the_prompt(asked) | dict(asked.options)
            return self._submitted(messages, options, stack)

    def begin_raw(self, prompt: RawPrompt, options: Mapping[str, Any]) -> Answering:
        """Of a prompt without a chat template. Raises as `begin`."""
        with ExitStack() as stack:
            return self._submitted(prompt, options, stack)

    def _submitted(
        self,
        asked: Sequence[dict[str, Any]] | RawPrompt,
        options: Mapping[str, Any],
        stack: ExitStack,
    ) -> Answering:
        ticket = self.service.submit(asked, tenant=owner(), **options)
        stack.callback(give_up, ticket)
        is_gone = request.environ.get("waitress.client_disconnected")
        if is_gone is not None:
            stack.callback(self.api.watcher.watch(is_gone, ticket))
        return Answering(ticket, stack.pop_all())

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
        with self.api.media.opened(references, owner()) as pictures:
            left = iter(pictures)
            names = {call.id: call.name for turn in turns for call in turn.calls}
            yield [
                {"role": turn.role, "content": _content(turn, left), **_tool_fields(turn, names)}
                for turn in _merged(turns)
            ]


class Answering:
    """An answer under way. `whole` or `streamed` ends with everything let go of, however it
    ends.
    """

    def __init__(self, ticket: Ticket, held: ExitStack) -> None:
        self._ticket, self._held = ticket, held

    def whole(self) -> Answer:
        """Raises what the answer failed by."""
        return self.whole_with_tokens()[0]

    def whole_with_tokens(self) -> tuple[Answer, list[TokenInfo]]:
        """The tokens too, where `logprobs` was asked for."""
        tokens: list[TokenInfo] = []
        with self._held:
            for event in self.events():
                if isinstance(event, TextPiece):
                    tokens += event.tokens
                elif isinstance(event, Finished):
                    return event.answer, tokens
        raise MtmdError("the service ended an answer without saying how")

    def close(self) -> None:
        """Nobody waits any more."""
        self._held.close()

    def events(self) -> Iterator[Event]:
        """As the ticket has them; an answer that the server itself gave up raises ApiError."""
        for event in self._ticket:
            if isinstance(event, Finished) and event.answer.receipt.finish == "cancelled":
                raise SHUTTING_DOWN
            yield event

    def streamed(
        self,
        write: Callable[[Iterator[Event]], Iterator[str]],
        failed: Callable[[ApiError], str],
        mimetype: str,
    ) -> Response:
        """`write`: what is sent for the events; `failed`: for an error, whose status cannot be sent
        any more.
        """
        request_id = g.request_id

        def pieces() -> Iterator[str]:
            try:
                yield from write(self.events())
            except Exception as error:
                yield failed(as_api_error(error, request_id))

        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        response = Response(pieces(), mimetype=mimetype, headers=headers)
        response.call_on_close(self._held.close)
        return response


def _merged(turns: Sequence[Turn]) -> list[Turn]:
    count = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
    if count < 2:
        return list(turns)
    parts: list[str | Reference] = []
    for turn in turns[:count]:
        parts += ["\n\n", *turn.parts] if parts else turn.parts
    return [Turn("system", tuple(parts)), *turns[count:]]


def _content(turn: Turn, pictures: Iterator[Any]) -> str | list[dict[str, Any]]:
    """A text where it is nothing else: some templates take no lists."""
    if all(isinstance(part, str) for part in turn.parts):
        return "".join(part for part in turn.parts if isinstance(part, str))
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": next(pictures)}
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
    return ({"continue_final_message": True} if goes_on else {}) | dict(asked.tools)


def _detail(asked: Asked) -> str:
    """One for all pictures: the closest look that any of them asks for."""
    return max(asked.details, key=_DETAILS.index, default="auto")
