"""A conversation held with a model: what was said before goes with each question."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import fields
from html import escape
from io import BytesIO
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, cast

from mtmd.base.errors import PromptError
from mtmd.base.text import plural
from mtmd.clip.image.decode import Picture
from mtmd.display.answer_view import EDGE, picture_html
from mtmd.events import Answer, Event, Finished
from mtmd.options.answer import CONVERSATION, AnswerOptions
from mtmd.options.keywords import AnswerKeywords
from mtmd.prompt.conversation import (
    Images,
    Message,
    check_list,
    check_message,
    messages_of,
    with_system,
)
from mtmd.prompt.load_image import ImageSource, picture_url, png_bytes, preview, read_picture
from mtmd.prompt.message_forms import in_json_types, in_own_form, with_parts
from mtmd.prompt.url_kinds import is_data_url, is_url

if TYPE_CHECKING:  # not in typing before Python 3.11
    from typing_extensions import Unpack

_MAY_BE_NONE = {f.name for f in fields(AnswerOptions) if f.default is None}


class Answers(Protocol):
    """Describes what answers; a `Model` does."""

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
    """Made by `Model.chat`. A question that fails, or whose answer is left before its end, leaves
    no trace.

    One conversation is for one thread at a time; a model holds any number of them.
    """

    def __init__(
        self,
        model: Answers,
        system: str | None,
        chosen: AnswerKeywords,
        messages: Sequence[Message] = (),
    ):
        """`messages`: what was said before. Raises PromptError for what is none."""
        if messages:
            check_list(messages)
        for number, message in enumerate(messages, 1):
            check_message(message, number)
        self.model = model
        self._messages = with_system(in_own_form(messages), system)
        self._is_read = False
        """Somebody may hold the messages, to whom the next ones belong in JSON's types as well."""
        self._pictures: dict[str, Picture] = {}
        """What data URLs of the messages show, decoded."""
        self.options = chosen
        model.check(chosen)

    @property
    def messages(self) -> list[Message]:
        """All that was said, as `Model.stream` and `Model.chat` take it, and `json.dumps` does:
        pictures are data URLs, files as they were, arrays and Pillow images as PNG; videos are
        paths, or data URLs where bytes were given. May be changed.
        """
        self._is_read = True
        self._messages[:] = in_json_types(self._messages, self._url_of)
        return self._messages

    @messages.setter
    def messages(self, messages: Sequence[Message]) -> None:
        self._messages = messages if isinstance(messages, list) else list(messages)
        self._is_read = True

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
        """Do what `ask` does, event by event, `Finished` the last."""
        turn = self._turn(prompt, image)
        for event in self.model.stream(self._shown(turn), **self._with(chosen)):
            if isinstance(event, Finished):
                self._keep(turn, event.answer)
            yield event

    async def aask(
        self,
        prompt: str | None = None,
        image: Images | None = None,
        **chosen: Unpack[AnswerKeywords],
    ) -> Answer:
        """Do what `ask` does, for asyncio."""
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
        """Do what `stream` does, for `async for`."""
        turn = self._turn(prompt, image)
        async for event in self.model.astream(self._shown(turn), **self._with(chosen)):
            if isinstance(event, Finished):
                self._keep(turn, event.answer)
            yield event

    def give(self, results: Mapping[str, str], **chosen: Unpack[AnswerKeywords]) -> Answer:
        """The answer once the tools that the last one called have been run: their results, by the
        calls' ids. Raises PromptError for other ids than those of the calls.
        """
        last = self._messages[-1] if self._messages else {}
        calls = [call["id"] for call in last.get("tool_calls", ())]
        if set(calls) != set(results) or not calls:
            raise PromptError(
                f"results: found {', '.join(map(repr, results)) or 'none'}, expected one for each "
                f"call of the last answer: {', '.join(map(repr, calls)) or 'it has none'}"
            )
        turn: list[Message] = [
            {"role": "tool", "tool_call_id": call, "content": results[call]} for call in calls
        ]
        answer = _answer_of(self.model.stream(self._shown(turn), **self._with(chosen)))
        self._keep(turn, answer)
        return answer

    def undo(self) -> None:
        """Take the last question and its answer back. Raises PromptError where there is none."""
        requested = [i for i, message in enumerate(self._messages) if message["role"] == "user"]
        if not requested:
            raise PromptError("there is no question yet")
        del self._messages[requested[-1] :]

    def clear(self) -> None:
        """Begin anew, with the system text kept."""
        self._messages[:] = [m for m in self._messages[:1] if m["role"] == "system"]

    def __repr__(self) -> str:
        turns = sum(message["role"] == "user" for message in self._messages)
        return f"<mtmd.Chat with {self.model.name!r}, {plural(turns, 'question')}>"

    def _repr_html_(self) -> str:
        """Return the HTML for notebooks."""
        shown = map(_html, self._shown())
        return f'<div class="mtmd-chat">{"".join(shown)}</div>'

    def _with(self, chosen: AnswerKeywords) -> AnswerKeywords:
        own = {k: v for k, v in chosen.items() if v is not None or k in _MAY_BE_NONE}
        return cast(AnswerKeywords, {**CONVERSATION, **self.options, **own})

    def _turn(self, prompt: str | None, image: Images | None) -> list[Message]:
        """The next question, its pictures as data URLs where they come from files, else loaded:
        once for all that follow.
        """
        return _with_pictures(messages_of(image, prompt), self._saved)

    def _saved(self, source: Any) -> Any:
        if isinstance(source, str) and is_data_url(source):
            return source
        if isinstance(source, (str, PathLike)) and not is_url(source):
            file: Any = BytesIO(read_picture(source))
            file.name = os.fsdecode(source)
        elif isinstance(source, (bytes, bytearray, memoryview)):
            file = BytesIO(source)
        else:
            return source if isinstance(source, Picture) else self.model.load_picture(source)
        url = picture_url(file.getvalue())
        if url not in self._pictures:
            self._pictures[url] = self.model.load_picture(file)
        return url

    def _shown(self, turn: Sequence[Message] = ()) -> list[Message]:
        """All messages and the next ones, pictures decoded. Those that are no longer among them are
        forgotten.
        """
        known, self._pictures = self._pictures, {}

        def shown(source: Any) -> Any:
            if not isinstance(source, str) or not is_data_url(source):
                return source
            self._pictures[source] = known.get(source) or self.model.load_picture(source)
            return self._pictures[source]

        return _with_pictures(in_own_form([*self._messages, *turn]), shown)

    def _url_of(self, picture: Picture) -> str:
        url = picture_url(png_bytes(picture.pixels))
        self._pictures[url] = picture
        return url

    def _keep(self, turn: Sequence[Message], answer: Answer) -> None:
        stated: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.thinking:
            stated["reasoning_content"] = answer.thinking
        if answer.tool_calls:
            stated["tool_calls"] = [call.asdict() for call in answer.tool_calls]
        new = [*turn, stated]
        self._messages += in_json_types(new, self._url_of) if self._is_read else new


def _answer_of(events: Any) -> Answer:
    *_, last = events
    assert isinstance(last, Finished)
    return last.answer


def _with_pictures(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    """The messages, every picture changed."""

    def changed(part: Any) -> Any:
        is_picture = isinstance(part, Mapping) and part.get("type") == "image" and "image" in part
        return {**part, "image": change(part["image"])} if is_picture else part

    return [with_parts(message, changed) for message in messages]


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
        if part["type"] == "text" or isinstance(part.get("image"), Picture)
    )
    return f"<div><strong>{escape(message['role'])}</strong>{shown}</div>"
