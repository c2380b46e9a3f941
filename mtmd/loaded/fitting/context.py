"""Describes whether the context that was asked for can be had, told from configuration and headers,
before a weight is read.
"""

from __future__ import annotations

from mtmd.base.errors import OptionError
from mtmd.base.text import mib
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.llm.state import PAGE
from mtmd.loaded.fitting.alternatives import Way

SHORT = PAGE  # tokens of the shortest context that is looked at


def check_length(context: int, checkpoint: Checkpoint, name: str) -> None:
    """Raises OptionError for one that is longer than the model was made for."""
    if context > checkpoint.text.context:
        raise OptionError(
            f"context: found {context}, expected at most {checkpoint.text.context}, which "
            f"{name} was made for"
        )


def what_fits(way: Way) -> str:
    """Return what has room in memory in place of the context and the answers at once that were
    asked for, "" where nothing has: then it is the weights that are too large.
    """
    requested = way.pictures.context
    fits = []
    if text := way.longest_text(requested):
        shown = ""
        if way.pictures.encoder is not None:
            pictures = way.longest_context(requested)
            shown = f" ({pictures} beside a picture)" if pictures else " (without pictures)"
        fits.append(f"a context of {text}{shown}")
    if 0 < (fewer := way.most_answers()) < way.answers:
        fits.append(f"parallel {fewer}")
    if not fits and way.answers > 1 and way.slack(SHORT, 1, text=True) >= 0:
        fits.append(f"a context of {SHORT} with parallel 1")
    return " or ".join(fits)


def min_bytes(way: Way, space: str) -> int:
    """Return the bytes of a memory that the weights and one short answer need, without pictures."""
    return way.parts(SHORT, 1, text=True)[space].total


def check_room(context: int, way: Way) -> None:
    """Check that a step of the decoder has room: raises OptionError with what has. Where nothing
    has, whoever reads the weights may still have them on disk.
    """
    lacking = {
        space: (parts, way.available[space])
        for space, parts in way.parts(text=True).items()
        if space in way.available and parts.total > way.available[space]
    }
    fits = what_fits(way) if lacking else ""
    if not fits:
        return
    space, (parts, there) = max(lacking.items(), key=lambda one: one[1][0].total - one[1][1])
    raise OptionError(
        f"context: found {context}, for which the model needs {mib(parts.total)} of {space}, "
        f"{mib(parts.cache)} of them for keys and values, and {mib(there)} can be had; expected "
        f"one that fits, such as {fits}"
    )
