"""Describes what a request asks of thinking, as variables of the chat template and as what is done
in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.thinking.probe import ThinkingTemplate
from mtmd.thinking.request import ThinkingRequest

NO_MARKS = "the chat template and the vocabulary have no marks of thoughts"
NO_SWITCH = "the chat template has no variable for it"
CLOSED = f"think: {NO_SWITCH}; the thought is closed before it starts"


@dataclass(frozen=True)
class Chosen:
    """`variables` for the template; `closes`: the thought is closed at the end of the prompt;
    `notes` say what of the request has no effect.
    """

    variables: Mapping[str, Any]
    closes: bool
    notes: tuple[str, ...]


def choose(
    request: ThinkingRequest, template: ThinkingTemplate, seal: Callable[[Any], Any]
) -> Chosen:
    """Return how a template is rendered for a request. `seal` is for the texts among its
    variables.
    """
    notes: list[str] = []
    variables: dict[str, Any] = {}
    closes = request.budget == 0
    if request.is_off:
        closes = template.off is None
        variables |= template.off or {}
        if closes and request.think is not None:
            notes.append(f"think: {NO_MARKS}" if template.marks is None else CLOSED)
    elif request.think is not None:
        variables |= template.on or {}
        notes += _effort(request.think, template, variables)
    if request.budget is not None and template.marks is None:
        notes.append(f"think_budget: {NO_MARKS}; it has no effect")
    unread = [name for name in request.variables if name not in template.variables]
    if unread:
        notes.append(f"chat_template_kwargs: the chat template reads no {', '.join(unread)}")
    return Chosen(variables | seal(request.variables), closes, tuple(notes))


def _effort(think: bool | str, template: ThinkingTemplate, variables: dict[str, Any]) -> list[str]:
    """Sets the variable that says how much to think; notes of what cannot be done."""
    if template.marks is None and template.effort is None:
        return [f"think: {NO_MARKS}; it has no effect"]
    if think is True:
        return [] if template.on is not None else [f"think: {NO_SWITCH}; the model decides"]
    if template.effort is None:
        return [f"reasoning_effort: {NO_SWITCH}; it has no effect"]
    if think not in template.efforts:
        known = ", ".join(sorted(template.efforts))
        return [f"reasoning_effort: the chat template knows {known}; {think!r} has no effect"]
    variables[template.effort] = think
    return []
