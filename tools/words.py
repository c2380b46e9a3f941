"""The words of this code: those that no identifier is made of, with the field's words for them, and
those that no docstring begins with. `tests/test_words.py` keeps both.
"""

from __future__ import annotations

import re

PRIVATE: dict[str, tuple[str, ...]] = {
    "amiss": ("wrong",),
    "apart": ("separate",),
    "aside": ("moved", "released"),
    "asked": ("requested", "request"),
    "asking": ("requesting", "request"),
    "asks": ("requests", "requesting"),
    "beside": ("alongside", "concurrent"),
    "desk": ("queue", "worker"),
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
    "seat": ("slot", "member"),
    "seats": ("slots", "members"),
    "tell": ("report", "notify"),
    "telling": ("reporting",),
    "tells": ("reports",),
    "told": ("reported", "passed"),
    "want": ("request", "need"),
    "wanted": ("requested", "needed"),
    "wants": ("requests", "needs"),
}
"""Words that stand in no identifier, with those to take in their place."""

PHRASES = re.compile(r"in_?place|not_?found|at_least|at_most|most_common|set_aside", re.I)
"""Terms of the field, of libraries and of English in which such a word may stand."""

PUBLIC = frozenset(
    (
        *("asks", "asks_any", "context_most", "kept_whole", "most_answers", "most_tokens_per_s"),
        "place_rows",
    )
)
"""Identifiers that are keys of JSON, or the name of an op, and stay."""

PUBLIC_IN = {
    "kernels/report/facts.py": ("found",),
    "kernels/trials.py": ("kept",),
    "mtmd/inspect/info.py": ("most_tokens",),
    "mtmd/receipt.py": ("place",),
}
"""The same, in one file each."""

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


def private_words(identifier: str, file: str = "") -> list[str]:
    """Return the words of an identifier that are to be replaced."""
    if identifier in PUBLIC or identifier in PUBLIC_IN.get(file, ()):
        return []
    return [word for word in words_of(PHRASES.sub("", identifier)) if word in PRIVATE]


def first_word(docstring: str) -> str:
    """Return the word that a docstring begins with, in lower case; "" where that is no word."""
    match = re.match(r"[A-Za-z]+", docstring.lstrip())
    return match[0].lower() if match else ""
