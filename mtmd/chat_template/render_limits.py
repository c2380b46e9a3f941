"""Describes what the rendering of one chat template may use: memory in characters, and seconds.
Plain Python, without jinja2.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from mtmd.base.errors import ModelError, PromptError

VALUE_WEIGHT_MAX = 4 << 20  # characters of one value; a list element counts as 16
MADE_WEIGHT_MAX = 256 << 20  # all values of one rendering together
INTEGER_BITS_MAX = 4096
LONG = 1 << 16  # characters of messages that may be to blame for a limit
# of this thread, so that a busy machine does not count; templates take milliseconds
SECONDS_MAX = 2.0

# Methods of strings, lists and dicts whose result is at most about as large as what goes in, or
# that are guarded below.
METHODS = frozenset(
    [
        "capitalize",
        "casefold",
        "copy",
        "count",
        "endswith",
        "find",
        "format",
        "format_map",
        "get",
        "index",
        "isalnum",
        "isalpha",
        "isdigit",
        "islower",
        "isnumeric",
        "isspace",
        "isupper",
        "items",
        "join",
        "keys",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rindex",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "title",
        "upper",
        "values",
    ]
)

# "%5000d", "%*d", "{:5000}", "{:{}}": fields padded to a width of four digits or more, or to one
# given as a value.
_WIDE = re.compile(r"\d{4}|%[^a-zA-Z%]*\*|\{[^{}]+\{")
_FIELD_CHARS = 1000  # what one field may be padded to


class RenderLimitError(PromptError):
    """Messages are too long for what a rendering may use: no other form of them would do."""


class Meter:
    """Describes what one rendering may still use. `given`: characters of its messages."""

    def __init__(self, name: str, given: int) -> None:
        self._name, self._given = name, given
        self.made = 0
        self._end = time.thread_time() + SECONDS_MAX

    def charge(self, weight: int) -> None:
        self.made += weight
        if self.made > MADE_WEIGHT_MAX:
            self.exceed(f"more than {MADE_WEIGHT_MAX} characters in intermediate values")
        if time.thread_time() > self._end:
            self.exceed(f"more than {SECONDS_MAX:g} seconds")

    def check(self, weight: int) -> None:
        """Check a value about to be made."""
        if weight > VALUE_WEIGHT_MAX:
            self.exceed(f"a value of more than {VALUE_WEIGHT_MAX} characters")

    def hold(self, value: Any) -> Any:
        """Weigh a value just made, and return it. Parts that are shared count as often as they
        appear, as they do when printed.
        """
        weight, stack = 0, [value]
        while stack:
            item = stack.pop()
            weight += 16
            if isinstance(item, str):
                weight += len(item)
            elif isinstance(item, int) and item.bit_length() > INTEGER_BITS_MAX:
                self.refuse("an endless number")
            elif isinstance(item, range):
                weight += 16 * len(item)
            elif isinstance(item, (list, tuple)):
                stack.extend(item)
            elif isinstance(item, dict):
                stack.extend((*item.keys(), *item.values()))
            self.check(weight)
        self.charge(weight)
        return value

    def each(self, items: Iterable[Any], weight: int) -> Iterator[Any]:
        for item in items:
            self.charge(weight)
            yield item

    def exceed(self, what: str, cause: Exception | None = None) -> NoReturn:
        """A limit is hit: by the messages where they are long, otherwise by the template itself."""
        if self._given < LONG:
            self.refuse(what, cause)
        raise RenderLimitError(
            f"messages of {self._given:,} characters make {self._name} ask for {what}; shorten them"
        ) from cause

    def refuse(self, what: str, cause: Exception | None = None) -> NoReturn:
        raise ModelError(
            f"{self._name} needs {what}; shorten the messages or use another template"
        ) from cause

    def check_binop(self, operator: str, left: Any, right: Any) -> None:
        """Refuse an operation whose result would be too large, before it runs. Sums at most double,
        so they are weighed afterwards.
        """
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                    self.check(len(value) * max(times, 0))
        elif (
            operator == "**"
            and isinstance(left, int)
            and isinstance(right, int)
            and left.bit_length() * right > INTEGER_BITS_MAX
        ):
            self.refuse("an endless number")
        elif operator == "%" and isinstance(left, str):
            self.check_format(left, "%", right)

    def check_method(
        self, name: str, owner: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Refuse a method whose result would be too large, before it runs. Returns the arguments to
        run it with.
        """
        if name not in METHODS:
            self.refuse(f"the method {name!r}, which chat templates may not use")
        if not isinstance(owner, str):
            return args
        if (
            name == "replace"
            and len(args) >= 2
            and isinstance(args[0], str)
            and isinstance(args[1], str)
        ):
            self.check_replace(owner, args[0], args[1])
        elif name == "join" and args:
            parts = list(self.each(args[0], 1))
            self.hold(parts)
            self.check(len(owner) * len(parts))
            return (parts, *args[1:])
        elif name in ("format", "format_map"):
            self.check_format(owner, "{", [*args, kwargs])
        return args

    def check_replace(self, text: str, old: str, new: str) -> None:
        self.check(len(text) + text.count(old) * len(new))

    def check_format(self, text: str, sign: str, values: Any) -> None:
        """Refuse a format that repeats or pads its values beyond measure. `sign` begins a field."""
        if _WIDE.search(text):
            self.refuse("a number padded to 1,000 characters or more")
        before = self.made
        self.hold(values)
        self.check(len(text) + text.count(sign) * (_FIELD_CHARS + self.made - before))
