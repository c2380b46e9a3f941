"""Types in which a cache can store rows of keys and values (a head of a token each) in fewer bytes:
sizes, the way in and the way back to fp32.

A row is codes, then scales, so that codes of all heads lie where wide loads can take them:

    codes   of 32 values after another; in 4 bits low nibbles are values 0..15, high ones 16..31
    scales  fp16 of each 32 values

and zeros up to a multiple of 4 bytes. A head whose size is no multiple of 32 is filled up with
zeros. What is coded are not the values of a block but their Walsh-Hadamard transform (`rotate`),
which spreads few large ones over all (arXiv:2404.00456): it is its own inverse and keeps products,
so attention turns queries and results instead of keys and values. Codes and scales are ggml's Q8_0
and Q4_0, except that codes are rounded by the scale as it is stored. fp8 codes the values as they
are: its errors are relative to each value, so a large one, spread over all, would bring its error
to the others (docs/LOG.md); the largest becomes 448, without an error of its own.

A cache [2, S, G, bytes] has the keys of all tokens, then their values, in rows of one type. With a
type for keys and another for values, named together as `q8_0/q4_0`, it is [1, S, G, bytes]: the row
of a key, then that of its value. In a cache [1, S, G, bytes] in rows of one type, keys are the
values, too. Next to rows of another type numbers are stored as rows, too (`plain`: bf16 and fp32):
then the codes are the numbers, filled up in the same way, without scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from types import MappingProxyType

import torch
from torch import Tensor

BLOCK = 32  # values whose codes lie together
LARGEST_F8 = 448.0


@dataclass(frozen=True)
class RowType:
    """One of these types. `largest` is the code that the largest value of a scale becomes, 0 for a
    type without scales; `encode` and `decode` are between values over their scale, fp32 [..., 32],
    and codes, uint8.
    """

    name: str
    bits: int
    largest: float
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    signed: bool = False
    rotated: bool = True

    @property
    def plain(self) -> bool:
        """Return whether the codes are numbers as they are."""
        return not self.largest

    def code_bytes(self, values: int) -> int:
        return blocks_of(values) * BLOCK * self.bits // 8

    def row_bytes(self, values: int) -> int:
        size = self.code_bytes(values) + (0 if self.plain else 2 * blocks_of(values))
        return -(-size // 4) * 4


def blocks_of(values: int) -> int:
    """Return how many blocks a row of so many values has."""
    return -(-values // BLOCK)


def quantize_rows(x: Tensor, kind: str) -> Tensor:
    """x [..., K] -> uint8 [..., row_bytes]. A block with NaN or an infinity is NaN."""
    of, values = ROW_TYPES[kind], x.shape[-1]
    padded = x.new_zeros((*x.shape[:-1], blocks_of(values) * BLOCK), dtype=torch.float32)
    padded[..., :values] = x
    if of.plain:
        return of.encode(padded)
    blocks = (rotate(padded) if of.rotated else padded).unflatten(-1, (-1, BLOCK))
    top = blocks.abs().amax(-1)
    if of.signed:
        low = blocks.amin(-1)
        top = torch.where(-low > blocks.amax(-1), low, top)
    scales = (top * (1 / of.largest)).to(torch.float16)
    factor = scales.float().reciprocal()
    usable = factor.isfinite() & (factor != 0)
    factor = torch.where(usable, factor, 0.0)[..., None]
    codes = of.encode((blocks * factor).nan_to_num_(0.0, 0.0, 0.0)).flatten(-2)
    rows = x.new_zeros((*x.shape[:-1], of.row_bytes(values)), dtype=torch.uint8)
    rows[..., : codes.shape[-1]] = codes
    at = of.code_bytes(values)
    rows[..., at : at + 2 * scales.shape[-1]] = scales.contiguous().view(torch.uint8)
    return rows


def dequantize_rows(rows: Tensor, kind: str, values: int) -> Tensor:
    """uint8 [..., row_bytes] -> fp32 [..., K], K = `values`"""
    of = ROW_TYPES[kind]
    at = of.code_bytes(values)
    if of.plain:
        return of.decode(rows[..., :at])[..., :values].contiguous()
    stored = rows[..., at : at + 2 * blocks_of(values)]
    scales = stored.contiguous().view(torch.float16).float()
    codes = rows[..., :at].unflatten(-1, (-1, BLOCK * of.bits // 8))
    numbers = (of.decode(codes) * scales[..., None]).flatten(-2)
    return (rotate(numbers) if of.rotated else numbers)[..., :values].contiguous()


def part_types(quant: str) -> tuple[str, str]:
    """Return the types of keys and of values in a cache of the type `quant`."""
    keys, _, values = quant.partition("/")
    return keys, values or keys


def value_offset(quant: str, head: int) -> int:
    """Return how many bytes after a key its value begins, 0 where values lie in the other half."""
    keys, values = part_types(quant)
    return ROW_TYPES[keys].row_bytes(head) if keys != values else 0


def cached_bytes(quant: str, head: int) -> int:
    """Return the bytes of a cache's last axis, for heads of `head` values."""
    return value_offset(quant, head) + ROW_TYPES[part_types(quant)[1]].row_bytes(head)


