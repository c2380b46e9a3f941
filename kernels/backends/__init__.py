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

__all__ = ["Backend", "Cpu", "Limited", "Reference", "backends_for", "several_backends"]

ONE = re.compile(r"auto|cpu|cuda(:[0-9]{1,4})?")


def backends_for(device: str = "auto", refuse: Sequence[str] = ()) -> list[Backend]:
    """The backends of a device: the accelerator first, then the CPU, then the reference, which
    takes everything.

    device: auto, cpu, cuda or cuda:N. refuse: rules of `Limited`, put in front of the preferred
    backend. Raises OptionError for a device that is not there.
    """
    fallback: list[Backend] = [Cpu(), Reference()]
    if not ONE.fullmatch(device):
        several = "; several go with split layer, or fit" if "," in device else ""
        raise OptionError(f"device {device!r}: expected auto, cpu, cuda or cuda:N{several}")
    kind, _, index = device.partition(":")
    count = torch.cuda.device_count() if kind != "cpu" else 0
    number = int(index or 0)
    if kind == "cuda" and number >= count:
        raise _missing(device, count)
    backends = [_gpu(number), *fallback] if count else fallback
    return [Limited(backends[0], refuse), *backends] if refuse else backends


def several_backends(device: str = "auto", refuse: Sequence[str] = ()) -> list[Backend]:
    """As `backends_for`, with every GPU that `device` lets be, in its order: auto, cpu, cuda for
    all, or several between commas, such as cuda:1,cuda:0,cpu.
    """
    names = device.split(",")
    if not all(ONE.fullmatch(name) for name in names) or len(set(names)) < len(names):
        raise OptionError(
            f"device {device!r:.80}: expected auto, cpu, cuda, or different ones of cuda:N and cpu "
            "between commas"
        )
    count = torch.cuda.device_count() if set(names) != {"cpu"} else 0
    numbers: list[int] = []
    for name in names:
        kind, _, index = name.partition(":")
        if kind == "cuda" and int(index or 0) >= count:
            raise _missing(name, count)
        if name != "cpu":
            numbers += [int(index)] if index else range(count)
    accelerators: list[Backend] = [_gpu(number) for number in dict.fromkeys(numbers)]
    cpu = Cpu()
    if refuse:  # a stand-in for the first of them, or beside the CPU
        accelerators[:1] = [Limited(accelerators[0] if accelerators else cpu, refuse)]
    return [*accelerators, cpu, Reference()]


def _gpu(number: int) -> Backend:
    from mtmd.kernels.backends.gpu import Gpu

    return Gpu(f"cuda:{number}")


def _missing(device: str, count: int) -> OptionError:
    return OptionError(
        f"device {device!r}: found {count} CUDA device{'' if count == 1 else 's'}; use "
        "--device cpu or auto"
    )
