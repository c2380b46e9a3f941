"""Quantizers: errors no larger than those of llama.cpp's own, weighted and not; blocks that decode
to the nearest value; values that are refused.
"""

from __future__ import annotations

import numpy as np
import pytest
import quantizers
import torch

from mtmd.base.errors import ModelError
from mtmd.kernels.cpu.quantize import ENCODERS, quantize
from mtmd.kernels.quantization.bits import fields, pack
from mtmd.kernels.quantization.blocks import BLOCKS, dequantize

# NMSE of `ggml_quantize_chunk` (ggml as in llama-cpp-python 0.3.36) on `values`, without and with
# `importance`.
LLAMA_CPP = {
    "Q8_0": (4.2061e-05, 4.2686e-05),
    "Q4_0": (1.0883e-02, 9.2627e-03),
    "Q4_1": (7.1648e-03, 4.6115e-03),
    "Q5_0": (2.7001e-03, 2.3281e-03),
    "Q5_1": (1.6860e-03, 1.0800e-03),
    "IQ4_NL": (7.3760e-03, 6.3469e-03),
    "MXFP4": (1.5335e-02, 1.5779e-02),
    "Q2_K": (1.0217e-01, 5.9425e-02),
    "Q3_K": (2.8324e-02, 2.2315e-02),
    "Q4_K": (6.1496e-03, 4.9220e-03),
    "Q5_K": (1.5721e-03, 1.3525e-03),
    "Q6_K": (4.1895e-04, 3.6201e-04),
    "IQ4_XS": (7.5636e-03, 6.6170e-03),
    # Eight bits with a scale for 64 values: half of their last of three places, at worst.
    "F8_64": (1e-3, 1e-3),
}


@pytest.fixture(scope="module")
def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    """Normal values with wide columns, and how much each column counts."""
    random = np.random.default_rng(0)
    values = torch.from_numpy(random.standard_normal((64, 1024), dtype=np.float32))
    values[:, ::97] *= 4
    return values, torch.from_numpy(random.random(1024, dtype=np.float32) ** 4) + 0.01


def error(values, kind, importance=None):
    rows = quantize(values, kind, importance)
    weight = 1 if importance is None else importance.double()
    lost = (dequantize(rows, kind) - values).double() ** 2 * weight
    return float(lost.sum() / (values.double() ** 2 * weight).sum())


@pytest.mark.parametrize("kind", ENCODERS)
def test_errors_are_no_larger_than_those_of_llama_cpp(kind, drawn):
    values, importance = drawn
    plain, weighted = LLAMA_CPP[kind]
    assert error(values, kind) <= plain
    assert error(values, kind, importance) <= weighted
    assert error(values.bfloat16(), kind) <= plain * 1.01


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("kind", quantizers.ENCODERS)
def test_bytes_are_those_of_the_same_steps_in_torch(kind, weigh):
    """Equal to the bit where torch sums in the same order: in columns of a multiple of 64 blocks;
    of awkward numbers too, and of a last unit with few blocks.
    """
    size, draw = BLOCKS[kind].values, torch.Generator().manual_seed(7)
    x = torch.randn(192, size, generator=draw) * torch.logspace(-6, 4, 192)[:, None]
    x[5] = 0
    x[6] = 3.0
    x[7, 3:] = 0
    x[8] = -x[8].abs()
    x[9] = torch.arange(size) * 1e5
    w = torch.rand(192, size, generator=draw) ** 4 + 0.01 if weigh else None
    expected = quantizers.ENCODERS[kind](x, w)
    assert torch.equal(ENCODERS[kind](x, w), expected)
    few = ENCODERS[kind](x[:17], None if w is None else w[:17])
    assert torch.equal(few, expected[:17])


@pytest.mark.parametrize("kind", ENCODERS)
def test_values_that_a_type_can_hold_come_back(kind, drawn):
    """What was decoded is encoded with next to no error, as a block of zeros is with none."""
    values = drawn[0][:4]
    held = dequantize(quantize(values, kind), kind)
    limit = {"Q2_K": 2e-3, "Q3_K": 1e-3}.get(kind, 3e-4)
    assert error(held, kind) < limit
    zeros = torch.zeros(2, BLOCKS[kind].values)
    assert torch.equal(dequantize(quantize(zeros, kind), kind), zeros)


@pytest.mark.parametrize("kind", ENCODERS)
def test_awkward_values_stay_finite(kind):
    count = BLOCKS[kind].values
    rows = torch.stack(
        [
            torch.full((count,), 3.0),
            torch.full((count,), -1e-9),
            torch.arange(count) * 1e5,
            torch.nn.functional.one_hot(torch.tensor(5), count) * -6.0,
            torch.linspace(-1e-3, 1.0, count),
        ]
    )
    back = dequantize(quantize(rows, kind), kind)
    assert bool(back.isfinite().all())
    for index in (0, 3, 4):
        assert float((back[index] - rows[index]).abs().max()) < 0.5


def test_shapes_and_threads_do_not_matter(drawn):
    values, importance = drawn
    whole = quantize(values, "Q4_K", importance)
    assert torch.equal(whole[7:8], quantize(values[7:8], "Q4_K", importance))
    experts = quantize(values.view(4, 16, 1024), "Q4_K", importance)
    assert torch.equal(experts, whole.view(4, 16, -1))
    assert quantize(values[:0], "Q4_K").shape == (0, 576)


def test_what_cannot_be_quantized_is_refused():
    with pytest.raises(ModelError, match="expected a multiple of 256"):
        quantize(torch.zeros(2, 64), "Q4_K")
    with pytest.raises(ModelError, match="'IQ1_S' cannot be made; expected one of Q8_0"):
        quantize(torch.zeros(2, 256), "IQ1_S")
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ModelError, match="infinite or no numbers"):
            quantize(torch.full((2, 256), wrong), "Q4_K")


@pytest.mark.parametrize(("bits", "group"), [(1, 1), (1, 32), (2, 32), (2, 1), (4, 16), (4, 64)])
def test_packed_fields_are_unpacked_again(bits, group):
    codes = torch.randint(0, 1 << bits, (3, 256), dtype=torch.uint8)
    assert torch.equal(fields(pack(codes, bits, group), bits, group), codes)
