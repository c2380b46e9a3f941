"""Block types against the gguf package: sizes, and values bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from mtmd.base.errors import ModelError
from mtmd.kernels.quantization import blocks
from mtmd.kernels.quantization.blocks import BLOCKS, NATIVE, dequantize, row_bytes

# Where a block keeps fp16 numbers. IQ1_M scatters the bits of one: the upper four are in its last
# byte.
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ2_XXS": [0],
    "IQ2_XS": [0],
    "IQ2_S": [0],
    "IQ3_XXS": [0],
    "IQ3_S": [0],
    "IQ1_S": [0],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "IQ1_M": [],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "MXFP4": [],
    "NVFP4": [],
}
QUANTIZED = [
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "TQ1_0",
    "TQ2_0",
    "MXFP4",
]  # those that the package can make


def random_rows(kind: str, rows: int, count: int, seed: int) -> np.ndarray[Any, Any]:
    """Random bytes with finite scales: uint8 [rows, count blocks]."""
    block = BLOCKS[kind]
    data = np.random.default_rng(seed).integers(0, 256, (rows, count, block.bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        # An exponent whose bits are all ones is infinite or not a number.
        data[:, :, at + 1] &= np.where(data[:, :, at + 1] & 0x7C == 0x7C, 0xBF, 0xFF).astype(
            np.uint8
        )
    if kind == "IQ1_M":
        data[:, :, 55] &= np.where(data[:, :, 55] & 0x70 == 0x70, 0xBF, 0xFF).astype(np.uint8)
    if kind == "MXFP4":
        data[:, :, 0] = np.minimum(data[:, :, 0], 250)
    return data.reshape(rows, -1)


def expect_equal(result: torch.Tensor, expected: np.ndarray[Any, Any]) -> None:
    assert (
        result.dtype == torch.float32
        and result.shape == expected.shape
        and np.isfinite(expected).all()
    )
    assert np.array_equal(
        result.numpy().view(np.int32), expected.view(np.int32)
    )  # so that -0 is not 0


def test_sizes_are_those_of_the_package() -> None:
    decoded = {kind.name for kind in quants._type_traits if kind.name != "BF16"}
    assert decoded <= set(BLOCKS) == set(HALVES) and set(BLOCKS) > NATIVE
    for name, block in BLOCKS.items():
        kind = GGMLQuantizationType[name]
        assert (block.name, block.id, block.values, block.bytes) == (
            name,
            kind.value,
            *GGML_QUANT_SIZES[kind],
        )
        assert row_bytes(name, 3 * block.values) == 3 * block.bytes and row_bytes(name, 0) == 0


@pytest.mark.parametrize("kind", BLOCKS)
def test_random_bytes(kind: str) -> None:
    data = random_rows(kind, 7, 37, seed=1)
    expected = quants.dequantize(data, GGMLQuantizationType[kind])
    assert np.unique(expected).size > 50
    expect_equal(dequantize(torch.from_numpy(data), kind), expected)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_numbers(kind: str) -> None:
    numbers = np.random.default_rng(2).standard_normal((5, 768), dtype=np.float32)
    data = quants.quantize(numbers, GGMLQuantizationType[kind])
    expect_equal(
        dequantize(torch.from_numpy(data), kind),
        quants.dequantize(data, GGMLQuantizationType[kind]),
    )


@pytest.mark.parametrize("kind", BLOCKS)
def test_any_leading_dimensions_strides_and_alignment(kind: str) -> None:
    data = torch.from_numpy(random_rows(kind, 12, 4, seed=3)).view(3, 4, -1)
    expected = dequantize(data, kind)
    assert expected.shape == (3, 4, 4 * BLOCKS[kind].values)
    assert torch.equal(dequantize(data.transpose(0, 1), kind), expected.transpose(0, 1))
    assert torch.equal(dequantize(data[::2, 1], kind), expected[::2, 1])
    assert torch.equal(dequantize(data[1, 2], kind), expected[1, 2])
    size = 2 * BLOCKS[kind].bytes
    assert torch.equal(dequantize(data[..., size:], kind), expected[..., 2 * BLOCKS[kind].values :])
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), data.reshape(-1)))[1:]
    assert torch.equal(dequantize(shifted, kind), expected.reshape(-1))
    assert dequantize(data[:0], kind).shape == (0, *expected.shape[1:])


@pytest.mark.parametrize("kind", BLOCKS)
def test_cut_into_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.from_numpy(random_rows(kind, 3, 11, seed=4))
    whole = dequantize(data, kind)
    monkeypatch.setattr(blocks, "CPU_CHUNK_VALUES", 4 * BLOCKS[kind].values)
    assert torch.equal(dequantize(data, kind), whole)


def test_data_is_not_written_to() -> None:
    for kind in BLOCKS:
        data = torch.from_numpy(random_rows(kind, 1, 2, seed=5))
        before = data.clone()
        first = dequantize(data, kind)
        assert torch.equal(dequantize(data, kind), first) and torch.equal(data, before)


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ModelError, match=r"'Q9_X' is no block type; expected one of Q4_0, "):
        row_bytes("Q9_X", 32)
    with pytest.raises(
        ModelError, match="row of 100 values cannot be Q4_K; expected a multiple of 256"
    ):
        row_bytes("Q4_K", 100)
    with pytest.raises(
        ModelError,
        match=r"Q8_0 rows are torch.uint8 \[2, 33\]; expected torch.uint8 \[..., multiple of 34\]",
    ):
        dequantize(torch.zeros(2, 33, dtype=torch.uint8), "Q8_0")
    with pytest.raises(ModelError, match=r"Q8_0 rows are torch\.int8"):
        dequantize(torch.zeros(2, 34, dtype=torch.int8), "Q8_0")
