"""Tools, as any of the adapters may be given them. This is the one place that refuses them."""

from __future__ import annotations

from typing import Any

from mtmd.web.errors import ApiError

_NOTHING: tuple[Any, ...] = (None, [], "", "none", {"type": "none"})


def check_tools(tools: Any, choice: Any = None) -> None:
    """Raises ApiError for tools that an answer may call: this interface has none yet."""
    if tools not in _NOTHING and choice not in ("none", {"type": "none"}):
        raise _refused("tools")


def check_history(where: str, calls: Any) -> None:
    """Raises ApiError for calls and results of tools in a conversation. `where`: their place."""
    if calls not in _NOTHING:
        raise _refused(where)


def _refused(where: str) -> ApiError:
    return ApiError(
        400,
        f"{where}: calls of tools are not supported at this address; leave them out",
        param=where,
        code="unsupported_parameter",
    )
