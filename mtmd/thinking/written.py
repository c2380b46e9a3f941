"""A thought and an answer as one text, as it is stored: <think> before the thought, </think>
between the two.
"""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"
_OPENING, _CLOSING = f"{OPEN}\n", f"\n{CLOSE}\n\n"


class Writing:
    """The text of one answer as its pieces come. `begun`: what it goes on from."""

    def __init__(self, begun: str = ""):
        thought, answer = parts(begun)
        self._is_inside = bool(thought) and not answer and CLOSE not in begun

    def thought(self, text: str) -> str:
        """Return what is written for more of the thought."""
        before = "" if self._is_inside or not text else _OPENING
        self._is_inside |= bool(text)
        return f"{before}{text}"

    def answer(self, text: str) -> str:
        """Return what is written for more of the answer."""
        before = _CLOSING if self._is_inside and text else ""
        self._is_inside &= not text
        return f"{before}{text}"


def parts(text: str) -> tuple[str, str]:
    """(thought, answer) of such a text; no thought where it does not begin with one."""
    if not text.startswith(OPEN):
        return "", text
    thought, closed, answer = text[len(OPEN) :].partition(CLOSE)
    return thought.strip() if closed else thought.lstrip(), answer.lstrip()
