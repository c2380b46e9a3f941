"""A conversation held with a model: what was said before goes with each question."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from dataclasses import fields
from html import escape
from typing import TYPE_CHECKING, Any, Protocol, cast

from mtmd.clip.image.decode import Picture
from mtmd.config import AnswerOptions
from mtmd.display.answer_view import EDGE, picture_html
from mtmd.events import Answer, Event, Finished
from mtmd.kernels.errors import PromptError
from mtmd.option_types import AnswerKeywords
from mtmd.prompt.conversation import Images, Message, messages_of, with_system
from mtmd.prompt.load_image import ImageSource, preview

if TYPE_CHECKING:  # not in typing before Python 3.11
    from typing_extensions import Unpack

_MAY_BE_NONE = {f.name for f in fields(AnswerOptions) if f.default is None}


class Answers(Protocol):
    """What answers; a `Model` does."""

    @property
    def name(self) -> str: ...

    def check(self, chosen: AnswerKeywords) -> None: ...

    def load_picture(self, source: ImageSource) -> Picture: ...

    def stream(
        self, messages: Sequence[Message], /, **chosen: Unpack[AnswerKeywords]
    ) -> Iterator[Event]: ...

    def astream(
        self, messages: Sequence[Message], /, **chosen: Unpack[AnswerKeywords]
    ) -> AsyncGenerator[Event, None]: ...


class Chat:
    """Made by `Model.chat`. `messages` is all that was said, as `Model.stream` takes it; it may be
    changed. A question that fails, or whose answer is left before its end, leaves no trace.

    One conversation is for one thread at a time; a model holds any number of them.
    """

    def __init__(self, model: Answers, system: str | None, chosen: AnswerKeywords):
        self.model = model
        self.messages: list[Message] = with_system((), system)
        self.options = chosen
        model.check(chosen)

    def ask(
        self,
        prompt: str | None = None,
        image: Images | None = None,
        **chosen: Unpack[AnswerKeywords],
    ) -> Answer:
        """The answer to the next question, about `image` or what was shown before. `chosen` is for
        this question alone, and None leaves what the chat has; a schema, tools and a seed it takes
        off. Raises MtmdError.
        """
        *_, last = self.stream(prompt, image, **chosen)
        assert isinstance(last, Finished)
        return last.answer

    def stream(
        self,
        prompt: str | None = None,
        image: Images | None = None,
        **chosen: Unpack[AnswerKeywords],
    ) -> Generator[Event, None, None]:
        """As `ask`, event by event, `Finished` the last."""
        turn = self._turn(prompt, image)
        for event in self.model.stream([*self.messages, *turn], **self._with(chosen)):
            if isinstance(event, Finished):
                self._keep(turn, event.answer)
            yield event

    async def aask(
        self,
        prompt: str | None = None,
        image: Images | None = None,
        **chosen: Unpack[AnswerKeywords],
    ) -> Answer:
        """As `ask`, for asyncio."""
        async for event in self.astream(prompt, image, **chosen):
            if isinstance(event, Finished):
                return event.answer
        raise AssertionError("a stream ends with Finished, or raises")

    async def astream(
        self,
        prompt: str | None = None,
        image: Images | None = None,
        **chosen: Unpack[AnswerKeywords],
    ) -> AsyncGenerator[Event, None]:
        """As `stream`, for `async for`."""
        turn = self._turn(prompt, image)
        async for event in self.model.astream([*self.messages, *turn], **self._with(chosen)):
            if isinstance(event, Finished):
                self._keep(turn, event.answer)
            yield event

    def give(self, results: Mapping[str, str], **chosen: Unpack[AnswerKeywords]) -> Answer:
        """The answer once the tools that the last one called have been run: their results, by the
        calls' ids. Raises PromptError for other ids than those of the calls.
        """
        last = self.messages[-1] if self.messages else {}
        calls = [call["id"] for call in last.get("tool_calls", ())]
        if set(calls) != set(results) or not calls:
            raise PromptError(
                f"results: found {', '.join(map(repr, results)) or 'none'}, expected one for each "
                f"call of the last answer: {', '.join(map(repr, calls)) or 'it has none'}"
            )
        turn: list[Message] = [
            {"role": "tool", "tool_call_id": call, "content": results[call]} for call in calls
        ]
        answer = _answer_of(self.model.stream([*self.messages, *turn], **self._with(chosen)))
        self._keep(turn, answer)
        return answer

    def undo(self) -> None:
        """Take the last question and its answer back. Raises PromptError where there is none."""
        asked = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            raise PromptError("nothing has been asked yet")
        del self.messages[asked[-1] :]

    def clear(self) -> None:
        """Begin anew, with the system text kept."""
        self.messages = [m for m in self.messages[:1] if m["role"] == "system"]

    def __repr__(self) -> str:
        turns = sum(message["role"] == "user" for message in self.messages)
        return f"<mtmd.Chat with {self.model.name!r}, {turns} question{'s' * (turns != 1)}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        return f'<div class="mtmd-chat">{"".join(map(_html, self.messages))}</div>'

    def _with(self, chosen: AnswerKeywords) -> AnswerKeywords:
        own = {k: v for k, v in chosen.items() if v is not None or k in _MAY_BE_NONE}
        return cast(AnswerKeywords, {**self.options, **own})

    def _turn(self, prompt: str | None, image: Images | None) -> list[Message]:
        """The next question, its pictures loaded once for all that follow."""
        return [
            {**message, "content": [self._loaded(part) for part in message["content"]]}
            if isinstance(message["content"], list)
            else message
            for message in messages_of(image, prompt)
        ]

    def _loaded(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        if part["type"] != "image" or isinstance(part["image"], Picture):
            return part
        return {**part, "image": self.model.load_picture(part["image"])}

    def _keep(self, turn: Sequence[Message], answer: Answer) -> None:
        said: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.tool_calls:
            said["tool_calls"] = [call.asdict() for call in answer.tool_calls]
        self.messages += [*turn, said]


def _answer_of(events: Any) -> Answer:
    *_, last = events
    assert isinstance(last, Finished)
    return last.answer


def _html(message: Message) -> str:
    content = message["content"]
    parts: list[Any] = (
        [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    )
    shown = "".join(
        picture_html(preview(part["image"].pixels, EDGE))
        if part["type"] == "image"
        else f'<p style="white-space:pre-wrap;max-width:46em">{escape(part["text"])}</p>'
        for part in parts
        if part["type"] != "image" or isinstance(part["image"], Picture)
    )
    return f"<div><strong>{escape(message['role'])}</strong>{shown}</div>"
