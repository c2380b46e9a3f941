"""The tiles of the pictures answered about lately: what the model saw, for those who asked it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import numpy as np

from mtmd.prompt.bridge import Prepared

KEPT_BYTES = 64 << 20


class ProcessedTiles:
    def __init__(self) -> None:
        self._tiles: OrderedDict[tuple[str, str], tuple[np.ndarray, ...]] = OrderedDict()
        self._lock = Lock()

    def add(self, prepared: Sequence[Prepared], tenant: str) -> None:
        """The latest stay, `KEPT_BYTES` of them."""
        with self._lock:
            for one in prepared:
                if one.plan.tiles:
                    self._tiles[tenant, one.key[0]] = one.plan.tiles
            while (
                sum(tile.nbytes for tiles in self._tiles.values() for tile in tiles) > KEPT_BYTES
                and len(self._tiles) > 1
            ):
                self._tiles.popitem(last=False)

    def get(self, sha256: str, tenant: str) -> tuple[np.ndarray, ...] | None:
        """The tiles as pictures, uint8 [Y, X, 3] each, or None, also for another's picture."""
        with self._lock:
            tiles = self._tiles.get((tenant, sha256))
        return None if tiles is None else tuple(map(_as_bytes, tiles))


def _as_bytes(tile: np.ndarray) -> np.ndarray:
    """A normalised tile [3, Y, X] with its values spread over 0 to 255."""
    low, high = float(tile.min()), float(tile.max())
    scaled = (tile - low) * (255 / (high - low) if high > low else 0)
    result: np.ndarray = np.round(scaled.transpose(1, 2, 0)).astype(np.uint8)
    return result
