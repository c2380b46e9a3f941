"""Describes how flash attention is launched for given types: the split of the head, the tile,
strides, who shares out the keys. Plain arithmetic, no Triton.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from math import gcd

import torch

from mtmd.kernels.gpu.launch import Call, power_of_two
from mtmd.kernels.graph import Type

MAX_HEAD = 576
# The keys of a launch are shared out if it has at most so many tokens, as decoding a batch does;
# then so many programs are wanted (two for each processor of an A100, H100 or MI300, about) and
# each gets at least so many blocks of keys. Not measured.
FEW_TOKENS, REQUESTED, MIN_BLOCKS = 16, 256, 4


@dataclass(frozen=True)
class Operands:
    """Operands of `attention`: q [B, T, H, K], k [B, S, G, K], v [B, S, G, V] -> [B, T, H, V],
    contiguous

    mask [T, S], [H, T, S] or [B, H, T, S]; bounds [T, 2] or [B, T, 2]
    """

    q: Type
    k: Type
    v: Type
    mask: Type | None = None
    bounds: Type | None = None
    _: KW_ONLY
    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    mask_capped: bool = False

    @property
    def limited(self) -> bool:
        """Return whether some rows do not see all keys."""
        return self.causal or self.window is not None or self.bounds is not None


@dataclass(frozen=True)
class Tile:
    """The work of one program: `rows` (tokens x query heads of a group) by blocks of `keys`, on
    `warps` warps, with loads running `stages` - 1 blocks ahead; `registers` as `Call` has them.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


def parts(size: int, exact: bool = False) -> tuple[int, int]:
    """A head size as two powers of two that cover it, the second 0 or at least 16: 72 = 64 + 16, 80
    = 64 + 16, 88 = 64 + 32.

    Above 256 the first is 256, above 512 it is 512. Elsewhere, where both would be equal they are
    one (112 = 64 + 64 = 128): a third part would cover 112 exactly, for 12 % less arithmetic at the
    price of a third accumulator and a third kind of load. exact: of scores in fp32, where a product
    of one part would have all of a row in registers at once: 64 is 32 + 32, and 128 is 64 + 64.
    """
    if size > 256:
        first = 512 if size > 512 else 256
        return first, max(16, power_of_two(size - first))
    first = max(16, 1 << (size.bit_length() - 1))
    second = 0 if first >= size else max(16, power_of_two(size - first))
    if second == first:
        first, second = 2 * first, 0
    if exact and second == 0 and 32 < first <= 128:
        return first // 2, first // 2
    return first, second


def choose_tile(width: int, dtype: torch.dtype, rows: int, masked: bool) -> Tile:
    """The tile for a head size and a number of rows (tokens x query heads of a group).

    Chosen from the compiler's report alone, not by a GPU's clock: the largest tile that spills
    nothing on cuda:80 and cuda:90 and fits gfx942's 64 KiB and, compiled as for cuda:80, the 99 KiB
    of consumer cards. See docs/kernels.md.
    """
    if dtype == torch.float32:
        # Exact fp32 runs on plain multiply-adds on NVIDIA, whose operands take many registers.
        if width > 256:
            # Of 32 keys it takes all registers, and no fewer instructions a key.
            return Tile(16, 16, 8, 1)
        if rows <= 16:
            return Tile(16, 16, 4, 2)
        if width <= 96:
            return Tile(64, 32, 8, 2)
        return Tile(32, 32, 8, 2) if width <= 128 else Tile(32, 16, 8, 2)
    if rows <= 16:
        # Decoding: 16 rows, the smallest block that a matrix instruction takes.
        if width <= 128:
            return Tile(16, 64, 4, 2)
        return Tile(16, 32, 4, 2) if width <= 256 else Tile(16, 16, 4, 1 + (width <= 512))
    if width > 128:
        return Tile(64, 32, 8, 2) if width <= 256 else Tile(32, 16, 8, 1 + (width <= 512))
    if rows <= 64:
        return Tile(64, 64, 4, 2) if width <= 96 else Tile(64, 32, 4, 2)
    # A mask is loaded ahead as well: 32 KiB for each stage.
    return Tile(128, 64, 8, 2 if masked or width > 96 else 3)


