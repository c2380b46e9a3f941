"""Facts of a device of CUDA or HIP, with torch's answers in place of a card's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mtmd.kernels.backends import Cpu, Limited, Reference
from mtmd.kernels.backends.cuda_device import queue_bytes
from mtmd.kernels.backends.gpu import Gpu
from mtmd.kernels.backends.target import Target
from mtmd.kernels.backends.torch_device import TorchDevice

MIB = 1 << 20
LT = MIB  # of cuBLASLt


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("cuda:80", 8 * MIB + 128 * 1024 + LT),
        ("cuda:89", 8 * MIB + 128 * 1024 + LT),
        ("cuda:90", 32 * MIB + LT),
        ("cuda:120", 32 * MIB + LT),
        ("hip:gfx1100", (32 + 76) * MIB),
        ("hip:gfx942", (128 + 76) * MIB),
    ],
)
def test_workspaces_of_a_queue_are_those_that_torch_gives(target: str, expected: int) -> None:
    assert queue_bytes(target) == Target(target).queue_bytes == expected
    assert Limited(Target(target), ()).queue_bytes == expected


def test_a_card_that_is_here_has_those_of_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    card, without_triton = Gpu(), TorchDevice("cuda:0")
    assert card.target == "cuda:90" and card.queue_bytes == 33 * MIB == without_triton.queue_bytes
    monkeypatch.setattr(torch.version, "hip", "7.0")
    amd = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: amd)
    assert card.target == "hip:gfx942" and card.queue_bytes == 204 * MIB
    others = (Cpu(), Reference(), TorchDevice("mps", torch.device("cpu")))
    assert [device.queue_bytes for device in others] == [0, 0, 0]
