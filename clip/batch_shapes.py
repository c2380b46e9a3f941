"""The batches of tiles that an encoder can meet, for what has to be ready before it does."""

from __future__ import annotations

from mtmd.base.errors import ImageError, OptionError
from mtmd.clip.encoder import BATCH, TowerEncoder
from mtmd.clip.resolution.resolution import prepare_blank
from mtmd.clip.token_budget import Budget
from mtmd.kernels.graph import Shape

USUAL = ((224, 224), (512, 384), (640, 480), (480, 640), (1024, 768), (1280, 720), (1920, 1080))


def foreseen_tiles(encoder: TowerEncoder, budget: Budget) -> list[tuple[int, Shape]]:
    """(tiles at once, shape of a tile): those of a family with one size are all there are; of
    others, those of the warm-up, of the largest picture and of `USUAL` ones, (width, height) in
    pixels.
    """
    shapes = dict.fromkeys(tuple(tile.shape) for _, tile in encoder.sizes().values())
    for width, height in USUAL:
        try:
            plan = prepare_blank(encoder.family.resolution, width, height, budget)
        except (ImageError, OptionError):
            continue  # such a picture is refused, now and later
        shapes |= dict.fromkeys(tuple(tile.shape) for tile in plan.tiles)
    return [(batch, shape) for shape in shapes for batch in range(1, BATCH + 1)]


def foreseen_packs(encoder: TowerEncoder) -> tuple[int, ...]:
    """Tokens of every pack that the encoder can meet; none where they are of any length."""
    strip = encoder.strip
    if strip is None or not strip.few or encoder.why_no_packs is not None:
        return ()
    return strip.sizes
