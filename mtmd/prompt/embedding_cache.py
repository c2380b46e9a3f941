"""The cache of encoded pictures, by their content: pixels and size, and the budget they were given,
for one model in one compute type; never by path or name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import TypeAlias

from torch import Tensor

from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.token_budget import Budget

PICTURES = 4096
"""Kept at most: of small models, whose pictures take some kB, bytes alone would let tens of
thousands stay of which hardly one is asked about again.
"""
Key: TypeAlias = "tuple[str, Budget, str]"
"""SHA-256 of a picture's pixels and size, its budget of tokens, and the salt of who asks: those of
another salt do not find it.
"""


class EmbeddingCache:
    """Least recently used pictures go first. Threads may share it.

    `limit`: bytes of embeddings to hold at most, asked for at each `put`; the picture put last
    stays, however large it is. `maximum`: pictures, or groups of a video's frames.
    """

    def __init__(self, limit: Callable[[], int], maximum: int = PICTURES):
        self._limit, self._maximum = limit, maximum
        self._entries: OrderedDict[Key, tuple[ImagePlan, Tensor]] = OrderedDict()
        self.stored = 0  # bytes of embeddings
        self._lock = Lock()

    def get(self, key: Key) -> tuple[ImagePlan, Tensor] | None:
        """The plan of a picture, without its tiles, and its embeddings [T, D]; None if they are not
        here.
        """
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: Key, plan: ImagePlan, embeddings: Tensor) -> None:
        plan = replace(plan, tiles=(), order=None, weights=None)  # pixels are not needed again
        limit = self._limit()
        with self._lock:
            if key in self._entries:
                self.stored -= self._entries.pop(key)[1].nbytes
            self._entries[key] = plan, embeddings
            self.stored += embeddings.nbytes
            while len(self._entries) > 1 and (
                self.stored > limit or len(self._entries) > self._maximum
            ):
                self.stored -= self._entries.popitem(last=False)[1][1].nbytes
