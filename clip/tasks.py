"""Tasks of models that read documents: what a person wants of a page, by names that all have, and
the prompts that a model's authors trained it with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

TASKS = ("markdown", "text", "table", "formula", "layout")


@runtime_checkable
class Tasked(Protocol):
    """A vision family whose authors say how it is asked for a task."""

    @property
    def tasks(self) -> Mapping[str, str]:
        """Return the prompts by task, those of `TASKS` that it has."""


def tasks_of(family: object) -> dict[str, str]:
    """Return the prompts of a vision family, in the order of `TASKS`; none where its authors say
    none.
    """
    prompts = family.tasks if isinstance(family, Tasked) else {}
    return {task: prompts[task] for task in TASKS if task in prompts}
