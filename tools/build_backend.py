"""setuptools' build backend, with an editable install that type checkers and editors can read
(editable_types.py).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from editable_types import PTH, TREE, add_file, link
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # whatever else a frontend asks for


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    name: str = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    try:
        tree = link(TREE)
    except OSError as error:  # Windows lets not everybody make links
        print(f"type checkers will not find mtmd: {error}", file=sys.stderr)
        return name
    add_file(Path(wheel_directory) / name, PTH, f"{tree}\n".encode())
    return name
