"""The tiles of the pictures answered about lately: what the model saw, for those who asked it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np

from mtmd.prompt.bridge import PreparedAudio, Single

SAVED_BYTES = 64 << 20
PICTURES = 128  # kept at most, however small they are


class ProcessedTiles:
    """Tiles of recent pictures. Those of one salt are kept once; each tenant sees what they have
    asked about themselves.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self.stored = 0  # bytes
        self._lock = Lock()

    def add(self, prepared: Sequence[Single], tenant: str) -> None:
        """Add what is a picture. The latest stay, `PICTURES` of them and `SAVED_BYTES`; the last,
        however large it is.
        """
        with self._lock:
            for one in (one for one in prepared if not isinstance(one, PreparedAudio)):
                sha256, _, salt = one.key
                entry = self._entries.get((salt, sha256))
                if one.plan.tiles:
                    tenants = {tenant} if entry is None else entry.tenants | {tenant}
                    self._entries[salt, sha256] = made = _Entry(one.plan.tiles, tenants)
                    self.stored += made.bytes - (0 if entry is None else entry.bytes)
                elif entry is not None:  # encoded before
                    entry.tenants.add(tenant)
            while len(self._entries) > 1 and (
                self.stored > SAVED_BYTES or len(self._entries) > PICTURES
            ):
                self.stored -= self._entries.popitem(last=False)[1].bytes

    def get(self, sha256: str, salt: str, tenant: str) -> tuple[np.ndarray, ...] | None:
        """The tiles as pictures, uint8 [Y, X, 3] each, each frame of a tile by itself; or None,
        also for another's picture.
        """
        with self._lock:
            entry = self._entries.get((salt, sha256))
        if entry is None or tenant not in entry.tenants:
            return None
        frames = [f for tile in entry.tiles for f in np.split(tile, tile.shape[0] // 3)]
        return tuple(map(_as_bytes, frames))


@dataclass(frozen=True)
class _Entry:
    tiles: tuple[np.ndarray, ...]
    tenants: set[str]

    @property
    def bytes(self) -> int:
        return sum(tile.nbytes for tile in self.tiles)


def _as_bytes(tile: np.ndarray) -> np.ndarray:
    """A normalised tile [3, Y, X] with its values spread over 0 to 255; frames are bytes yet."""
    if tile.dtype == np.uint8:
        return np.ascontiguousarray(tile.transpose(1, 2, 0))
    low, high = float(tile.min()), float(tile.max())
    scaled = (tile - low) * (255 / (high - low) if high > low else 0)
    result: np.ndarray = np.round(scaled.transpose(1, 2, 0)).astype(np.uint8)
    return result
