"""LoRA adapters as people write them: NAME=PATH:SCALE where a model is loaded, NAME:SCALE where an
answer chooses some.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mtmd.base.errors import OptionError
from mtmd.base.options import Kind, refuse

MAX_ADAPTERS = 64
MAX_SCALE = 1e4
_NAME = r"[A-Za-z0-9][\w.-]{0,63}"
_SCALE = r":(?P<scale>-?\d+(?:\.\d+)?)"
_LOADED = re.compile(rf"(?:(?P<name>{_NAME})=)?(?P<path>.+?)(?:{_SCALE})?", re.ASCII | re.DOTALL)
_CHOSEN = re.compile(rf"(?P<name>{_NAME})(?:{_SCALE})?", re.ASCII)
AdapterChoice = tuple[tuple[str, "float | None"], ...]
"""Names of adapters, each with its scale, None for the one that it was loaded with."""


@dataclass(frozen=True)
class AdapterOption:
    """`name` is None for an adapter that is applied to every answer."""

    name: str | None
    path: str
    scale: float

    @staticmethod
    def parse(text: str) -> AdapterOption:
        """Read one of the texts of `LoadOptions.lora`."""
        match = _LOADED.fullmatch(text)
        assert match is not None
        return AdapterOption(match["name"], match["path"], float(match["scale"] or 1))

    def __str__(self) -> str:
        name = "" if self.name is None else f"{self.name}="
        return f"{name}{self.path}:{self.scale:f}"


def _loaded(name: str, value: object) -> tuple[str, ...]:
    """A path, several, or {name: path}."""
    if isinstance(value, Mapping):
        value = [f"{key}={os.fspath(path)}" for key, path in value.items()]
    values = value if isinstance(value, (list, tuple)) else [value]
    if len(values) > MAX_ADAPTERS:
        raise OptionError(f"{name}: found {len(values)} adapters, expected at most {MAX_ADAPTERS}")
    result = []
    for item in values:
        text = os.fspath(item) if isinstance(item, (str, os.PathLike)) else item
        if not isinstance(text, str) or "\0" in text or not (match := _LOADED.fullmatch(text)):
            refuse(name, item, "[NAME=]PATH[:SCALE], a list of such, or {name: path}")
        _check_scale(name, match["scale"])
        result.append(text)
    return tuple(result)


def from_folder(value: object, folder: Path) -> tuple[str, ...]:
    """Return `LoadOptions.lora` as a file in `folder` has it: paths of what is there are from it
    on. Raises OptionError.
    """
    result = []
    for text in _loaded("lora", value):
        one = AdapterOption.parse(text)
        path = folder / Path(one.path).expanduser()
        result.append(str(replace(one, path=str(path))) if path.exists() else text)
    return tuple(result)


def _chosen(name: str, value: object) -> AdapterChoice:
    """A name, several, or {name: scale}."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        pairs = []
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, tuple) and len(item) == 2:  # as it is stored
                pairs.append(item)
                continue
            match = _CHOSEN.fullmatch(item) if isinstance(item, str) else None
            if match is None:
                refuse(name, item, "NAME[:SCALE] of an adapter, a list of such, or {name: scale}")
            pairs.append((match["name"], match["scale"] and float(match["scale"])))
    if len(pairs) > MAX_ADAPTERS:
        raise OptionError(f"{name}: found {len(pairs)} adapters, expected at most {MAX_ADAPTERS}")
    for key, scale in pairs:
        if not isinstance(key, str) or not re.fullmatch(_NAME, key, re.ASCII):
            refuse(name, key, "the name of an adapter")
        _check_scale(name, scale)
    return tuple(dict(pairs).items())


def _check_scale(name: str, scale: object) -> None:
    number = float(scale) if isinstance(scale, str) else 1.0 if scale is None else scale
    if type(number) not in (int, float) or not math.isfinite(number) or abs(number) > MAX_SCALE:  # type: ignore[arg-type]
        refuse(name, scale, f"a scale from -{MAX_SCALE:,.0f} to {MAX_SCALE:,.0f}")


LOADED = Kind(
    _loaded,
    "Path | Sequence[Path] | Mapping[str, Path]",
    repeated=True,
    metavar="[NAME=]PATH[:SCALE]",
)
CHOSEN = Kind(
    _chosen, "str | Sequence[str] | Mapping[str, float]", repeated=True, metavar="NAME[:SCALE]"
)
