"""Budget of tokens for a picture: what the user requests, fitted to what a family can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtmd.base.errors import OptionError
from mtmd.base.text import plural

DETAILS = ("auto", "low", "high")
LOW_TOKENS = 256  # what detail "low" leaves a family of any size; tiles are not cut then


@dataclass(frozen=True)
class Budget:
    """Tokens of one picture, at least and at most, None for the checkpoint's own limits.

    `several`: the picture is one of several in a conversation, for families to which that matters.
    `detail`: "low" shows the picture as a whole, in at most `LOW_TOKENS` tokens where the family
    can choose; "high" and "auto" as the checkpoint's own settings say. Numbers given go before it.
    """

    min_tokens: int | None = None
    max_tokens: int | None = None
    detail: str = "auto"
    several: bool = False

    @property
    def low(self) -> bool:
        return self.detail == "low"

    def limits(self, minimum: int, maximum: int) -> tuple[int, int]:
        """Return the minimum and the maximum, from the family's own limits. Raises OptionError
        where the least is more than the most.
        """
        low = self.min_tokens if self.min_tokens is not None else minimum
        high = (
            self.max_tokens
            if self.max_tokens is not None
            else min(maximum, LOW_TOKENS)
            if self.low
            else maximum
        )
        if self.min_tokens is None:
            low = min(low, high)
        elif self.max_tokens is None:
            high = max(low, high)
        if low > high:
            raise OptionError(
                f"image_min_tokens {low} is more than image_max_tokens {high}; expected no more"
            )
        return low, high

    def choose(self, ways: Sequence[int]) -> tuple[int, tuple[str, ...]]:
        """Return which of several ways to show a picture, given the tokens each takes, and a note
        where it is not the first, the model's own.

        The first where it keeps the budget, else the nearest that does; where none has enough
        tokens, the one with most. Raises OptionError where all have too many.
        """
        minimum, own = min(range(len(ways)), key=ways.__getitem__), ways[0]
        low, high = self.limits(ways[minimum], max(ways))
        if self.minimum:
            high = ways[minimum]
        allowed = [i for i, tokens in enumerate(ways) if tokens <= high]
        if not allowed:
            raise OptionError(
                f"a picture takes at least {plural(ways[minimum], 'token')} with this model, "
                f"more than image_max_tokens {high}; raise it"
            )
        enough = [i for i in allowed if ways[i] >= low]
        chosen = (
            min(enough, key=lambda i: abs(ways[i] - own))
            if enough
            else max(allowed, key=ways.__getitem__)
        )
        if ways[chosen] >= low and chosen == 0:
            return 0, ()
        return chosen, (
            f"shown in {plural(ways[chosen], 'token')}, {own} without limits of its own",
        )

    def maximum(self, ways: Sequence[int]) -> int:
        """The most tokens that `choose` can come to, from those that each way may take at most."""
        if self.minimum:
            return min(ways)
        maximum = ways[0] if self.min_tokens is None else max(ways)
        return maximum if self.max_tokens is None else min(maximum, self.max_tokens)

    @property
    def minimum(self) -> bool:
        """Return whether a picture that may be cut into tiles is not."""
        return self.low and self.min_tokens is None and self.max_tokens is None

    def check_fixed(self, tokens: int) -> None:
        """Check the budget for a family whose pictures always take the same number of tokens.
        Raises OptionError where that is outside the budget.
        """
        if (self.min_tokens or 0) > tokens or (
            self.max_tokens is not None and self.max_tokens < tokens
        ):
            given = {"image_min_tokens": self.min_tokens, "image_max_tokens": self.max_tokens}
            reported = ", ".join(
                f"{name} {value}" for name, value in given.items() if value is not None
            )
            raise OptionError(
                f"{reported}: every picture takes {plural(tokens, 'token')} with this model, "
                f"expected a range with {tokens} in it; leave it out or use another model"
            )


DEFAULT_BUDGET = Budget()
