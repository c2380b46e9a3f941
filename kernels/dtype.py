"""Names and sizes of element types, as reports print them."""

from __future__ import annotations

import torch

NAMES: dict[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "bool",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in NAMES.items()}


def name_of(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bf16"."""
    return NAMES.get(dtype) or str(dtype).removeprefix("torch.")
