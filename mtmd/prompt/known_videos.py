"""Videos that were asked about before: what they say of themselves, and what their frames, or
groups of them, are known by.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, TypeAlias

from mtmd.clip.video.video import Part, VideoFacts
from mtmd.prompt.bridge import Prepared, PreparedVideo

SAVED = 256  # videos
SAVED_TILE_BYTES = 128 << 20  # of frames ready to be encoded, for who asks again before they are
NOTED_BYTES = 16 << 20  # of all else
_GROUP_BYTES, _FRAME_BYTES = 1300, 200  # of one: keys, sizes, receipt; number and time
Location: TypeAlias = "tuple[str, str]"
"""Whose video, and the digest of its content."""
Span: TypeAlias = "tuple[float | None, float | None]"
"""Its first and last second that are asked for."""


@dataclass(frozen=True, eq=False)
class Known:
    """A video that was prepared before: what its groups, or frames, are known by, and with `video`
    how a family that reads videos had it.
    """

    facts: VideoFacts
    indices: tuple[int, ...]
    times: tuple[float, ...]
    prepared: tuple[Prepared, ...]
    video: PreparedVideo | None

    @property
    def tile_bytes(self) -> int:
        return sum(tile.nbytes for one in self.prepared for tile in one.plan.tiles)

    @property
    def noted_bytes(self) -> int:
        """About what it takes without tiles."""
        plans = [one.plan for one in self.prepared]
        mixtures = (array for plan in plans for array in (plan.order, plan.weights))
        text = len(self.video.text) if self.video else 0
        return (
            _GROUP_BYTES * (len(self.prepared) + 1)
            + _FRAME_BYTES * len(self.indices)
            + sum(array.nbytes for array in mixtures if array is not None)
            + 4 * text
        )


class KnownVideos:
    """Videos by file and frames; the embeddings lie in the bridge's cache, and of what is not
    encoded yet the latest tiles here. The least recently used go first. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._met: OrderedDict[tuple[Location, Span], tuple[VideoFacts, Part]] = OrderedDict()
        self._known: OrderedDict[Any, Known] = OrderedDict()

    @property
    def stored_bytes(self) -> int:
        """Return the held bytes of all of it, about."""
        with self._lock:
            known = list(self._known.values())
        return sum(one.tile_bytes + one.noted_bytes for one in known)

    def met(self, location: Location, span: Span) -> tuple[VideoFacts, Part] | None:
        """Return what a file says of itself, and what of it lies in `span`."""
        with self._lock:
            if (location, span) in self._met:
                self._met.move_to_end((location, span))
            return self._met.get((location, span))

    def get(self, key: Any) -> Known | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def put(
        self, location: Location, span: Span, met: tuple[VideoFacts, Part], key: Any, known: Known
    ) -> None:
        """The one put last stays, however much is noted of it."""
        with self._lock:
            self._met[location, span], self._known[key] = met, _without_embeddings(known)
            self._met.move_to_end((location, span))
            self._known.move_to_end(key)
            while len(self._met) > SAVED:
                self._met.popitem(last=False)
            left, maximum = SAVED_TILE_BYTES, NOTED_BYTES
            for number, (old, one) in enumerate(reversed(list(self._known.items()))):
                left, maximum = left - one.tile_bytes, maximum - one.noted_bytes
                if number and (maximum < 0 or number >= SAVED):
                    del self._known[old]
                elif left < 0:
                    self._known[old] = _without_tiles(one)


def _without_embeddings(known: Known) -> Known:
    prepared = tuple(replace(one, embeddings=None) for one in known.prepared)
    return replace(known, prepared=prepared, video=known.video and replace(known.video, groups=()))


def _without_tiles(known: Known) -> Known:
    """Return it without tiles, without the order of their tokens, and what these are mixed by: only
    they are read so.
    """
    prepared = (
        replace(one, plan=replace(one.plan, tiles=(), order=None, weights=None))
        for one in known.prepared
    )
    return replace(known, prepared=tuple(prepared))
