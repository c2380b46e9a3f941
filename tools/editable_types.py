"""What an editable install gets beside setuptools' import hook, which no type checker follows: a
folder of links in the form of the package, and the folder's name in a .pth file.

`python tools/editable_types.py [FOLDER]` makes and prints the folder alone, for PYTHONPATH where
nothing can be installed.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / "build" / "editable"
ROOMS = ("kernels", "clip", "llm", "web")
PTH = "mtmd_types.pth"


def link(tree: Path) -> Path:
    """`tree` made anew, with the package in it as it installs."""
    shutil.rmtree(tree, ignore_errors=True)
    package = tree / "mtmd"
    package.mkdir(parents=True)
    parts = [p for p in (ROOT / "mtmd").iterdir() if p.name != "__pycache__"]
    for part in (*parts, *(ROOT / room for room in ROOMS)):
        (package / part.name).symlink_to(part)
    return tree


def add_file(wheel: Path, name: str, data: bytes) -> None:
    """One more file in a wheel, and its line in RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(wheel) as old:
        files = [(info, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for info, content in files:
            if info.filename.endswith(".dist-info/RECORD"):
                content += f"{name},sha256={digest},{len(data)}\n".encode()
            new.writestr(info, content)
        new.writestr(name, data)


if __name__ == "__main__":
    print(link(Path(sys.argv[1]).resolve() if sys.argv[1:] else TREE))
