"""Quantized checkpoints of four families: the greedy tokens of transformers, in fp32 on the
dequantized weights, have to come out of the files that hold codes and scales.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from common import Oracle, literal, picture
from gemma3 import gemma3
from llava import llava
from published import published
from quantized_files import FORMATS
from qwen2_vl import qwen2_5_vl
from qwen3_5 import TEXT as QWEN3_5
from qwen3_5 import qwen3_5
from qwen3_vl import qwen3_vl
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import FineGrainedFP8Config

from mtmd import Finished, load
from mtmd.kernels.checkpoint.open_weights import QuantizedWeights

# Widths of whole blocks, so that weights can be kept as they are stored.
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
ROTARY = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
FAMILIES: dict[str, Callable[[Path], Oracle]] = {
    "gemma3": lambda f: gemma3(f, text=WIDE | WINDOWS),
    "llava": lambda f: llava(f, text=WIDE),
    "qwen2_5_vl": lambda f: qwen2_5_vl(f, text=WIDE | {"rope_parameters": ROTARY}),
    "qwen3_5_moe": lambda f: qwen3_5(
        f,
        seed=2,  # no near tie between tokens, in any of the formats
        experts=True,
        text=WIDE
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": QWEN3_5["rope_parameters"] | {"mrope_section": [2, 1, 1]},
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 128,  # as published: whole blocks are moved
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
    ),
}
LEFT = ("embed_tokens", "lm_head", "norm", "conv1d", "gate.weight", "in_proj_a", "in_proj_b")
# What the tower of one format is quantized in, too: rows there are no whole blocks.
TOWER = "fp8-row"


@pytest.fixture(scope="module")
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param) / "model")


def quantized(folder: Path, name: str) -> tuple[Path, Path]:
    """The checkpoint with its decoder's weights in a format, and with the values of these."""
    format = FORMATS[name]
    stored: dict[str, Tensor] = {}
    plain = load_file(folder / "model.safetensors")
    for key, weight in plain.items():
        tower = "vis" in key
        text = "layers." in key and not tower and not any(left in key for left in LEFT)
        if weight.dim() == 3 and text and "experts" in key:
            plain[key] = torch.stack(experts(stored, key, weight, name))
        elif weight.dim() == 2 and (text or (tower and name == TOWER and "proj." in key)):
            held, plain[key] = format.quantize(weight)
            base = key.removesuffix("weight")
            stored |= {f"{base}{part}": tensor.contiguous() for part, tensor in held.items()}
        else:
            stored[key] = weight
    return write(folder, f"{name}-stored", stored, format.settings), write(
        folder, f"{name}-values", {key: value.contiguous() for key, value in plain.items()}
    )


def experts(stored: dict[str, Tensor], key: str, weight: Tensor, name: str) -> list[Tensor]:
    """Each expert by itself, as quantizers write them; the values of all."""
    base = key.rpartition(".")[0]
    parts = {"gate_proj": 0, "up_proj": 1} if "gate_up" in key else {"down_proj": 0}
    result = []
    for number, expert in enumerate(weight):
        values = []
        for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
            held, value = FORMATS[name].quantize(rows.contiguous())
            values.append(value)
            stored |= {f"{base}.{number}.{part}.{n}": t.contiguous() for n, t in held.items()}
        result.append(torch.cat(values))
    return result


def write(
    folder: Path, name: str, tensors: dict[str, Tensor], settings: dict[str, Any] | None = None
) -> Path:
    copy = folder.with_name(name)
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    if settings is not None:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return copy


NAMES = ("fp8", "fp8-row", "awq", "gptq", "int4", "int8-bytes", "nvfp4", "mxfp4")
MORE = ("nf4-nested", "bnb-int8", "mlx", "mlx-8")


# Experts in every format; of the others, whose weights are read alike, one for each format in turn
DENSE = [family for family in FAMILIES if family != "qwen3_5_moe"]
PAIRS = [("qwen3_5_moe", name) for name in (*NAMES, *MORE)] + sorted(
    {(family, name) for family, name in zip(cycle(DENSE), (*NAMES, *MORE), strict=False)}
    | {(family, TOWER) for family in DENSE}
)


