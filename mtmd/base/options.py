"""Numbers that people choose, checked. NumPy's scalars count as the numbers they hold, booleans do
not.
"""

from __future__ import annotations

import math
import re
from numbers import Integral, Real
from typing import NoReturn

from mtmd.base.errors import OptionError


def integer(name: str, value: object, least: int, most: int) -> int:
    """`value` as an int. Raises OptionError unless it is a whole number from `least` to `most`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, Integral)
        or not least <= int(value) <= most
    ):
        refuse(name, value, f"an integer from {least} to {most}")
    return int(value)


def integer_or_none(name: str, value: object, least: int, most: int) -> int | None:
    return None if value is None else integer(name, value, least, most)


LEAST_BYTES = 1 << 20  # nobody gives less memory than that, but "24" for GiB
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
        if 0 < float(match[1]) < LEAST_BYTES and text[-1].isdigit():
            unit = "GiB" if value < 1 << 10 else "MiB"
            raise OptionError(
                f"{name}: found {text}, which is bytes, expected a unit; did you mean {text}{unit}?"
            )
    return integer(name, value, 1, 1 << 50)


def number(name: str, value: object, least: float, most: float) -> float:
    """`value` as a float. Raises OptionError unless it is a number from `least` to `most`; NaN is
    in no range.
    """
    if not least <= as_float(value) <= most:
        refuse(name, value, f"a number from {least:g} to {most:g}")
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
