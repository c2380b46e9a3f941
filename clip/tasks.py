"""Tasks of models that read documents or caption pictures: what a person wants, by names that all
have, and the prompts that a model's authors trained it with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from mtmd.base.errors import OptionError

TASKS = (
    *("markdown", "text", "table", "formula", "layout"),
    *("caption", "short-caption", "long-caption", "objects"),
)


@runtime_checkable
class Tasked(Protocol):
    """A vision family whose authors say how it is asked for a task."""

    @property
    def tasks(self) -> Mapping[str, str]:
        """Return the prompts by task, those of `TASKS` that it has."""


def check_task(task: str, prompts: Mapping[str, str]) -> None:
    """Raises OptionError for a task that is not among a model's prompts."""
    if task not in prompts:
        has = f"it has {', '.join(prompts)}" if prompts else "it has none; ask in your own words"
        raise OptionError(f"task: found {task}, which this model was not made for; {has}")


def tasks_of(family: object) -> dict[str, str]:
    """Return the prompts of a vision family, in the order of `TASKS`; none where its authors say
    none.
    """
    prompts = family.tasks if isinstance(family, Tasked) else {}
    return {task: prompts[task] for task in TASKS if task in prompts}
