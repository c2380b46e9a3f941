"""Describes what a model would need and do on a card that is not here, as plain data, read off
plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mtmd.base.errors import ImageError, OptionError
from mtmd.clip.encoder import BATCH
from mtmd.clip.resolution.resolution import ImagePlan, prepare_blank
from mtmd.clip.token_budget import Budget
from mtmd.inspect.ranks_facts import LinkFacts
from mtmd.kernels.backends.target import Target
from mtmd.kernels.estimate.cards import Card
from mtmd.kernels.estimate.roofline import UNCONFIRMED, Estimate, OpShare, estimate
from mtmd.kernels.plan.scheduler import Plan
from mtmd.kernels.report.facts import CompiledKernel, WarmupFacts
from mtmd.llm.batch import BatchShape
from mtmd.loaded.fitting.needed_memory import (
    MAX_ANSWERS,
    SPARE,
    NeededMemory,
    longest_that_fits,
    max_that_fit,
)
from mtmd.model import Model

SCHEMA = 2  # of `Prediction.asdict`: raised when a field is renamed, removed or means another thing
LENGTHS = (1024, 8192, 32768, 131072)  # tokens of a sequence
SIZES = ((224, 224), (640, 480), (1024, 768), (1920, 1080), (3840, 2160))  # pictures, in pixels
DRIVER_BYTES = 512 << 20  # the driver's context, and the code of libraries: about


@dataclass(frozen=True)
class CardFacts:
    """`target` is its architecture. Published numbers, None where only that was named; TFLOP/s are
    dense, with sums in fp32.
    """

    name: str
    title: str
    target: str
    multiprocessors: int | None
    memory_bytes: int | None
    gb_per_s: float | None
    tflops_16: float | None
    tflops_32: float | None
    source: str


@dataclass(frozen=True)
class Picture:
    """A picture of `size` (width, height). `compute_bytes` is the predicted peak of encoding one of
    its tiles; `encode` is of all of them, `BATCH` at once. `refused` says why it is not taken.
    """

    size: tuple[int, int]
    tokens: int
    tiles: int
    compute_bytes: int
    encode: Estimate | None
    refused: str | None = None

    def is_shared_by(self, context: int) -> bool:
        """Return whether a sequence of so many tokens can have it, and one token of an answer."""
        return self.refused is None and self.tokens < context


@dataclass(frozen=True)
class Length:
    """Sequences of `context` tokens. `cache_bytes` are of as many as are answered at once; `bytes`
    is what all takes without a picture, and `picture_bytes` beside each of the pictures, None for
    one that is refused, or that a sequence does not hold. Times are of a step when a sequence is as
    long as that: `prefill` of `prefill_tokens` more, `decode` of one, `decode_all` of one of each
    of the sequences.
    """

    context: int
    cache_bytes: int
    bytes: int
    picture_bytes: tuple[int | None, ...]
    prefill_tokens: int
    prefill: Estimate | None
    decode: Estimate | None
    decode_all: Estimate | None


@dataclass(frozen=True)
class GraphOps:
    """Describes what one graph at one size launches, by op and kernel."""

    graph: str
    launches: int
    ops: tuple[OpShare, ...]


@dataclass(frozen=True)
class Prediction(WarmupFacts):
    """A warm-up report of a card that is not here. Nothing was run on it: memory is what plans
    say, times are estimates with a range.

    usable_bytes: of the card's memory, less what the driver takes and what is left to others; None
    where the memory is not known. sequences: answers computed at once. longest_context: tokens of
    each with which all fits, beside the largest picture that they hold (fewer than any has, where
    not even the smallest fits); 0 where none does, None without a card's memory. links: what may
    tie the cards together where several ranks share the model (`ranks`); all else is of one card.
    not_compiled: why kernels were not.
    """

    card: CardFacts | None = None
    sequences: int = 1
    context: int = 0
    context_most: int = 0
    usable_bytes: int | None = None
    weight_bytes: int = 0
    longest_context: int | None = None
    most_answers: int | None = None
    lengths: tuple[Length, ...] = ()
    pictures: tuple[Picture, ...] = ()
    work: tuple[GraphOps, ...] = ()
    links: tuple[LinkFacts, ...] = ()
    compiled: tuple[CompiledKernel, ...] = ()
    not_compiled: str | None = None

    def fits(self, needed: int | None) -> bool | None:
        """None where nobody knows."""
        if self.usable_bytes is None or needed is None:
            return None
        return needed <= self.usable_bytes

    @property
    def requested(self) -> Length:
        """The context that was asked for, or is the default."""
        return next(length for length in self.lengths if length.context == self.context)

    @property
    def needed_bytes(self) -> int:
        """Return the bytes needed at the requested context, beside the largest picture of those
        that are taken.
        """
        return max(
            self.requested.bytes, *(b for b in self.requested.picture_bytes if b is not None), 0
        )

    def asdict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "ran_on_a_gpu": False,
            "times": UNCONFIRMED,
            **super().asdict(),
            "needed_bytes": self.needed_bytes,
            "fits": self.fits(self.needed_bytes),
        }


def card_facts(card: Card) -> CardFacts:
    def scaled(value: int | None, unit: float) -> float | None:
        return None if value is None else value / unit

    return CardFacts(
        card.name,
        card.title,
        card.target,
        card.multiprocessors,
        card.memory_bytes,
        scaled(card.bandwidth, 1e9),
        scaled(card.flops_16, 1e12),
        scaled(card.flops_32, 1e12),
        card.source,
    )


def usable_bytes(memory_bytes: int | None) -> int | None:
    """Return the usable bytes of a card with so much memory, as a model that is loaded there would
    reckon.
    """
    if memory_bytes is None:
        return None
    free = max(memory_bytes - DRIVER_BYTES, 0)
    return free - free // SPARE


class Needs:
    """Describes what a model's plans say about one card."""

    def __init__(self, model: Model, target: Target, card: Card):
        self.model, self.target, self.card = model, target, card
        self.space, self.needed = (
            target.space,
            NeededMemory(model.encoder, model.runner, model.loaded.audio_encoder),
        )
        budget = Budget(model.options.image_min_tokens, model.options.image_max_tokens)
        self.prepared = list(_prepared(model, budget))
        self.pictures = tuple(self._picture(*row) for row in self.prepared)

    @property
    def lengths(self) -> tuple[Length, ...]:
        maximum, own = self.model.checkpoint.text.context, self.model.runner.context
        requested = {own, *(length for length in LENGTHS if length <= maximum)}
        if maximum <= LENGTHS[-1]:
            requested.add(maximum)
        return tuple(self._length(context) for context in sorted(requested))

    def longest_context(self) -> int | None:
        """Return the longest context as `longest_that_fits` finds it, up to the model's own limit,
        from the shortest that holds one of the pictures; below that where none of those fits.
        """
        usable = usable_bytes(self.card.memory_bytes)
        if usable is None:
            return None
        maximum = self.model.checkpoint.text.context
        stored = [p.tokens + 1 for p in self.pictures if p.is_shared_by(maximum)]
        minimum = min(stored, default=1)

        def slack(context: int) -> int:
            return usable - self._worst(context)

        result = longest_that_fits(slack, maximum, minimum=minimum)
        return result or (longest_that_fits(slack, min(maximum, minimum - 1)) if minimum > 1 else 0)

    def weight_bytes(self) -> int:
        parts = self.needed.weights, self.needed.tower
        return sum(part.get(self.space, 0) for part in parts)

    def most_answers(self) -> int | None:
        """Return it at once, of the context asked for, beside the largest picture that it holds; up
        to `MAX_ANSWERS`.
        """
        usable, context = usable_bytes(self.card.memory_bytes), self.model.runner.context
        if usable is None:
            return None
        return max_that_fit(lambda count: usable - self._worst(context, count), MAX_ANSWERS)

    def bytes(
        self, context: int, picture: Picture | None = None, answers: int | None = None
    ) -> int:
        """Everything: weights, the cache of all sequences, and what is computed with, with the
        margins that a loaded model keeps: a step of the decoder beside an encode, or a prefill, and
        the cache of encoded pictures.
        """
        encode = {self.space: picture.compute_bytes} if picture else None
        return self.needed.parts(context, answers, encode)[self.space].total

    def _worst(self, context: int, answers: int | None = None) -> int:
        return max(
            self.bytes(context, picture, answers)
            for picture in (None, *(p for p in self.pictures if p.is_shared_by(context)))
        )

    def _compute(self, plan: Plan) -> int:
        return plan.compute_bytes.get(self.space, 0)

    def _length(self, context: int) -> Length:
        runner = self.model.runner
        step, prefill = self.needed.plans(context)
        count, pages = runner.sequences, runner.pages_for(context)
        together = runner.plan(BatchShape(count, 0, count, count, count * pages))
        return Length(
            context,
            runner.cache_bytes(context).get(self.space, 0),
            self.bytes(context),
            tuple(
                self.bytes(context, p) if p.is_shared_by(context) else None for p in self.pictures
            ),
            min(runner.sizes()["prefill"].tokens, context),
            self.estimate(prefill),
            self.estimate(step),
            self.estimate(together),
        )

    def estimate(self, plan: Plan) -> Estimate | None:
        return estimate(plan, self.target, self.card)

    def _picture(
        self, size: tuple[int, int], prepared: ImagePlan | None, refused: str | None
    ) -> Picture:
        encoder = self.model.encoder
        if prepared is None or encoder is None:
            return Picture(size, 0, 0, 0, None, refused)
        shapes = Counter(tuple(tile.shape) for tile in prepared.tiles)
        peak = max(self._compute(encoder.plan(1, shape)) for shape in shapes)
        runs = [
            (encoder.plan(batch, shape), times)
            for shape, count in shapes.items()
            for batch, times in ((BATCH, count // BATCH), (count % BATCH, 1))
            if batch and times
        ]
        return Picture(size, prepared.tokens, len(prepared.tiles), peak, self._all(runs))

    def _all(self, runs: Sequence[tuple[Plan, int]]) -> Estimate | None:
        total = None
        for plan, times in runs:
            one = self.estimate(plan)
            if one is None:
                return None
            total = one.plus(one, times - 1) if total is None else total.plus(one, times)
        return total


def _prepared(
    model: Model, budget: Budget
) -> Iterator[tuple[tuple[int, int], ImagePlan | None, str | None]]:
    if model.encoder is None:
        return
    for width, height in SIZES:
        try:
            plan = prepare_blank(model.encoder.family.resolution, width, height, budget)
            yield (width, height), plan, None
        except (ImageError, OptionError) as error:
            yield (width, height), None, str(error)


def facts_of(report: WarmupFacts) -> dict[str, Any]:
    """The fields that a prediction takes over."""
    names = WarmupFacts.__dataclass_fields__
    return {name: getattr(report, name) for name in names}
