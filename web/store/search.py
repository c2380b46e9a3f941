"""Search in conversations: what a query asks for, as SQL, and the words around the first
match.
"""

from __future__ import annotations

TRIGRAM = 3  # the shortest word that the index knows
AROUND = 40  # characters on either side of the match
MAX_WORDS = 20
# A longer word is looked for by its beginning: what the index does for one grows with its square.
WORD_CHARS = 32


def words_of(query: str) -> list[str]:
    """Return those to look for: one that is part of another is found with that."""
    words = [word[:WORD_CHARS] for word in query.replace("\0", " ").split()[:MAX_WORDS]]
    saved: list[str] = []
    for word in sorted(dict.fromkeys(words), key=len, reverse=True):
        if not any(word in longer for longer in saved):
            saved.append(word)
    return [word for word in dict.fromkeys(words) if word in saved]


def condition(column: str, words: list[str], *, indexed: bool) -> tuple[str, list[str]]:
    """SQL that holds where `column` has every word in it, and its values. `indexed`: the column is
    one of a trigram table.
    """
    long = [w for w in words if indexed and len(w) >= TRIGRAM]
    parts, values = [], []
    if long:
        parts.append(f"{column.split('.')[0]} MATCH ?")
        values.append(" AND ".join('"' + w.replace('"', '""') + '"' for w in long))
    for word in words:
        if word not in long:
            parts.append(f"{column} LIKE ? ESCAPE '\\'")
            values.append(
                "%" + word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
            )
    return f"({' AND '.join(parts) or '1'})", values


def around(text: str, words: list[str]) -> str:
    """One line of `text` about the first place that has one of the words."""
    folded = text.casefold()
    if len(folded) != len(text):  # a few letters fold into two, which moves what follows them
        folded = text.lower() if len(text.lower()) == len(text) else text
    locations = [folded.find(w.casefold()) for w in words]
    first = min((p for p in locations if p >= 0), default=0)
    start, end = max(0, first - AROUND), first + AROUND
    return (
        ("…" if start else "")
        + " ".join(text[start:end].split())
        + ("…" if end < len(text) else "")
    )
