"""In which ways a model would lie in memories, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mtmd.kernels.report.facts import LayoutFacts

SCHEMA = 1  # of `FitFacts.asdict`: raised when a field is renamed, removed or means another thing


@dataclass(frozen=True)
class FitDevice:
    """One memory: `memory_bytes` of it, of which a model may take `usable_bytes`, None where that
    is not known.
    """

    name: str
    what: str
    memory_bytes: int | None
    usable_bytes: int | None


@dataclass(frozen=True)
class FitFacts:
    """`layouts` in order of preference, of which `chosen` is the first that fits, None where none
    does; `advice` says then what would. `picture_tokens` of the largest picture, 0 where the model
    takes none. `longest_context` of a layout holds for as many `answers` at once.
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

    @property
    def fits(self) -> bool:
        return self.chosen is not None

    def asdict(self) -> dict[str, Any]:
        layouts = [
            asdict(layout)
            | {
                "fits": layout.fits,
                "memories": [
                    asdict(m) | {"needed": m.needed, "fits": m.fits} for m in layout.memories
                ],
            }
            for layout in self.layouts
        ]
        return {"schema": SCHEMA, **asdict(self), "layouts": layouts, "fits": self.fits}
