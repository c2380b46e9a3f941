"""Activations as machine code: the references in fp32 and bf16, in place and not."""

from __future__ import annotations

import pytest
import torch
from op_cases import node_of
from torch import Tensor

from mtmd.kernels.backends import Cpu as Backend
from mtmd.kernels.cpu import activation
from mtmd.kernels.cpu.native import compile as native
from mtmd.kernels.cpu.native.compile import Compiler, Cpu, host
from mtmd.kernels.cpu.table import choose
from mtmd.kernels.cpu.tiled import cpu
from mtmd.kernels.graph import Type
from mtmd.kernels.ops import OPS

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(cpu.host_form("f32") is None, reason="the CPU has neither AVX2 nor AVX-512"),
]
NMSE = {torch.float32: 1e-13, torch.bfloat16: 1e-5}
FORMS = [
    ("gelu", {"approximate": "tanh"}),
    ("gelu", {"approximate": "quick"}),
    ("silu", {}),
    ("gelu_mul", {"approximate": "none"}),
    ("gelu_mul", {"approximate": "tanh"}),
    ("silu_mul", {}),
]
EDGES = (0.0, -0.0, torch.inf, torch.nan, -100.0, 100.0, 1e-30, -3e4)


def operands(op: str, count: int, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(count)
    inputs = [
        torch.randn(count, generator=draw).mul_(4).to(dtype)
        for _ in range(2 if op.endswith("mul") else 1)
    ]
    inputs[0][: len(EDGES)] = torch.tensor(EDGES)
    return inputs


def check(op: str, inputs: list[Tensor], attrs: dict[str, str]) -> None:
    node = node_of(op, list(inputs), attrs)
    assert choose(node) is not None
    expected = OPS[op].reference(*(i.double() for i in inputs), **attrs)
    for in_place in (False, True):
        given = [i.clone() for i in inputs]
        actual = Backend().lower(node, in_place)(*given)
        assert (actual is given[0]) == in_place and actual.dtype == inputs[0].dtype
        assert in_place or torch.equal(given[0].nan_to_num(), inputs[0].nan_to_num())
        same = expected.isfinite()
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.isinf(), expected.isinf())
        power = expected[same].square().sum()
        assert (actual.double() - expected)[same].square().sum() / power < NMSE[actual.dtype]


@pytest.mark.parametrize("dtype", NMSE, ids=str)
@pytest.mark.parametrize("op, attrs", FORMS, ids=str)
def test_every_form(op, attrs, dtype):
    for count in (activation.WORTH, 2 * activation.CHUNK + 1, 20_011):
        check(op, operands(op, count, dtype), attrs)


@pytest.mark.skipif(not host().has("avx2"), reason="the CPU has no AVX2")
def test_a_cpu_without_avx_512(monkeypatch, tmp_path):
    made = Compiler(Cpu("x86-64-v3", "+avx2,+fma"), tmp_path)
    monkeypatch.setattr(native, "compiler", lambda: made)
    for dtype in NMSE:
        check("gelu", operands("gelu", 17_000, dtype), {"approximate": "tanh"})
        check("silu_mul", operands("silu_mul", 17_000, dtype), {})
    assert made.stats.kernels == 4


def test_what_is_rejected_and_why():
    large = torch.randn(200, 300)
    reject = activation.GELU.rejects
    assert reject(Type.of(large), approximate="tanh") is None
    assert "torch's is as fast" in str(reject(Type.of(large), approximate="none"))
    assert "values; the kernel is for" in str(reject(Type.of(large[:3]), approximate="tanh"))
    assert "not contiguous" in str(reject(Type.of(large.T), approximate="tanh"))
    assert "fp32 or bf16" in str(reject(Type.of(large.double()), approximate="tanh"))
    both = Type.of(large), Type.of(large.bfloat16())
    assert "all of one type" in str(activation.SILU_MUL.rejects(*both))
