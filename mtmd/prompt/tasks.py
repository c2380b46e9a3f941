"""A task in the place of a prompt: the words that the model's authors have for it, put into the
last turn of a conversation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mtmd.base.errors import PromptError
from mtmd.clip.family import ShowsTokens
from mtmd.clip.tasks import check_task, tasks_of
from mtmd.prompt.conversation import Message, OwnWords

CONFLICT = "task: found with a prompt, expected one of them; a task has its own prompt"

# Special tokens that say where something is, a part of the answers of models made for that
LOCATION_TOKEN = re.compile(
    r"<\|(?:/?ref|/?det|TEXT_(?:START|END)|LOC_(?:BEGIN|END|\d{1,4})|box_(?:start|end)"
    r"|object_ref_(?:start|end))\|>"
)


def with_task(messages: Sequence[Message], task: str, prompts: Mapping[str, str]) -> list[Message]:
    """The conversation with a task's prompt behind the pictures of its last turn; `prompts` are
    those of the model. Raises OptionError for a task that it does not have, PromptError for a last
    turn with words of its own.
    """
    check_task(task, prompts)
    *before, last = messages
    content = last.get("content")
    parts: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else []
    parts = parts or list(content or ())
    pictures = [part for part in parts if not _is_blank(part)]
    if last.get("role") != "user" or any("text" in part for part in pictures):
        raise PromptError(CONFLICT)
    question = {"type": "text", "text": OwnWords(prompts[task])}
    return [*before, {**last, "content": [*pictures, question]}]


def shown_tokens(family: object) -> re.Pattern[str] | None:
    """Return which special tokens are text of a family's answers, None for none."""
    if isinstance(family, ShowsTokens):
        return family.shown_tokens
    return LOCATION_TOKEN if "layout" in tasks_of(family) else None


def _is_blank(part: Any) -> bool:
    text = part.get("text") if isinstance(part, Mapping) else None
    return isinstance(text, str) and not text.strip()
