"""The command that installs what an optional part needs, as this installation was made."""

from __future__ import annotations

import json
import platform
import sys
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit


@lru_cache(maxsize=8)
def install_command(extra: str) -> str:
    """Return the command that installs `extra` of pyproject.toml: from the folder of a checkout
    that is installed as it lies, by name otherwise.
    """
    try:
        made_from = distribution("mtmd").read_text("direct_url.json")
    except PackageNotFoundError:
        made_from = None
    origin = json.loads(made_from or "{}")
    if origin.get("dir_info", {}).get("editable"):
        folder = unquote(urlsplit(origin["url"]).path)
        return f"{sys.executable} -m pip install -e '{folder}[{extra}]'"
    return f"pip install 'mtmd[{extra}]'"


def install_triton() -> str:
    """Return how to have Triton, of which its makers publish builds for Linux alone."""
    if platform.system() == "Linux":
        return install_command("gpu")
    return (
        "its makers publish it for Linux (WSL is one); for Windows others do (pip install "
        "triton-windows, not tried)"
    )
