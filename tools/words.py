"""The words of this code: those that no identifier is made of, with the field's words for them, and
those that no docstring begins with. `tests/test_words.py` keeps both.
"""

from __future__ import annotations

import re

PRIVATE: dict[str, tuple[str, ...]] = {
    "amiss": ("wrong",),
    "apart": ("separate",),
    "aside": ("released",),
    "asked": ("requested", "request"),
    "asking": ("requesting", "request"),
    "asks": ("requests", "requesting"),
    "beside": ("alongside", "concurrent"),
    "desk": ("worker",),
    "door": ("adapter",),
    "found": ("result", "value", "actual", "match"),
    "held": ("stored", "cached"),
    "kept": ("saved", "stored"),
    "least": ("minimum", "lowest"),
    "most": ("maximum", "limit"),
    "place": ("slot", "location"),
    "placed": ("located", "assigned"),
    "places": ("slots", "locations"),
    "said": ("stated", "reported"),
    "seat": ("worker", "slot"),
    "seats": ("workers", "slots"),
    "tell": ("report", "notify"),
    "telling": ("reporting",),
    "tells": ("reports",),
    "told": ("reported", "passed"),
    "want": ("request",),
    "wanted": ("requested", "needed"),
    "wants": ("requests", "needs"),
}
"""Words that stand in no identifier, with those to take in their place."""

ALLOWED: frozenset[str] = frozenset()
"""Identifiers that have one of these words all the same: they are another's, or public."""

NO_BEGINNING = frozenset(
    (
        *("what", "of", "as", "whether", "where", "those", "it", "and", "for", "who", "how", "so"),
        *("from", "which", "whose", "whom", "whoever", "whatever", "if", "in", "by", "with"),
        *("without", "on", "at", "to", "that", "these", "they", "them", "its", "their"),
    )
)
"""Words that no docstring begins with: it begins with a noun or a verb."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z]*|[a-z]+|\d+")


def words_of(identifier: str) -> list[str]:
    """Return the words of an identifier in snake or camel case, in lower case."""
    return [word.lower() for word in _WORD.findall(identifier)]


def private_words(identifier: str) -> list[str]:
    """Return the words of an identifier that are to be replaced."""
    if identifier in ALLOWED:
        return []
    return [word for word in words_of(identifier) if word in PRIVATE]


def first_word(docstring: str) -> str:
    """Return the word that a docstring begins with, in lower case; "" where that is no word."""
    match = re.match(r"[A-Za-z]+", docstring.lstrip())
    return match[0].lower() if match else ""
