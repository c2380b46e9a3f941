"""Measurements on a card, saved on disk: a file of JSON for each card and set of versions.

It is a hint and no more: a file that is damaged, or says what no measurement says, is measured
anew, and a kernel that it names still has to take the node.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mtmd.base.files import cache_folder, open_regular, write_atomically
from mtmd.kernels.trials import Measured, Trial

FORMAT = 2
BYTES_MAX = 1 << 20
SHAPES_MAX = 512
TEXT_MAX = 400
KERNELS_MAX = 16
log = logging.getLogger("mtmd.kernels")


def machine(device: torch.device) -> dict[str, str]:
    """Return what a measurement holds for: the card, and whatever decides which code runs there."""
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "card": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "runtime": str(torch.version.hip or torch.version.cuda),
        "cudnn": str(cudnn),
        "kernel": _source(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _source() -> str:
    """A digest of our kernel's text, and of how kernels are called and measured."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for folder in (here.parents[1] / "gpu" / "flash_attention", here):
        for file in sorted(folder.glob("*.py")):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


class Saved:
    """`machine` says for what, asked when it is needed first; `folder` where, None for the user's
    cache.
    """

    def __init__(self, machine: Callable[[], Mapping[str, str]], folder: Path | None = None):
        self._ask, self._folder = machine, folder

    @cached_property
    def machine(self) -> dict[str, str]:
        return dict(self._ask())

    @cached_property
    def file(self) -> Path | None:
        """None where nothing can be kept, or the device is not there."""
        folder = self._folder or cache_folder("attention")
        try:
            text = json.dumps(self.machine, sort_keys=True)
        except (RuntimeError, AssertionError):  # as torch says it of a card
            return None
        return folder and folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    @cached_property
    def _shapes(self) -> dict[str, Measured]:
        return self._read()

    def get(self, shape: str) -> Measured | None:
        return self._shapes.get(shape)

    def add(self, shape: str, measured: Measured) -> None:
        """Beside what other processes have added meanwhile."""
        if self.file is None:
            return
        shapes = self._read() | self._shapes | {shape: measured}
        while len(shapes) > SHAPES_MAX:
            del shapes[next(iter(shapes))]
        self.__dict__["_shapes"] = shapes
        entries = {
            name: {
                "node": m.node,
                "trials": [[t.name, t.ms, t.refused, t.lasting] for t in m.trials],
            }
            for name, m in shapes.items()
        }
        text = json.dumps({"format": FORMAT, "machine": self.machine, "shapes": entries}, indent=1)
        write_atomically(self.file, text.encode())

    def _read(self) -> dict[str, Measured]:
        if self.file is None:
            return {}
        try:
            with open_regular(self.file) as file:
                content = file.read(BYTES_MAX + 1)
        except OSError:  # none yet
            return {}
        try:
            if len(content) > BYTES_MAX:
                raise ValueError(f"more than {BYTES_MAX} bytes")
            result = json.loads(content)
            if result["format"] != FORMAT or result["machine"] != self.machine:
                raise ValueError("of another card or other versions")
            entries = list(result["shapes"].items())[:SHAPES_MAX]
            return {_text(name): _measured(entry) for name, entry in entries}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("what was measured of attention is measured anew: %s: %s", self.file, error)
            return {}


def _measured(entry: Any) -> Measured:
    trials = tuple(_trial(*one) for one in entry["trials"][:KERNELS_MAX])
    return Measured(_text(entry["node"]), trials)


def _trial(name: Any, ms: Any, refused: Any, lasting: Any) -> Trial:
    if type(lasting) is not bool:
        raise ValueError("neither lasting nor not")
    if (ms is None) == (refused is None):
        raise ValueError("a trial without an outcome")
    if ms is not None and not (type(ms) is float and math.isfinite(ms) and ms > 0):
        raise ValueError("a time that is none")
    return Trial(_text(name), ms, None if refused is None else _text(refused), lasting)


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > TEXT_MAX or not value.isprintable():
        raise ValueError("a text that is none")
    return value
