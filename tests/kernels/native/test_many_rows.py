"""Products of many rows with weights of every type, in every form of products, against fp64, in
memory full of NaN.
"""

from __future__ import annotations

import platform

import pytest
import torch
import torch.nn.functional as F

from mtmd.kernels.cpu.native import compile
from mtmd.kernels.cpu.native.compile import Compiler, Cpu, host
from mtmd.kernels.cpu.tiled import cpu, many_rows, octets, product
from mtmd.kernels.cpu.tiled.codes import FORMS
from mtmd.kernels.gpu.quant_matmul.cases import HALVES, random_blocks
from mtmd.kernels.quantization.blocks import BLOCKS, NATIVE, dequantize

pytestmark = pytest.mark.usefixtures("poisoned")
# Weights and results rounded to bfloat16; in fp32 only what their decoding rounds, or x in 16 bits
LIMIT = {torch.bfloat16: 2.0**-16, torch.float32: 1e-11}
WORDS = 2e-9
V3 = "+avx2,+fma,+f16c,+bmi2,+sse4.1,+ssse3"
CPUS = {
    "AVX-512 BF16": Cpu(
        "znver4", f"{V3},+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512bf16,-sse4a"
    ),
    "AVX-512": Cpu("x86-64-v4", f"{V3},+avx512f,+avx512bw,+avx512dq,+avx512vl"),
    "AVX-512 VNNI": Cpu(
        "x86-64-v4", f"{V3},+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512vnni,+fast-dpwssd"
    ),
    "AVX-VNNI": Cpu("x86-64-v3", f"{V3},+avxvnni,+fast-dpwssd"),
    "AVX2": Cpu("x86-64-v3", V3),
}
NEEDS = {
    "AVX-512 BF16": "avx512bf16",
    "AVX-512": "avx512bw",
    "AVX-512 VNNI": "avx512vnni",
    "AVX-VNNI": "avxvnni",
    "AVX2": "avx2",
}


EACH_WAY_IN_8_BITS = [  # products added in 16 bits sixteen at a time, eight, four, two, and, x in 7
    (kind, torch.float32) for kind in ("Q2_K", "Q4_0", "Q4_1", "MXFP4", "Q5_K", "Q8_0", "U8_64")
]


def limit_of(kind: str, dtype: torch.dtype, int8: bool = False) -> float:
    words = many_rows.form_of(kind, many_rows.TYPES[dtype], int8)[0] == "words"
    return max(LIMIT[dtype], WORDS) if words else LIMIT[dtype]


def nmse(
    kind: str, rows: int, outer: int, blocks: int, dtype: torch.dtype, int8: bool = False
) -> float:
    """The worst row's error, relative to such rows' power."""
    width, draw = blocks * BLOCKS[kind].values, torch.Generator().manual_seed(rows + outer)
    w = random_blocks(kind, outer, width, seed=outer)
    x, b = (torch.randn(s, generator=draw).to(dtype) for s in ((rows, width), (outer,)))
    numbers = dequantize(w, kind).double()
    bias = (b * numbers.square().sum(1).mean().sqrt()).to(dtype) if outer % 2 else None
    out = torch.full((rows, outer), torch.nan, dtype=dtype)
    many_rows.multiply(kind, x, w, bias, out, int8)
    if int8 and many_rows.form_of(kind, many_rows.TYPES[dtype], True)[0] == "octets":
        x = in_bits(x.float(), octets.bits_of(kind, compile.compiler().cpu.has))
    expected = F.linear(x.double(), numbers, None if bias is None else bias.double())
    power = x.double().square().mean() * numbers.square().mean() * width + expected.square().mean()
    return float((out.double() - expected).square().mean(1).amax() / power)


