"""A conversation as the text of a prompt: in the forms that the chat template reads, changed where
the template has no place for something, and checked to hold every text that was sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from threading import RLock
from typing import Any, TypeVar

from mtmd.base.errors import PromptError
from mtmd.chat_template.content_forms import ContentForms, Render, RoleForm, read_forms
from mtmd.chat_template.render_limits import SECONDS_MAX, RenderLimitError
from mtmd.chat_template.text_check import check_texts
from mtmd.prompt.rewritten_turns import ARRANGEMENTS, Arrange, open_ended
from mtmd.tools.history import report
from mtmd.tools.probe import ToolTemplate, read_template
from mtmd.tools.tool import Toolbox

ATTEMPTS_MAX = 16
PROBES_S = 4.0  # of this thread, for all probes of one template; they take some 10 ms
_TEXT, _PARTS = RoleForm(), RoleForm(False, True, True, True, True)
T = TypeVar("T")


class ConversationText:
    """Describes what one chat template makes of conversations. It may be used from several threads.

    render: `ChatTemplate.render`. seal: makes the texts of tools harmless, as those of messages
    are. special, stops: spellings of the special tokens, and of those that end an answer. marker:
    what the template writes for a picture, None for a model without pictures. in_text, video: what
    stands for a picture, and for a video, in a template that reads strings. audio: what the
    template writes for audio, None for a model without. in_line: in a string no line ends beside a
    picture.
    """

    def __init__(
        self,
        render: Render,
        seal: Callable[[str], str],
        special: Sequence[str] = (),
        stops: Sequence[str] = (),
        marker: str | None = None,
        in_text: str | None = None,
        video: str = "",
        audio: str | None = None,
        in_line: bool = False,
    ):
        self._render, self._seal = render, seal
        self._special, self._stops, self._marker = special, stops, marker
        self._in_text, self._video, self._audio = in_text, video, audio
        self._in_line = in_line
        self._probing = RLock()
        self._forms: ContentForms | None = None
        self._tools: ToolTemplate | None = None

    def _shown(self, messages: Sequence[Mapping[str, Any]], /, **more: Any) -> str:
        if self._needs_list and more.get("tools") is None:
            more["tools"] = []
        return self._render(messages, **more)

    @cached_property
    def _needs_list(self) -> bool:
        """Return whether the template reads a list of tools where there are none."""
        ask = [{"role": "user", "content": "probed"}]
        try:
            self._render(ask, tools=None)
        except PromptError:
            try:
                self._render(ask, tools=[])
            except PromptError:
                return False
            return True
        return False

    @property
    def forms(self) -> ContentForms:
        """Return how the template reads contents, found out when it is first needed."""
        with self._probing:
            if self._forms is None:
                render = _in_time(self._shown)
                self._forms = read_forms(
                    render, self._marker, self._in_text, self._video, self._audio, self._in_line
                )
            return self._forms

    @property
    def tools(self) -> ToolTemplate:
        """Return what the template can do with tools, found out when it is first needed."""
        with self._probing:
            if self._tools is None:
                render = _in_time(partial(_fitted, self._shown, self.forms, {}))
                self._tools = read_template(render, self._special, self._stops, self._marker)
            return self._tools

    def write(
        self,
        messages: Sequence[dict[str, Any]],
        box: Toolbox,
        read: Callable[[str], T],
        open_end: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[T, tuple[str, ...]]:
        """Return what `read` makes of the prompt, and notes on what was changed for the template.

        messages: as `read_conversation` makes them. read: raises PromptError for a prompt that it
        cannot use; then the next way to write the conversation is tried. open_end: the prompt ends
        where the text of the last message does. variables: further ones for the template.

        Raises PromptError, with the template's own words where it refuses the messages as they
        are, and naming the text that it leaves out.
        """
        refused: PromptError | None = None
        attempts, end = 0, time.thread_time() + SECONDS_MAX
        for template, forms in self._ways(messages, box):
            written = _Written(self._shown, template, forms, box, self._seal, open_end, variables)
            for arrange, note in ARRANGEMENTS:
                if note and not written.changes(arrange, messages):
                    continue
                attempts += 1
                try:
                    prompt, left_out = check_texts(partial(written.prompt, arrange), messages)
                    notes = (*written.notes, *filter(None, [note]), *left_out)
                    return read(prompt), notes
                except RenderLimitError as error:
                    raise PromptError(str(error)) from error
                except PromptError as error:
                    refused = refused or error
                if attempts == ATTEMPTS_MAX or time.thread_time() > end:
                    raise refused
        assert refused is not None, "there is one way at least"
        raise refused

    def _ways(
        self, messages: Sequence[dict[str, Any]], box: Toolbox
    ) -> Iterator[tuple[ToolTemplate | None, ContentForms]]:
        """Yield how a conversation can be written, the most faithful way first: what the template
        can do with tools (None where there are none), and the forms of contents.
        """
        template: ToolTemplate | None = None
        if bool(box.callable) or any("tool_calls" in m or m["role"] == "tool" for m in messages):
            template = self.tools
            yield template, self.forms
            if self.tools.writes_calls:
                yield replace(self.tools, writes_calls=False), self.forms
            written = replace(self.tools, writes_calls=False, writes_results=False)
            if self.tools.writes_results:
                yield written, self.forms
            if self.tools.declares:
                yield replace(written, declares=False), self.forms
        else:
            yield None, self.forms
        yield template, self.forms.only(_TEXT)
        yield template, self.forms.only(_PARTS)


class _Written:
    """A conversation written in one way. `notes` say what was done to its tools."""

    def __init__(
        self,
        render: Render,
        template: ToolTemplate | None,
        forms: ContentForms,
        box: Toolbox,
        seal: Callable[[str], str],
        open_end: bool,
        variables: Mapping[str, Any] | None,
    ):
        self._fitted = partial(_fitted, render, forms, dict(variables or {}))
        self._template, self._box, self._seal, self._open = template, box, seal, open_end
        self.notes: tuple[str, ...] = ()

    def prompt(self, arrange: Arrange, messages: list[dict[str, Any]]) -> str:
        made, tools = self._with_tools(messages)
        made = arrange(made)
        if self._open:
            return open_ended(self._fitted, made, tools)
        return self._fitted(made, tools=tools)

    def changes(self, arrange: Arrange, messages: Sequence[dict[str, Any]]) -> bool:
        made, _ = self._with_tools(list(messages))
        return arrange(made) != made

    def _with_tools(
        self, messages: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        if self._template is None:
            return messages, None
        reported = report(messages, self._box, self._template, self._seal)
        self.notes = reported.notes
        return reported.messages, reported.tools


def _in_time(render: Render) -> Render:
    """The same, refusing everything after `PROBES_S`."""
    end = time.thread_time() + PROBES_S

    def rendered(messages: Sequence[Mapping[str, Any]], /, **more: Any) -> str:
        if time.thread_time() > end:
            raise PromptError("the chat template takes too long to be probed")
        return render(messages, **more)

    return rendered


def _fitted(
    render: Render,
    forms: ContentForms,
    variables: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    /,
    **more: Any,
) -> str:
    return render(forms.fit(messages), **{**variables, **more})
