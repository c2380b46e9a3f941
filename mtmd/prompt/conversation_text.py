"""A conversation as the text of a prompt: in the forms that the chat template reads, changed where
the template has no place for something, and checked to hold every text that was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

from mtmd.chat_template.content_forms import ContentForms, Render, RoleForm, read_forms
from mtmd.chat_template.text_check import check_texts
from mtmd.kernels.errors import PromptError
from mtmd.prompt.leniency import open_ended, rearranged
from mtmd.tools.history import tell
from mtmd.tools.probe import ToolTemplate, read_template
from mtmd.tools.tool import Toolbox

ATTEMPTS_MAX = 16
_TEXT, _PARTS = RoleForm(), RoleForm(False, True, True, True)
T = TypeVar("T")


class ConversationText:
    """What one chat template makes of conversations. It may be used from several threads.

    render: `ChatTemplate.render`. seal: makes the texts of tools harmless, as those of messages
    are. special, stops: spellings of the special tokens, and of those that end an answer. marker:
    what the template writes for a picture, None for a model without pictures. in_text, video: what
    stands for a picture, and for a video, in a template that reads strings.
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
    ):
        self._render, self._seal = render, seal
        self._special, self._stops, self._marker = special, stops, marker
        self._in_text, self._video = in_text, video

    @cached_property
    def forms(self) -> ContentForms:
        """How the template reads contents, found out when it is first needed."""
        return read_forms(self._render, self._marker, self._in_text, self._video)

    @cached_property
    def tools(self) -> ToolTemplate:
        """What the template can do with tools, found out when it is first needed."""

        def render(messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
            return self._render(self.forms.fit(messages), **more)

        return read_template(render, self._special, self._stops, self._marker)

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
        for arranged, template, forms, notes in islice(self._ways(messages, box), ATTEMPTS_MAX):
            found: list[str] = []

            def rendered(
                made: list[dict[str, Any]],
                template: ToolTemplate | None = template,
                forms: ContentForms = forms,
                found: list[str] = found,
            ) -> str:
                tools = None
                if template is not None:
                    told = tell(made, box, template, self._seal)
                    made, tools = told.messages, told.tools
                    found[:] = told.notes
                fit = forms.fit

                def render(messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
                    return self._render(fit(messages), **{**(variables or {}), **more})

                if open_end:
                    return open_ended(render, made, tools)
                return render(made, tools=tools)

            try:
                prompt, left_out = check_texts(rendered, arranged)
                return read(prompt), (*found, *notes, *left_out)
            except PromptError as error:
                refused = refused or error
        assert refused is not None, "there is one way at least"
        raise refused

    def _ways(
        self, messages: Sequence[dict[str, Any]], box: Toolbox
    ) -> Iterator[tuple[list[dict[str, Any]], ToolTemplate | None, ContentForms, tuple[str, ...]]]:
        """The conversation in the ways in which it can be written, the most faithful one first:
        messages, how tools are written (None where there are none), forms, notes.
        """
        is_tool_use = bool(box.callable) or any(
            "tool_calls" in m or m["role"] == "tool" for m in messages
        )
        arrangements: list[tuple[list[dict[str, Any]], tuple[str, ...]]] = [(list(messages), ())]
        arrangements += [(made, (note,)) for made, note in rearranged(list(messages))]
        for template in self._tool_ways() if is_tool_use else [None]:
            for arranged, notes in arrangements:
                yield arranged, template, self.forms, notes
        for form in (_TEXT, _PARTS):
            for arranged, notes in arrangements:
                template = self.tools if is_tool_use else None
                yield arranged, template, self.forms.only(form), notes

    def _tool_ways(self) -> Iterator[ToolTemplate]:
        """The template as it was found, and as one that shows less of tools."""
        yield self.tools
        if self.tools.writes_calls:
            yield replace(self.tools, writes_calls=False)
        if self.tools.writes_results:
            yield replace(self.tools, writes_calls=False, writes_results=False)
