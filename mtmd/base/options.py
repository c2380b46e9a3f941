"""Options that people choose: declared once each, as a field of a dataclass, and checked.

    @dataclass(frozen=True)
    class LoadOptions:
        threads: int | None = option(None, whole(1, 1024), "CPU threads", default="torch's choice")

        def __post_init__(self) -> None:
            check_options(self)

Commands, keyword arguments, fields of requests and `docs/options.md` are made of what stands there.
NumPy's scalars count as the numbers they hold, booleans do not.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, NoReturn

from mtmd.base.errors import OptionError


@dataclass(frozen=True)
class Kind:
    """The values that an option takes.

    `check(name, value)` returns the value as it is stored, or raises OptionError. `takes` is the
    Python type of the keyword argument, "" for the type of the field. A command reads its word by
    `parse`; `repeated`: it may be given several times; `switch`: it has no value.
    """

    check: Callable[[str, Any], Any]
    takes: str = ""
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None
    low: float | None = None
    high: float | None = None
    values: tuple[str, ...] = ()
    repeated: bool = False
    switch: bool = False

    def __str__(self) -> str:
        """Return what is expected, in a few words."""
        if self.values:
            return ", ".join(self.values)
        if self.low is not None and self.high is not None:
            return f"{self.low:,} to {self.high:,}"
        return "" if self.low is None else f"from {self.low:,}"


@dataclass(frozen=True)
class Option:
    """Describes how an option is declared. The field has its name and default.

    `help` is a sentence without its full stop; `default` is how the default is described where its
    value does not say enough ("{}" stands for the value). `group` is the heading in the help of
    commands; `flag` the spelling there where it is not --the-name, with a short one before it where
    there is one, and None for an option that no command has. `scale`: a command counts in such
    units. `suggested`: values that a shell offers. `preset`: a preset may set it.
    """

    kind: Kind
    help: str
    default: str | None = None
    flag: str | None = ""
    group: str = ""
    dest: str = ""
    scale: int = 1
    suggested: tuple[str, ...] = ()
    preset: bool = False


def option(
    value: Any, kind: Kind, help: str, *, repr: bool = True, preset: bool = False, **how: Any
) -> Any:
    """A field of a dataclass with this default. `how`: fields of `Option`."""
    declared = Option(kind, help, preset=preset, **how)
    return dataclasses.field(default=value, repr=repr, metadata={"option": declared})


@cache
def options_of(record: type) -> Mapping[str, Option]:
    """The options among the fields of a dataclass, by name."""
    fields = dataclasses.fields(record)
    declared = {f.name: f.metadata["option"] for f in fields if "option" in f.metadata}
    return MappingProxyType(declared)


@cache
def defaults_of(record: type) -> Mapping[str, Any]:
    """The defaults of the options of a dataclass, by name."""
    fields = dataclasses.fields(record)
    return MappingProxyType({f.name: f.default for f in fields if "option" in f.metadata})


def name_of(field: str, declared: Option) -> str:
    """The name in messages, and of a command's attribute: as a command spells it, with underscores,
    unless the option has a `dest`.
    """
    flag = [declared.dest] if declared.dest else (declared.flag or "").split()
    return flag[-1].removeprefix("--").replace("-", "_") if flag else field


def check_options(record: Any) -> None:
    """Check every option of a frozen dataclass that is not its default, and store what the checks
    return. Raises OptionError for the first that is wrong.
    """
    kind: type = type(record)
    defaults = defaults_of(kind)
    for field, declared in options_of(kind).items():
        value = getattr(record, field)
        if value is not defaults[field]:
            value = declared.kind.check(name_of(field, declared), value)
            object.__setattr__(record, field, value)


def whole(low: int, high: int | None = None, **how: Any) -> Kind:
    """Whole numbers in a range, to any size without `high`."""

    def check(name: str, value: object) -> int:
        if high is None and isinstance(value, int) and value < low:
            refuse(name, value, f"at least {low}")
        return integer(name, value, low, (1 << 63) if high is None else high)

    return Kind(check, parse=int, low=low, high=high, **{"metavar": "N"} | how)


def ranged(
    low: float, high: float, expected: str, *, scale: int = 1, unit: str = "", **how: Any
) -> Kind:
    """Numbers in a range, which messages describe in other words, and in a unit."""

    def check(name: str, value: Any) -> Any:
        if not low <= value <= high:
            shown = f"{value / scale:g} {unit}" if unit else f"{value:.12g}"
            raise OptionError(f"{name}: found {shown}, expected {expected}")
        return value

    parse = int if isinstance(low, int) else float
    return Kind(check, parse=parse, low=low, high=high, **{"metavar": unit.upper() or "N"} | how)


def real(low: float, high: float, **how: Any) -> Kind:
    """Numbers in a range."""
    return Kind(
        lambda name, value: number(name, value, low, high),
        parse=float,
        low=low,
        high=high,
        **{"metavar": "X"} | how,
    )


def one_of(*values: str, **how: Any) -> Kind:
    """One of a few words."""

    def check(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in values:
            refuse(name, value, f"one of {', '.join(values)}")
        return value

    usual = {
        "takes": f"Literal[{', '.join(map(repr, values))}]".replace("'", '"'),
        "metavar": f"{{{','.join(values)}}}",
    }
    return Kind(check, values=values, **usual | how)


def _flag(name: str, value: object) -> bool:
    if type(value) is not bool:
        refuse(name, value, "true or false")
    return value


def _texts(name: str, value: object) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)):
        refuse(name, value, "a text or a list of texts")
    for item in values:
        if not isinstance(item, str) or not item:
            refuse(name, item, "a text that is not empty")
    return tuple(values)


def _path(name: str, value: object) -> str:
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(path, str) or not path or "\0" in path:
        refuse(name, value, "a path")
    return path


FLAG = Kind(_flag, switch=True)
SIZE = Kind(lambda name, value: size_or_none(name, value), takes="int | str", metavar="SIZE")


def texts(metavar: str = "TEXT") -> Kind:
    """One text, or several."""
    return Kind(_texts, takes="str | Sequence[str]", repeated=True, metavar=metavar)


def path(metavar: str = "FILE") -> Kind:
    return Kind(_path, takes="str | PathLike[str]", metavar=metavar)


def several(metavar: str) -> Kind:
    """Texts that the record checks."""
    return Kind(lambda _, value: tuple(value), repeated=True, metavar=metavar)


def as_given(metavar: str | None = None) -> Kind:
    """Values that the record checks."""
    return Kind(lambda _, value: value, metavar=metavar)


def integer(name: str, value: object, low: int, high: int) -> int:
    """`value` as an int. Raises OptionError unless it is a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        refuse(name, value, f"an integer from {low} to {high}")
    return int(value)


