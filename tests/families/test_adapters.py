"""LoRA adapters against PEFT: random ones, on random checkpoints, in fp32."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import peft
import pytest
import torch
from common import Oracle
from safetensors.torch import load_file
from test_against_transformers import conversations, requested

from mtmd.base.errors import ModelError
from mtmd.events import Answer, Finished
from mtmd.loading import load
from mtmd.service.ticket import Ticket

Build = Callable[[str, str], Oracle]
TOKENS = 16
TEXT = r".*(language_model|text_model|model)\.layers.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def adapter(oracle: Oracle, folder: Path, seed: int = 0, **config: Any) -> Oracle:
    """transformers' model with a random adapter, which is saved in `folder`."""
    settings = peft.LoraConfig(**{"r": 3, "lora_alpha": 5} | config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's use of transformers; of tied tables
        model = peft.get_peft_model(copy.deepcopy(oracle.model), settings)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            value = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(value * 0.6 * parameter.shape[-1] ** -0.5)
        if "magnitude" in name:
            parameter.data *= 1 + 0.3 * torch.rand(parameter.shape, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return replace(oracle, model=model.eval())


def theirs(oracle: Oracle, row: str) -> list[list[int]]:
    return [oracle.greedy(requested(oracle, m), TOKENS) for m in conversations(row)]


def answer_of(ticket: Ticket) -> Answer:
    """The end of it."""
    return next(e.answer for e in ticket if isinstance(e, Finished))


def ours(model: Any, row: str, *choices: Any) -> list[list[list[int]]]:
    """Answers to all conversations of a row, with each choice of adapters, all at once."""
    tickets = [
        [
            model.service.submit(m, max_tokens=TOKENS, ignore_eos=True, adapter=choice)
            for m in conversations(row)
        ]
        for choice in choices
    ]
    return [[list(answer_of(one).output_token_ids) for one in of] for of in tickets]


def as_gguf(folder: Path, file: Path, heads: dict[str, int]) -> None:
    """What llama.cpp's convert_lora_to_gguf.py makes of a folder for a Llama decoder: names and
    rows as its converter has those of weights, with the rotary pairs of `heads` side by side.
    """
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 8)
    config = json.loads((folder / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", config["lora_alpha"])
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        module, _, matrix = name.removesuffix(".weight").rpartition(".lora_")
        module = module.removeprefix("base_model.model.").replace("language_model.", "")
        if matrix == "B" and (count := heads.get(module[-6:])):
            tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        ours = names.get_name(f"{module}.weight", (".weight",))
        writer.add_tensor(f"{ours}.lora_{matrix.lower()}", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


LLAVA, QWEN, GEMMA, DELTA = (
    ("llava", "llava-next, mistral with a window"),
    ("qwen2_vl", "qwen2-vl, heads of 40 and 24"),
    ("gemma3", "head of 72"),
    ("qwen3_5", "dense"),
)
CASES = {
    # rotary pairs turned, ranks and scales by pattern
    LLAVA: {
        "target_modules": TEXT,
        "rank_pattern": {"q_proj": 5, "layers.1.mlp.up_proj": 2},
        "alpha_pattern": {"k_proj": 11},
        "use_rslora": True,
    },
    # the encoder, whose queries, keys and values are one matrix in files
    QWEN: {"target_modules": "all-linear"},
    # recurrent layers, whose heads lie in another order here
    DELTA: {"target_modules": "all-linear", "exclude_modules": r".*visual.*"},
    # a table that the decoder multiplies by its width's root
    GEMMA: {"target_modules": ["q_proj", "down_proj", "embed_tokens"]},
}


@pytest.mark.parametrize("case", CASES, ids=[row for row, _ in CASES])
def test_as_peft(build: Build, tmp_path: Path, case: tuple[str, str]) -> None:
    """Two adapters and none in the same batches, each as PEFT answers; one that is merged."""
    oracle, row = build(*case), case[0]
    adapted = [
        adapter(oracle, tmp_path / str(seed), seed=seed, r=2 + seed, **CASES[case])
        for seed in range(2)
    ]
    expected = [theirs(one, row) for one in (oracle, *adapted)]
    assert len({str(e) for e in expected}) == 3
    chosen = {"a": tmp_path / "0", "b": tmp_path / "1"}
    with load(oracle.folder, device="cpu", dtype="fp32", lora=chosen, parallel=9) as model:
        assert ours(model, row, None, "a", "b") == expected
    with load(oracle.folder, device="cpu", dtype="fp32", lora=tmp_path / "1") as model:
        assert model.checkpoint.adapters[0].merged
        assert ours(model, row, None) == expected[2:]


def test_gguf(build: Build, tmp_path: Path) -> None:
    """An adapter as llama.cpp's converter writes it is the one of PEFT."""
    case = (
        "llava",
        "llava 1.5, llama with 6 heads on 2 and llama3 rope, last layer with its class token, as published",
    )
    oracle = build(*case)
    expected = theirs(adapter(oracle, tmp_path / "peft", target_modules=TEXT), "llava")
    text = oracle.model.config.text_config
    heads = {"q_proj": text.num_attention_heads, "k_proj": text.num_key_value_heads}
    as_gguf(tmp_path / "peft", tmp_path / "a.gguf", heads)
    with load(oracle.folder, device="cpu", dtype="fp32", lora=tmp_path / "a.gguf") as model:
        assert ours(model, "llava", None) == [expected]


def test_experts(build: Build, tmp_path: Path) -> None:
    """Tables of experts, whose matrices PEFT nests."""
    oracle = build("qwen3_vl", "experts")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    expected = theirs(
        adapter(oracle, tmp_path / "a", target_modules=["q_proj"], target_parameters=names),
        "qwen3_vl",
    )
    with load(oracle.folder, device="cpu", dtype="fp32", lora=tmp_path / "a") as model:
        assert ours(model, "qwen3_vl", None) == [expected]
    with pytest.raises(ModelError, match="it is no product of rows with one matrix"):
        load(oracle.folder, device="cpu", lora={"a": tmp_path / "a"})


def test_dora(build: Build, tmp_path: Path) -> None:
    """Magnitudes are merged exactly; as products are computed they are refused."""
    oracle = build(*QWEN)
    expected = theirs(adapter(oracle, tmp_path / "a", use_dora=True, **CASES[QWEN]), QWEN[0])
    with load(oracle.folder, device="cpu", dtype="fp32", lora=tmp_path / "a") as model:
        assert ours(model, QWEN[0], None) == [expected]
    with pytest.raises(ModelError, match=r"it has magnitudes .* leave its name out"):
        load(oracle.folder, device="cpu", lora={"a": tmp_path / "a"})
