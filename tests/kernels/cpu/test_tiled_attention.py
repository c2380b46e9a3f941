"""Flash attention as machine code: the reference in fp32 and bf16, in every form of products that
this machine can run.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from op_cases import draw, node_of
from random_graphs import Source, transformer
from torch import Tensor

from mtmd.kernels.backends import Cpu as Backend
from mtmd.kernels.cpu import tiled_attention
from mtmd.kernels.cpu.native import compile as native
from mtmd.kernels.cpu.native.compile import Compiler, Cpu, host
from mtmd.kernels.cpu.table import choose
from mtmd.kernels.cpu.tiled import cpu, team
from mtmd.kernels.graph import Type
from mtmd.kernels.ops import attention
from mtmd.kernels.plan.scheduler import make_plan
from mtmd.kernels.report.facts import WarmupFacts
from mtmd.kernels.report.from_plans import graph_facts
from mtmd.kernels.report.report_text import render

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(cpu.host_form("f32") is None, reason="the CPU has neither AVX2 nor AVX-512"),
]
NMSE = {torch.float32: 1e-11, torch.bfloat16: 3e-5}  # against the reference in fp32
TYPES = (torch.float32, torch.bfloat16)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(
    rows: int,
    keys: int,
    *,
    batch: int = 1,
    heads: int = 2,
    groups: int = 2,
    size: int = 64,
    value: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Queries, keys and values."""
    q = values(batch, rows, heads, size, dtype=dtype)
    k = values(batch, keys, groups, size, dtype=dtype, seed=1)
    return [q, k, values(batch, keys, groups, value or size, dtype=dtype, seed=2)]


def check(inputs: list[Tensor | None], **options: Any) -> Tensor:
    """The kernel's result, which has to be the reference's."""
    actual = tiled_attention.tiled_attention(*inputs, scale=0.2, **options)  # type: ignore[arg-type]
    wide = [i.float() if i is not None and i.is_floating_point() else i for i in inputs]
    expected = attention.reference(*wide, scale=0.2, **options).double()
    assert actual.dtype == inputs[0].dtype and actual.is_contiguous()  # type: ignore[union-attr]
    power = float(expected.square().sum()) or 1.0
    error = float((actual.double() - expected).square().sum()) / power
    assert error <= NMSE[actual.dtype], f"NMSE {error:.1e}"
    return actual


# Rows and keys around whole steps of 32, blocks of keys, units
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows, keys", [(1, 1), (31, 33), (33, 127), (65, 129), (600, 300)])
def test_every_edge_of_a_block(rows, keys, dtype):
    q, k, v = operands(rows, keys, batch=2, dtype=dtype)
    for options in ({}, {"causal": True}, {"causal": True, "window": 40}, {"window": 7}):
        check([q, k, v], **options)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size, value", [(72, 72), (80, 88), (7, 9), (130, 48)])
