"""Calling kernels, on the device their tensors lie on."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from mtmd.kernels.gpu.launch import Call


def run_call(kernel: Any, call: Call, tensors: tuple[Tensor, ...]) -> None:
    device = (
        torch.cuda.device(tensors[0].device) if tensors[0].is_cuda else contextlib.nullcontext()
    )  # Triton launches on the current one
    with device:
        kernel[(call.programs,)](
            *tensors, **call.scalars, **call.constants, num_warps=call.warps, num_stages=call.stages
        )
