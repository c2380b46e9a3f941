"""Processes in which modules are not to be had: as on a machine that has torch, Triton and what
they bring, and neither most of the package's dependencies nor its tests', nor the package itself.
"""

from __future__ import annotations

import os
from pathlib import Path

LACKING = (
    *("flask", "gevent", "pydantic", "llguidance", "argcomplete", "prometheus_client"),
    *("gguf", "openai", "anthropic", "ollama", "schemathesis", "jsonschema", "simpy", "playwright"),
    *("pyarrow", "pillow_heif", "pypdfium2", "av", "ray", "aiohttp", "yarl"),
)
# Read by every Python as it starts, after what installed packages have it do.
CODE = """
import sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in LACKING:
            raise ModuleNotFoundError(f"No module named {name!r}: it is hidden", name=name)

sys.meta_path.insert(0, Lacking())
if not INSTALLED:
    sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
    sys.path[:] = [p for p in sys.path if not p.endswith("build/editable")]
"""


def without(folder: Path, installed: bool = True) -> dict[str, str]:
    """The environment of such a process; `folder` is to write a file into. Whether the package is
    installed there.
    """
    location = folder / "lacking"
    location.mkdir(exist_ok=True)
    names = f"LACKING, INSTALLED = {LACKING!r}, {installed}\n"
    (location / "sitecustomize.py").write_text(names + CODE)
    return {**os.environ, "PYTHONPATH": str(location)}
