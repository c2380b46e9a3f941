"""Describes whether there is memory for what is asked, told before anything is allocated, from what
plans are predicted to take.

What a model may take is fixed when it is loaded, so that a picture becomes the same whoever else is
being answered: one that would never fit beside weights and caches is shown smaller, or refused.
What fits, but not just now, is for the caller to put off.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import numpy as np

from mtmd.base.errors import DeviceMemoryError, OptionError, PlacementError
from mtmd.base.text import mib
from mtmd.clip.encoder import AudioEncoder, Encoder, TowerEncoder
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.token_budget import Budget
from mtmd.kernels.graph import Shape
from mtmd.kernels.plan.free_memory import free_bytes
from mtmd.kernels.plan.scheduler import Plan
from mtmd.llm.engine.runner import Runner
from mtmd.loaded.fitting.needed_memory import (
    CACHE_PART,
    SPARE,
    Bytes,
    NeededMemory,
    lazy_memories,
    limits,
    with_margin,
)

FINENESS = 64  # a picture is made smaller by steps of such a part of its tokens
# a picture in fewer shows too little to be asked about, or in fewer than a quarter of its own
MIN_TOKENS = 64
# a step that takes such a part of what was free so many seconds ago may run; one that takes a
# smaller part as much longer after, at most
PLENTY, SEEN_S, SEEN_MAX_S = 8, 0.2, 10.0


class Admission:
    """`limit`: the most bytes to take of the preferred device's memory for everything, None for
    what is free when this is made. `cache_bytes`: the most that encoded pictures are kept in.
    """

    def __init__(
        self,
        encoder: Encoder | None,
        runner: Runner,
        limit: int | None,
        cache_bytes: int,
        audio: AudioEncoder | None = None,
    ):
        self.encoder, self.runner, self.backends = encoder, runner, runner.backends
        self.audio = audio
        self._requested, self._cache_bytes = limit, cache_bytes
        self.limits = limits(self.backends, runner.devices, limit)
        """Bytes by memory space; those of which nobody knows are not in it."""
        self.needed = NeededMemory(encoder, runner, audio, lazy_memories(limit))
        self._keeps = (encoder or audio or runner).backends[0].space
        """Where encoded pictures are kept."""
        self.encoding: Plan | None = None
        """The plan of the batch that is being encoded, if one is."""
        self._seen: tuple[Bytes, float] = {}, float("-inf")
        """What was free, and when."""

    @property
    def lacks_room(self) -> bool:
        """Return whether a step of the decoder has none beside weights and cache. What is left to
        others is not held to, unless a limit was asked for.
        """
        part = 0 if self._requested is not None else SPARE - 1
        spare = {space: size // part if part else 0 for space, size in self.limits.items()}
        room = {space: size + spare[space] for space, size in self.room.items()}
        return not self._within(room, [self._step])

    def check(self, what_fits: Callable[[], str], min_bytes: Callable[[str], int]) -> None:
        """Raises OptionError for a limit that leaves no room for a step of the decoder, with what
        fits in place of context and parallel, "" where nothing does: then with the `min_bytes`
        of a memory that one short answer needs.
        """
        if self._requested is not None and self.lacks_room:
            space = min(self.limits, key=self._left)
            step = with_margin(self._step.compute_bytes.get(space, 0))
            if space == self._keeps:
                step = step * CACHE_PART // (CACHE_PART - 1) + CACHE_PART
            minimum = self.limits[space] - self._alongside_weights[space] + step
            raise OptionError(
                f"memory_limit: found {mib(self.limits[space])}, expected at least {mib(minimum)} "
                "for the weights, a full cache and a step of the decoder; "
                + (
                    f"raise it, or lower {self._lower}: {fits} fits"
                    if (fits := what_fits())
                    else f"the weights and one short answer need {mib(min_bytes(space))}, no "
                    "context fits below that"
                )
            )

    @property
    def _lower(self) -> str:
        """Return what takes less memory when it is lower: one answer at once cannot be fewer."""
        return "context or parallel" if self.runner.sequences > 1 else "context"

    def _left(self, space: str) -> int:
        """Return what a step of the decoder would leave of a memory."""
        step = with_margin(self._step.compute_bytes.get(space, 0))
        return self.room.get(space, 0) - step

    @property
    def weight_bytes(self) -> int:
        """Return the weight bytes of the memories whose size is known."""
        return sum(self._weights.values())

    @cached_property
    def _weights(self) -> Bytes:
        parts = self.needed.weights, self.needed.tower
        return {space: sum(part.get(space, 0) for part in parts) for space in self.limits}

    @cached_property
    def counted_caches(self) -> Bytes:
        """Bytes of a full cache, by memory space. The system hands out a cache's memory as it is
        written: without a limit to keep, one sequence's share is counted there, and more of them
        wait when there is no more.
        """
        return self.needed.cache()

    @cached_property
    def _alongside_weights(self) -> Bytes:
        """Limits less weights, what is counted of caches, and what is kept beside."""
        return {
            space: limit
            - self._weights[space]
            - self.counted_caches.get(space, 0)
            - self._saved.get(space, 0)
            - self.needed.workspaces.get(space, 0)
            for space, limit in self.limits.items()
        }

    @cached_property
    def _saved(self) -> Bytes:
        """Return what pictures are resized in, and what recorded runs keep."""
        return Counter(self.needed.resizing) + Counter(self.needed.recordings())

    @cached_property
    def embedding_cache_bytes(self) -> int:
        """The most bytes of encoded pictures to keep."""
        room = self._alongside_weights.get(self._keeps)
        return (
            self._cache_bytes
            if room is None
            else min(self._cache_bytes, max(room, 0) // CACHE_PART)
        )

    @cached_property
    def room(self) -> Bytes:
        """Return what can ever be there to compute with, by memory space."""
        return {
            space: room - (self.embedding_cache_bytes if space == self._keeps else 0)
            for space, room in self._alongside_weights.items()
        }

    @cached_property
    def _step(self) -> Plan:
        """The least that the decoder goes on with while a picture is encoded."""
        return self.runner.plan(self.runner.sizes()["decode"])

    def fit(self, pixels: np.ndarray, budget: Budget) -> ImagePlan:
        """A picture prepared, uint8 [Y, X, 3], in fewer tokens where encoding one of its tiles
        would take more memory than can be free.

        Nothing is encoded. Raises DeviceMemoryError, with the numbers, where no budget of tokens
        makes it small enough; and what `Resolution.prepare` raises.
        """
        assert self.encoder is not None
        plan = self.encoder.family.resolution.prepare(pixels, budget)
        if self._fits(plan):
            return plan
        needed, free = self._shortage(self._largest(plan))
        result = self._shrunk(pixels, budget, plan)
        if result is None:
            raise DeviceMemoryError(
                f"encoding a picture of {pixels.shape[1]} x {pixels.shape[0]} pixels needs "
                f"{mib(needed)}, {mib(free)} are free beside "
                "weights and caches, and it cannot be shown small enough; use a smaller "
                f"{self._lower}, dtype bf16, or another device"
            )
        text = (
            f"shrunk from {plan.tokens} to {result.tokens} tokens: encoding it as it is needs "
            f"{mib(needed)}, {mib(free)} are free"
        )
        return replace(result, notes=(*plan.notes, text), shrunk_from=plan.tokens)

    def check_frames(self, plan: ImagePlan) -> None:
        """Raises DeviceMemoryError, with the numbers, where encoding a group of frames takes more
        memory than can be free.
        """
        if self._fits(plan):
            return
        needed, free = self._shortage(self._largest(plan))
        raise DeviceMemoryError(
            f"encoding frames of {plan.sizes[0][0]} x {plan.sizes[0][1]} pixels needs "
            f"{mib(needed)}, {mib(free)} are free beside weights and caches; show them in fewer "
            f"tokens (image_max_tokens), or use a smaller {self._lower}"
        )

    def check_audio(self, plan: ImagePlan) -> None:
        """Raises DeviceMemoryError, with the numbers, where encoding a window of audio takes more
        memory than can be free.
        """
        assert self.audio is not None
        if self._fits(plan, self.audio):
            return
        needed, free = self._shortage(self._largest(plan, self.audio))
        raise DeviceMemoryError(
            f"encoding audio needs {mib(needed)}, {mib(free)} are free beside weights and caches; "
            f"use a smaller {self._lower}, dtype bf16, or another device"
        )

    def _shrunk(self, pixels: np.ndarray, budget: Budget, plan: ImagePlan) -> ImagePlan | None:
        """The picture in the most tokens with which it fits, nearly."""
        assert self.encoder is not None
        minimum = budget.min_tokens or min(MIN_TOKENS, plan.tokens // 4)
        low, high, result = minimum, plan.tokens - 1, None
        resolution = self.encoder.family.resolution
        while high - low >= (plan.tokens // FINENESS if result else 0):
            middle = (low + high) // 2
            tried = None
            with suppress(OptionError):  # too few for this family
                tried = resolution.prepare(pixels, replace(budget, max_tokens=middle))
            if tried is None or tried.tokens < minimum:
                low = middle + 1
            elif self._fits(tried):
                result, low = tried, middle + 1
            else:
                high = min(middle, tried.tokens) - 1
        return result

    def _fits(self, plan: ImagePlan, by: TowerEncoder | None = None) -> bool:
        return all(self._within(self.room, [p, self._step]) for p in self._plans(plan, by))

    def _plans(self, plan: ImagePlan, by: TowerEncoder | None) -> list[Plan]:
        encoder = by or self.encoder
        assert encoder is not None
        return [
            encoder.plan_of([shape])
            for shape in dict.fromkeys(tuple(tile.shape) for tile in plan.tiles)
        ]

    def _largest(self, plan: ImagePlan, by: TowerEncoder | None = None) -> Plan:
        return max(self._plans(plan, by), key=lambda p: sum(p.compute_bytes.values()))

    def _shortage(self, plan: Plan, room: Bytes | None = None) -> tuple[int, int]:
        """Return what encoding needs and what is free for it, in bytes, of the memory that lacks
        most.
        """
        room = self.room if room is None else room
        result = [
            (
                with_margin(plan.compute_bytes.get(space, 0)),
                max(size - with_margin(self._step.compute_bytes.get(space, 0)), 0),
            )
            for space, size in room.items()
        ]
        return max(result, key=lambda pair: pair[0] - pair[1])

    def may_encode(
        self, encoder: TowerEncoder, shapes: Sequence[Shape], alone: bool = False
    ) -> bool:
        """Return whether tiles of these shapes can be encoded together now, and answers go on
        meanwhile; `alone` as `Encoder.steps` has it.
        """
        try:
            plans = [encoder.plan_of(shapes, alone), self._step]
        except PlacementError:
            return True  # the run will tell
        return self._within(self.room, plans) and self._within(self.free_now(), plans)

    def may_decode(self, plan: Plan) -> bool:
        """Return whether the decoder can run a batch now, beside what is being encoded."""
        alongside = [self.encoding] if self.encoding else []
        return self._within(self.room, [plan, *alongside]) and (
            self._is_little(plan) or self._within(self._look(), [plan])
        )

    def _is_little(self, plan: Plan) -> bool:
        """Return whether it is little of what was free when that was measured last; the less, the
        longer ago that may be. To ask the system takes longer than a step of decoding where others
        keep the interpreter busy.
        """
        free, requested = self._seen
        needs = {space: with_margin(plan.rough_bytes.get(space, 0)) for space in free}
        parts = min((size // max(needs[space], 1) for space, size in free.items()), default=0)
        age_s = min(SEEN_S * parts / PLENTY, SEEN_MAX_S)
        return parts >= PLENTY and time.monotonic() - requested <= age_s

    def _look(self) -> Bytes:
        free = self.free_now()
        self._seen = free, time.monotonic()
        return free

    def shortage(self, encoder: TowerEncoder, shape: Shape) -> DeviceMemoryError:
        """Return what to tell of a tile that has waited in vain."""
        needed, free = self._shortage(encoder.plan_of([shape]), self.free_now())
        what = "the audio" if isinstance(encoder, AudioEncoder) else "the picture"
        return DeviceMemoryError(
            f"encoding {what} needs {mib(needed)}, {mib(free)} are free at the moment; try "
            "again later, or show "
            "it in fewer tokens"
        )

    def free_now(self) -> Bytes:
        """Return what is free, by memory space, less the weights that are yet to be read, and what
        is kept beside at any time: of recorded runs that is free by torch's count, of libraries'
        workspaces it is not, from the first run on.
        """
        result = {}
        for backend in self.backends:
            free = free_bytes(backend)
            if free is not None and backend.space in self.limits:
                to_come = self._weights[backend.space] - self.runner.residency.bytes[backend.space]
                result[backend.space] = free - max(to_come, 0) - self._saved.get(backend.space, 0)
        return result

    @staticmethod
    def _within(room: Bytes, plans: Sequence[Plan]) -> bool:
        """Return whether plans that run side by side fit: by what is known at once, else by what
        has to be found out.
        """

        def fits(kind: Callable[[Plan], Bytes]) -> bool:
            needs = [kind(plan) for plan in plans]
            return all(
                total <= size or not total
                for total, size in ((_total(needs, space), size) for space, size in room.items())
            )

        return fits(lambda plan: plan.rough_bytes) or fits(lambda plan: plan.compute_bytes)


def _total(needs: Iterable[Bytes], space: str) -> int:
    return sum(with_margin(need.get(space, 0)) for need in needs)
