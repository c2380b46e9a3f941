"""Describes how a chat template and a vocabulary write a thought, and which variables turn thinking
on and off, found out by rendering a conversation with each and looking at what stands around the
parts that are known.

Nothing is known of any model here: marks are known by their place, or, where a template shows no
thought, by their shape: a pair of marks whose name says that they are of a thought.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtmd.base.errors import MtmdError
from mtmd.thinking.marks import ABOUT_THOUGHTS, ATOM, Marks, last_mark
from mtmd.thinking.request import EFFORTS
from mtmd.tools.syntax import common_prefix

Render = Callable[..., str]
IN_CONTENT, IN_PARTS = "content", "parts"
VARIABLES_MAX = 8  # that are tried as a switch
SECONDS_MAX = 5.0  # of this thread, for all of it; templates take a tenth of a second
FIELDS = ("reasoning_content", "reasoning", "thinking", "thought", IN_PARTS)
_THOUGHT, _CONTENT, _CALLED = "probedthought", "probedcontent", "probedcall"
_QUESTION = {"role": "user", "content": "probedquestion"}
_CALL = {
    "id": "probeid01",
    "type": "function",
    "function": {"name": _CALLED, "arguments": {"qa": "qb"}},
}
_EFFORT = re.compile(r"effort|strength", re.I)
# Which of several variables is set first, as most programs know them.
_USUAL = ("enable_thinking", "thinking", "reasoning_effort", "thinking_effort")


@dataclass(frozen=True)
class ThinkingTemplate:
    """Describes what a template can do by itself. `marks`: None where nothing is known of thoughts.
    `field`: under which name a message of the history has its thought, `IN_CONTENT` for between its
    marks in the content, `IN_PARTS` for a part of the content, None where no thought is read. `on`
    and `off` are variables that turn thinking on and off, None where none do. `effort` is the
    variable that says how much, and `efforts` the values that it takes. `variables` are all that
    the template reads.
    """

    marks: Marks | None = None
    field: str | None = None
    on: Mapping[str, Any] | None = None
    off: Mapping[str, Any] | None = None
    effort: str | None = None
    efforts: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()


def read_thinking(
    render: Render, source: str, variables: Collection[str], vocabulary: Collection[str]
) -> ThinkingTemplate:
    """`render(messages, add_generation_prompt=..., **variables)` as `ChatTemplate.render`; `source`
    and `variables` are the template's, `vocabulary` the spellings of the tokens that stand for
    themselves: special ones and added ones.
    """
    return _Probe(render, source, frozenset(variables), vocabulary).template()


class _Probe:
    def __init__(
        self, render: Render, source: str, variables: frozenset[str], vocabulary: Collection[str]
    ):
        self._render, self._source, self._variables = render, source, variables
        self._vocabulary, self._end = vocabulary, time.thread_time() + SECONDS_MAX
        self._requested = self._try([_QUESTION])
        # What the template writes before an answer, first without any variable.
        self._switch = self._find_switch()
        self._effort, self._texts = self._find_effort()
        ways = [{}, *self._switched(True), *self._switched(False)]
        self._begins = [(way, self._begun(way)) for way in ways]

    def template(self) -> ThinkingTemplate:
        marks, name = self._by_rendering() or (self._by_shape(), None)
        if marks is None:
            return ThinkingTemplate(variables=self._variables)
        if name is None and self._reads_content(marks):
            name = IN_CONTENT
        on: Mapping[str, Any] | None = next(iter(self._switched(True)), None)
        return ThinkingTemplate(
            marks, name, on, self._off(marks), self._effort, self._efforts(), self._variables
        )

    def _try(
        self,
        messages: Sequence[Mapping[str, Any]],
        more: Mapping[str, Any] | None = None,
        **way: Any,
    ) -> str:
        """Nothing where the template refuses, or has taken too long already."""
        if time.thread_time() > self._end:
            return ""
        try:
            given = {"add_generation_prompt": False, **(more or {}), **way}
            return self._render(messages, **given)
        except MtmdError:
            return ""

    def _begun(self, way: Mapping[str, Any]) -> str:
        """Return what stands between a question and the answer to it."""
        written = self._try([_QUESTION], way, add_generation_prompt=True)
        without = self._try([_QUESTION], way)
        return written[len(common_prefix(written, without)) :]

    def _find_switch(self) -> str | None:
        """The variable that is true or false, and makes a difference to a prompt."""
        names = [n for n in self._variables if ABOUT_THOUGHTS.search(n) and not _EFFORT.search(n)]
        for name in sorted(names, key=_rank)[:VARIABLES_MAX]:
            on, off = (
                self._try([_QUESTION], {name: v}, add_generation_prompt=True) for v in (True, False)
            )
            if on and off and on != off:
                return name
        return None

    def _switched(self, value: bool) -> Iterator[dict[str, Any]]:
        if self._switch is not None:
            yield {self._switch: value}

    def _find_effort(self) -> tuple[str | None, dict[str, str]]:
        """The variable that says how much to think, and the prompt with each value; and, first, of
        none.
        """
        names = [n for n in self._variables if _EFFORT.search(n)]
        on = next(iter(self._switched(True)), {})
        for name in sorted(names, key=_rank)[:VARIABLES_MAX]:
            texts = {"": self._try([_QUESTION], on, add_generation_prompt=True)}
            for value in EFFORTS:
                texts[value] = self._try(
                    [_QUESTION], {**on, name: value}, add_generation_prompt=True
                )
            if len(set(filter(None, texts.values()))) > 1:
                return name, texts
        return None, {}

    def _efforts(self) -> frozenset[str]:
        """Return those that mean something: a value that makes no difference does where others
        do.
        """
        usual = [v for v in ("low", "medium", "high") if self._texts.get(v)]
        differs = any(self._texts[v] != self._texts[""] for v in usual)
        means = {v for v in EFFORTS if self._texts.get(v) and self._texts[v] != self._texts[""]}
        if differs:
            means |= {v for v in (*usual, "max") if self._texts.get(v)}
        return frozenset(means - {"none"})

    def _off(self, marks: Marks) -> Mapping[str, Any] | None:
        """The variables by which a prompt does not begin a thought."""
        for way in self._switched(False):
            if not marks.ends_inside(self._begun(way)):
                return way
        if self._effort is not None:
            for value in ("none", "minimal", "low"):
                if marks.ends_after(self._begun({self._effort: value})):
                    return {self._effort: value}
        return None

    def _by_rendering(self) -> tuple[Marks, str] | None:
        """The marks around a thought that the template writes, and the field that has it."""
        for name in FIELDS:
            for content, calls in ((_CONTENT, []), ("", [_CALL]), (_CONTENT, [_CALL])):
                for way in ({}, *self._switched(True)):
                    marks = self._around(name, content, calls, way)
                    if marks is not None:
                        return marks, name
        return None

    def _around(
        self, name: str, content: str, calls: Sequence[Any], way: Mapping[str, Any]
    ) -> Marks | None:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = calls
        message = with_thought(message, _THOUGHT, name)
        text, after = self._try([_QUESTION, message], way), content or _CALLED
        if text.count(_THOUGHT) != 1 or after not in text:
            return None
        before, rest = text.split(_THOUGHT)
        if after not in rest:
            return None
        closing = rest[: rest.index(after)]
        if not content:  # the beginning of the call is not the thought's
            mark = ATOM.search(closing)
            closing = closing[: mark.end()] if mark else ""
        begun = before[len(common_prefix(before, self._try([_QUESTION], way))) :]
        opening = self._opening(begun, Marks("", closing).close)
        # a list printed as it is
        as_data = name == IN_PARTS and re.search(r"['\"]type['\"]", opening)
        if not opening.strip() or not closing.strip() or as_data:
            return None
        return Marks(opening, closing)

    def _opening(self, begun: str, closing: str) -> str:
        """Return the opening of what stands between a question and a thought, what the model
        writes, or would where the prompt does not. What holds the `closing` begins no thought.
        """
        rests = [begun[len(b) :] for _, b in self._begins if b and begun.startswith(b)]
        if rests := [rest for rest in rests if rest.strip()]:
            return max(rests, key=len)
        longer = [b[len(begun) :] for _, b in self._begins if begun and b.startswith(begun)]
        if longer := [rest for rest in longer if rest.strip() and closing not in rest]:
            return min(longer, key=len)
        return last_mark(begun)

    def _by_shape(self) -> Marks | None:
        """Return where no thought is rendered: a pair of marks that the template begins answers
        with, that it names, or that the vocabulary has.
        """
        named = dict.fromkeys(a for a in ATOM.findall(self._source) if ABOUT_THOUGHTS.search(a))
        words = [w for w in self._vocabulary if ATOM.fullmatch(w) and ABOUT_THOUGHTS.search(w)]
        known = {*named, *words}
        for _, begin in self._begins:
            opening = last_mark(begin)
            if opening.strip() in known and (close := _closing(opening.strip(), known)):
                return Marks(opening, f"\n{close}\n\n")
        opened = [mark.replace("/", "", 1) for mark in named if "/" in mark]
        for mark in (*named, *opened, *sorted(words)):
            if close := _closing(mark, known):
                return Marks(f"{mark}\n", f"\n{close}\n\n")
        return None

    def _reads_content(self, marks: Marks) -> bool:
        """Return whether thoughts of earlier turns, which stand in their content, are left out."""
        content = f"{marks.opening}{_THOUGHT}{marks.closing}{_CONTENT}"
        later = {"role": "assistant", "content": "later"}
        turns = [_QUESTION, {**later, "content": content}, _QUESTION, later, _QUESTION]
        text = self._try(turns)
        return _CONTENT in text and _THOUGHT not in text


def with_thought(message: Mapping[str, Any], thought: str, name: str) -> dict[str, Any]:
    """The message of the assistant with a thought in the field `name`; of `IN_CONTENT` the caller
    knows the marks.
    """
    if name != IN_PARTS:
        return {**message, name: thought}
    content = message.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    return {**message, "content": [{"type": "thinking", "thinking": thought}, *parts]}


def _closing(mark: str, known: Collection[str]) -> str | None:
    """The mark that ends what `mark` begins, if it is among the `known` ones."""
    inner = mark[1:-1]
    ways = [
        f"{mark[0]}/{inner}{mark[-1]}",
        f"{mark[0]}|/{inner[1:]}{mark[-1]}",
        *(
            mark.replace(one, other)
            for one, other in (
                ("begin", "end"),
                ("BEGIN", "END"),
                ("START", "END"),
                ("start", "end"),
            )
            if one in mark
        ),
    ]
    return next((way for way in ways if way in known and way != mark), None)


def _rank(name: str) -> tuple[int, str]:
    return (_USUAL.index(name) if name in _USUAL else len(_USUAL), name)
