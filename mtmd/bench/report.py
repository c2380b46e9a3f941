"""Describes what a benchmark found. One dataclass, for the table, JSON and the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mtmd.base.text import mib
from mtmd.bench.measure import Sample, exponent

NO_BF16 = "not in this CPU"
# In the order of a request.
STAGES = ("preprocess", "encode", "prefill", "decode", "first token", "copy", "speculative copy")
STAGE_MEANING = {
    "preprocess": "pictures to tiles",
    "encode": "tiles to embeddings",
    "prefill": "prompt read",
    "decode": "one step of all sequences",
    "first token": "of the service",
    "copy": "a token of the prompt, written again",
    "speculative copy": "the same with tokens proposed",
}
AXES = ("resolution", "images", "context", "batch", "threads", "load")
AXIS_MEANING = {
    "resolution": "pixels a side",
    "images": "pictures",
    "context": "tokens of text",
    "batch": "sequences",
    "threads": "threads",
    "load": "busy processes beside it",
}


@dataclass(frozen=True)
class Point:
    """Describes where something is measured: one value of each axis. `threads` None is torch's
    choice.
    """

    resolution: int
    images: int
    context: int
    batch: int
    threads: int | None
    load: int

    def value(self, axis: str) -> int | None:
        result: int | None = getattr(self, axis)
        return result


@dataclass(frozen=True)
class Stage:
    """One stage at one point. `tokens` are those that one run reads or makes, 0 where none;
    `floor_ms` is what it takes at the machine's ceilings, None where nobody reckons it;
    `peak_bytes` the most memory held meanwhile, weights included, `added_bytes` what of it was not
    held before, None where the system does not tell; `patches` are those of all `tiles`, both 0 of
    other stages than the encoder's.
    """

    name: str
    point: Point
    ms: Sample
    tokens: int
    floor_ms: float | None
    peak_bytes: int | None
    added_bytes: int | None = None
    patches: int = 0
    tiles: int = 0

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.ms.median * 1e3 if self.tokens and self.ms.median else None

    @property
    def share(self) -> float | None:
        """Return the share of the roofline: 1 is as fast as the machine's ceilings allow."""
        return self.floor_ms / self.ms.median if self.floor_ms and self.ms.median else None


@dataclass(frozen=True)
class OpRow:
    """Nodes of one op and size of one graph; `share` of the roofline, more than 1 where
    operands are in the processor's caches.
    """

    graph: str
    op: str
    size: str
    count: int
    ms: float
    gflop_per_s: float
    gb_per_s: float
    flop_per_byte: float
    share: float


@dataclass(frozen=True)
class PredictedMemory:
    """Peak bytes beyond weights of encoding a picture, as the plans say; nothing was run."""

    resolution: int
    tiles: int
    patches: int
    flash_bytes: int
    explicit_bytes: int


@dataclass(frozen=True)
class Machine:
    device: str
    device_name: str
    system: str
    processor: str
    cores: int
    torch: str
    read_gb_per_s: float
    bf16_gflop_per_s: float | None
    fp32_gflop_per_s: float


@dataclass(frozen=True)
class Report:
    """`open_ms`: until the model could be asked, weights not read; `first_ms`: the first pass
    through all stages, which reads (or makes) the weights and prepares kernels; `loaded_bytes`:
    held after it; `peak_bytes`: the most that was held during a stage, the first pass included, of
    the process on a CPU, of the device otherwise; None where the system does not tell.
    """

    model: str
    command: str
    version: str
    dtype: str
    weight_bytes: int
    machine: Machine
    rounds: int
    decode_tokens: int
    open_ms: float
    first_ms: float
    loaded_bytes: int | None
    peak_bytes: int | None
    base: Point
    stages: tuple[Stage, ...]
    ops: tuple[OpRow, ...]
    memory: tuple[PredictedMemory, ...]

    def at_base(self) -> list[Stage]:
        return [s for s in self.stages if s.point == self.base]

    def sweep(self, axis: str, stage: str) -> list[Stage]:
        """Along one axis, all else as at the base; empty where it has one value."""
        result = [
            s
            for s in self.stages
            if s.name == stage
            and all(s.point.value(a) == self.base.value(a) for a in AXES if a != axis)
        ]
        result.sort(key=lambda s: s.point.value(axis) or 0)
        return result if len(result) > 1 else []

    def sweeps(self) -> list[tuple[str, str, list[Stage]]]:
        """(axis, stage, measurements), those that have several values."""
        all_of_them = ((axis, stage, self.sweep(axis, stage)) for axis in AXES for stage in STAGES)
        return [row for row in all_of_them if row[2]]

    def asdict(self) -> dict[str, Any]:
        """Return it with the derived figures, under names with units."""
        result = asdict(self)
        result["stages"] = [
            asdict(s)
            | {
                "ms": list(s.ms.values),
                "median_ms": s.ms.median,
                "least_ms": s.ms.minimum,
                "most_ms": s.ms.maximum,
                "spread": s.ms.spread,
                "tokens_per_s": s.tokens_per_s,
                "roofline_share": s.share,
            }
            for s in self.stages
        ]
        result["growth"] = [
            {"axis": axis, "stage": stage, **asdict(match)}
            for axis, stage, rows in self.sweeps()
            for match in growths(axis, rows)
        ]
        return result


@dataclass(frozen=True)
class Growth:
    """`of` time or memory: it is about a constant times `against` ** `exponent`, which is None for
    fewer than three values.
    """

    of: str
    against: str
    exponent: float | None

    def __str__(self) -> str:
        return f"{self.of} ~ {self.against}^{self.exponent:.2f}"


def against(axis: str, stage: str) -> str:
    """Return what a stage grows with along an axis: an encode with the patches that pixels make."""
    return "patches" if (axis, stage) == ("resolution", "encode") else axis


def location(axis: str, stage: Stage) -> float:
    """Return where on the axis a measurement is, in what it grows with."""
    counted = stage.patches if against(axis, stage.name) == "patches" else stage.point.value(axis)
    return float(counted or 0)


def growths(axis: str, rows: list[Stage]) -> list[Growth]:
    """Return how a stage grows along an axis; memory where it takes more of it the more it does."""
    name = rows[0].name
    with_what = against(axis, name)
    at = [location(axis, s) for s in rows]
    times = exponent(list(zip(at, (s.ms.median for s in rows), strict=True)))
    result = [Growth("time", with_what, times)]
    if name == "encode" and axis in ("resolution", "images"):
        # A small one may find all that it needs in memory that the process holds already
        added = [(x, float(s.added_bytes)) for x, s in zip(at, rows, strict=True) if s.added_bytes]
        result.append(Growth("memory", with_what, exponent(added)))
    return result


FASTER = "lie in the processor's caches, which are faster than memory"


def above(report: Report) -> Iterator[str]:
    """Why shares of the roofline are above 100 %, where some are."""
    if any((stage.share or 0) > 1 for stage in report.stages):
        yield f"weights, {mib(report.weight_bytes)} in all, {FASTER}"
    elif any(row.share > 1 for row in report.ops):
        yield f"operands of an op that is run by itself {FASTER}"


def many(count: int, what: str, ending: str = "s") -> str:
    """ "1 round", "2 rounds"."""
    return f"{count} {what}{'' if count == 1 else ending}"
