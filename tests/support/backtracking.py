"""How much work a regular expression can be made to do: a matcher that backtracks as Python's does
and counts its steps, and texts made from a pattern's own parts to set it going. Counted, so that
the same pattern gives the same numbers on every machine.
"""

from __future__ import annotations

import math
import random
import re
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

if sys.version_info >= (3, 11):
    from re import _constants as c
    from re import _parser as parser
else:
    import sre_constants as c
    import sre_parse as parser

LENGTHS = (64, 128, 256)  # characters of the texts that are compared
STEPS_MAX = 120  # for each character of a text
EXPONENT_MAX = 1.1
ANY_TEXT = "aZ0_ \n-.,:;/\\\"'<>[](){}|=+*%é日\x00"
CHARS = (c.LITERAL, c.NOT_LITERAL, c.ANY, c.IN)  # items that take one character
_FAILS = ("", "\x00", "a", " ")


class TooManySteps(Exception):
    pass


@dataclass(frozen=True)
class Growth:
    """Of the steps with the length of the text: the largest exponent met, the most steps for each
    character, and the text of both.
    """

    exponent: float
    steps: float
    text: str

    @property
    def is_linear(self) -> bool:
        return self.exponent <= EXPONENT_MAX and self.steps <= STEPS_MAX


def growth(pattern: str, flags: int = 0, how: str = "search") -> Growth:
    """The worst over texts made for it. `how`: "search" looks at every place, "match" at the first,
    "fullmatch" there and for a match of the whole text.
    """
    matcher = Matcher(pattern, flags)
    worst, seen = Growth(0.0, 0.0, ""), set[str]()
    for make in matcher.attacks():
        texts = [make(length) for length in LENGTHS]
        lengths = [len(text) for text in texts]
        if texts[-1] in seen or not lengths[0] < lengths[1] < lengths[2]:
            continue
        seen.add(texts[-1])
        steps = [matcher.steps(text, how) for text in reversed(texts)][::-1]
        result = Growth(_exponent(lengths, steps), steps[-1] / lengths[-1], texts[-1][:60])
        if not result.is_linear:
            return result
        worst = max(worst, result, key=lambda g: g.exponent)
    return worst


def _exponent(lengths: list[int], steps: list[float]) -> float:
    """The lesser of two: of all steps, and of what each further character costs, in which the way
    to a repetition has no weight. Each is above 1 for some linear patterns, for different reasons.
    """
    if math.inf in steps:
        return math.inf
    whole = math.log(steps[2] / steps[0]) / math.log(lengths[2] / lengths[0])
    slopes = [(steps[i + 1] - steps[i]) / (lengths[i + 1] - lengths[i]) for i in (0, 1)]
    if min(slopes) <= 0:
        return whole
    middles = [lengths[i + 1] + lengths[i] for i in (0, 1)]
    return min(whole, 1 + math.log(slopes[1] / slopes[0]) / math.log(middles[1] / middles[0]))


