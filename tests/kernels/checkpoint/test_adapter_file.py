"""Adapters that are wrong, cut or hostile: one line, from headers alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from adapters import DEMO, write_adapter
from safetensors.torch import load_file, save_file

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.adapter_file import open_adapter

Q = next(iter(DEMO))
A = f"base_model.model.{Q}.lora_A.weight"


def test_scales(tmp_path: Path) -> None:
    """alpha over the rank or its root, by the first pattern that a module's name ends with."""
    patterns = {"rank_pattern": {}, "alpha_pattern": {"self_attn.q_proj": 6, "up_proj": 10}}
    changes = open_adapter(write_adapter(tmp_path, lora_alpha=8, **patterns)).changes
    assert [c.scale for c in changes.values()] == [10 / 4, 6 / 4]
    changes = open_adapter(write_adapter(tmp_path, lora_alpha=8, use_rslora=True)).changes
    assert {c.scale for c in changes.values()} == {4.0}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
        ({"bias": "all"}, "bias is 'all', expected 'none'; merge the adapter"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is .*merge the adapter"),
        ({"init_lora_weights": "pissa_niter_4"}, "has changed the base model"),
        ({"use_dora": True}, "no magnitude vector, but use_dora is True"),
        ({"r": 8}, "matrices of ranks 4 and 4, expected 8 of both"),
        ({"r": 1 << 30}, "r is 1073741824, expected an integer from 1"),
        ({"lora_alpha": 1e300}, "lora_alpha is 1e"),
        ({"lora_alpha": "x"}, "lora_alpha is 'x', expected a number"),
        ({"rank_pattern": {"(a+)+$": 4}}, "is no name of a module"),
        ({"rank_pattern": []}, "found list, expected an object"),
    ],
)
def test_settings(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    refused(write_adapter(tmp_path, **config), words)


def refused(path: Path, words: str) -> None:
    with pytest.raises(ModelError, match=words) as raised:
        open_adapter(path)
    assert "\n" not in str(raised.value)


def test_tensors(tmp_path: Path) -> None:
    file = write_adapter(tmp_path) / "adapter_model.safetensors"
    tensors = load_file(file)
    for change, words in (
        ({A: None}, "has one of its two matrices"),
        ({A: torch.zeros(5, 256)}, "ranks 5 and 4, expected 4 of both"),
        ({A: torch.zeros(4, 16, 16)}, "expected the matrix of a linear layer"),
        ({A: torch.zeros(4, 256, dtype=torch.int8)}, "is I8"),
        ({"base_model.model.lm_head.weight": torch.zeros(1)}, "neither lora_A nor lora_B"),
        (dict.fromkeys(tensors), "has no tensors"),
    ):
        changed = {k: v for k, v in (tensors | change).items() if v is not None}
        save_file(changed, file)
        refused(tmp_path, words)
    file.write_bytes(file.read_bytes()[:-8] or b"x")
    save_file(tensors, file)
    file.write_bytes(file.read_bytes()[:-8])
    refused(tmp_path, "cut off")


def test_places(tmp_path: Path) -> None:
    refused(tmp_path, "found no adapter_config.json")
    refused(tmp_path / "nothing", "found no such file or folder")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    refused(tmp_path, r"has no adapter_model.safetensors \(found none\)")
    (tmp_path / "adapter_model.bin").write_bytes(b"PK\3\4")
    refused(tmp_path, "found adapter_model.bin, a pickle, which can run code")
    refused(tmp_path / "adapter_model.bin", "is a pickle")


def test_gguf(tmp_path: Path) -> None:
    def write(kind: str, alpha: float | str, **tensors: torch.Tensor) -> Path:
        writer = gguf.GGUFWriter(path := tmp_path / "a.gguf", "llama")
        writer.add_type(kind)
        writer.add_string("adapter.type", "lora")
        writer.add_key_value(
            "adapter.lora.alpha",
            alpha,
            gguf.GGUFValueType.STRING if isinstance(alpha, str) else gguf.GGUFValueType.FLOAT32,
        )
        for name, tensor in tensors.items():
            writer.add_tensor(f"blk.0.attn_q.weight.{name}", tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    a, b = torch.zeros(2, 8), torch.zeros(6, 2)
    (change,) = open_adapter(write("adapter", 6.0, lora_a=a, lora_b=b)).changes.values()
    assert (change.shape, change.rank, change.scale) == ((6, 8), 2, 3.0)
    refused(write("model", 6.0, lora_a=a, lora_b=b), "general.type 'model'")
    refused(write("adapter", "6", lora_a=a, lora_b=b), "adapter.lora.alpha is '6'")
    refused(write("adapter", 6.0, lora_a=a), "one of its two")
    refused(write("adapter", 6.0, lora_a=a, lora_b=b, x=a), "neither lora_a nor lora_b")
    path = write("adapter", 6.0, lora_a=a, lora_b=torch.zeros(6, 3))
    refused(path, re.escape("ranks 2 and 3"))
