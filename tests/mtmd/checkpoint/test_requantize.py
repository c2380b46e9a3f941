"""Weights quantized at load: the same as those of a file of that type, in less memory, and named in
receipt and report.
"""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from mtmd import fit, load
from mtmd.base.errors import OptionError
from mtmd.checkpoint.facts import facts_of
from mtmd.checkpoint.requantize import with_weights
from mtmd.kernels.cpu.quantize import quantize
from mtmd.kernels.quantization.blocks import dequantize
from mtmd.options.load import LoadOptions

TURN = [{"role": "user", "content": "hello"}]


@pytest.fixture
def checkpoint(demo):
    return demo.checkpoint


def test_tensors_are_quantized_when_they_are_read(checkpoint):
    made = with_weights(checkpoint, "Q8_0")
    name = "blk.0.ffn_up.weight"
    values = checkpoint.text_weights.read(name, torch.float32)
    assert made.text_weights.quant(name) == "Q8_0"
    assert torch.equal(made.text_weights.read(name, torch.float32), quantize(values, "Q8_0"))
    norm = "blk.0.attn_norm.weight"
    assert torch.equal(
        made.text_weights.read(norm, torch.float32),
        checkpoint.text_weights.read(norm, torch.float32),
    )
    assert made.weight_bytes < checkpoint.weight_bytes
    assert facts_of(made).weight_type == "Q8_0"
    again = with_weights(made, "Q4_0")
    rows = again.text_weights.read(name, torch.float32)
    assert torch.equal(rows, quantize(dequantize(quantize(values, "Q8_0"), "Q8_0"), "Q4_0"))
    assert 1e-3 < again.text_weights.file.nmse < 2e-2
    assert with_weights(checkpoint, None) is checkpoint


def test_an_answer_says_what_the_weights_were_quantized_to():
    with closing(load("demo", weights="q8_0")) as model:
        *_, last = model.stream(TURN, max_tokens=2)
        (note,) = last.answer.receipt.model_notes
        assert note.startswith("the decoder's weights, stored as") and note.endswith("to Q8_0")
        assert note in str(model.warmup_report)


def test_memory_is_predicted_for_the_quantized_weights():
    wide, narrow = (fit("demo", memory="1GiB", weights=w) for w in ("F32", "Q4_0"))
    assert narrow.layouts[0].memories[0].weights < wide.layouts[0].memories[0].weights


def test_types_that_are_not_known_are_refused_by_name():
    assert LoadOptions(weights="q4_k").weights == "Q4_K_M"
    with pytest.raises(OptionError, match=r"weights: found 'Q9', expected one of F32, .*Q4_K_M"):
        LoadOptions(weights="Q9")