@pytest.mark.parametrize(("oracle", "name"), PAIRS, indirect=["oracle"])
def test_greedy_tokens(oracle: Oracle, name: str) -> None:
    same_tokens(oracle, *quantized(oracle.folder, name), name)


@pytest.mark.parametrize("name", ["gptq-order", "int4-order"])
@pytest.mark.parametrize("oracle", ["qwen2_5_vl"], indirect=True)
def test_columns_in_an_order_of_their_own(oracle: Oracle, name: str) -> None:
    same_tokens(oracle, *quantized(oracle.folder, name), name)


@pytest.mark.parametrize("oracle", ["qwen2_5_vl", "qwen3_5_moe"], indirect=True)
def test_values_of_fp8_as_transformers_reads_them(oracle: Oracle) -> None:
    """Which takes the file of codes itself, with `dequantize`."""
    stored, values = quantized(oracle.folder, "fp8")
    config = FineGrainedFP8Config(dequantize=True, weight_block_size=(128, 128))
    read = type(oracle.model).from_pretrained(
        stored, quantization_config=config, dtype=torch.float32
    )
    expected = type(oracle.model).from_pretrained(values, dtype=torch.float32).state_dict()
    original = oracle.model.state_dict()
    changed = 0
    for name, weight in read.state_dict().items():
        assert torch.equal(weight.float(), expected[name]), name
        changed += not torch.equal(weight.float(), original[name])
    assert changed >= 10


def test_stacked_experts_as_published(tmp_path: Path) -> None:
    """Qwen3-VL's experts are [E, in, out], and so are the blocks of their FP8 files."""
    rotary = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5]}
    text = WIDE | {
        "hidden_size": 192,
        "moe_intermediate_size": 128,
        "rope_parameters": rotary | {"mrope_interleaved": True},
    }
    oracle = published(lambda f: qwen3_vl(f, experts=True, text=text), transposed=True)(
        tmp_path / "model"
    )
    stored, values = dict[str, Tensor](), load_file(oracle.folder / "model.safetensors")
    for key, weight in values.items():
        stored[key] = weight
        if ".experts." in key:
            made = [FORMATS["fp8"].quantize(expert) for expert in weight]
            stored[key] = torch.stack([held["weight"] for held, _ in made])
            scales = [held["weight_scale_inv"] for held, _ in made]
            stored[f"{key}_scale_inv"] = torch.stack(scales)
            # transformers 5 has rows of outputs
            values[key] = torch.stack([value for _, value in made]).transpose(1, 2).contiguous()
    same_tokens(
        oracle,
        write(oracle.folder, "stored", stored, FORMATS["fp8"].settings),
        write(oracle.folder, "values", values),
        "fp8",
    )


def same_tokens(oracle: Oracle, stored: Path, values: Path, name: str) -> None:
    """Greedy tokens of transformers with the values, by the weights as they are stored."""
    model = load(stored, device="cpu", dtype="fp32")
    assert name == TOWER or not model.warmup_report.dequantized
    file = model.checkpoint.text_weights.file
    assert isinstance(file, QuantizedWeights) and file.quantized == FORMATS[name].label
    pixels = picture(5, 60, 44)
    text = {"type": "text", "text": "Describe the image."}
    asked = [{"role": "user", "content": [{"type": "image", "image": pixels}, text]}]
    *_, last = model.stream(asked, max_tokens=32, ignore_eos=True)
    assert isinstance(last, Finished)
    witness = type(oracle.model).from_pretrained(values, dtype=torch.float32)
    witness.generation_config.eos_token_id = None
    expected = replace(oracle, model=literal(witness))
    inputs = expected.inputs([{"role": "user", "content": [{"type": "image"}, text]}], [pixels])
    assert list(last.answer.prompt_token_ids) == expected.prompt_ids(inputs)
    assert list(last.answer.output_token_ids) == expected.greedy(inputs, 32)
