"""Describes what a misspelt word or path most likely means. Loads without torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

ALIKE = 0.65  # of the letters of a name: --reload is no --threads, and --input no --min-p
LOOKED_AT = 10_000  # names of a folder among which a misspelt one is looked for


def nearest(word: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """Return the one of the `known` words spelled most like `word`, None where none has that part
    of its letters, or more, in common with it.
    """
    from difflib import get_close_matches  # here: only mistakes need it

    by_lower = {other.lower(): other for other in known}
    result = get_close_matches(word.lower(), by_lower, 1, alike)
    return by_lower[result[0]] if result else None


def did_you_mean(word: str, known: Iterable[str], meant: Mapping[str, str] | None = None) -> str:
    """The end of a message about a word that is not known: "; did you mean 'x'?", or nothing. Words
    of others and the `known` ones that they are `meant` for go before what is spelled alike.
    """
    known = list(known)
    near = (meant or {}).get(word)
    if near not in known:
        bare = {other.lstrip("-"): other for other in known}  # the dashes of options say nothing
        name = word.lstrip("-")
        result = nearest(name, bare, ALIKE) if len(name) > 1 else None
        near = bare[result] if result else None
    return f"; did you mean {near!r}?" if near else ""


def expected_type(word: str, known: Iterable[str]) -> str:
    """The end of a message about a type of model that is not read: how many are, where they are
    listed, and which may be meant.
    """
    known = set(known)
    where = f"expected one of the {len(known)} that docs/models.md lists"
    return f"{where}{did_you_mean(word, known)}"


def _nearest_name(part: str, names: Iterable[str]) -> str | None:
    """The name of a file or folder that is spelled most like `part`. An ending that both have, as
    .png, does not make them alike.
    """
    stem, ending = os.path.splitext(part)  # noqa: PTH122  # of a name
    alike: dict[str, str] = {}
    others = []
    for name in names:
        its_stem, its_ending = os.path.splitext(name)  # noqa: PTH122
        if its_ending.lower() == ending.lower():
            alike[its_stem] = name
        else:
            others.append(name)
    result = nearest(stem, alike)
    return alike[result] if result else nearest(part, others, ALIKE)


def nearest_path(path: str) -> str | None:
    """The file or folder there is that a misspelt path most likely means, None where none is like
    it: any of its parts may be misspelt.
    """
    here = Path()
    try:
        for part in Path(path).parts:
            if (here / part).exists():
                here /= part
                continue
            names = islice((entry.name for entry in os.scandir(here)), LOOKED_AT)
            result = _nearest_name(part, names)
            if result is None:
                return None
            here /= result
    except (OSError, ValueError):  # a folder that may not be read, a NUL in the path
        return None
    return str(here)


def did_you_mean_path(path: str | os.PathLike[str]) -> str:
    """The end of a message about a path at which nothing is: "; did you mean 'x'?", or nothing."""
    near = nearest_path(os.fspath(path))
    return f"; did you mean {near!r}?" if near else ""
