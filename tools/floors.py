"""The lowest version that pyproject.toml allows of each library, as pip constraints, on standard
output: what `make floors` installs to show that the ranges are honest.

torch stays at the pinned version: another one is gigabytes of another device's libraries.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:  # the standard library has it from 3.11 on; pip brings its own
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).parent.parent
PINNED = "torch"


def requirements() -> list[Requirement]:
    """What the package needs to run on this version of Python, with the extras that its tests of
    the lowest versions need.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *extras["gpu"], *extras["parquet"], *extras["video"]]
    needs = [Requirement(text) for text in texts]
    return [need for need in needs if need.marker is None or need.marker.evaluate()]


def floor(need: Requirement) -> str | None:
    return next((s.version for s in need.specifier if s.operator in (">=", "==")), None)


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split(";")[0].split("==") for line in lines if re.match(r"\w[\w.-]*==", line)]
    return {name.lower(): version.strip() for name, version in pins}


if __name__ == "__main__":
    for need in requirements():
        version = pinned()[PINNED] if need.name == PINNED else floor(need)
        print(f"{need.name}=={version}")
