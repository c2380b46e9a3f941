"""Thoughts of earlier turns, in the form in which the chat template reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtmd.thinking.marks import Marks
from mtmd.thinking.probe import IN_CONTENT, ThinkingTemplate, with_thought

FIELD = "reasoning_content"  # under which checked messages have their thought
NAMES = (FIELD, "reasoning", "thinking")  # and messages from outside


def without_thoughts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, their thoughts left out."""
    return [{k: v for k, v in message.items() if k != FIELD} for message in messages]


def with_thoughts(
    messages: Sequence[Mapping[str, Any]], template: ThinkingTemplate
) -> list[dict[str, Any]]:
    """Checked messages, each thought in the field that the template reads; left out where it reads
    none.
    """
    made = []
    bare = without_thoughts(messages)
    for message, without in zip(messages, bare, strict=True):
        thought, marks = message.get(FIELD), template.marks
        if not thought or template.field is None or marks is None:
            made.append(without)
        elif template.field == IN_CONTENT:
            made.append(_in_content(without, marks, marks.seal(thought)))
        else:
            made.append(with_thought(without, marks.seal(thought), template.field))
    return made


def _in_content(message: dict[str, Any], marks: Marks, thought: str) -> dict[str, Any]:
    written = f"{marks.opening.lstrip()}{thought}{marks.closing}"
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{written}{content}"}
    return {**message, "content": [{"type": "text", "text": written}, *content]}
