"""Flash attention on the CPU: the reference in bounded memory, at every edge of a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_cases import draw, node_of
from torch import Tensor

from mtmd.kernels.cpu.attention import KERNEL, ROWS, flash_attention
from mtmd.kernels.graph import Node
from mtmd.kernels.kernel import types_of
from mtmd.kernels.ops import attention

pytestmark = pytest.mark.usefixtures("poisoned")
NMSE = {torch.float32: 1e-11, torch.bfloat16: 3e-5}  # against the reference in fp32
MIB = 2**20


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(
    rows: int,
    keys: int,
    *,
    batch: int = 1,
    heads: int = 2,
    groups: int = 2,
    size: int = 8,
    value: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        random(batch, rows, heads, size, dtype=dtype),
        random(batch, keys, groups, size, dtype=dtype, seed=1),
        random(batch, keys, groups, value or size, dtype=dtype, seed=2),
    )


def close(
    result: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bounds: Tensor | None = None,
    **options: Any,
) -> None:
    expected = attention.reference(
        q.float(), k.float(), v.float(), None if mask is None else mask.float(), bounds, **options
    ).double()
    assert result.dtype == v.dtype and result.shape == expected.shape and result.is_contiguous()
    assert bool(torch.isfinite(result).all())
    error = float(
        (result.double() - expected).square().sum() / expected.square().sum().clamp(min=1e-9)
    )
    assert error <= NMSE[result.dtype], f"NMSE {error:.1e}"


def image_bounds(rows: int, keys: int, window: int | None = None) -> Tensor:
    """Causal rows at the end of the keys, a picture in the middle of them."""
    here = torch.arange(rows) + keys - rows
    low, high = (
        torch.zeros_like(here) if window is None else (here - window + 1).clamp(min=0),
        here.clone(),
    )
    start, stop = keys - rows + rows // 3, keys - rows + rows // 2
    block = (here >= start) & (here <= stop)
    low[block], high[block] = torch.minimum(low[block], torch.tensor(start)), stop
    return torch.stack((low, high), 1).int()


EDGES = (1, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 1)


@pytest.mark.parametrize("rows", EDGES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window": 100},
        {"window": 7},
        {"softcap": 1.5},
        {"softcap": 1.5, "causal": True},
    ],
    ids=str,
)
def test_blocks_join_without_a_seam(rows, options):
    for keys in (rows, rows + 37, max(1, rows - 40)):
        q, k, v = operands(rows, keys)
        close(flash_attention(q, k, v, scale=0.3, **options), q, k, v, scale=0.3, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", EDGES)
def test_bounds_over_blocks(rows, dtype):
    q, k, v = operands(rows, rows + 50, batch=2, heads=4, dtype=dtype)
    for window in (None, 64):
        bounds = image_bounds(rows, rows + 50, window)
        close(flash_attention(q, k, v, None, bounds, scale=0.3), q, k, v, None, bounds, scale=0.3)
        both = torch.stack((bounds, torch.tensor([[3, 9]]).int().expand(rows, 2)))
        close(flash_attention(q, k, v, None, both, scale=0.3), q, k, v, None, both, scale=0.3)


def test_rows_that_see_nothing_give_zeros():
    rows, keys = ROWS + 9, 40
    q, k, v = operands(rows, keys)
    bounds = torch.tensor([[0, keys - 1]]).int().repeat(rows, 1)
    empty = torch.tensor([0, 5, ROWS - 1, ROWS, ROWS + 8])
    bounds[empty] = torch.tensor(
        [[5, 4], [-9, -1], [keys, keys + 5], [30, 2], [keys + 100, -100]]
    ).int()
    for options in ({}, {"softcap": 2.0}):
        result = flash_attention(q, k, v, None, bounds, scale=0.3, **options)
        assert result[:, empty].eq(0).all() and result[:, 1:5].ne(0).all()
        close(result, q, k, v, None, bounds, scale=0.3, **options)
    nothing = torch.tensor([[1, 0]]).int().repeat(rows, 1)
    assert flash_attention(q, k, v, None, nothing, scale=0.3).eq(0).all()
    mask = torch.zeros(rows, keys)
    mask[empty] = -torch.inf
    assert flash_attention(q, k, v, mask, scale=0.3)[:, empty].eq(0).all()
    early = flash_attention(
        q, k, v, scale=0.3, causal=True
    )  # 265 rows, 40 keys: 225 rows come before the first key
    assert early[:, : rows - keys].eq(0).all() and early[:, rows - keys :].ne(0).all()


MASKS = [
    (300, 310),
    (4, 300, 310),
    (1, 300, 310),
    (2, 4, 300, 310),
    (2, 1, 300, 310),
    (1, 4, 300, 310),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks_of_every_shape(shape, dtype):
    q, k, v = operands(300, 310, batch=2, heads=4, groups=2, dtype=dtype)
    mask = random(*shape, dtype=dtype, seed=3).masked_fill(random(*shape, seed=4) > 1, -torch.inf)
    bounds = image_bounds(300, 310)
    for options in ({}, {"causal": True}, {"softcap": 2.0}):
        close(
            flash_attention(q, k, v, mask, scale=0.3, **options),
            q,
            k,
            v,
            mask,
            scale=0.3,
            **options,
        )
        close(
            flash_attention(q, k, v, mask, bounds, scale=0.3, **options),
            q,
            k,
            v,
            mask,
            bounds,
            scale=0.3,
            **options,
        )


def test_a_mask_in_fp32_is_not_rounded_to_the_operands_type():
    q, k, v = operands(300, 310, dtype=torch.bfloat16)
    mask = random(300, 310, seed=3) * 30
    close(flash_attention(q, k, v, mask, scale=0.3), q, k, v, mask, scale=0.3)
    close(
        flash_attention(q, k, v, mask, scale=0.3, causal=True),
        q,
        k,
        v,
        mask,
        scale=0.3,
        causal=True,
    )


def test_the_lowest_number_masks_as_well_as_minus_infinity():
    q, k, v = operands(300, 300)
    seen = torch.ones(300, 300).tril().bool()
    low = torch.zeros(300, 300).masked_fill(~seen, torch.finfo(torch.float32).min)
    close(flash_attention(q, k, v, low, scale=0.3), q, k, v, scale=0.3, causal=True)


@pytest.mark.parametrize("groups", [6, 3, 2, 1])
def test_grouped_heads_and_values_of_another_width(groups):
    for value in (18, 5):
        q, k, v = operands(260, 270, batch=2, heads=6, groups=groups, size=18, value=value)
        close(flash_attention(q, k, v, scale=0.3), q, k, v, scale=0.3)
        close(flash_attention(q, k, v, scale=0.3, causal=True), q, k, v, scale=0.3, causal=True)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_decode_one_row_behind_a_cache(batch):
    q, k, v = operands(1, 700, batch=batch, heads=4, groups=2, size=32)
    bounds = torch.tensor([[300, 400]]).int()
    close(flash_attention(q, k, v, scale=0.3), q, k, v, scale=0.3)
    close(flash_attention(q, k, v, None, bounds, scale=0.3), q, k, v, None, bounds, scale=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_cases_strided_or_not(dtype):
    for seed in range(60):
        inputs, attrs = draw("attention", seed, dtype, strided=bool(seed % 2))
        close(flash_attention(*inputs, **attrs), *inputs, **attrs)


def peak(peak_bytes: Any, inputs: list[Tensor | None], options: dict[str, Any]) -> tuple[int, int]:
    """(measured, predicted) bytes, the result among them."""
    node: Node = node_of("attention", inputs, options)
    reported = KERNEL.workspace(*types_of(node), **options)
    return peak_bytes(lambda: KERNEL.run(*inputs, **options)), node.type.bytes + reported


LONG = 4096
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "grouped": ({"groups": 1}, {}),
    "causal": ({}, {"causal": True}),
    "window": ({}, {"causal": True, "window": 64}),
    "bounds": ({"bounds": True}, {}),
    "mask": ({"mask": (LONG, LONG)}, {}),
    "mask by head": ({"mask": (2, LONG, LONG)}, {}),
    "mask by head, causal": ({"mask": (1, 2, LONG, LONG)}, {"causal": True}),
    "soft cap": ({}, {"softcap": 5.0}),
    "values of another width": ({"value": 4}, {}),
    "keys apart in memory": ({"strided": True}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_no_square_of_scores_ever_exists_and_what_is_taken_was_told(name, peak_bytes):
    kind, options = CASES[name]
    q, k, v = operands(LONG, LONG, groups=kind.get("groups", 2), value=kind.get("value"))
    if kind.get("strided"):
        k = torch.randn(1, LONG, 8, 2).transpose(2, 3)
    mask = torch.zeros(kind["mask"]) if "mask" in kind else None
    bounds = image_bounds(LONG, LONG) if "bounds" in kind else None
    measured, reported = peak(peak_bytes, [q, k, v, mask, bounds], {"scale": 0.3, **options})
    scores = 2 * LONG * LONG * 4
    # One block of 256 rows: 1/16 of all scores, and its mask; by head where the mask is.
    assert measured < scores / (4 if name == "mask by head, causal" else 6), (
        f"{measured / MIB:.1f} MiB"
    )
    assert measured <= reported * 1.05, f"told {reported / MIB:.2f}, took {measured / MIB:.2f} MiB"
    if name not in ("window", "bounds"):  # whose blocks leave keys out, more or fewer by the values
        assert reported <= measured * 1.1, (
            f"told {reported / MIB:.2f}, took {measured / MIB:.2f} MiB"
        )


def test_memory_grows_with_the_length_not_with_its_square(peak_bytes):
    taken = [
        peak(peak_bytes, [*operands(n, n)], {"scale": 0.3, "causal": True})[0]
        for n in (1024, 2048, 4096)
    ]
    assert taken[2] - taken[1] < 2.2 * (taken[1] - taken[0])


def test_a_narrow_window_takes_no_mask_over_all_keys(peak_bytes):
    wide, _ = peak(peak_bytes, [*operands(LONG, LONG)], {"scale": 0.3, "causal": True})
    narrow, _ = peak(
        peak_bytes, [*operands(LONG, LONG)], {"scale": 0.3, "causal": True, "window": 64}
    )
    assert narrow < wide / 3


@pytest.mark.parametrize("batch, heads, groups", [(1, 4, 2), (3, 4, 1)])
def test_what_16_bits_take_was_told_too(batch, heads, groups, peak_bytes):
    for rows, options in ((1, {}), (700, {}), (700, {"causal": True}), (300, {"softcap": 4.0})):
        inputs = operands(
            rows, 900, batch=batch, heads=heads, groups=groups, size=32, dtype=torch.bfloat16
        )
        measured, reported = peak(peak_bytes, [*inputs], {"scale": 0.3, **options})
        assert measured <= reported * 1.1 + 2**16, (
            f"{rows} rows, {options}: told {reported / MIB:.2f}, took {measured / MIB:.2f} MiB"
        )
