"""Products with block-quantized weights: what the op says, and the CPU kernel against exact
dequantization.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from op_cases import node_of
from torch import Tensor

from mtmd.base.errors import PlacementError
from mtmd.kernels import ops
from mtmd.kernels.backends import Cpu
from mtmd.kernels.cpu import quant_matmul
from mtmd.kernels.cpu.tiled import many_rows
from mtmd.kernels.gpu.quant_matmul.cases import IN_DETAIL, random_blocks
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops import OPS
from mtmd.kernels.quantization.blocks import BLOCKS, dequantize

pytestmark = pytest.mark.usefixtures("poisoned")
# Of the others, one for each way to read blocks: those that share it are tested in kernels/native
KINDS = (*IN_DETAIL, "IQ3_S", "IQ2_XS", "TQ1_0", "Q1_0", "MXFP4", "NVFP4", "U4_64", "F8_64")
# Sums of x in 16-bit integers against fp64; in bf16 the result is rounded, in prefill the weights as
# well: each by at most 2^-8 of itself, by half mostly.
NMSE = {torch.float32: 1e-8, torch.bfloat16: 2.0**-16}


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def nmse(result: Tensor, x: Tensor, w: Tensor, bias: Tensor | None, kind: str) -> float:
    """Against fp64, relative to the result's power, or to that of products of such rows on average:
    a single one may be next to nothing.
    """
    x, wide = x.double(), dequantize(w, kind).double()
    expected = F.linear(x, wide, None if bias is None else bias.double())
    power = x.square().mean() * wide.square().mean() * x.shape[-1]
    return float(
        (result.double() - expected).square().mean()
        / torch.maximum(power, expected.square().mean())
    )


@pytest.mark.parametrize("dtype", NMSE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_dequantized_weights(kind, dtype):
    worst = 0.0
    for index, (rows, outer, blocks) in enumerate(
        [
            (1, 1, 1),
            (1, 33, 2),
            (3, 7, 5),
            (8, 31, 1),
            (9, 31, 2),
            (17, 13, 3),
            (40, 1, 1),
            (40, 9, 5),
        ]
    ):
        w = random_blocks(kind, outer, blocks * BLOCKS[kind].values, seed=index)
        x, bias = (
            values(rows, blocks * BLOCKS[kind].values, dtype=dtype),
            values(outer, dtype=dtype) if index % 2 else None,
        )
        result = quant_matmul.quant_matmul(x, w, bias, quant=kind)
        assert result.shape == (rows, outer) and result.dtype == dtype and result.is_contiguous()
        worst = max(worst, nmse(result, x, w, bias, kind))
    assert worst <= NMSE[dtype]


@pytest.mark.parametrize("rows", [2, 40])
def test_leading_dimensions_strides_and_no_rows(rows):
    w = random_blocks("Q4_0", 5, 64)
    x = values(3, rows, 128)[..., ::2]
    result = quant_matmul.quant_matmul(x, w, quant="Q4_0")
    assert result.shape == (3, rows, 5) and nmse(result, x, w, None, "Q4_0") <= 1e-8
    assert quant_matmul.quant_matmul(x[:, :0], w, quant="Q4_0").shape == (3, 0, 5)


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.usefixtures("poisoned")
def test_a_bias_with_strides_is_read_while_its_copy_lives(rows):
    w, x, bias = random_blocks("Q4_0", 5, 64), values(rows, 64), values(10, seed=1)[::2]
    result = quant_matmul.quant_matmul(x, w, bias, quant="Q4_0")
    assert nmse(result, x, w, bias, "Q4_0") <= 1e-8


@pytest.mark.parametrize("rows", [1, 40, 600])
def test_threads_share_a_weight_and_its_rows_without_changing_the_product(rows, monkeypatch):
    w, x = random_blocks("Q6_K", 101, 512), values(rows, 512)
    whole = quant_matmul.quant_matmul(x, w, quant="Q6_K")
    monkeypatch.setattr(quant_matmul, "SHARE_VALUES", 512 * 3)
    monkeypatch.setattr(many_rows, "SHARE", 1 << 20)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert quant_matmul._shares(101 * 512) == 3
    floats = ("single", 8, 4, 2)
    two_by_two = many_rows._shares(600, 512, 101, floats, 4, many_rows.SHARE)
    assert two_by_two == (64, 320, 4), "two panels, two runs"
    torch.testing.assert_close(
        quant_matmul.quant_matmul(x, w, quant="Q6_K"), whole, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("rows", "columns", "threads", "expected"),
    [
        (256, 576, 2, (96, 256, 6)),  # three panels each
        (256, 3072, 2, (128, 256, 24)),
        (600, 101, 3, (32, 224, 12)),  # four panels in three runs
        (17, 192, 2, (96, 32, 2)),
    ],
)
def test_panels_of_integers_are_shared_evenly(rows, columns, threads, expected):
    assert many_rows._even_shares(rows, columns, threads, 160) == expected


def test_so_many_panels_that_threads_claim_several_at_once_are_shared_as_others_are():
    assert many_rows._even_shares(256, 151936, 2, 160) is None


@pytest.mark.parametrize("dtype", NMSE, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 300])
def test_the_workspace_is_the_measured_one(rows, dtype, peak_bytes):
    x, w = values(rows, 2048, dtype=dtype), random_blocks("Q8_0", 700, 2048)
    node = node_of("matmul", [x, w, None], {"quant": "Q8_0"})
    measured = peak_bytes(lambda: quant_matmul.quant_matmul(x, w, quant="Q8_0"))
    predicted = node.type.bytes + Cpu().workspace(node)
    assert abs(predicted / measured - 1) < 0.1, f"predicted {predicted}, measured {measured}"
    assert predicted - node.type.bytes < 4 * 2048 * 700 / 2, (
        "the weight is never dequantized as a whole"
    )


def test_the_cpu_runs_blocks_by_its_kernel_and_other_types_of_x_by_the_reference():
    x, w = values(2, 256), random_blocks("Q5_K", 3, 256)
    node = node_of("matmul", [x, w, None], {"quant": "Q5_K"})
    assert Cpu().lower(node).func is quant_matmul.quant_matmul
    halves = node_of("matmul", [x.half(), w, None], {"quant": "Q5_K"})
    assert Cpu().lower(halves).func is not quant_matmul.quant_matmul
    assert Cpu().workspace(halves) >= 4 * 3 * 256


def test_embed_dequantizes_the_rows_it_picks():
    table, tokens = random_blocks("Q6_K", 9, 512), torch.tensor([3, 0, 8, 3])
    expected = dequantize(table, "Q6_K")[tokens]
    assert torch.equal(ops.embed.reference(tokens, table, quant="Q6_K", dtype="fp32"), expected)
    scaled = ops.embed.reference(tokens, table, scale=3.3, quant="Q6_K", dtype="bf16")
    assert torch.equal(scaled, expected.bfloat16() * torch.tensor(3.3).bfloat16().item())
    node = node_of("embed", [tokens, table], {"quant": "Q6_K", "dtype": "bf16"})
    assert OPS["embed"].bytes(node) == 4 * (420 + 512 * 2 + 8)


def test_quantized_bytes_are_what_a_product_reads():
    node = node_of(
        "matmul", [values(4, 512), random_blocks("Q4_K", 10, 512), None], {"quant": "Q4_K"}
    )
    assert OPS["matmul"].bytes(node) == 4 * 4 * 512 + 10 * 288 + 4 * 4 * 10
    assert OPS["matmul"].flops(node) == 2 * 4 * 10 * 512


def leaf(*shape: int, dtype: torch.dtype = torch.uint8) -> Node:
    return Node("input", (), Type.contiguous(shape, dtype), {}, "leaf")


@pytest.mark.parametrize(
    "w, attrs, words",
    [
        (leaf(5, 34), {"quant": "Q8_0"}, "inner sizes differ"),
        (leaf(5, 69), {"quant": "Q8_0"}, "blocks of 34"),
        (leaf(5, 68), {"quant": "Q9_0"}, "Q9_0"),
        (leaf(5, 68), {}, "inner sizes differ"),
        (leaf(5, 64), {}, "several types"),
        (leaf(5, 68, dtype=torch.float32), {"quant": "Q8_0"}, "fp32"),
        (leaf(1, 5, 68), {"quant": "Q8_0"}, "[1, 5, 68]"),
    ],
)
def test_matmul_refuses_what_is_no_weight_of_that_type(w, attrs, words):
    x = leaf(3, 64, dtype=torch.float32)
    assert ops.matmul(x, leaf(5, 68), quant="Q8_0").type == Type.contiguous((3, 5), torch.float32)
    with pytest.raises(PlacementError) as error:
        ops.matmul(x, w, **attrs)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "attrs, words",
    [
        ({"quant": "Q8_0"}, "dtype None"),
        ({"quant": "Q8_0", "dtype": "i64"}, "dtype i64"),
        ({"dtype": "fp32"}, "fraction"),
        ({"quant": "Q6_K", "dtype": "fp32"}, "blocks of 210"),
    ],
)
def test_embed_wants_a_type_for_quantized_rows_alone(attrs, words):
    with pytest.raises(PlacementError) as error:
        ops.embed(leaf(3, dtype=torch.int64), leaf(5, 68), **attrs)
    assert words in str(error.value)


def test_kernels_are_compiled_for_quantized_weights_alone():
    script = (
        "import sys, torch\nfrom mtmd.kernels.cpu.quant_matmul import quant_matmul\n"
        "assert 'llvmlite' not in sys.modules\n"
        "quant_matmul(torch.ones(1, 32), torch.zeros(1, 34, dtype=torch.uint8), "
        "quant='Q8_0')\nassert 'llvmlite' in sys.modules and 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_nothing_is_read_behind_a_weight(kind, blocks):
    """A rank's part of a weight may have rows of a single block; what lies behind it is no number."""
    width = blocks * BLOCKS[kind].values
    stored = random_blocks(kind, 5, width, 1)
    memory = torch.full((stored.numel() + 4096,), 255, dtype=torch.uint8)
    memory[: stored.numel()] = stored.flatten()
    w = memory[: stored.numel()].view(stored.shape)
    for rows in (1, 2, 3, 8, 16, 40):
        for dtype, limit in NMSE.items():
            x = values(rows, width, dtype=dtype, seed=rows)
            result = quant_matmul.quant_matmul(x, w, quant=kind)
            assert nmse(result, x, stored, None, kind) <= limit
