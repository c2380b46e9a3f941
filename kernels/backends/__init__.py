"""Backends on which nodes can run, in order of preference."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from mtmd.base.errors import OptionError
from mtmd.base.extras import install_triton
from mtmd.base.text import plural
from mtmd.kernels.backends.backend import Backend
from mtmd.kernels.backends.cpu import Cpu
from mtmd.kernels.backends.limited import Limited
from mtmd.kernels.backends.reference import Reference

__all__ = ["Backend", "Cpu", "Limited", "Reference", "backends_for", "several_backends"]

DEVICES = "auto, cpu, cuda, cuda:N, mps, xpu or xpu:N"
KIND_NAMES = {"cuda": "CUDA", "mps": "Metal", "xpu": "XPU"}
ONE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:[0-9]{1,4})?")
ONE_OF_SEVERAL = re.compile(r"auto|cpu|cuda(:[0-9]{1,4})?")


def backends_for(
    device: str = "auto", refuse: Sequence[str] = (), records: bool = True
) -> list[Backend]:
    """The backends of a device: the accelerator first, then the CPU, then the reference, which
    takes everything.

    device: auto, cpu, cuda, cuda:N, mps, xpu or xpu:N; auto is CUDA's where there is one. refuse:
    rules of `Limited`, put in front of the preferred backend. records: whether a GPU records runs
    and replays them. Raises OptionError for a device that is not there.
    """
    fallback: list[Backend] = [Cpu(), Reference()]
    if not ONE.fullmatch(device):
        several = "; several go with split layer, or fit" if "," in device else ""
        raise OptionError(f"device {device!r}: expected {DEVICES}{several}")
    kind, _, index = device.partition(":")
    count, number = _devices(kind), int(index or 0)
    if kind in KIND_NAMES and number >= count:
        raise _missing(device, kind, count)
    backends = fallback
    if kind in ("mps", "xpu"):
        from mtmd.kernels.backends.torch_device import TorchDevice

        backends = [TorchDevice(kind if kind == "mps" else f"xpu:{number}"), *fallback]
    elif count:
        backends = [_gpu(number, records), *fallback]
    _check_records(records, backends)
    return [Limited(backends[0], refuse), *backends] if refuse else backends


def several_backends(
    device: str = "auto", refuse: Sequence[str] = (), records: bool = True
) -> list[Backend]:
    """Return backends as `backends_for` does, with every GPU that `device` lets be, in its order:
    auto, cpu, cuda for all, or several between commas, such as cuda:1,cuda:0,cpu.
    """
    names = device.split(",")
    if not all(ONE_OF_SEVERAL.fullmatch(name) for name in names) or len(set(names)) < len(names):
        raise OptionError(
            f"device {device!r:.80}: expected auto, cpu, cuda, or different ones of cuda:N and cpu "
            "between commas"
        )
    count = torch.cuda.device_count() if set(names) != {"cpu"} else 0
    numbers: list[int] = []
    for name in names:
        kind, _, index = name.partition(":")
        if kind == "cuda" and int(index or 0) >= count:
            raise _missing(name, kind, count)
        if name != "cpu":
            numbers += [int(index)] if index else range(count)
    accelerators: list[Backend] = [_gpu(number, records) for number in dict.fromkeys(numbers)]
    cpu = Cpu()
    _check_records(records, [*accelerators, cpu])
    if refuse:  # a stand-in for the first of them, or beside the CPU
        accelerators[:1] = [Limited(accelerators[0] if accelerators else cpu, refuse)]
    return [*accelerators, cpu, Reference()]


def _check_records(records: bool, backends: Sequence[Backend]) -> None:
    """Raise OptionError where nothing would be recorded anyway."""
    if not records and not any(backend.fuses for backend in backends):
        raise OptionError(
            f"no_graphs: found the device {backends[0].name}, on which no run is recorded, "
            "expected a GPU with Triton; leave the option out"
        )


def _gpu(number: int, records: bool) -> Backend:
    """Return the backend of a GPU: by our kernels, or by torch's alone where Triton is not
    installed, as on Windows.
    """
    if find_spec("triton") is None:
        from mtmd.kernels.backends.torch_device import TorchDevice

        lacks = f"Triton, which compiles kernels for it, is not installed: {install_triton()}"
        return TorchDevice(f"cuda:{number}", lacks=lacks)
    from mtmd.kernels.backends.gpu import Gpu

    return Gpu(f"cuda:{number}", records)


def _devices(kind: str) -> int:
    """Return how many devices of a kind torch finds; of auto, CUDA's."""
    if kind == "cpu":
        return 0
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    return torch.xpu.device_count() if kind == "xpu" else torch.cuda.device_count()


def _missing(device: str, kind: str, count: int) -> OptionError:
    return OptionError(
        f"device {device!r}: found {plural(count, f'{KIND_NAMES[kind]} device')}; "
        "use device='cpu' or 'auto' (--device cpu or auto)"
    )
