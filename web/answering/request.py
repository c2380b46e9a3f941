"""A request for an answer, in no interface's form: each interface reads its requests into this."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from mtmd import ToolCall
from mtmd.web.intake.media import Reference, Shown

Piece: TypeAlias = str | Reference  # of a message: a text, or what stands for a picture or video
OpenedPiece: TypeAlias = Piece | Shown  # also a picture or video that is opened already
# what is read as it is, without a chat template: a text, ids of tokens, or both mixed
RawText: TypeAlias = str | Sequence[str | int]
_DETAILS = ("low", "auto", "high")


@dataclass(frozen=True)
class Turn:
    """One message. `content`: a text, or texts and pictures in order; None where it has none.
    `answers`: the id of the call whose result this is, and `name` the name of its function, in a
    turn of the role "tool". `thought`: what the assistant thought before.
    """

    role: str
    content: str | tuple[OpenedPiece, ...] | None
    calls: tuple[ToolCall, ...] = ()
    answers: str | None = None
    thought: str = ""
    name: str | None = None

    @property
    def pieces(self) -> tuple[OpenedPiece, ...]:
        if isinstance(self.content, tuple):
            return self.content
        return () if self.content is None else (self.content,)

    @property
    def characters(self) -> int:
        texts = [piece for piece in self.pieces if isinstance(piece, str)]
        called = sum(len(call.arguments) for call in self.calls)
        return sum(map(len, texts)) + called + len(self.thought)

    @property
    def stored_bytes(self) -> int:
        """Return what it takes to keep; pictures that are opened are not kept."""
        stated = sum(len(p.encode()) for p in self.pieces if isinstance(p, str))
        stated += sum(p.stored_bytes for p in self.pieces if isinstance(p, Reference))
        called = sum(len(c.id) + len(c.name) + len(c.arguments.encode()) for c in self.calls)
        return stated + called + len(self.answers or "") + len(self.thought.encode())

    def message(self, shown: Iterator[Shown]) -> dict[str, Any]:
        """Return the message as `Service.submit` takes it. `shown`: its references, opened."""
        content: Any = self.content
        if isinstance(content, tuple):
            opened = (next(shown) if isinstance(one, Reference) else one for one in content)
            content = [
                {"type": "text", "text": one} if isinstance(one, str) else one.part
                for one in opened
            ]
        message = {"role": self.role, "content": content}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.calls:
            message["tool_calls"] = [call.asdict() for call in self.calls]
        if self.role in ("tool", "function"):
            message |= {"tool_call_id": self.answers, "name": self.name}
        return message


@dataclass(frozen=True)
class AnswerRequest:
    """`prompts`: in place of a conversation. `options`: fields of AnswerOptions, of which those in
    `prompt_options` (tools, thinking, whether the last message is continued) are part of the
    prompt. `number` of answers to each prompt; `custom_tools`: names of tools that take a text in
    place of arguments. `usual_system`: where no turn is of the system, the model's usual one is.
    """

    model: str | None
    stream: bool = False
    turns: tuple[Turn, ...] = ()
    prompts: tuple[RawText, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    prompt_options: Mapping[str, Any] = field(default_factory=dict)
    detail: str = "auto"
    number: int = 1
    custom_tools: frozenset[str] = frozenset()
    usual_system: bool = True


def conversation(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """Return the turns as chat templates know them: one system message at the beginning, a lone
    text as a text, results of tools with the names of their functions.
    """
    turns = list(turns)
    count = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
    if count > 1:
        turns = [Turn("system", _joined(turns[:count])), *turns[count:]]
    names = {call.id: call.name for turn in turns for call in turn.calls}
    return tuple(
        replace(turn, content=_alone(turn.pieces), name=names.get(turn.answers or ""))
        for turn in turns
    )


def continues(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the option by which what the assistant says last is the beginning of the answer."""
    last = turns[-1] if turns else None
    is_begun = last is not None and last.role == "assistant" and not last.calls
    return {"continue_final_message": True} if is_begun else {}


def closest(details: Iterable[str]) -> str:
    """Return one detail for all pictures: the closest look that any of them asks for."""
    return max(details, key=_DETAILS.index, default="auto")


def _joined(turns: Sequence[Turn]) -> tuple[OpenedPiece, ...]:
    """Return the pieces of several system messages as those of one."""
    pieces: list[OpenedPiece] = []
    for turn in turns:
        first, *more = turn.pieces or ("",)
        if pieces and isinstance(first, str) and isinstance(last := pieces[-1], str):
            pieces[-1:] = [f"{last}\n\n{first}"]
        else:
            pieces.append(first)
        pieces += more
    return tuple(pieces)


def _alone(pieces: tuple[OpenedPiece, ...]) -> str | tuple[OpenedPiece, ...]:
    """Several texts are not joined until it is known what the template reads."""
    if len(pieces) > 1 or any(not isinstance(piece, str) for piece in pieces):
        return pieces
    return "".join(piece for piece in pieces if isinstance(piece, str))
