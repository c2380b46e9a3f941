"""Describes what a model needs of each memory, by part, from what its plans say: for any context,
any number of answers and any picture. Nothing is allocated to find it, and no weight is read.

It is what `memory_admission.py` lets in: a step of the decoder beside an encode, or a prefill, with
a margin, and the cache of encoded pictures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mtmd.base.errors import ImageError, OptionError
from mtmd.clip.encoder import BATCH, AudioEncoder, Encoder
from mtmd.clip.resolution.resolution import prepare_blank
from mtmd.clip.token_budget import Budget
from mtmd.kernels.backends import Backend
from mtmd.kernels.graph import Shape
from mtmd.kernels.plan.free_memory import free_bytes
from mtmd.kernels.plan.graph_replay import recordings_bytes
from mtmd.kernels.plan.scheduler import Plan
from mtmd.llm.batch import BatchShape
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.speculation import MAX_ROWS, MAXIMUM
from mtmd.llm.state import PAGE

CACHE_BYTES = 256 << 20  # the most that encoded pictures are kept in, where there is memory for it
SPARE = 16  # a part in so many of what is free at the start is left to others
MARGIN = 8  # and a part in so many is added to a prediction
# the part of what is there to compute with that the cache of encoded pictures may take
CACHE_PART = 8
# tokens: how finely the longest context is looked for, and below the first of them
CHUNK, FINE = 1024, PAGE
MAX_ANSWERS = 1024
LARGE = (3840, 2160)  # pixels of a picture that is shown in as many tokens as it may be
HOST = "cpu"
Bytes = Mapping[str, int]


@dataclass(frozen=True)
class Parts:
    """Bytes of one memory: weights of the decoder, those of the encoder, the cache of all
    sequences, and what is computed with, pictures that are resized, or kept encoded, and what
    recorded runs and libraries keep, among it.
    """

    weights: int = 0
    tower: int = 0
    cache: int = 0
    compute: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.tower + self.cache + self.compute

    def plus(self, other: Parts) -> Parts:
        return Parts(
            self.weights + other.weights,
            self.tower + other.tower,
            self.cache + other.cache,
            self.compute + other.compute,
        )


def lazy_memories(limit: int | None) -> tuple[str, ...]:
    """The host's, which the system hands out as it is written; none where there is a limit to keep,
    within which all has to lie.
    """
    return (HOST,) if limit is None else ()


class NeededMemory:
    """Memory needed by one process with these two; in `lazy` memories (`lazy_memories`) one
    sequence's share of the cache is counted, and more wait when there is no more.
    """

    def __init__(
        self,
        encoder: Encoder | None,
        runner: Runner,
        audio: AudioEncoder | None = None,
        lazy: Iterable[str] = (),
    ):
        self.encoder, self.runner, self.audio = encoder, runner, audio
        self.lazy = frozenset(lazy)

    @cached_property
    def weights(self) -> Bytes:
        images = 1 if self.encoder or self.audio else 0
        return self.runner.plan(
            BatchShape(1, images=images, adapters=self.runner.all_adapters)
        ).weight_bytes

    @cached_property
    def tower(self) -> Bytes:
        """Weights of the encoders."""
        result = Counter[str]()
        for encoder in filter(None, (self.encoder, self.audio)):
            for plan in encoder.weight_plans():
                result.update(plan.weight_bytes)
        return result

    @cached_property
    def resizing(self) -> Bytes:
        """Memory in which the encoder's device resizes pictures, beside whatever else it does."""
        size = self.encoder.preprocessing.device_bytes if self.encoder else 0
        return {self.encoder.backends[0].space: size} if self.encoder and size else {}

    @cached_property
    def workspaces(self) -> Bytes:
        """Return what libraries keep for each queue in which matrices are multiplied: the
        decoder's, that of the encoders, and those in which runs of each are recorded.
        """
        step, _ = self.plans(self.runner.context)
        queues = [(device, step) for device in self.runner.devices]
        if tower := self.encoder or self.audio:
            tile = tower.family.resolution.tile_type()
            queues.append((tower.backends[0], tower.plan(1, tile.shape)))
        result = Counter[str]()
        for device, plan in queues:
            result[device.space] += device.queue_bytes * (1 + plan.is_where_runs_are_recorded)
        return +result

    def cache(self, context: int | None = None, answers: int | None = None) -> Bytes:
        sequences = answers or self.runner.sequences
        return {
            space: size // (sequences if space in self.lazy else 1)
            for space, size in self.runner.cache_bytes(context, answers).items()
        }

    def recordings(self, context: int | None = None, answers: int | None = None) -> Bytes:
        """Return what recorded runs keep, beside whatever runs: of the decoder, for so many answers
        at once with all that may be proposed of each, and of the encoder, which have queues of
        their own.
        """
        if not self.runner.backends[0].records:
            return {}
        step, prefill = self.plans(context or self.runner.context)
        rows = min((answers or self.runner.sequences) * (1 + MAXIMUM), MAX_ROWS)
        return Counter(recordings_bytes([(step, rows), (prefill, 1)])) + self._encodes

    @cached_property
    def _encodes(self) -> Counter[str]:
        """Return what recorded runs of the encoder keep."""
        plans = (
            plan
            for encoder in filter(None, (self.encoder, self.audio))
            for plan in encoder.largest_plans()
        )
        return Counter(recordings_bytes((plan, 1) for plan in plans))

    def plans(self, context: int) -> tuple[Plan, Plan]:
        """A step of decode, and a prefill, of a sequence that is as long as `context`."""
        pages = self.runner.pages_for(context)
        largest = self.runner.sizes()["prefill"]
        tokens = min(largest.tokens, context)
        return (
            self.runner.plan(replace(largest, tokens=1, images=0, pages=pages)),
            self.runner.plan(
                replace(largest, tokens=tokens, images=min(largest.images, tokens), pages=pages)
            ),
        )

    def encode(self, tiles: Iterable[Shape], batch: int = 1) -> Bytes:
        """The most that encoding so many of one of these tiles takes."""
        assert self.encoder is not None
        peaks = [self.encoder.plan(batch, shape).compute_bytes for shape in dict.fromkeys(tiles)]
        return _largest(peaks)

    @cached_property
    def _encode_audio(self) -> Bytes:
        """The most that encoding windows of audio takes, as many at once as may be."""
        if self.audio is None:
            return {}
        tile = self.audio.family.resolution.largest_tile_type()
        return self.audio.plan(BATCH, tile.shape).compute_bytes

    def parts(
        self, context: int | None = None, answers: int | None = None, encode: Bytes | None = None
    ) -> dict[str, Parts]:
        """Return the parts by memory; `encode` is what a picture takes beside a step of the
        decoder.
        """
        context = context or self.runner.context
        step, prefill = (plan.compute_bytes for plan in self.plans(context))
        encode, cache = _largest([encode or {}, self._encode_audio]), self.cache(context, answers)
        keeps = (self.encoder or self.audio or self.runner).backends[0].space
        recordings = self.recordings(context, answers)
        spaces = dict.fromkeys((*self.weights, *self.tower, *cache, *step, *prefill, *encode))
        result = {}
        for space in spaces:
            compute = max(
                with_margin(prefill.get(space, 0)),
                with_margin(step.get(space, 0)) + with_margin(encode.get(space, 0)),
            )
            if space == keeps:
                compute = with_pictures(compute)
            compute += sum(part.get(space, 0) for part in (self.resizing, recordings))
            compute += self.workspaces.get(space, 0)
            result[space] = Parts(
                self.weights.get(space, 0), self.tower.get(space, 0), cache.get(space, 0), compute
            )
        return result


