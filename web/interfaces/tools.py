"""Tools as the adapters' requests have them, made the options by which the service knows them, and
calls handed out in the adapters' forms.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtmd import Event, Finished, TextPiece, ToolCall, ToolCallPiece


def tool_options(
    tools: Sequence[Mapping[str, Any]] | None, choice: Any = None, several: bool | None = None
) -> dict[str, Any]:
    """Fields of AnswerOptions. `tools` and `choice` are read, and refused, where options are."""
    if tools:
        return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": several}
    return {} if choice in (None, "auto", "none") else {"tool_choice": choice}


def arguments_of(call: ToolCall) -> dict[str, Any] | None:
    """As an object; None for a call that is cut, as the answer was."""
    try:
        found = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class CallReader:
    """Puts the pieces of calls together: of each event, what is whole with it."""

    def __init__(self) -> None:
        self._open: tuple[int, str, str, list[str]] | None = None

    def read(self, event: Event) -> Iterator[ToolCall]:
        if isinstance(event, ToolCallPiece):
            if self._open is None or self._open[0] != event.index:
                yield from self._close()
                self._open = (event.index, event.id or "", event.name or "", [])
            self._open[3].append(event.arguments)
        elif isinstance(event, (TextPiece, Finished)):
            yield from self._close()

    def _close(self) -> Iterator[ToolCall]:
        if self._open is not None:
            _, id_, name, parts = self._open
            self._open = None
            yield ToolCall(id_, name, "".join(parts))
