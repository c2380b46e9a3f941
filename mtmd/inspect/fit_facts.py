"""Layouts of a model in memories, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mtmd.kernels.report.facts import LayoutFacts

SERVED = 16  # answers at once of `mtmd serve` by default
SCHEMA = 1  # of `FitFacts.asdict`: raised when a field is renamed, removed or means another thing


@dataclass(frozen=True)
class FitDevice:
    """One memory: `memory_bytes` of it, of which a model may take `usable_bytes`, None where that
    is not known. Keys and values of so many answers are `counted` there; where these are fewer than
    are computed at once, the system hands memory out as it is written, and others wait for room.
    """

    name: str
    what: str
    memory_bytes: int | None
    usable_bytes: int | None
    counted: int


@dataclass(frozen=True)
class FitFacts:
    """`layouts` in order of preference, of which `chosen` is the first that fits into memories of a
    known size, None where none does; `advice` says then what would. A layout in `undecided` fits
    as far as sizes are known, and needs a memory of which none is. `picture_tokens` of the largest
    picture, 0 where the model takes none. `longest_context` of a layout holds for as many `answers`
    at once, as far as they are `counted`. Keys and values are stored in `kv_type`. `mtmd serve` has
    so many answers at once, `served`: as many as were given, or its default.
    """

    model: str
    dtype: str
    context: int
    context_most: int
    answers: int
    picture_size: tuple[int, int] | None
    picture_tokens: int
    devices: tuple[FitDevice, ...]
    layouts: tuple[LayoutFacts, ...]
    chosen: str | None
    advice: tuple[str, ...]
    kv_type: str = ""
    served: int = SERVED

    @property
    def fits(self) -> bool:
        return self.chosen is not None

    @property
    def undecided(self) -> tuple[LayoutFacts, ...]:
        return tuple(one for one in self.layouts if one.fits and one.unknown)

    def asdict(self) -> dict[str, Any]:
        layouts = [
            asdict(layout)
            | {
                "fits": layout.fits and not layout.unknown,
                "memories": [
                    asdict(m)
                    | {"needed": m.needed, "fits": None if m.available is None else m.fits}
                    for m in layout.memories
                ],
            }
            for layout in self.layouts
        ]
        return {"schema": SCHEMA, **asdict(self), "layouts": layouts, "fits": self.fits}