def in_bits(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x, float32, rounded as products in so many bits do, in float64."""
    runs, limit = x.view(len(x), -1, 32), 2 ** (bits - 1) - 1
    largest = runs.abs().amax(2, keepdim=True)
    rounded = (runs * (torch.tensor(float(limit)) / largest)).round().double()
    return (rounded * (largest * (1 / limit)).double()).view(x.shape)


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_every_type_of_weight(kind):
    assert nmse(kind, 33, 35, 3, torch.bfloat16) <= limit_of(kind, torch.bfloat16)


@pytest.mark.parametrize(
    "kind", ["Q1_0", "Q6_K", "A8_32", "IQ2_XS", "IQ4_XS", "TQ1_0", "NV4_128", "BF16_32", "F16_32"]
)
def test_types_that_differ_in_fp32(kind):
    assert nmse(kind, 33, 35, 3, torch.float32) <= limit_of(kind, torch.float32)


@pytest.mark.parametrize("rows", [16, 17, 31, 32, 48, 49, 63, 80, 600])
def test_rows_are_read_by_halves_of_32(rows):
    for dtype in LIMIT:
        assert nmse("Q4_0", rows, 100, 9, dtype) <= limit_of("Q4_0", dtype)


@pytest.mark.parametrize("name", CPUS)
def test_the_forms_of_other_cpus(name, monkeypatch):
    if not host().has(NEEDS[name]):
        pytest.skip(f"the CPU has no {name}")
    target = CPUS[name]
    monkeypatch.setattr(cpu, "host_form", lambda dtype: cpu.form_of(target, dtype, False))
    monkeypatch.setattr(many_rows, "host_form", cpu.host_form)
    monkeypatch.setattr(compile._shared, "compiler", Compiler(target))
    form = many_rows.host_form("bf16")
    assert form == (("pairs", 16, 8, 2) if "BF16" in name else many_rows.host_form("f32"))
    for kind, dtype in (
        ("Q4_K", torch.bfloat16),
        ("NF4_64", torch.float32),
        ("NVFP4", torch.float32),
        ("Q2_K", torch.float32),
    ):
        assert nmse(kind, 37, 67, 2, dtype) <= limit_of(kind, dtype)
    for kind, dtype in (("Q4_K", torch.bfloat16), ("Q6_K", torch.float32), *EACH_WAY_IN_8_BITS):
        assert nmse(kind, 37, 67, 2, dtype, int8=True) <= limit_of(kind, dtype, int8=True)
    assert many_rows.form_of("Q4_0", "f32", True)[0] == "octets"
    assert octets.bits_of("Q8_0", target.has) == (8 if "VNNI" in name else 7)
    in_words = many_rows.form_of("Q2_K", "f32")[0] == "words"
    assert in_words == (name in ("AVX-512 VNNI", "AVX-VNNI", "AVX2"))
    assert many_rows.form_of("NF4_64", "f32")[0] == many_rows.form_of("F8_64", "f32")[0] == "single"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the code is for another CPU")
@pytest.mark.parametrize("name", sorted(CPUS.keys() - {"AVX-512 BF16"}))
def test_instructions_of_weights_of_8_bits(name, tmp_path):
    """Nothing is run: the steps of a product are written out, and what adds fours is that."""
    target = CPUS[name]
    form = octets.in_octets("Q8_0", cpu.form_of(target, "f32", False), target)
    text = Compiler(target, tmp_path).assembly(product.emit_product, "Q8_0", form, "f32", "f32")
    _, _, rows, columns = form
    by_fours, by_twos = (text.count(f"\t{what}\t") for what in ("vpdpbusd", "vpmaddubsw"))
    if "VNNI" in name:
        assert by_fours >= octets.UNROLLED * rows * columns
    else:
        assert by_fours == 0 and by_twos >= octets.RUN // octets.FOUR * rows * columns


def by_shifts(_, x, w, total):
    """What `vpdpbusd` does with bytes x without a sign and signed w, four of them in 32 bits."""
    x, w = x.bits(total.type), w.bits(total.type)
    for j in range(octets.FOUR):
        total = total + (x >> 8 * j & 255) * (w << 24 - 8 * j).ashr(24)
    return total


@pytest.mark.parametrize(("lanes", "rows"), [(8, 4), (16, 8)])
def test_products_added_in_fours_on_any_cpu(lanes, rows, monkeypatch, tmp_path):
    monkeypatch.setattr(compile._shared, "compiler", Compiler(host(), tmp_path))
    monkeypatch.setattr(octets, "dots", by_shifts)
    monkeypatch.setattr(octets, "_has_dots", lambda _: True)
    monkeypatch.setattr(octets, "in_octets", lambda *_: ("octets", lanes, rows, 2))
    for kind in ("Q4_0", "Q4_K", "Q6_K", "Q8_0"):
        limit = limit_of(kind, torch.float32, int8=True)
        assert nmse(kind, 37, 67, 2, torch.float32, int8=True) <= limit


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q2_K"])
def test_sums_of_integers_are_exact(kind):
    """What is left is float32's rounding of the scaled sums."""
    if many_rows.form_of(kind, "f32")[0] != "words":
        pytest.skip("the CPU multiplies in float32")
    draw = torch.Generator().manual_seed(3)
    w, x = random_blocks(kind, 40, 512, seed=1), torch.randn(48, 512, generator=draw) * 3
    x[:, ::50] *= 100
    out = torch.empty(48, 40)
    many_rows.multiply(kind, x, w, None, out)
    runs = x.view(48, -1, 32)
    largest = runs.abs().amax(2, keepdim=True)
    scale, q = largest * (1 / 32767), (runs * (torch.tensor(32767.0) / largest)).round().double()
    error = (q * scale.double() - runs.double()).abs()
    assert (error <= 0.51 * scale).all()
    numbers = dequantize(w, kind).double()
    expected = F.linear((q * scale.double()).view(48, -1), numbers)
    bound = 2.0**-21 * (x.double().abs() @ numbers.abs().T).amax(1, keepdim=True)
    assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("kind", sorted(octets.CENTERS))
def test_every_type_with_x_in_8_bits(kind):
    assert nmse(kind, 33, 35, 3, torch.bfloat16, int8=True) <= limit_of(
        kind, torch.bfloat16, int8=True
    )


@pytest.mark.parametrize("rows", [16, 17, 31, 32, 49, 600])
def test_rows_in_8_bits(rows):
    """The bound is float32's rounding: sums of integers are exact."""
    assert nmse("Q5_0", rows, 100, 9, torch.float32, int8=True) <= LIMIT[torch.float32]


@pytest.mark.parametrize("kind", sorted(octets.CENTERS.keys() & HALVES.keys()))
@pytest.mark.parametrize("sign", [1, -1])
def test_no_sum_in_16_bits_overflows(kind, sign):
    """Each row of the weight has the same byte everywhere, so that one has the largest integers of
    its type, another the smallest; x is as large as can be.
    """
    block = BLOCKS[kind]
    w = torch.tensor([0x00, 0xFF, 0x7F, 0x80, 0x0F, 0xF0, 0x88, 0x77], dtype=torch.uint8)
    w = w.view(-1, 1).repeat(2, block.bytes)
    for at in HALVES[kind]:
        w[:, at], w[:, at + 1] = 0x00, 0x3C  # 1 in fp16
    x, out = torch.full((16, block.values), float(sign)), torch.empty(16, 16)
    many_rows.multiply(kind, x, w, None, out, True)
    expected = F.linear(x.double(), dequantize(w, kind).double())
    assert torch.allclose(out.double(), expected, rtol=1e-5, atol=1e-3)


def test_nothing_but_the_results_is_written():
    x, w = torch.randn(16, 64).bfloat16(), random_blocks("Q8_0", 5, 64)
    memory = torch.full((18, 5), torch.nan, dtype=torch.bfloat16)
    many_rows.multiply("Q8_0", x, w, None, memory[1:-1])
    assert memory[1:-1].isfinite().all() and memory[[0, -1]].isnan().all()


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(("kind", "int8"), [("Q8_0", False), ("Q4_1", True)])
def test_infinite_x_stays_in_its_row(kind, int8, dtype, number):
    x, w = torch.randn(40, 64).to(dtype), random_blocks(kind, 40, 64)
    x[7, 9] = number
    out = torch.empty(40, 40, dtype=dtype)
    many_rows.multiply(kind, x, w, None, out, int8)
    assert not out[7].isfinite().any() and out[:7].isfinite().all() and out[8:].isfinite().all()


def test_all_types_can_be_read():
    assert set(FORMS) == set(BLOCKS) >= NATIVE


def test_sizes_of_memory():
    assert product.locations("BF16", ("tiles", 16, 8, 2), 64, 64) == (8192, 16384, 18432)
    assert product.locations("Q4_0", ("single", 16, 8, 2), 64, 64) == (16384, 24576, 32768)
    assert product.locations("Q4_1", ("words", 16, 8, 2), 64, 64) == (9216, 17408, 17408)
    assert product.block_of(896, 2) == 7 and product.block_of(896, 4) == 4
    assert cpu.second_cache() >= 1 << 17
