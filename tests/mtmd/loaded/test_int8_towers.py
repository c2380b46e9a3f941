"""Encoders whose products take activations in 8 bits: their weights, embeddings, memory, and what is
said of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtmd.base.errors import OptionError
from mtmd.bench.shapes import random_checkpoint
from mtmd.checkpoint.requantize import with_int8_towers
from mtmd.checkpoint.requantized import Requantized
from mtmd.clip.warmup import check_encoder
from mtmd.inspect.fit import fit
from mtmd.kernels.cpu.native.compile import host
from mtmd.kernels.cpu.tiled import octets
from mtmd.kernels.cpu.tiled.cpu import host_form
from mtmd.kernels.plan import int8_products
from mtmd.kernels.quantization.blocks import dequantize
from mtmd.kernels.report.check import PACKED
from mtmd.model import Model
from mtmd.options.load import LoadOptions

HERE = octets.why_not(host_form("f32"), host()) is None
needs_it = pytest.mark.skipif(not HERE, reason="no product is faster in 8 bits on this CPU")
LAYERS = 2
WIDE, WHOLE = 1072, 1088  # numbers of the longest rows, and of whole blocks of them
OTHERS = 4 * 64 * 64 + 64 * WIDE  # of a layer
SAVED = LAYERS * (4 * (OTHERS + 64 * WIDE) - (OTHERS + 64 * WHOLE) * 34 // 32)  # bytes, in fp32
CONFIG = {
    "model_type": "smolvlm",
    "scale_factor": 2,
    "text_config": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 600,
        "max_position_embeddings": 512,
    },
    "vision_config": {
        "model_type": "smolvlm_vision",
        "hidden_size": 64,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "image_size": 128,
        "patch_size": 16,
    },
}
IMAGE = {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 128}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = tmp_path_factory.mktemp("int8")
    (result / "config.json").write_text(json.dumps(CONFIG))
    (result / "preprocessor_config.json").write_text(json.dumps(IMAGE))
    return result


def loaded(folder: Path, **chosen: Any) -> Model:
    options = LoadOptions(**{"device": "cpu", "dtype": "fp32", "context": 256, **chosen})
    return Model(random_checkpoint(str(folder), "BF16"), options)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Model]:
    result = loaded(folder)
    yield result
    result.close()


@pytest.fixture(scope="module")
def rounded(folder: Path) -> Iterator[Model]:
    result = loaded(folder, activations="int8")
    yield result
    result.close()


def embeddings(model: Model, batch: int = 2) -> torch.Tensor:
    assert model.encoder is not None
    tile = model.encoder.family.resolution.tile_type().shape
    pixels = torch.randn(batch, *tile, generator=torch.Generator().manual_seed(1))
    return model.encoder.run(pixels.to(model.dtype)).double()


@needs_it
def test_embeddings_are_near_those_of_fp32(plain: Model, rounded: Model) -> None:
    """Each product loses about 1e-4 where x has 7 bits, and half of that where it has 8."""
    exact, result = embeddings(plain), embeddings(rounded)
    error = float((exact - result).square().sum() / exact.square().sum())
    assert 1e-6 < error < 1e-2


@needs_it
def test_what_rounds_is_said(rounded: Model) -> None:
    """All products of the layers: four of attention and two of the rest of each."""
    facts = {one.graph: one for one in rounded.warmup_report.activations}
    assert facts["encoder"].products == 6 * LAYERS == facts["encoder"].all_products - 1
    assert facts["encoder"].quantized == "Q8_0"
    assert facts["decoder"].products == 0 and facts["decoder"].quantized == ""
    report = " ".join(str(rounded.warmup_report).split())
    assert f"activations: int8 in {6 * LAYERS} of the encoder's" in report
    assert "plain weights quantized to Q8_0" in report
    checked = rounded.exclusively(lambda: check_encoder(rounded.encoder))
    assert not checked.failed
    errors = {op: error for op, _, error in checked.worst}
    assert errors["matmul, int8"] < checked.limits["matmul, int8"] == PACKED
    lines = str(replace(rounded.warmup_report, checks=(checked,)))
    assert ", at most 1e-07, of x as it is rounded\n" in lines
    picture = np.zeros((128, 128, 3), np.uint8)
    receipt = rounded.answer(picture, "What?", max_tokens=2, ignore_eos=True).receipt
    assert receipt.activations == "int8 (encoder)"
    assert ", activations: int8 (encoder); " in str(receipt)


@needs_it
def test_weights_take_a_byte_for_each_number(plain: Model, rounded: Model) -> None:
    """And 2 bytes for every 32."""

    def reported(model: Model) -> int:
        graphs = {(g.graph, g.label): g for g in model.warmup_report.graphs}
        return graphs["encoder", "warm-up"].weight_bytes["cpu"]

    assert reported(plain) - reported(rounded) == SAVED


def test_rows_are_filled_up_to_whole_blocks(folder: Path) -> None:
    """On every CPU: how weights are stored follows from the checkpoint."""
    before = random_checkpoint(str(folder), "BF16")
    source, weights = before.vision_weights, with_int8_towers(before).vision_weights
    assert source is not None and weights is not None
    file = weights.file
    assert isinstance(file, Requantized) and set(file.types.values()) == {"Q8_0"}
    quantized = [name for name in weights.shapes if weights.quant(name)]
    assert len(quantized) == 6 * LAYERS and quantized == [
        n for n in file.names() if n in file.types
    ]
    assert source.shapes["v.blk.1.ffn_down.weight"] == (64, WIDE)
    assert file.meta("v.blk.1.ffn_down.weight") == ((64, WHOLE), torch.uint8)
    assert file.stored_bytes("v.blk.1.ffn_down.weight") == 64 * WHOLE * 34 // 32
    assert file.read("v.blk.1.ffn_down.weight").shape == (64, WHOLE * 34 // 32)
    for name in ("v.blk.1.attn_q.weight", "v.blk.1.ffn_down.weight"):
        exact, rows = source.read(name, torch.float32), weights.read(name, torch.uint8)
        stored, width = dequantize(rows, "Q8_0"), exact.shape[1]
        lost = (stored[:, :width] - exact).square().mean() / exact.square().mean()
        assert 0 < float(lost) < 1e-4 and not stored[:, width:].any()


@needs_it
def test_fit_knows_the_memory(folder: Path) -> None:
    chosen = {"random_weights": str(folder), "dtype": "fp32", "context": 256}
    plain, rounded = (
        fit(**chosen, activations=kind).layouts[0].memories for kind in ("auto", "int8")
    )
    assert sum(m.encoder for m in plain) - sum(m.encoder for m in rounded) == SAVED


def test_blocks_of_a_file_stay_as_they_are(folder: Path) -> None:
    """Here those that were made before."""
    once = with_int8_towers(random_checkpoint(str(folder), "BF16"))
    twice = with_int8_towers(once)
    before, after = once.vision_weights, twice.vision_weights
    assert before is not None and after is not None
    assert isinstance(after.file, Requantized) and not after.file.types
    name = next(name for name in before.shapes if before.quant(name))
    assert after.quant(name) == before.quant(name)
    assert torch.equal(after.read(name, torch.uint8), before.read(name, torch.uint8))
    assert once.weight_bytes == twice.weight_bytes


def test_a_gpu_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"found the device .*, expected a CPU; leave"):
        fit(random_weights=str(folder), target="rtx4090", activations="int8")
    monkeypatch.setattr(int8_products, "host_form", lambda _: None)
    with pytest.raises(OptionError, match="neither AVX2 nor AVX-512 BW"):
        loaded(folder, activations="int8")