def test_heads_of_any_size(size, value, dtype):
    check(list(operands(70, 90, heads=4, groups=2, size=size, value=value, dtype=dtype)))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_masks_bounds_and_caps(dtype):
    q, k, v = operands(150, 160, batch=2, heads=4, groups=1, dtype=dtype)
    bounds = torch.stack((torch.arange(150) // 3, torch.arange(150) + 4), 1).int()
    bounds[[0, 70, 149]] = torch.tensor([[5, 4], [-9, -1], [2_000_000, -2_000_000]]).int()
    both = torch.stack((bounds, torch.tensor([[3, 9]]).int().expand(150, 2)))
    for shape in ((150, 160), (4, 150, 160), (2, 1, 150, 160), (1, 4, 150, 160)):
        mask = values(*shape, dtype=dtype, seed=3)
        mask = mask.masked_fill(values(*shape, seed=4) > 1, -torch.inf)
        check([q, k, v, mask])
        check([q, k, v, mask, both], causal=True)
    assert check([q, k, v, None, bounds])[:, [0, 70, 149]].eq(0).all()
    check([q, k, v, None, both], softcap=2.0)
    check([q, k, v, values(150, 160, seed=5) * 30], softcap=5.0)  # a mask that stays float32
    check([q, k, v, mask * 5, bounds], softcap=5.0, mask_capped=True)


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
def test_the_lowest_number_masks_and_rows_of_nothing_else_are_as_the_reference_has_them(lowest):
    q, k, v = operands(40, 200)
    mask = torch.zeros(40, 200).masked_fill(~torch.ones(40, 200).tril().bool(), lowest)
    mask[3] = lowest
    check([q, k, v, mask])


def test_nan_and_scales_below_0():
    q, k, v = operands(70, 90)
    wrong = q.clone()
    wrong[0, 3] = torch.nan
    result = tiled_attention.tiled_attention(wrong, k, v, scale=0.2)
    assert result[0, 3].isnan().all() and result[0, 4:].isfinite().all()
    result = tiled_attention.tiled_attention(q, k, v, scale=-0.3)
    assert torch.allclose(result, attention.reference(q, k, v, scale=-0.3), atol=1e-5)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size, value", [(64, 64), (7, 9)])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_what_is_no_number_in_one_sequence_stays_there(dtype, size, value, softcap):
    """Two sequences in the same blocks of rows and keys: what one of them holds changes not a bit
    of the other, and is not hidden where it is.
    """
    rows, keys, own = 75, 91, 42
    q, k, v = operands(rows, keys, size=size, value=value, dtype=dtype)
    bounds = torch.tensor([[0, own - 1]] * 35 + [[own, keys - 1]] * 40).int()
    how = {"scale": 0.2, "softcap": softcap}
    expected = tiled_attention.tiled_attention(q, k, v, None, bounds, **how)
    halves = (slice(0, 35), slice(0, own)), (slice(35, rows), slice(own, keys))
    for (one, _), (other, theirs) in (halves, halves[::-1]):
        poisoned = q.clone(), k.clone(), v.clone()
        poisoned[2][:, theirs, :, ::2], poisoned[2][:, theirs, :, 1::2] = torch.inf, torch.nan
        for keys_too in (False, True):
            if keys_too:
                poisoned[1][:, theirs] = torch.nan
            result = tiled_attention.tiled_attention(*poisoned, None, bounds, **how)
            assert torch.equal(result[:, one], expected[:, one])
            assert result[:, other].isnan().all()


def test_scores_that_float32_holds_and_exponentials_that_it_does_not():
    q, k, v = operands(64, 300)
    check([q * 40, k * 40, v])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_random_cases_strided_or_not(dtype):
    for seed in range(6):
        inputs, attrs = draw("attention", seed, dtype, strided=bool(seed % 2))
        attrs.pop("scale")
        check(inputs, **attrs)


def test_one_thread_and_two_do_the_same():
    inputs = operands(300, 300, heads=3, groups=3, dtype=torch.bfloat16)
    results = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            results.append(tiled_attention.tiled_attention(*inputs, scale=0.1, causal=True))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*results)


def test_threads_of_another_library_do_the_same(monkeypatch):
    inputs = operands(300, 300, heads=3, groups=3)
    expected = tiled_attention.tiled_attention(*inputs, scale=0.1)
    monkeypatch.setattr(team, "_openmp", lambda: None)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(tiled_attention.tiled_attention(*inputs, scale=0.1), expected)
    finally:
        torch.set_num_threads(before)


# What other CPUs do: the form, and the machine code that LLVM makes for them; those of them that
# this one can run
LEVELS = {
    ("single", "avx2"): Cpu("x86-64-v3", "+avx2,+fma"),
    ("single", "avx512dq"): Cpu("x86-64-v4", "+avx2,+fma,+avx512f,+avx512dq,+avx512bw,+avx512vl"),
    ("pairs", "avx512bf16"): Cpu("znver4", "+avx2,+fma,+avx512f,+avx512dq,+avx512bw,+avx512bf16"),
    ("tiles", "amx-bf16"): host(),
}
HERE = [
    level
    for level in LEVELS
    if host().has(level[1]) and (level[0] != "tiles" or cpu.tiles_allowed())
]


@pytest.mark.parametrize("level", HERE, ids=lambda level: " ".join(level))
def test_the_forms_of_other_cpus(level, monkeypatch, tmp_path):
    target, tiles = LEVELS[level], level[0] == "tiles"
    made = Compiler(target, tmp_path)
    monkeypatch.setattr(native, "compiler", lambda: made)
    monkeypatch.setattr(cpu, "host_form", lambda dtype: cpu.form_of(target, dtype, tiles))
    assert cpu.form_of(target, "bf16", tiles)[0] == level[0]
    for dtype in TYPES:
        q, k, v = operands(70, 140, heads=4, groups=2, size=72, dtype=dtype)
        check([q, k, v])
        check([q, k, v], causal=True, window=50)
    assert made.stats.kernels >= 2


def test_a_cpu_without_vectors_leaves_attention_to_torch():
    assert cpu.form_of(Cpu("x86-64", ""), "f32", False) is None
    assert cpu.form_of(Cpu("apple-m1", "+neon"), "bf16", False) is None


def types(*inputs: Tensor | None) -> list[Type | None]:
    return [None if i is None else Type.of(i) for i in inputs]


def test_what_is_rejected_and_why():
    q, k, v = operands(512, 512, size=64)
    rejects = tiled_attention.rejects
    assert rejects(*types(q, k, v), scale=1.0) is None
    assert "v fp32" in str(rejects(*types(q.bfloat16(), k.bfloat16(), v), scale=1.0))
    few = q[:, :8]
    assert "8 rows" in str(rejects(*types(few, k, v), scale=1.0))
    small = operands(64, 64)
    assert "million products" in str(rejects(*types(*small), scale=1.0))
    mask = torch.zeros(512, 512, dtype=torch.float16)
    assert "mask is" in str(rejects(*types(q, k, v, mask), scale=1.0))
    wide = operands(512, 512, size=1024)
    assert "heads of 1024" in str(rejects(*types(*wide), scale=1.0))


def test_it_comes_before_torch_where_there_is_enough_to_do():
    large = node_of("attention", list(operands(512, 512)), {"scale": 0.1})
    small = node_of("attention", list(operands(16, 16)), {"scale": 0.1})
    assert choose(large) is tiled_attention.KERNEL and choose(small) is not tiled_attention.KERNEL


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_it_takes_was_told_and_does_not_grow_with_the_keys(dtype, peak_bytes):
    measured = []
    for keys in (1024, 4096):
        inputs = operands(1024, keys, dtype=dtype)
        node = node_of("attention", list(inputs), {"scale": 0.1, "causal": True})
        run = Backend().lower(node)
        measured.append(peak_bytes(lambda run=run, inputs=inputs: run(*inputs)))
        reported = node.type.bytes + Backend().workspace(node)
        assert reported * 0.95 <= measured[-1] <= reported * 1.05
    assert measured[0] == measured[1]


def test_nothing_is_written_beyond_the_result():
    """Of memory around a thread's own, and of the result's rows beyond the last."""
    form = tiled_attention._form(torch.float32, 24, 24, None, None, 0.3)
    locations, size = replace(form).locations(64)
    room = np.full(size + 128, 7, np.uint8)
    room[: -(-room.ctypes.data // 64) * 64 - room.ctypes.data] = 7
    base = -(-room.ctypes.data // 64) * 64
    q, k, v = operands(40, 50, heads=1, groups=1, size=24)
    out = torch.full((1, 48, 1, 24), 7.0)
    from mtmd.kernels.cpu.tiled import flash

    address = native.compile_kernel(flash.emit_flash, form)
    args = [n for x in (q, k, v, out) for n in (x.data_ptr(), *x.stride()[:3])]
    args += [0] * 7 + [40, 50, 1, 1, 40, 1, tiled_attention._bits(0.3), 0, 1 << 40, 0]
    words = np.array([*args, *locations.values()], np.int64)
    kernel = ctypes.CFUNCTYPE(
        None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
    )
    kernel(address)(words.ctypes.data, 0, 1, base)
    assert out[:, :40].ne(7).any() and out[:, 40:].eq(7).all()
    assert (room[base - room.ctypes.data + size :] == 7).all()


@pytest.mark.parametrize(
    "form, words",
    [(("tiles", 16, 8, 2), "AMX"), (("pairs", 16, 8, 2), "AVX-512 BF16"), (None, None)],
    ids=str,
)
def test_the_report_says_what_multiplies(form, words, monkeypatch):
    monkeypatch.setattr(cpu, "host_form", lambda _: form)
    shape = {"batch": 1, "rows": 1024, "width": 256, "heads": 4, "ffn": 512}
    plan = make_plan([transformer(Source(), dtype=torch.bfloat16, **shape)], [Backend()])
    facts = graph_facts("encoder", "", "", plan)
    ways = {op: way for op, way, _ in facts.kernels}
    assert ways.get("attention") == (words and f"machine code ({words})")
    assert ("matmul" in ways) == (words == "AMX")
    text = render(WarmupFacts("x", "cpu", "", "bf16", (), (), (facts,)))
    assert (f"attention as machine code ({words})" in text) == (words is not None)
