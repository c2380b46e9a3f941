"""The end of a prompt, where an answer begins: inside a thought, after one, or before either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtmd.thinking.history import FIELD
from mtmd.thinking.marks import Marks
from mtmd.tools.history import plain_text


class PromptEnd:
    """End of a conversation's prompt that is yet to be rendered. `closes`: a thought is closed at
    once; `open_end`: the answer goes on from the last message. `messages` and `open_end` are what
    to render: a last message that is a thought alone is not among them.
    """

    def __init__(
        self, marks: Marks | None, closes: bool, messages: Sequence[dict[str, Any]], open_end: bool
    ):
        self._marks, self._closes = marks, closes
        self.messages, self.open_end = list(messages), open_end
        self._thought: str | None = None
        self._is_begun = False
        last = self.messages[-1]
        stated = plain_text(last["content"]).lstrip()
        if open_end and marks is not None and last["role"] == "assistant":
            self._is_begun = stated.startswith(marks.open) and marks.close not in stated
            if not stated and not last.get("tool_calls") and last.get(FIELD):
                self._thought, self.open_end = last[FIELD], False
                del self.messages[-1]

    def of(self, text: str) -> tuple[str, bool | None]:
        """The prompt, as rendered, with its end, and whether that is inside a thought; None where
        the answer has none.
        """
        marks = self._marks
        if marks is None:
            return text, None
        if self.open_end:
            return text, self._is_begun or None
        inside = marks.ends_inside(text)
        opening = "" if inside else marks.opening
        if self._thought is not None:
            return f"{text}{opening}{marks.seal(self._thought)}", True
        if not inside and marks.ends_after(text):
            return text, None
        return (f"{text}{opening}{marks.closing}", None) if self._closes else (text, inside)
