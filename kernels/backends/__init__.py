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


def backends_for(device: str = "auto", refuse: Sequence[str] = ()) -> list[Backend]:
    """The backends of a device: the accelerator first, then the CPU, then the reference, which
    takes everything.

    device: auto, cpu, cuda or cuda:N. refuse: rules of `Limited`, put in front of the preferred
    backend. Raises OptionError for a device that is not there.
    """
    fallback: list[Backend] = [Cpu(), Reference()]
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", device):
        raise OptionError(f"device {device!r}: expected auto, cpu, cuda or cuda:N")
    kind, _, index = device.partition(":")
    count = torch.cuda.device_count() if kind != "cpu" else 0
    number = int(index or 0)
    if kind == "cuda" and number >= count:
        raise OptionError(
            f"device {device!r}: found {count} CUDA device{'' if count == 1 else 's'}; use "
            "--device cpu or auto"
        )
    backends = fallback
    if count:
        from mtmd.kernels.backends.gpu import Gpu

        backends = [Gpu(f"cuda:{number}"), *fallback]
    return [Limited(backends[0], refuse), *backends] if refuse else backends