def _largest(peaks: Sequence[Bytes]) -> Bytes:
    """Return the largest of each memory."""
    return {s: max(p.get(s, 0) for p in peaks) for s in {s for p in peaks for s in p}}


def with_margin(size: int) -> int:
    return size + size // MARGIN


def with_pictures(compute: int) -> int:
    """Return what is computed with, and the cache of encoded pictures beside."""
    return min(-(-compute * CACHE_PART // (CACHE_PART - 1)), compute + CACHE_BYTES)


def limits(
    backends: Sequence[Backend], devices: Sequence[Backend], requested: int | None
) -> dict[str, int]:
    """The most bytes to take of each memory, less a part that is left to others; of the devices no
    more than `requested`: of the accelerators where there are some. Those of which nobody knows are
    not in it.
    """
    result: dict[str, int] = {}
    for backend in reversed(backends):
        free = free_bytes(backend)
        if free is not None:
            result[backend.space] = free - free // SPARE
    if requested is not None:
        for device in [d for d in devices if d.space != HOST] or devices:
            result[device.space] = min(requested, result.get(device.space, requested))
    return result


def max_that_fit(slack: Callable[[int], int], maximum: int, start: int = 1) -> int:
    """The largest number up to `maximum` with a slack that is not negative, 0 where there is none.
    Slack falls with the number, nearly in a line: so every second guess is where a line between the
    two numbers that are known goes through zero, and the others halve what is between them.
    `start`: a number that is worth being tried first.
    """
    if (last := slack(maximum)) >= 0:
        return maximum
    low, high, first = 0, maximum, 0
    for known in dict.fromkeys((min(start, maximum), 1)):
        if known < high and (left := slack(known)) >= 0:
            low, first = known, left
            break
        if known < high:
            high, last = known, left
    if not low:
        return 0
    halve = False
    while high - low > 1:
        line = low + (high - low) * first // (first - last)
        middle = (low + high) // 2 if halve else min(max(line, low + 1), high - 1)
        left, halve = slack(middle), not halve
        if left >= 0:
            low, first = middle, left
        else:
            high, last = middle, left
    return low


def longest_that_fits(
    slack: Callable[[int], int], maximum: int, own: int = CHUNK, minimum: int = 1
) -> int:
    """The largest context from `minimum` to `maximum` with a slack that is not negative: in steps
    of `CHUNK` tokens, of `FINE` ones where not even one such step fits, or `maximum`; 0 where there
    is none. `own`: a context that is worth being tried first.
    """
    first = -(-minimum // CHUNK) * CHUNK
    return _in_steps(CHUNK, slack, maximum, own, minimum) or _in_steps(
        FINE, slack, min(maximum, first), own, minimum
    )


def _in_steps(step: int, slack: Callable[[int], int], maximum: int, own: int, minimum: int) -> int:
    first = -(-minimum // step)
    count = -(-maximum // step) - first + 1

    def context(number: int) -> int:
        return min((first + number - 1) * step, maximum)

    if count < 1:
        return 0
    start = max(own // step - first + 1, 1)
    result = max_that_fit(lambda number: slack(context(number)), count, start)
    return context(result) if result else 0


@dataclass(frozen=True)
class LargestPicture:
    """`size` is (width, height) of the picture that was looked at, None for the largest tile that
    the family has; `tiles` are their shapes.
    """

    tokens: int
    tiles: tuple[Shape, ...]
    size: tuple[int, int] | None = None


def largest_picture(
    encoder: Encoder, budget: Budget, context: int, size: tuple[int, int] | None = None
) -> LargestPicture:
    """The picture that takes most: one of `size` pixels, or the largest that the budget of tokens
    and the context let be. Raises ImageError and OptionError where it is not taken.
    """
    resolution = encoder.family.resolution
    maximum = resolution.max_tokens(budget)
    if size is None and budget.max_tokens is None and maximum < context:
        return LargestPicture(maximum, (resolution.largest_tile_type().shape,))
    if size is None and maximum >= context:
        budget = Budget(budget.min_tokens, min(context - 1, budget.max_tokens or context))
    width, height = size or LARGE
    plan = prepare_blank(resolution, width, height, budget)
    if plan.tokens >= context:
        raise ImageError(
            f"a picture of {width} x {height} pixels takes {plan.tokens} tokens, and the context "
            f"holds {context}, answer included; use a longer context, or smaller pictures"
        )
    tiles = tuple(dict.fromkeys(tuple(tile.shape) for tile in plan.tiles))
    return LargestPicture(plan.tokens, tiles, size)


def smaller_picture(encoder: Encoder, budget: Budget, tokens: int) -> LargestPicture | None:
    """A large picture shown in that many tokens at most; None for a family that cannot."""
    try:
        return largest_picture(encoder, Budget(budget.min_tokens, tokens), tokens + 1, LARGE)
    except (ImageError, OptionError):
        return None
