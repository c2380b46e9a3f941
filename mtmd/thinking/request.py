"""Describes what a request says of thinking, checked. Nothing heavy is imported for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from mtmd.base.errors import OptionError
from mtmd.base.options import refuse

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[str, ...] = get_args(Effort)
VARIABLES_MAX = 16 << 10  # characters of JSON
# What the conversation says, and the request by other fields.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


@dataclass(frozen=True)
class ThinkingRequest:
    """`think`: whether the model is to think, or how much (an effort); None for what the template
    does by itself. `budget`: the most tokens of the thought, None for any number. `variables` are
    for the template.
    """

    think: bool | str | None = None
    budget: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_off(self) -> bool:
        return self.think in (False, "none") or (self.think is None and self.budget == 0)


def checked_variables(value: object) -> Mapping[str, Any] | None:
    """Variables for a chat template: an object of JSON's types, also as text, as a command has it.
    Raises OptionError for anything else, and for names that the conversation itself has.
    """
    name = "chat_template_kwargs"
    if isinstance(value, str) and len(value) <= VARIABLES_MAX:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            refuse(name, value, "a JSON object")
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        refuse(name, value, "a JSON object")
    try:
        text = json.dumps(dict(value), allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        refuse(name, value, "values of JSON's types")
    if len(text) > VARIABLES_MAX:
        raise OptionError(f"{name}: found {len(text):,} characters, expected {VARIABLES_MAX:,}")
    for key in value:
        if key in RESERVED or key.endswith("_token") or not key.isidentifier():
            raise OptionError(
                f"{name}: found {key!r:.60}, expected names of a template's own variables"
            )
    made: Mapping[str, Any] = json.loads(text)
    return made
