"""Norms, rotary embeddings and sums as machine code: the references, in rows as they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_cases import node_of
from torch import Tensor

from mtmd.kernels.backends import Cpu
from mtmd.kernels.cpu import native_rows
from mtmd.kernels.cpu.table import choose
from mtmd.kernels.ops import OPS

pytestmark = pytest.mark.usefixtures("poisoned")
# Of rounding the result: bf16 to the nearest, fp32 in another order of sums
CLOSE: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2.0**-7, "atol": 2.0**-9},
}


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def check(op: str, inputs: list[Tensor | None], **attrs: Any) -> None:
    node = node_of(op, inputs, attrs)
    kernel = choose(node)
    assert kernel in (native_rows.ADD, native_rows.RMS_NORM, native_rows.ROPE)
    result, expected = kernel.run(*inputs, **attrs), OPS[op].reference(*inputs, **attrs)
    assert result.is_contiguous() and result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, **CLOSE[expected.dtype])


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_norms_of_rows_and_of_heads_in_wider_rows(dtype):
    check("rms_norm", [values(41, 3, 101).to(dtype), values(101)], eps=1e-6)
    joint = values(70, 5 * 64).to(dtype)
    check("rms_norm", [joint[:, :192].unflatten(1, (3, 64)), values(64)], eps=1e-5)
    check("rms_norm", [joint, None], eps=1e-6)


@pytest.mark.parametrize("pairs", ["half", "adjacent"])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_heads_are_turned(dtype, pairs):
    table = values(51, 2, 20)
    check("rope", [values(2, 51, 3, 50).to(dtype), table], pairs=pairs)
    joint = values(51, 5 * 40).to(dtype)
    check("rope", [joint[:, 40:160].unflatten(1, (3, 40)), table], pairs=pairs)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_sums_and_sums_in_place(dtype):
    a, b = values(300, 1031).to(dtype), values(1031, 300).view(300, 1031).to(dtype)
    check("add", [a, b])
    expected, memory = a + b, a.data_ptr()
    assert native_rows.ADD.in_place is not None
    result = native_rows.ADD.in_place(a, b)
    assert result.data_ptr() == memory and torch.equal(result, expected)


def test_what_it_takes_was_told(peak_bytes):
    inputs = [values(300, 640), values(640)]
    node = node_of("rms_norm", inputs, {"eps": 1e-6})
    measured = peak_bytes(lambda: native_rows.rms_norm(*inputs, eps=1e-6))
    counted = node.type.bytes + Cpu().workspace(node)
    assert measured <= counted * 1.02 <= measured * 1.1


@pytest.mark.parametrize(
    "op, inputs, attrs, words",
    [
        ("rms_norm", [values(3, 64), values(64)], {"eps": 1e-6}, "192 values"),
        ("rms_norm", [values(300, 64).half(), values(64)], {"eps": 1e-6}, "fp16"),
        ("rms_norm", [values(300, 64), values(64).half()], {"eps": 1e-6}, "fp32"),
        ("rms_norm", [values(64, 300).t(), values(64)], {"eps": 1e-6}, "side by side"),
        (
            "rms_norm",
            [values(9, 30, 5, 64)[:, :7, ::2], values(64)],
            {"eps": 1e-6},
            "three dimensions",
        ),
        ("add", [values(90, 64), values(64)], {}, "alike"),
        ("rope", [values(90, 4, 64), values(90, 2, 32)], {"parts": 2}, "2 parts"),
    ],
)
def test_what_is_left_to_the_reference(op, inputs, attrs, words):
    node = node_of(op, inputs, attrs)
    kernel = {"add": native_rows.ADD, "rms_norm": native_rows.RMS_NORM, "rope": native_rows.ROPE}[
        op
    ]
    assert words in str(kernel.rejects(*(i.type for i in node.inputs if i is not None), **attrs))
    assert choose(node) is None
