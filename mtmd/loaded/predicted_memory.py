"""Describes what a model will take once it answers, from what its plans say; told before a weight
is read.
"""

from __future__ import annotations

from mtmd.clip.encoder import BATCH
from mtmd.loaded.loaded_model import LoadedModel


def predicted_bytes(loaded: LoadedModel) -> dict[str, int]:
    """Return the predicted bytes by memory space: weights, what is counted of a full cache, and
    what is computed with where the largest tiles are encoded, as many at once as may be, beside a
    step of the decoder.
    """
    needed, encode = loaded.admission.needed, None
    if loaded.encoder is not None:
        tiles = [tile.shape for _, tile in loaded.encoder.sizes().values()]
        encode = needed.encode(tiles, BATCH)
    return {space: p.total for space, p in needed.parts(encode=encode).items() if p.total}
