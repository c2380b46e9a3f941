"""Random weights: valid blocks of the right size, the types that llama-quantize chooses, and logits
that are numbers for every shape in the table.
"""

import json
import re
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import torch

from mtmd.base.errors import ModelError, OptionError
from mtmd.bench.random_weights import BANK, RandomFile, _blocks, plain_kinds, text_kinds
from mtmd.bench.shapes import random_checkpoint, read_shape, shape_names
from mtmd.kernels.cpu.quantize import ENCODERS
from mtmd.kernels.quantization.blocks import BLOCKS
from mtmd.llm.engine.spans import Span
from mtmd.model import Model
from mtmd.options.load import LoadOptions


@pytest.mark.parametrize("kind", sorted(ENCODERS))
@pytest.mark.parametrize("spread", [0.01, 0.125])
def test_blocks_are_numbers_of_the_size_asked_for(kind, spread):
    values = BLOCKS[kind].decode(_blocks(kind, spread))
    assert values.shape == (BANK, BLOCKS[kind].values)
    assert bool(torch.isfinite(values).all())
    assert float(values.std()) == pytest.approx(spread, rel=0.05)
    assert abs(float(values.mean())) < spread / 4


def kinds_of(shape, weights):
    file = random_checkpoint(shape, weights).text_weights.file
    return {name: file.kind(name) for name in file.names()}


def test_the_types_of_a_mixture_are_those_of_llama_quantize():
    """Counts of a file that it wrote of this shape, its table of tokens not tied here."""
    result = kinds_of("smolvlm-256m", "Q4_K_M")
    assert Counter(result.values()) == {"Q5_0": 167, "F32": 61, "Q4_K": 16, "Q8_0": 15, "Q6_K": 14}
    assert result["blk.5.attn_v.weight"] == "Q8_0" and result["blk.3.ffn_down.weight"] == "Q4_K"
    plain = kinds_of("smolvlm-256m", "Q4_0")
    assert Counter(plain.values()) == {"Q4_0": 211, "F32": 61, "Q8_0": 1}


@pytest.mark.parametrize("weights", ["BF16", "F32", "Q8_0", "Q4_0", "Q4_K_M", "Q6_K", "IQ4_XS"])
def test_a_model_of_any_type_gives_numbers(shape, weights):
    model = Model(random_checkpoint(str(shape), weights), LoadOptions(context=64))
    logits = model.runner.prefill([Span((1, 2, 3))], model.runner.new_cache())
    assert bool(torch.isfinite(logits).all()) and 0.05 < float(logits.float().std()) < 50
    *_, last = model.stream([{"role": "user", "content": "hello"}], max_tokens=3, ignore_eos=True)
    assert last.answer.receipt.output_tokens == 3


@pytest.mark.parametrize("name", shape_names())
def test_every_shape_in_the_table_gives_numbers(name, tmp_path):
    """With three layers, as many as pictures are added to, few experts and a small table of tokens."""
    _, config, image = read_shape(name)
    values = json.loads(json.dumps(config.values))
    text = values.get("text_config", values)
    text |= {"num_hidden_layers": 3, "vocab_size": 1024, "max_position_embeddings": 4096}
    if "num_experts" in text:
        text["num_experts"] = 16
    if "layer_types" in text:
        text["layer_types"] = ["conv", "full_attention", "conv"]
    (tmp_path / "config.json").write_text(json.dumps(text))
    if text is values or "model_type" in text:
        checkpoint = random_checkpoint(str(tmp_path), "Q4_0")
        with closing(Model(checkpoint, LoadOptions(context=64))) as model:
            logits = model.runner.prefill([Span((1, 2, 3))], model.runner.new_cache())
        assert bool(torch.isfinite(logits).all())
    whole = random_checkpoint(name, "Q4_0")
    assert whole.weight_bytes > 1e8 and (whole.vision is None) == (not image.values)


def test_equal_shapes_are_equal_models_and_tensors_differ(shape):
    first, again = (random_checkpoint(str(shape), "BF16").text_weights for _ in range(2))
    a, b = "blk.0.attn_q.weight", "blk.1.attn_q.weight"
    assert torch.equal(first.read(a, torch.float32), again.read(a, torch.float32))
    assert not torch.equal(first.read(a, torch.float32), first.read(b, torch.float32))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("google/gemma-3-12b-it", "gemma-3-12b"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl-7b"),
        ("llava-hf/llava-onevision-qwen2-0.5b-ov-hf", "llava-onevision-0.5b"),
        ("zai-org/GLM-4.1V-9B-Thinking", "glm-4.1v-9b"),
        ("SmolVLM-256M", "smolvlm-256m"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-VL-30B-A3B-Thinking", "qwen3-vl-30b-a3b"),
    ],
)
def test_names_of_the_hub_are_known(name, expected):
    actual, config, _ = read_shape(name)
    assert actual == expected and config.values == read_shape(expected)[1].values


def test_every_model_with_measured_sizes_in_the_docs_is_a_shape():
    table = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    names = re.findall(r"^\| `([\w.-]+/[\w.-]+)` \| [\d.]+ GB", table, re.M)
    assert len(names) > 10
    for name in names:
        read_shape(name)


def test_what_is_not_known_is_refused_with_the_choices(shape):
    with pytest.raises(OptionError, match=r"did you mean 'qwen3-vl-8b'\?"):
        read_shape("Qwen/Qwen3-VL-9B-Instruct")
    with pytest.raises(OptionError, match="expected a config"):
        read_shape("Qwen/Qwen2-7B-Instruct")
    with pytest.raises(OptionError, match=r"expected one of F32, F16, BF16, .*Q4_K_M"):
        text_kinds("Q9", {})
    with pytest.raises(OptionError, match=r"expected a config\.json, .* or one of .*smolvlm-256m"):
        random_checkpoint("no-such-model", "BF16")
    config = json.loads(shape.read_text())
    config["text_config"]["vocab_size"] = 100
    shape.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="vocab_size is 100, expected at least 512"):
        random_checkpoint(str(shape), "BF16")
    assert RandomFile({}, plain_kinds("BF16")).bytes == 0


def test_the_warm_up_takes_a_shape_in_place_of_a_model(shape, mtmd):
    ran = mtmd("warmup", "--random-weights", shape, "--weights", "Q4_0", "--no-run")
    assert ran.code == 0 and "random Q4_0" in ran.out and "decoder" in ran.out, ran