def cached_parts(halves: int, quant: str | None) -> int:
    """Return 2 for a cache [halves, S, G, bytes] of keys and values, 1 for one of keys alone."""
    return 2 if quant in PAIRS else halves


def part_of(cache: Tensor, which: int, quant: str, head: int) -> Tensor:
    """Return the rows of keys (0) or of values (1) of a cache, a view [S, G, bytes of a row]."""
    offset = value_offset(quant, head)
    if not offset:
        return cache[which]
    return cache[0, ..., offset:] if which else cache[0, ..., :offset]


def quantize_cache(x: Tensor, quant: str) -> Tensor:
    """Keys and values [P, S, G, K] -> a cache of the type `quant`, [P or 1, S, G, bytes]"""
    rows = [quantize_rows(part, kind) for part, kind in zip(x, part_types(quant), strict=False)]
    return torch.cat(rows, -1)[None] if quant in PAIRS else torch.stack(rows)


def dequantize_cache(cache: Tensor, quant: str, head: int) -> Tensor:
    """A cache of the type `quant` -> keys and values, fp32 [P, S, G, K]"""
    return torch.stack(
        [
            dequantize_rows(part_of(cache, which, quant, head), part_types(quant)[which], head)
            for which in range(cached_parts(cache.shape[0], quant))
        ]
    )


def rotate(x: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of each 32 values          fp32 [..., 32 n]"""
    result: Tensor = (x.unflatten(-1, (-1, BLOCK)) @ _hadamard(x.device)).flatten(-2)
    return result


@lru_cache(maxsize=16)
def _hadamard(device: torch.device) -> Tensor:
    """fp32 [32, 32]: -1 where the numbers of row and column have an odd number of bits in common,
    else 1, over sqrt(32).
    """
    with torch.inference_mode(False):  # it outlives whoever asks first
        signs = [[1 - 2 * ((i & j).bit_count() & 1) for j in range(BLOCK)] for i in range(BLOCK)]
        return torch.tensor(signs, dtype=torch.float32, device=device) / sqrt(BLOCK)


def _to_q8(x: Tensor) -> Tensor:
    return x.round().clamp_(-127, 127).to(torch.int8).view(torch.uint8)


def _from_q8(codes: Tensor) -> Tensor:
    return codes.view(torch.int8).float()


def _to_q4(x: Tensor) -> Tensor:
    codes = (x + 8.5).floor_().clamp_(0, 15).to(torch.uint8)
    low, high = codes.chunk(2, -1)
    return low | high << 4


def _from_q4(codes: Tensor) -> Tensor:
    return torch.cat((codes & 15, codes >> 4), -1).float() - 8


def _to_f8(x: Tensor) -> Tensor:
    """e4m3fn (arXiv:2209.05433), to the nearest even, in integers: not every device has the
    type.
    """
    x = x.clamp(-LARGEST_F8, LARGEST_F8)  # a scale may have been rounded down
    bits = x.contiguous().view(torch.int32)
    size = bits & 0x7FFF_FFFF
    normal = (size + 0x7FFFF + (size >> 20 & 1) >> 20) - (120 << 3)
    small = (x.abs() + 16384.0).view(torch.int32) - 0x4680_0000  # a step is 2^-9 there
    codes = torch.where(size < 121 << 23, small, normal)
    return (codes | bits >> 24 & 0x80).to(torch.uint8)


def _from_f8(codes: Tensor) -> Tensor:
    """Read them as fp16, whose exponent begins 8 lower."""
    wide = codes.to(torch.int32)
    halves = (wide & 0x80) << 8 | (wide & 0x7F) << 7
    return halves.to(torch.int16).view(torch.float16).float() * 256


def _to_numbers(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).view(torch.uint8)


def _from_numbers(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda codes: codes.contiguous().view(dtype).float()


def _plain(name: str, dtype: torch.dtype) -> RowType:
    encode, decode = _to_numbers(dtype), _from_numbers(dtype)
    return RowType(name, 8 * dtype.itemsize, 0.0, encode, decode, rotated=False)


_ALL = (
    RowType("q8_0", 8, 127.0, _to_q8, _from_q8),
    RowType("q4_0", 4, -8.0, _to_q4, _from_q4, signed=True),
    RowType("fp8", 8, LARGEST_F8, _to_f8, _from_f8, rotated=False),
    _plain("bf16", torch.bfloat16),
    _plain("fp32", torch.float32),
)
ROW_TYPES: Mapping[str, RowType] = MappingProxyType({of.name: of for of in _ALL})
CODED = tuple(of.name for of in _ALL if not of.plain)  # those that a whole cache can have
PAIRS = tuple(f"{keys}/{values}" for keys in ROW_TYPES for values in ROW_TYPES if keys != values)
CACHE_TYPES = (*CODED, *PAIRS)
