"""Block types against the gguf package: sizes, and values bit for bit. Those of our own, and what
the package does not decode, against plain formulas.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from mtmd.base.errors import ModelError
from mtmd.kernels.quantization import blocks, own_blocks
from mtmd.kernels.quantization.blocks import BLOCKS, NATIVE, OWN_IDS, dequantize, row_bytes

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
    "Q1_0": [0],
    "A4_64": [0, 2],
    "A8_32": [0, 2],
}
OWN = {name for name, block in BLOCKS.items() if block.id >= OWN_IDS}
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
    for at in HALVES.get(kind, ()):
        # An exponent whose bits are all ones is infinite or not a number.
        data[:, :, at + 1] &= np.where(data[:, :, at + 1] & 0x7C == 0x7C, 0xBF, 0xFF).astype(
            np.uint8
        )
    if kind == "IQ1_M":
        data[:, :, 55] &= np.where(data[:, :, 55] & 0x70 == 0x70, 0xBF, 0xFF).astype(np.uint8)
    if kind == "MXFP4":
        data[:, :, 0] = np.minimum(data[:, :, 0], 250)
    if kind in ("BF16_32", "F16_32"):
        data[:, :, 1::2] &= 0xBB  # an exponent that has not all bits, nor all but a few
    elif kind in OWN and kind not in HALVES:
        # The upper byte of an fp32 number, whose exponent is neither all ones nor nearly so.
        data[:, :, 3] = np.where(data[:, :, 3] & 0x40, data[:, :, 3] & 0xC0, data[:, :, 3])
    if kind == "F8_64":
        data[:, :, 4:] = np.where(data[:, :, 4:] & 0x7F == 0x7F, 0x40, data[:, :, 4:])
    if kind == "NV4_128":
        data[:, :, 4:12] &= 0x77
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
    assert decoded <= set(BLOCKS) - OWN and set(BLOCKS) >= NATIVE
    for name in set(BLOCKS) - OWN:
        block = BLOCKS[name]
        kind = GGMLQuantizationType[name]
        assert (block.name, block.id, block.values, block.bytes) == (
            name,
            kind.value,
            *GGML_QUANT_SIZES[kind],
        )
        assert row_bytes(name, 3 * block.values) == 3 * block.bytes and row_bytes(name, 0) == 0


def number(data: bytes, dtype: str) -> float:
    return float(np.frombuffer(data, dtype)[0])


def e4m3(code: int) -> float:
    """An 8-bit float by the OCP specification: sign, 4 bits of exponent, 3 bits of mantissa."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def e2m1(code: int) -> float:
    """A 4-bit float by the OCP specification: sign, 2 bits of exponent, 1 bit of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -value if sign else value


def nibble(data: bytes, i: int, group: int = 16) -> int:
    """Code i, where the lower bits of `group` bytes come before the upper ones."""
    byte = data[i // (2 * group) * group + i % group]
    return byte >> 4 if i % (2 * group) >= group else byte & 15


def plainly(kind: str, block: bytes) -> list[float]:
    """One block's values, as the docstrings of own_blocks.py and few_bits.py describe it."""
    count = BLOCKS[kind].values
    if kind == "Q1_0":
        d = number(block[:2], "<f2")
        return [d if block[2 + i // 8] >> i % 8 & 1 else -d for i in range(count)]
    if kind in ("A4_64", "A8_32"):
        d, m = number(block[:2], "<f2"), number(block[2:4], "<f2")
        q = [nibble(block[4:], i) if kind == "A4_64" else block[4 + i] for i in range(count)]
        return [float(np.float32(d * code) + np.float32(m)) for code in q]
    if kind == "NV4_128":
        whole = number(block[:4], "<f4")
        return [
            e2m1(nibble(block[12:], i, 8)) * (e4m3(block[4 + i // 16]) * whole)
            for i in range(count)
        ]
    if kind in ("BF16_32", "F16_32"):
        pairs = [block[i : i + 2] for i in range(0, 2 * count, 2)]
        return [
            number(two, "<f2") if kind == "F16_32" else number(bytes(2) + two, "<f4")
            for two in pairs
        ]
    scale, zero = number(bytes([0]) + block[1:4], "<f4"), block[0]
    if kind == "U8_64":
        return [scale * (block[4 + i] - zero) for i in range(count)]
    if kind == "F8_64":
        return [scale * e4m3(block[4 + i]) for i in range(count)]
    codes = [nibble(block[4:], i) for i in range(count)]
    if kind.startswith("U4"):
        return [scale * (code - zero) for code in codes]
    values = own_blocks.NF4_VALUES if kind == "NF4_64" else own_blocks.BNB_FP4_VALUES
    return [scale * float(np.float32(values[code])) for code in codes]


@pytest.mark.parametrize("kind", BLOCKS)
def test_random_bytes(kind: str) -> None:
    formula = kind in OWN or kind == "Q1_0"
    data = random_rows(kind, 7, 3 if formula else 37, seed=1)
    if formula:
        parts = data.reshape(-1, BLOCKS[kind].bytes)
        values = np.array([plainly(kind, block.tobytes()) for block in parts], np.float32)
        expected = values.reshape(7, -1)
    else:
        expected = quants.dequantize(data, GGMLQuantizationType[kind])
    assert np.unique(expected).size > 40
    result = dequantize(torch.from_numpy(data), kind)
    if kind == "NV4_128":  # the formula rounds once, at the end
        assert np.allclose(result.numpy(), expected, rtol=3e-7, atol=1e-38)
    else:
        expect_equal(result, expected)


def test_packing() -> None:
    rng = torch.Generator().manual_seed(6)
    codes = torch.randint(0, 16, (3, 128), generator=rng, dtype=torch.uint8)
    scales = torch.rand(3, 2, generator=rng) - 0.5
    zeros = torch.randint(0, 17, (3, 2), generator=rng, dtype=torch.int32)
    scales[0, 0], scales[0, 1], scales[1, 0] = torch.finfo(torch.float32).max, 0.0, 1e-40
    packed = own_blocks.rows(own_blocks.header(scales, zeros), own_blocks.nibbles(codes))
    assert packed.shape == (3, row_bytes("U4_64", 128))
    expected = (codes.float().view(3, 2, 64) - zeros.unsqueeze(2)) * scales.unsqueeze(2)
    result = dequantize(packed, "U4_64").view(3, 2, 64)[1:]
    assert torch.allclose(result, expected[1:], rtol=2.0**-17, atol=1e-42)
    assert dequantize(packed, "U4_64").isfinite()[0, 64:].all()
    largest = own_blocks.header(torch.tensor([torch.finfo(torch.float32).max]))
    assert largest.view(torch.float32).isfinite().all()
    halves = scales.half().clamp(-1, 1)
    packed = own_blocks.rows(own_blocks.header(halves, zeros), own_blocks.nibbles(codes))
    expected = (codes.float().view(3, 2, 64) - zeros.unsqueeze(2)) * halves.float().unsqueeze(2)
    assert torch.equal(dequantize(packed, "U4_64").view(3, 2, 64), expected)
    head = own_blocks.floats(halves, halves)
    packed = own_blocks.rows(head, own_blocks.nibbles(codes))
    expected = (codes.float().view(3, 2, 64) + 1) * halves.float().unsqueeze(2)
    assert torch.allclose(dequantize(packed, "A4_64").view(3, 2, 64), expected)
    head = own_blocks.floats(scales[1:2, 0].view(1, 1), scales[:1, :1])
    assert head.shape == (1, 1, 8) and head.dtype == torch.uint8
    assert (own_blocks.nibbles(codes, 8)[0, :8] == codes[0, :8] | codes[0, 8:16] << 4).all()


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
