"""Describes what holds for one model where a request does not say otherwise: a system prompt,
sampling, other names, and how it is loaded. Read from a JSON file:

    {"*": {"temperature": 0.2},
     "gemma-3-4b-it-Q4_K_M": {"system": "Answer in one sentence.", "top_p": 0.9,
                              "aliases": ["gemma"], "load": {"context": 4096}}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtmd import OptionError
from mtmd.base.options import options_of
from mtmd.checkpoint.collection import near
from mtmd.options.adapters import from_folder
from mtmd.options.answer import AnswerOptions
from mtmd.options.by_name import options
from mtmd.options.load import LoadOptions
from mtmd.web.settings import ALIAS_CHARS

FILE = "presets.json"  # in a folder of models
BYTES_MAX = 1 << 20
SYSTEM_CHARS_MAX = 100_000
EVERY = "*"
ANSWER, LOAD = (
    tuple(name for name, declared in options_of(record).items() if declared.preset)
    for record in (AnswerOptions, LoadOptions)
)
_PATHS = ("mmproj", "chat_template")  # from the file's folder on


@dataclass(frozen=True)
class Preset:
    """`answer`: fields of AnswerOptions; `load`: of LoadOptions."""

    system: str = ""
    answer: Mapping[str, Any] = field(default_factory=dict)
    load: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()

    def asdict(self) -> dict[str, Any]:
        """Return what the page shows."""
        return {"system": self.system} | dict(self.answer)


NONE = Preset()


def read_presets(path: Path, names: Iterable[str]) -> dict[str, Preset]:
    """Read the presets of every model in `names`. Raises OptionError saying what is wrong with the
    file, where.
    """
    where, known = f"presets {path}", list(names)
    try:
        with path.open("rb") as file:
            data = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise OptionError(
            f"{where}: cannot be read ({error.strerror}), expected a JSON file"
        ) from error
    if len(data) > BYTES_MAX:
        raise OptionError(f"{where}: found more than {BYTES_MAX:,} bytes, expected fewer")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{where}: found no JSON ({error}); expected an object") from error
    if not isinstance(values, dict):
        raise OptionError(f"{where}: found {type(values).__name__}, expected an object by model")
    for name in values:
        if name != EVERY and name not in known:
            instead = near(name, known) or f"; there is {', '.join(known[:8])}"
            raise OptionError(f"{where}: there is no model {name!r:.80}{instead}")
    every = _preset(values.get(EVERY, {}), f"{where}, {EVERY}", path.parent)
    if every.aliases:
        raise OptionError(f"{where}, {EVERY}: aliases belong to one model")
    presets = {}
    for name in known:
        own = _preset(values.get(name, {}), f"{where}, {name}", path.parent)
        presets[name] = Preset(
            own.system or every.system,
            {**every.answer, **own.answer},
            {**every.load, **own.load},
            own.aliases,
        )
    _check_aliases(presets, where)
    return presets


def _preset(values: Any, where: str, folder: Path) -> Preset:

    if not isinstance(values, dict):
        raise OptionError(f"{where}: found {type(values).__name__}, expected an object")
    rest = dict(values)
    system, load, aliases = rest.pop("system", ""), rest.pop("load", {}), rest.pop("aliases", [])
    if not isinstance(system, str) or len(system) > SYSTEM_CHARS_MAX:
        raise OptionError(
            f"{where}: system: expected a text of at most {SYSTEM_CHARS_MAX:,} characters"
        )
    if not isinstance(load, dict):
        raise OptionError(f"{where}: load: found {type(load).__name__}, expected an object")
    if not isinstance(aliases, list) or not all(
        isinstance(a, str) and 0 < len(a) <= ALIAS_CHARS and a.isprintable() for a in aliases
    ):
        raise OptionError(f"{where}: aliases: expected a list of names")
    _check_names(rest, (*ANSWER, "system", "load", "aliases"), where)
    _check_names(load, LOAD, f"{where}, load")
    if "lora" in load:
        try:
            load["lora"] = from_folder(load["lora"], folder)
        except OptionError as error:
            raise OptionError(f"{where}, load: {error}") from error
    load = {
        key: str(folder / Path(value).expanduser())
        if key in _PATHS and isinstance(value, str) and value
        else value
        for key, value in load.items()
    }
    try:
        options(AnswerOptions, rest)
        options(LoadOptions, load)
    except OptionError as error:
        raise OptionError(f"{where}: {error}") from error
    return Preset(system, rest, load, tuple(aliases))


def _check_names(values: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for name in values:
        if name not in known:
            instead = near(name, known) or f"; expected some of {', '.join(known)}"
            raise OptionError(f"{where}: {name!r:.60} is not known here{instead}")


def _check_aliases(presets: Mapping[str, Preset], where: str) -> None:
    """A name means one model."""
    seen = set(presets)
    for name, preset in presets.items():
        for alias in preset.aliases:
            if alias in seen:
                raise OptionError(
                    f"{where}, {name}: alias {alias!r:.80} is the name of another model"
                )
            seen.add(alias)