BYTES_MIN = 1 << 20  # nobody gives less memory than that, but "24" for GiB
UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def size_or_none(name: str, value: object) -> int | None:
    """Bytes as a whole number, or as a text with a unit: "8GiB", "500 MB". Raises OptionError for
    anything else, and for a text without a unit that is too small to be meant as bytes.
    """
    if value is None:
        return None
    if isinstance(value, str):
        text = value.strip()
        match = re.fullmatch(
            r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([kmgt]i?)?b?", text, re.ASCII | re.IGNORECASE
        )
        if match is None:
            refuse(name, value, "bytes, as a number or like 8GiB or 500MB")
        value = int(float(match[1]) * UNITS[(match[2] or "").lower()])
        if 0 < float(match[1]) < BYTES_MIN and text[-1].isdigit():
            unit = "GiB" if value < 1 << 10 else "MiB"
            raise OptionError(
                f"{name}: found {text}, which is bytes, expected a unit; did you mean {text}{unit}?"
            )
    return integer(name, value, 1, 1 << 50)


def number(name: str, value: object, low: float, high: float) -> float:
    """`value` as a float. Raises OptionError unless it is a number from `low` to `high`; NaN is
    in no range.
    """
    if not low <= as_float(value) <= high:
        refuse(name, value, f"a number from {low:g} to {high:g}")
    return as_float(value)


def as_float(value: object) -> float:
    """NaN, which fails every comparison, for what is no number or too large for a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def refuse(name: str, value: object, expected: str) -> NoReturn:
    """Raises OptionError naming the option, what was found and what is expected."""
    try:
        text = f"{value!r:.60}"
    except ValueError:  # an integer of thousands of digits, which Python does not print
        text = f"a huge {type(value).__name__}"
    raise OptionError(f"{name}: found {text}, expected {expected}")