def _tile_in_registers(
    width: int, dtype: torch.dtype, rows: int, masked: bool, limited: bool
) -> Tile:
    """Do what `choose_tile` does, but where this kernel would spill a few registers behind its
    loops: heads of 32 + 16 in fp32, with all keys on cuda:90, and decoding on cuda:80. limited:
    some rows do not see all keys.
    """
    tile = choose_tile(width, dtype, rows, masked)
    if dtype == torch.float32 and 32 < width <= 48:
        if rows <= 16:
            return replace(tile, stages=3)
        if not masked and not limited:
            return replace(tile, registers=112)
    return tile


def attention_call(
    o: Operands, tile: Tile | None = None, split: bool = True, splits: int | None = None
) -> Call:
    """`tile`, `split=False` to pad the head to a power of two and `splits` are for measurements;
    the defaults are what runs use.
    """
    batch, rows, heads, width = o.q.shape
    keys, groups, value = o.k.shape[1], o.k.shape[2], o.v.shape[3]
    per_key = heads // groups
    masked = o.mask is not None
    tile = tile or _tile_in_registers(
        max(width, value), o.q.dtype, rows * per_key, masked, o.limited
    )
    programs = batch * groups * -(-rows * per_key // tile.rows)
    splits = splits or choose_splits(rows, -(-keys // tile.keys), programs)
    (k1, k2), (v1, v2) = (parts(width, o.q.dtype == torch.float32), parts(value))
    if not split:
        (k1, k2), (v1, v2) = ((max(16, power_of_two(n)), 0) for n in (width, value))
    scalars: dict[str, int | float] = {
        "scale": float(o.scale),
        "cap": float(o.softcap or 1.0),
        "T": rows,
        "S": keys,
        "H": heads,
        "last": rows * per_key - 1,
    }
    steps = {n: _broadcast(t, t.shape)[:3] for n, t in (("q", o.q), ("k", o.k), ("v", o.v))}
    # Strides are passed divided by what all of them share, up to 16: multiplied by that constant in
    # the kernel, they tell the compiler how wide it may load (`load_columns`).
    align = gcd(16, *(s for strides in steps.values() for s in strides))
    for name, strides in steps.items():
        scalars |= {
            f"{name}_{axis}": stride // align
            for axis, stride in zip(("batch", "step", "head"), strides, strict=True)
        }
    mask_strides = _broadcast(o.mask, (batch, heads, rows, keys))
    names = "mask_batch", "mask_head", "mask_row", "mask_step"
    scalars |= dict(zip(names, mask_strides, strict=True))
    constants: dict[str, int | bool | str] = {
        "GROUP": per_key,
        "K": width,
        "V": value,
        "K1": k1,
        "K2": k2,
        "V1": v1,
        "V2": v2,
        "CAP": o.softcap is not None,
        "MASK": 0 if not masked else 2 if o.mask_capped else 1,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "ALIGN": align,
        "SPLITS": splits,
    }
    if not o.limited:
        constants["WHOLE"] = keys % tile.keys == 0
    else:
        # A window of this size hides nothing, one of minus this size everything; larger numbers
        # could overflow.
        reach = keys + rows
        scalars["window"] = 0 if o.window is None else max(-reach, min(o.window, reach))
        bound_strides = _broadcast(o.bounds, (batch, rows, 2))
        of_bounds = "bound_batch", "bound_step", "bound_end"
        scalars |= dict(zip(of_bounds, bound_strides, strict=True))
        limits = {"CAUSAL": o.causal, "WINDOW": o.window is not None}
        # Rows of a block that are one token's are one sequence's.
        shared = o.bounds is not None and rows > 1
        constants |= {**limits, "BOUNDS": o.bounds is not None, "SHARED": shared}
    return Call(
        scalars,
        constants,
        programs,
        tile.warps,
        tile.stages,
        registers=tile.registers,
        across=splits,
    )


def choose_splits(rows: int, blocks: int, programs: int) -> int:
    """Programs that share out the `blocks` of keys of each of `programs` blocks of rows, for `rows`
    tokens: a power of two.
    """
    if rows > FEW_TOKENS or not programs:
        return 1
    maximum = min(REQUESTED // programs, blocks // MIN_BLOCKS)
    return 1 << (maximum.bit_length() - 1) if maximum > 1 else 1


def _broadcast(given: Type | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides that read `given` as if it had the wanted shape: 0 along what it lacks, and where
    there is nothing to step over.
    """
    if given is None:
        return (0,) * len(shape)
    missing = len(shape) - len(given.shape)
    stored = zip(shape[missing:], given.shape, given.strides, strict=True)
    return (0,) * missing + tuple(
        stride if size == requested != 1 else 0 for requested, size, stride in stored
    )