class Matcher:
    def __init__(self, pattern: str, flags: int = 0) -> None:
        self.tree = parser.parse(pattern, flags)
        self.flags = self.tree.state.flags
        self._left = 0
        self._known: dict[tuple[Any, str], bool] = {}
        self.chars = _representatives(self)

    def steps(self, text: str, how: str) -> float:
        """Steps of all matches in `text`, infinitely many where they are more than any linear
        pattern needs.
        """
        maximum = self._left = STEPS_MAX * (len(text) + 1)
        try:
            at = 0
            while at <= len(text):
                end = self._first(text, at, how == "fullmatch")
                if how != "search":
                    break
                at = at + 1 if end is None or end == at else end
        except (TooManySteps, RecursionError):
            return math.inf
        return maximum - self._left

    def _first(self, text: str, at: int, whole: bool) -> int | None:
        for end in self._items(self.tree.data, 0, text, at, {}):
            if not whole or end == len(text):
                return end
        return None

    def _step(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise TooManySteps

    def _items(
        self, items: list[Any], first: int, text: str, at: int, groups: dict[int, tuple[int, int]]
    ) -> Iterator[int]:
        """Where what `items[first:]` match may end, in the order in which it is tried."""
        while first < len(items) and items[first][0] in CHARS:
            self._step()
            if at == len(text) or not self.takes(items[first], text[at]):
                return
            first, at = first + 1, at + 1
        if first == len(items):
            yield at
            return
        for end in self._one(items[first], text, at, groups):
            yield from self._items(items, first + 1, text, end, groups)

    def _one(self, item: Any, text: str, at: int, groups: Any) -> Iterator[int]:
        self._step()
        op, value = item
        if op is c.BRANCH:
            for branch in value[1]:
                yield from self._items(branch.data, 0, text, at, groups)
        elif op is c.SUBPATTERN:
            number, _, _, inner = value
            for end in self._items(inner.data, 0, text, at, groups):
                if number is not None:
                    groups[number] = (at, end)
                yield end
        elif op in (c.MAX_REPEAT, c.MIN_REPEAT):
            yield from self._repeat(op, *value, text, at, groups)
        elif op in (c.ASSERT, c.ASSERT_NOT):
            yield from self._look(op is c.ASSERT, *value, text, at, groups)
        elif op is c.GROUPREF:
            start, end = groups.get(value, (0, 0))
            for char in text[start:end]:
                self._step()
                if text[at : at + 1] != char:
                    return
                at += 1
            yield at
        elif op is c.AT:
            if self._is_at(value, text, at):
                yield at
        else:
            raise NotImplementedError(f"{op} in a pattern: teach this matcher to read it")

    def _look(self, requested: bool, way: int, inner: Any, text: str, at: int, groups: Any) -> Any:
        begin = at if way > 0 else at - inner.getwidth()[0]
        ends = self._items(inner.data, 0, text, begin, groups) if begin >= 0 else iter(())
        if any(way > 0 or end == at for end in ends) == requested:
            yield at

    def _repeat(
        self, op: Any, minimum: int, maximum: int, inner: Any, text: str, at: int, groups: Any
    ) -> Iterator[int]:
        items = inner.data
        if len(items) == 1 and items[0][0] in CHARS:
            yield from self._repeat_char(op, minimum, maximum, items[0], text, at)
            return

        def more(at: int, count: int) -> Iterator[int]:
            if op is c.MIN_REPEAT and count >= minimum:
                yield at
            if count < maximum:
                for end in self._items(items, 0, text, at, groups):
                    if end > at or count < minimum:
                        yield from more(end, count + 1)
            if op is c.MAX_REPEAT and count >= minimum:
                yield at

        yield from more(at, 0)

    def _repeat_char(
        self, op: Any, minimum: int, maximum: int, item: Any, text: str, at: int
    ) -> Iterator[int]:
        count = 0
        while op is c.MIN_REPEAT and count >= minimum:
            yield at + count
            self._step()
            if (
                count == maximum
                or at + count == len(text)
                or not self.takes(item, text[at + count])
            ):
                return
            count += 1
        while count < maximum and at + count < len(text) and self.takes(item, text[at + count]):
            self._step()
            count += 1
            if op is c.MIN_REPEAT and count >= minimum:
                yield at + count
        if op is c.MAX_REPEAT:
            while count >= minimum:
                self._step()
                yield at + count
                count -= 1

    def _is_at(self, what: Any, text: str, at: int) -> bool:
        if what in (c.AT_BEGINNING, c.AT_BEGINNING_STRING):
            return at == 0 or bool(self.flags & re.M and text[at - 1] == "\n")
        if what in (c.AT_END, c.AT_END_STRING):
            return (
                at == len(text)
                or (at == len(text) - 1 and text[at] == "\n" and what is c.AT_END)
                or bool(self.flags & re.M and text[at] == "\n")
            )
        sides = [_is_word(char) for char in (text[at - 1 : at] if at else "", text[at : at + 1])]
        return (sides[0] != sides[1]) == (what is c.AT_BOUNDARY)

    def takes(self, item: Any, char: str) -> bool:
        """Whether a character, or a set of them, is `char`."""
        key = id(item[1]) if item[0] is c.IN else item, char
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._is_in(item, char)
        return known

    def _is_in(self, item: Any, char: str) -> bool:
        op, value = item
        if self.flags & re.I:
            return any(self._takes(op, value, other) for other in {char.lower(), char.upper()})
        return self._takes(op, value, char)

    def _takes(self, op: Any, value: Any, char: str) -> bool:
        if op is c.ANY:
            return char != "\n" or bool(self.flags & re.S)
        if op is c.LITERAL:
            return char == chr(value)
        if op is c.NOT_LITERAL:
            return char != chr(value)
        negated = value[0][0] is c.NEGATE
        return negated != any(_in(part, char) for part in value[negated:])

    # Texts to set it going.

    def attacks(self) -> Iterator[Any]:
        """Functions from a length to a text of about that length."""
        whole = [self._sample(self.tree.data, random.Random(seed)) for seed in range(3)]
        for begin in dict.fromkeys(w[:n] for w in whole for n in range(1, min(len(w), 40) + 1)):
            yield _again(begin)
        for prefix, units in self._pumps():
            for unit in units:
                yield _again(prefix + unit)
                for end in _FAILS:
                    yield _run(prefix, unit, end)
                yield _run("\x00" + prefix, unit, "\x00")
                yield _starts_then_run(prefix, unit)
            for one in units[:3]:
                for other in units[:3]:
                    if one != other:
                        yield _run(prefix, one + other, "\x00")
                        yield _two_runs(prefix, one, other)

    def _pumps(self) -> list[tuple[str, list[str]]]:
        """For each repetition: what leads to it, and some of what it repeats."""
        result: dict[str, dict[str, None]] = {}
        for seed in range(2):
            self._walk(self.tree.data, "", random.Random(seed), result)
        return [(prefix, list(units)[:5]) for prefix, units in result.items()]

    def _walk(self, items: list[Any], prefix: str, rng: random.Random, result: Any) -> str:
        for item in items:
            op, value = item
            if op is c.SUBPATTERN:
                prefix = self._walk(value[3].data, prefix, rng, result)
            elif op is c.BRANCH:
                ends = [self._walk(branch.data, prefix, rng, result) for branch in value[1]]
                prefix = rng.choice(ends)
            elif op in (c.MAX_REPEAT, c.MIN_REPEAT):
                minimum, maximum, inner = value
                if maximum > 1:
                    units = result.setdefault(prefix, {})
                    units |= dict.fromkeys(filter(None, self._units(inner.data, rng)))
                once = self._walk(inner.data, prefix, rng, result)
                prefix = once if max(minimum, 1) == 1 else prefix + self._sample([item], rng)
            else:
                prefix += self._sample([item], rng)
        return prefix

    def _units(self, items: list[Any], rng: random.Random) -> list[str]:
        if len(items) == 1 and items[0][0] in CHARS:
            return [char for char in self.chars if self.takes(items[0], char)]
        return [self._sample(items, rng) for _ in range(4)]

    def _sample(self, items: list[Any], rng: random.Random) -> str:
        """A text that they are likely to match."""
        out = ""
        for op, value in items:
            if op in CHARS:
                fits = [char for char in self.chars if self.takes((op, value), char)]
                out += rng.choice(fits) if fits else ""
            elif op is c.SUBPATTERN:
                out += self._sample(value[3].data, rng)
            elif op is c.BRANCH:
                out += self._sample(rng.choice(value[1]).data, rng)
            elif op in (c.MAX_REPEAT, c.MIN_REPEAT):
                minimum, maximum, inner = value
                for _ in range(min(max(minimum, 1), maximum)):
                    out += self._sample(inner.data, rng)
            elif op is c.ASSERT and value[0] > 0:
                out += self._sample(value[1].data, rng)
        return out


def _run(prefix: str, unit: str, end: str) -> Any:
    return lambda n: prefix + unit * max(1, (n - len(prefix)) // len(unit)) + end


def _again(unit: str) -> Any:
    return lambda n: unit * max(1, n // len(unit)) if unit else ""


def _starts_then_run(prefix: str, unit: str) -> Any:
    return lambda n: prefix * (n // 2 // max(1, len(prefix))) + unit * (n // 2 // len(unit))


def _two_runs(prefix: str, one: str, other: str) -> Any:
    return lambda n: prefix + one * (n // 2 // len(one)) + other * (n // 2 // len(other)) + "\x00"


def _representatives(matcher: Matcher) -> list[str]:
    """One character for each way in which the pattern's sets tell characters apart."""
    sets = list(_sets(list(matcher.tree)))
    chars = ANY_TEXT + "".join(chr(value) for op, value in sets if op is c.LITERAL)
    chars += "".join(chr(v[0]) for op, s in sets if op is c.IN for o, v in s if o is c.RANGE)
    alike: dict[tuple[bool, ...], str] = {}
    for char in chars:
        alike.setdefault(tuple(matcher.takes(item, char) for item in sets), char)
    return list(alike.values())


def _sets(items: list[Any]) -> Iterator[Any]:
    for op, value in items:
        if op in CHARS:
            yield op, value
        elif op is c.SUBPATTERN:
            yield from _sets(value[3].data)
        elif op is c.BRANCH:
            for branch in value[1]:
                yield from _sets(branch.data)
        elif op in (c.MAX_REPEAT, c.MIN_REPEAT):
            yield from _sets(list(value[2]))
        elif op in (c.ASSERT, c.ASSERT_NOT):
            yield from _sets(value[1].data)


def _in(part: Any, char: str) -> bool:
    op, value = part
    if op is c.LITERAL:
        return char == chr(value)
    if op is c.RANGE:
        return value[0] <= ord(char) <= value[1]
    return {
        c.CATEGORY_DIGIT: unicodedata.category(char) == "Nd",
        c.CATEGORY_NOT_DIGIT: unicodedata.category(char) != "Nd",
        c.CATEGORY_SPACE: char.isspace(),
        c.CATEGORY_NOT_SPACE: not char.isspace(),
        c.CATEGORY_WORD: _is_word(char),
        c.CATEGORY_NOT_WORD: not _is_word(char),
    }[value]


def _is_word(char: str) -> bool:
    return char == "_" or char.isalnum()
