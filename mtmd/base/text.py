"""Texts of others in messages of ours, and the JSON that files hold. Loads without torch."""

from __future__ import annotations

import json
import unicodedata
from functools import lru_cache
from pathlib import Path
from typing import Any

from mtmd.base.errors import ModelError


def one_line(text: object, maximum: int | None = None) -> str:
    """The words of `text` with single blanks between them, at most `maximum` characters: libraries'
    messages have line breaks.
    """
    return " ".join(str(text).split())[:maximum]


def printable(text: str) -> str:
    """`text` with a "?" for each line break, escape and other character that cannot be seen: names
    of files hold them, too.
    """
    return "".join(char if char.isprintable() else "?" for char in text)


def shortened(text: str, maximum: int = 200) -> str:
    """`text` without its middle where it has more than `maximum` characters."""
    half = (maximum - 3) // 2
    return text if len(text) <= maximum else f"{text[:half]}...{text[-half:]}"


def plural(count: int, word: str) -> str:
    """Return a count with its noun: "1 token", "1,024 tokens"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def for_terminal(text: str) -> str:
    """`text` without what a terminal would obey: what models, files and their names say may hold
    escape sequences, or turn round the order in which it is read. Each such character becomes
    U+FFFD; lines and tabs stay.
    """
    return text if text.isascii() and text.isprintable() else "".join(map(_harmless, text))


@lru_cache(maxsize=4096)
def _harmless(char: str) -> str:
    # Cc: control characters, ESC and CSI among them; Cs: half of a surrogate pair. Other characters
    # without a shape of their own are needed, as the joiners of emoji and of Indic scripts are.
    obeyed = unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\t"
    turned = "\u202a" <= char <= "\u202e" or "\u2066" <= char <= "\u2069"
    return "\N{REPLACEMENT CHARACTER}" if obeyed or turned else char


def json_object(data: str | bytes, path: Path) -> dict[str, Any]:
    """Return what the file at `path`, which holds `data`, says. Raises ModelError naming it."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = one_line(error, 200)
        raise ModelError(f"{path} is not JSON: {reason}; download the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value


def mib(size: float) -> str:
    """Bytes as "12.34 MiB", or "56.7 KiB" below a tenth of that."""
    return (
        f"{size / 2**20:.2f} MiB" if size >= 2**20 / 10 or not size else f"{size / 2**10:.1f} KiB"
    )
