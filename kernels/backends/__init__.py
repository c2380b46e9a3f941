"""Where nodes can run, in order of preference."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from mtmd.kernels.backends.backend import Backend
from mtmd.kernels.backends.cpu import Cpu
from mtmd.kernels.backends.limited import Limited
from mtmd.kernels.backends.reference import Reference
from mtmd.kernels.errors import OptionError

__all__ = ["Backend", "Cpu", "Limited", "Reference", "backends_for"]


DEVICES = "auto, cpu, cuda, cuda:N, mps, xpu or xpu:N"
KIND_NAMES = {"cuda": "CUDA", "mps": "Metal", "xpu": "XPU"}


def backends_for(device: str = "auto", refuse: Sequence[str] = ()) -> list[Backend]:
    """The backends of a device: the accelerator first, then the CPU, then the reference, which
    takes everything.

    device: auto, cpu, cuda, cuda:N, mps, xpu or xpu:N; auto is CUDA's where there is one. refuse:
    rules of `Limited`, put in front of the preferred backend. Raises OptionError for a device that
    is not there.
    """
    fallback: list[Backend] = [Cpu(), Reference()]
    if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:[0-9]{1,4})?", device):
        raise OptionError(f"device {device!r}: expected {DEVICES}")
    kind, _, index = device.partition(":")
    count, number = _devices(kind), int(index or 0)
    if kind in KIND_NAMES and number >= count:
        raise OptionError(
            f"device {device!r}: found {count} {KIND_NAMES[kind]} device"
            f"{'' if count == 1 else 's'}; use --device cpu or auto"
        )
    backends = fallback
    if kind in ("mps", "xpu"):
        from mtmd.kernels.backends.torch_device import TorchDevice

        backends = [TorchDevice(kind if kind == "mps" else f"xpu:{number}"), *fallback]
    elif count:
        from mtmd.kernels.backends.gpu import Gpu

        backends = [Gpu(f"cuda:{number}"), *fallback]
    return [Limited(backends[0], refuse), *backends] if refuse else backends


def _devices(kind: str) -> int:
    """How many devices of a kind torch finds; of auto, CUDA's."""
    if kind == "cpu":
        return 0
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    return torch.xpu.device_count() if kind == "xpu" else torch.cuda.device_count()
