"""Why a picture of the web could not be had, for whoever runs the server: its client is not told,
as it would learn what there is inside.
"""

from __future__ import annotations

import logging
import socket
from urllib.parse import urlsplit

LONGEST = 200  # characters of what others have written
log = logging.getLogger("mtmd.web")


def report_to_operator(location: str, url: str, error: BaseException) -> None:
    """`location` in the request. Of the address the host alone: paths and queries may be
    secrets.
    """
    log.warning("%s was not fetched from %s: %s", location, _host(url), _reason(error))


def _host(url: str) -> str:
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None
    return _line(host or "an address without a host")


def _reason(error: BaseException) -> str:
    kind = type(error).__name__.lstrip("_")
    if isinstance(error, socket.gaierror):
        return f"its name is not found ({error.strerror})"
    if isinstance(error, TimeoutError):
        return "it took too long"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{kind}: {_line(text)}" if text else kind


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:LONGEST])
