"""The package for scripts of this folder: as it is installed, or by links to the folders it
installs from, where it is not.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def find_package() -> str:
    """How it was found, for people. Processes that are started afterwards find it, too."""
    try:
        if find_spec("mtmd.kernels") is not None:
            return "installed"
    except ModuleNotFoundError:
        pass
    folder = tempfile.TemporaryDirectory(prefix="mtmd-links-")
    atexit.register(folder.cleanup)
    tree = linked(Path(folder.name) / "package")
    sys.modules.pop("mtmd", None)  # without its parts, as it lies in the current folder
    sys.path.insert(0, str(tree))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tree), *([before] if before else [])])
    return "not installed, and found by links"


def linked(tree: Path) -> Path:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return Path(import_module("editable_types").link(tree))
    finally:
        sys.path.remove(str(ROOT / "tools"))
