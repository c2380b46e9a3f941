"""Which type of numbers a model gets where none was asked for."""

from __future__ import annotations

import pytest
import torch

from mtmd.kernels.backends import Cpu
from mtmd.loaded import device_and_dtype


@pytest.mark.parametrize(
    ("requested", "weight_bytes", "has_bf16", "chosen"),
    [
        ("auto", 10 << 20, True, torch.float32),  # the demo model
        ("auto", 80 << 20, True, torch.bfloat16),  # 256M in four bits
        ("auto", 1 << 30, True, torch.bfloat16),
        ("auto", 1 << 30, False, torch.float32),
        ("fp32", 1 << 30, True, torch.float32),
        ("bf16", 1, False, torch.bfloat16),
    ],
)
def test_dtype_on_a_cpu(
    requested: str,
    weight_bytes: int,
    has_bf16: bool,
    chosen: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_and_dtype, "_multiplies_bf16", lambda: has_bf16)
    assert device_and_dtype.choose_dtype(requested, Cpu(), weight_bytes) == chosen


@pytest.mark.parametrize(
    ("requested", "dtype", "weight_bytes", "has_bf16", "chosen"),
    [
        ("auto", "auto", 1 << 30, False, "bf16"),
        ("auto", "auto", 1 << 30, True, "bf16"),
        ("auto", "auto", 10 << 20, False, "fp32"),
        ("auto", "fp32", 1 << 30, False, "fp32"),
        ("auto", "bf16", 1 << 30, False, "bf16"),
        ("q8_0", "auto", 1 << 30, False, "q8_0"),
        ("fp32", "auto", 1 << 30, False, "fp32"),
    ],
)
def test_keys_and_values_on_a_cpu(
    requested: str,
    dtype: str,
    weight_bytes: int,
    has_bf16: bool,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_and_dtype, "_multiplies_bf16", lambda: has_bf16)
    computed = device_and_dtype.choose_dtype(dtype, Cpu(), weight_bytes)
    kind = device_and_dtype.choose_kv_type(requested, dtype, computed, Cpu(), weight_bytes)
    assert kind == chosen


def test_this_cpu_can_be_asked() -> None:
    assert device_and_dtype._multiplies_bf16() in (True, False)
