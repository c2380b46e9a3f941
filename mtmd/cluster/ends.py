"""How many actors have ended to no end, and whether others would fare better. Plain Python, as the
schedule is.
"""

from __future__ import annotations

ENDS_MOST = 10  # of actors that were started since there was a step forward
GONE_MOST = 100  # of actors whose machine went away since


class Ends:
    """Counts ends since the last step forward. Not those of actors that were there at that time:
    they have done something, and a machine takes all with it that it has. Not those for which a
    machine is to blame, but for very many.
    """

    def __init__(self) -> None:
        self._began: dict[int, int] = {}
        """Of actors that are there, the step at which each was started."""
        self._step = self._most_at_once = 0
        self._in_vain = self._gone = 0

    def started(self, actor: int) -> None:
        self._began[actor] = self._step
        self._most_at_once = max(self._most_at_once, len(self._began))

    def ended(self, actor: int, blame: bool) -> None:
        """`blame`: what it did may be why."""
        began = self._began.pop(actor)
        if not blame:
            self._gone += 1
        elif began == self._step:
            self._in_vain += 1

    def forward(self) -> None:
        """There was a step."""
        self._step += 1
        self._in_vain = self._gone = 0

    @property
    def count(self) -> int:
        return self._in_vain + self._gone

    @property
    def are_too_many(self) -> bool:
        twice = 2 * self._most_at_once
        return self._in_vain >= max(ENDS_MOST, twice) or self._gone >= max(GONE_MOST, 10 * twice)
