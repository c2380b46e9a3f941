"""Notice an answer that says the same again and again: small models, and greedy decoding, come to
that (Holtzman et al. 2019, "The curious case of neural text degeneration"), and go on to the end of
the context.
"""

from __future__ import annotations

from array import array

LOOK_EACH = 32  # tokens between two looks
NEEDLE = 16  # tokens at the end that are looked for earlier
TIMES = 4  # that the same tokens have to come, exactly
MINIMUM = 96  # tokens that repeat: rows of dashes, digits and indents are shorter
WINDOW = 2048  # tokens that are looked at, from the end


class RepetitionFinder:
    """Takes the tokens of an answer one by one. A look costs some microseconds, whatever the
    length of the answer, and there is one each 32 tokens.
    """

    def __init__(self) -> None:
        self._tokens = array("q")
        self._period = 0

    @property
    def result(self) -> bool:
        """Return whether the answer now ends in at least 96 tokens in which the same ones come four
        times or more, without another between them.
        """
        return self._period > 0

    @property
    def period(self) -> int:
        """The number of tokens that are repeated, 0 where none are."""
        return self._period

    @property
    def repeated(self) -> int:
        """The tokens at the end that repeat, the first time included; 0 where none do."""
        return self._covered(self._tokens, self._period) if self._period else 0

    def push(self, token: int) -> None:
        tokens = self._tokens
        if self._period and token != tokens[-self._period]:
            self._period = 0  # it goes on with something else
        tokens.append(token)
        if not self._period and len(tokens) % LOOK_EACH == 0 and len(tokens) >= MINIMUM:
            self._period = self._look()

    def _look(self) -> int:
        """The shortest distance at which the end repeats often enough, 0 for none."""
        tokens = self._tokens[-WINDOW:]
        data, size = tokens.tobytes(), tokens.itemsize
        needle = data[-NEEDLE * size :]
        at = len(data) - NEEDLE * size
        while True:  # the nearest place, from the end, that begins where a token does
            at = data.rfind(needle, 0, at + NEEDLE * size - 1)
            if at < 0 or at % size == 0:
                break
        if at < 0:
            return 0
        period = len(tokens) - NEEDLE - at // size
        covered = self._covered(tokens, period)
        return period if covered >= max(MINIMUM, TIMES * period) else 0

    @staticmethod
    def _covered(tokens: array[int], period: int) -> int:
        """Return how many tokens at the end are those that stand `period` before them, and
        `period`.
        """
        at = len(tokens) - 1
        while at >= period and tokens[at] == tokens[at - period]:
            at -= 1
        return len(tokens) - 1 - at + min(period, at + 1)
