"""Describes what may come next in a text, read from what stands in it already: prompt lookup, as in
arXiv:2304.04487 and transformers' `prompt_lookup_num_tokens`. Plain Python, no tensors.

Where the last tokens have occurred before, what followed them then is expected again. As long as
that holds, the copy goes on where it is; where it fails, the last three tokens, or two, are looked
up anew, their latest occurrence; where they are new, one token may have been replaced by another,
and the copy goes on behind it.

How likely a token is to be right is learned by watching, which costs nothing: each that comes is
compared with the one expected, whether that was proposed or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

PICTURE = -1  # stands for a token that is no text: never expected
LONG, SHORT = 3, 2  # tokens that are looked up
LONGEST = 12  # matches longer than this are equally good
# Before anything is seen: how often what is expected comes after a match of so many tokens, the
# first after one that was replaced; and how many observations that is worth.
CHANCES = (0.2, 0.2, 0.2, 0.35, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9)
WEIGHT = 4.0
FADING = 0.95  # of an observation's weight, with each later one


class Lookup:
    """One sequence's tokens, and where in them its continuation may be read."""

    def __init__(self, tokens: Iterable[int]):
        """Take the tokens of the prompt, `PICTURE` for what is no text."""
        self.tokens: list[int] = list(tokens)
        self.source: int | None = None
        """Where the token stands that is expected next."""
        self.matched = 0
        """Tokens before it that are equal to the last ones, `LONGEST` at most."""
        self._hits = [chance * WEIGHT for chance in CHANCES]
        self._seen = [WEIGHT] * len(CHANCES)
        t = self.tokens
        # What follows the latest occurrence of every two and three tokens, but of the last ones,
        # which nothing follows yet.
        self._after: dict[tuple[int, ...], int] = {
            **dict(zip(pairwise(t), range(SHORT, len(t)), strict=False)),
            **dict(zip(zip(t, t[1:], t[2:], strict=False), range(LONG, len(t)), strict=False)),
        }
        self._find()

    def push(self, token: int) -> None:
        """The token that has come."""
        t, source, matched = self.tokens, self.source, self.matched
        if source is None:
            self._append(token)
            self._find()
            return
        hit = t[source] == token
        self._hits[matched] = self._hits[matched] * FADING + hit
        self._seen[matched] = self._seen[matched] * FADING + 1
        self._append(token)
        if hit:
            self.source, self.matched = source + 1, min(matched + 1, LONGEST)
            return
        self._find()
        if self.source is None and matched:
            self.source, self.matched = source + 1, 0

    def chances(self, count: int) -> list[float]:
        """Return how likely it is that the first of the next `count` tokens is as expected, the
        first two are, and so on.
        """
        if self.source is None:
            return []
        result, chance = [], 1.0
        for at in range(self.matched, self.matched + count):
            bucket = min(at, LONGEST)
            chance *= self._hits[bucket] / self._seen[bucket]
            result.append(chance)
        return result

    def expected(self, count: int) -> tuple[int, ...]:
        """The next tokens, at most so many. A copy that reaches the end of the text goes on with
        what it has copied.
        """
        if self.source is None:
            return ()
        result = self.tokens[self.source : self.source + count]
        period = len(result)
        while len(result) < count:
            result.append(result[-period])
        if PICTURE in result:
            del result[result.index(PICTURE) :]
        return tuple(result)

    def _append(self, token: int) -> None:
        """Append what follows the last tokens."""
        t = self.tokens
        end = len(t)
        if end >= SHORT:
            self._after[t[-2], t[-1]] = end
            if end >= LONG:
                self._after[t[-3], t[-2], t[-1]] = end
        t.append(token)

    def _find(self) -> None:
        t = self.tokens
        self.source = None
        if len(t) >= LONG:
            self.source = self._after.get((t[-3], t[-2], t[-1]))
        if self.source is None and len(t) >= SHORT:
            self.source = self._after.get((t[-2], t[-1]))
        if self.source is None:
            return
        matched, at, end = 0, self.source, len(t)
        while matched < LONGEST and matched < at and t[at - 1 - matched] == t[end - 1 - matched]:
            matched += 1
        self.matched = matched
