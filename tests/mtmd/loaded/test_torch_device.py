"""A model on a device of which only torch knows what it can do, here in the place of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtmd.bench.shapes import random_checkpoint
from mtmd.config import LoadOptions
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.backends.torch_device import TorchDevice
from mtmd.model import Model

SHAPES = Path(__file__).parents[3] / "examples" / "shapes.png"


@pytest.fixture
def device() -> TorchDevice:
    return TorchDevice("mps", torch.device("cpu"))


def test_a_model_answers_as_on_the_cpu(demo: Model, device: TorchDevice) -> None:
    backends = [device, Cpu(), Reference()]
    options = LoadOptions(dtype="fp32")
    ours = Model(demo.checkpoint, options, backends=backends)
    answer = ours.answer(SHAPES, "How many shapes are there?")
    assert answer.text == demo.answer(SHAPES, "How many shapes are there?").text
    text = str(ours.warmup_report)
    assert "on mps" in text and "WARNING" not in text and "not tried" not in text
    device.untried["moe"] = 400 << 20
    assert "not tried on mps, as operands are too large for that: moe (400.00 MiB)" in str(
        ours.warmup_report
    )
    assert text.count("flash attention, ") == text.count(": ON") == 2


def test_quantized_weights_are_dequantized_at_load(device: TorchDevice) -> None:
    stored = random_checkpoint("smolvlm-256m", "Q4_K_M")
    assert not device.blocks and all(b.blocks for b in (Cpu(), Reference()))
    plain = stored.without_blocks()
    for before, after in (
        (stored.text_weights, plain.text_weights),
        (stored.vision_weights, plain.vision_weights),
    ):
        assert before and after
        kept = [name for name in before.stored if before.quant(name)]
        assert all(after.quant(name) is None for name in after.stored)
        assert len(after.dequantized) == len(before.dequantized) + len(kept)
        for name in kept:
            assert after.type_of(name, torch.bfloat16).dtype == torch.bfloat16
