"""The form in which a chat template reads the content of a message: a string, a list of parts, or
either. It can differ by role, and is found out by rendering short conversations, once per template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mtmd.base.errors import MtmdError

Render = Callable[..., str]
SEPARATOR = "\n"
"""Stands between the texts of parts that become one string, as llama.cpp and vLLM join them."""
_ONE, _TWO, _ASK, _REPLY = "probedone", "probedtwo", "probedask", "probedreply"
_CALL = "probedcall"
# A part that was printed instead of read: Python's or JSON's notation of it.
_AS_DATA = re.compile(rf"['\"]text['\"]\s*:\s*['\"](?:{_ONE}|{_TWO})")


@dataclass(frozen=True)
class RoleForm:
    """Describes what a template shows of one role's content: `text`, a string; `parts`, a list with
    one text part; `several`, a list with several; `pictures`, a picture among them; `audio`,
    audio among them, or alone.
    """

    text: bool = True
    parts: bool = False
    several: bool = False
    pictures: bool = False
    audio: bool = False


@dataclass(frozen=True)
class ContentForms:
    """The forms by role. A role that is not in `roles` has that of the user; `marker`, `video` and
    `audio` are the texts that stand for a picture, a video and audio in a string, `in_line` with
    the text beside them.
    """

    roles: Mapping[str, RoleForm]
    marker: str = ""
    video: str = ""
    audio: str = ""
    in_line: bool = False

    def of(self, role: str) -> RoleForm:
        """Return the form of a role."""
        if role == "developer" and role not in self.roles:
            role = "system"
        return self.roles.get(role) or self.roles.get("user", RoleForm())

    def only(self, form: RoleForm) -> ContentForms:
        """Return the same for a template of which nothing is known but that it reads this form."""
        return replace(self, roles={"user": form})

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with every content in a form that the template shows. A content that
        is in such a form already stays as it is; texts of several parts are joined by a line break.
        """
        return [
            {**message, "content": self._fitted(message["content"], self.of(message["role"]))}
            for message in messages
        ]

    def _fitted(self, content: Any, form: RoleForm) -> Any:
        if isinstance(content, str):
            if form.text or not form.parts or not content:
                return content
            return [{"type": "text", "text": content}]
        if any(part["type"] == "thinking" for part in content):  # of a template that reads those
            return content
        kinds = {part["type"] for part in content} - {"text"}
        if not kinds and form.parts and (len(content) == 1 or form.several):
            return content
        heard, seen = "audio" in kinds, kinds - {"audio"}
        if kinds and (form.pictures or not seen) and (form.audio or not heard):
            return content
        joined = self._joined(content)
        return joined if form.text or not form.parts else [{"type": "text", "text": joined}]

    def _joined(self, content: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of all parts."""
        text, in_line = "", True
        for part in content:
            one = self._as_text(part)
            if not one:
                continue
            before, in_line = in_line, self.in_line and part["type"] != "text"
            text += one if before or in_line else SEPARATOR + one
        return text

    def _as_text(self, part: Mapping[str, Any]) -> str:
        if part["type"] == "text":
            return str(part["text"])
        return {"video": self.video, "audio": self.audio}.get(part["type"], self.marker)


def read_forms(
    render: Render,
    marker: str | None = None,
    in_text: str | None = None,
    video: str = "",
    audio: str | None = None,
    in_line: bool = False,
) -> ContentForms:
    """Return the forms that a template reads. `render(messages, tools=..., ...)` is
    `ChatTemplate.render`; `marker` is the text that a template writes for a picture, None for a
    model without pictures; `in_text` is the text that stands for one in a string, where other text
    belongs around the marker, and `video` the same for a video; `audio` is to audio what `marker`
    is to a picture; `in_line`: no line ends beside them in a string.
    """
    probe = _Probe(render, marker, audio)
    user = probe.form(lambda content: [{"role": "user", "content": content}])
    ask = _stated("user", _ASK, user)

    def before(*messages: dict[str, Any]) -> Callable[[Any], list[dict[str, Any]]]:
        """Conversations in which the probed content is that of the last message."""
        *known, last = messages
        return lambda content: [*known, {**last, "content": content}]

    system = probe.form(lambda content: [{"role": "system", "content": content}, ask])
    assistant = probe.form(
        lambda content: [ask, {"role": "assistant", "content": content}, ask], pictures=False
    )
    roles = {"user": user, "system": system, "assistant": assistant}
    developer = probe.form(lambda content: [{"role": "developer", "content": content}, ask])
    if developer.text or developer.parts:
        roles["developer"] = developer
    objects_and_texts: tuple[Any, ...] = ({}, "{}")
    for arguments in objects_and_texts:
        call = {"id": "probeid01", "type": "function"}
        called = {**call, "function": {"name": _CALL, "arguments": arguments}}
        tool = probe.form(
            before(
                ask,
                {"role": "assistant", "content": "", "tool_calls": [called]},
                {"role": "tool", "tool_call_id": "probeid01", "name": _CALL},
            )
        )
        if tool.text or tool.parts:
            roles["tool"] = tool
            break
    shown = {role: form for role, form in roles.items() if form.text or form.parts or form.audio}
    return ContentForms(shown, in_text or marker or "", video, audio or "", in_line)


def _stated(role: str, text: str, form: RoleForm) -> dict[str, Any]:
    content: Any = [{"type": "text", "text": text}] if form.parts and not form.text else text
    return {"role": role, "content": content}


class _Probe:
    def __init__(self, render: Render, marker: str | None, audio: str | None):
        self._render, self._marker, self._audio = render, marker, audio

    def form(
        self, conversation: Callable[[Any], list[dict[str, Any]]], pictures: bool = True
    ) -> RoleForm:
        """Return what is shown of a content that `conversation` puts into a message."""
        one, two = {"type": "text", "text": _ONE}, {"type": "text", "text": _TWO}
        text = self._shows(conversation(_ONE), _ONE)
        parts = self._shows(conversation([one]), _ONE)
        if text and parts:
            string, listed = (self._before(conversation(content)) for content in (_ONE, [one]))
            if string and not listed:  # a list loses the mark of its turn
                return RoleForm()
        return RoleForm(
            text=text,
            parts=parts,
            several=parts and self._shows(conversation([one, two]), _ONE, _TWO),
            pictures=pictures
            and self._marker is not None
            and self._shows(conversation([{"type": "image"}, one]), _ONE, self._marker),
            audio=pictures
            and self._audio is not None
            and (
                self._shows(conversation([{"type": "audio"}, one]), _ONE, self._audio)
                or self._shows(conversation([{"type": "audio"}]), self._audio)  # and no text
            ),
        )

    def _before(self, messages: list[dict[str, Any]]) -> str:
        """Return what stands in the prompt before a content that is shown, blanks aside."""
        prompt = self._render(messages, tools=None, add_generation_prompt=False)
        return prompt.partition(_ONE)[0].strip()

    def _shows(self, messages: list[dict[str, Any]], *texts: str) -> bool:
        """Return whether each of the texts stands in the prompt once, those of parts in their
        order.
        """
        try:
            prompt = self._render(messages, tools=None, add_generation_prompt=False)
        except MtmdError:
            return False
        if any(prompt.count(text) != 1 for text in texts) or _AS_DATA.search(prompt):
            return False
        return _TWO not in texts or prompt.index(_ONE) < prompt.index(_TWO)
