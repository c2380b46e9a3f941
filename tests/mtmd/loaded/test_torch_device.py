"""A model on a device of which only torch knows what it can do, here in the place of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtmd.bench.shapes import random_checkpoint
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.backends.torch_device import TorchDevice
from mtmd.model import Model
from mtmd.options.load import LoadOptions

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
        saved = [name for name in before.stored if before.quant(name)]
        assert all(after.quant(name) is None for name in after.stored)
        assert len(after.dequantized) == len(before.dequantized) + len(saved)
        for name in saved:
            assert after.type_of(name, torch.bfloat16).dtype == torch.bfloat16


def test_a_cuda_device_without_triton_says_what_it_lacks_and_refuses(
    demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And answers as the CPU does, attention by torch's own."""
    lacks = "Triton, which compiles kernels for it, is not installed: pip install triton"
    device = TorchDevice("cuda:0", torch.device("cpu"), lacks)
    rejects = device.rejects
    refused = "torch on cuda:0: no such operator"
    monkeypatch.setattr(
        device, "rejects", lambda node: refused if node.op == "rope_table" else rejects(node)
    )
    ours = Model(demo.checkpoint, LoadOptions(dtype="fp32"), [device, Cpu(), Reference()])
    answer = ours.answer(SHAPES, "How many shapes are there?")
    assert answer.text == demo.answer(SHAPES, "How many shapes are there?").text
    report = ours.warmup_report
    assert report.lacks == lacks and report.asdict()["lacks"] == lacks
    text = str(report)
    assert "WARNING: cuda:0 runs by torch's own operators, launched one by one" in text
    assert f"  {lacks}\n" in text
    assert "x rope_table" in text and f"{refused}; runs on cpu" in text
    assert text.count("flash attention, ") == text.count(": ON") == 2
    assert demo.warmup_report.lacks is None and "WARNING" not in str(demo.warmup_report)
