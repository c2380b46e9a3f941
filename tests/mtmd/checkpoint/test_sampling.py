"""A checkpoint's recommended sampling: read within limits, everything else named, nothing refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import checkpoints as make
import pytest
import torch

from mtmd.checkpoint.sampling import MAX_NAMED, of_config, of_generation_config, of_gguf
from mtmd.loading import DEMO_MODEL, load

FILE = "generation_config.json"
QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}


@pytest.mark.parametrize(
    ("values", "used"),
    [
        (QWEN, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}),
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, {"temperature": 1, "top_k": 64, "top_p": 0.95}),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": True}, {"temperature": 1}),
        ({"do_sample": False, "repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"do_sample": True, "temperature": 1, "top_k": -1, "top_p": 1.0}, {"temperature": 1}),
        ({"do_sample": True, "top_k": 40.0}, {"temperature": 1, "top_k": 40}),
        ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
        ({"eos_token_id": [1, 2], "transformers_version": "5"}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_used(values: dict[str, Any], used: dict[str, float]) -> None:
    result = of_generation_config(values, FILE)
    assert result.values == used and result.unused == ()


def test_the_rest_is_named() -> None:
    values = QWEN | {
        "encoder_no_repeat_ngram_size": 3,
        "num_beams": 4,
        "typical_p": 1.0,
        "max_new_tokens": 2048,
        "suppress_tokens": [],
        "stop_strings": None,
        "exotic\x1b[31m": {"a": 1},
    }
    result = of_generation_config(values, FILE)
    assert result.unused == (
        "encoder_no_repeat_ngram_size 3 (not supported)",
        "num_beams 4 (not supported)",
        'exotic?[31m {"a": 1} (not supported)',
    )
    assert result.length == ("max_new_tokens 2048",)
    many = of_generation_config({f"x{n}": 1 for n in range(1000)}, FILE)
    assert len(many.unused) == MAX_NAMED + 1 and many.unused[-1] == "and 984 more"


def test_greedy_leaves_what_draws_aside() -> None:
    result = of_generation_config(QWEN | {"do_sample": False}, FILE)
    assert result.values == {}
    assert result.unused == ("temperature 0.7, top_k 20, top_p 0.8 (do_sample is false)",)


@pytest.mark.parametrize(
    ("name", "value", "reported"),
    [
        ("temperature", "hot", "temperature 'hot' (expected a number from 0 (greedy) to 100)"),
        ("temperature", -1, "temperature -1 (expected a number from 0 (greedy) to 100)"),
        ("temperature", float("nan"), "temperature nan (expected a number from 0 (greedy) to 100)"),
        ("top_k", 1 << 40, f"top_k {1 << 40} (expected an integer from 0 to {(1 << 31) - 1})"),
        ("top_p", True, "top_p true (expected a number from 0 (the best token alone) to 1 (off))"),
        ("repetition_penalty", 0, "repetition_penalty 0 (expected a number from 0.01 to 100)"),
        ("do_sample", "yes", "do_sample 'yes' (expected true or false)"),
        ("min_p", [0.1], "min_p [0.1] (expected a number from 0 to 1)"),
    ],
)
def test_broken_values_are_warnings(name: str, value: Any, reported: str) -> None:
    result = of_generation_config({name: value}, FILE)
    assert result.unused == (reported,) and name not in result.values


def test_a_config_of_old() -> None:
    """Where generation_config.json is missing, transformers reads its names in config.json."""
    result = of_config({"repetition_penalty": 1.2, "hidden_size": 64, "top_k": 50, "num_beams": 1})
    assert (result.source, result.values, result.unused) == (
        "config.json",
        {"repetition_penalty": 1.2},
        (),
    )


def test_keys_of_a_gguf() -> None:
    keys = {
        "general.name": "x",
        "general.sampling.temp": 0.699999988079071,
        "general.sampling.top_p": 0.949999988079071,
        "general.sampling.top_k": 64,
        "general.sampling.penalty_repeat": 1.1,
        "general.sampling.penalty_last_n": 64,
        "general.sampling.mirostat": 0,
        "general.sampling.mirostat_tau": 5.0,
        "general.sampling.xtc_probability": 0.5,
        "general.sampling.xtc_threshold": 0.1,
        "general.sampling.sequence": "top_k;temperature",
    }
    result = of_gguf(keys, "m.gguf")
    assert result.source == "general.sampling.* of m.gguf"
    assert result.values == {
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 64,
        "repetition_penalty": 1.1,
    }
    assert result.unused == (
        "penalty_last_n 64 (the penalty counts all of the text)",
        "xtc_probability 0.5 (not supported)",
        "xtc_threshold 0.1 (not supported)",
        "sequence 'top_k;temperature' (the order here is temperature, top_k, top_p, min_p)",
    )


def test_a_gguf_without_a_temperature_draws_at_one() -> None:
    """Its converter leaves out a temperature of 1, and do_sample."""
    result = of_gguf({"general.sampling.top_k": 64, "general.sampling.top_p": 0.95}, "m.gguf")
    assert result.values == {"temperature": 1, "top_k": 64, "top_p": 0.95}
    off = {"general.sampling.penalty_repeat": 1.3, "general.sampling.penalty_last_n": 0}
    assert of_gguf(off, "m.gguf").values == {}, "it counts no token"


def test_no_other_key_of_a_gguf_is_looked_up() -> None:
    """Arrays are parsed each time, and a vocabulary has 262,144 tokens."""

    class Keys(dict[str, object]):
        def __getitem__(self, key: str) -> object:
            looked_up.append(key)
            return super().__getitem__(key)

        def items(self) -> Any:
            return ((key, self[key]) for key in self)

    looked_up: list[str] = []
    keys = Keys({"tokenizer.ggml.tokens": ["a"], "general.sampling.temp": 0.5})
    assert of_gguf(keys, "m.gguf").values == {"temperature": 0.5}
    assert looked_up == ["general.sampling.temp"]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with settings of its own."""
    folder = tmp_path_factory.mktemp("sampled") / "demo"
    shutil.copytree(DEMO_MODEL, folder)
    saved = json.loads((folder / FILE).read_text())
    chosen = QWEN | {"repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 3}
    (folder / FILE).write_text(json.dumps(saved | chosen))
    return folder


def test_who_uses_them(sampled: Path, one: Path) -> None:
    """A conversation all, an answer the penalty alone; what a request says comes first."""
    with load(sampled) as model:
        assert model.sampling.values == {
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.8,
            "repetition_penalty": 1.3,
        }
        receipts = {
            "answer": model.answer(one, "How many?", max_tokens=2).receipt,
            "chat": model.chat().ask("How many?", one, max_tokens=2).receipt,
            "greedy": model.chat(temperature=0).ask("How many?", one, max_tokens=2).receipt,
            "warmer": model.chat().ask("How many?", one, temperature=0.9, max_tokens=2).receipt,
            "off": model.answer(one, "How many?", max_tokens=2, sampling="off").receipt,
        }
    used = {
        name: {n: (s.value, s.source) for n, s in receipt.sampling.items()}
        for name, receipt in receipts.items()
    }
    penalty = {"repetition_penalty": (1.3, FILE)}
    filters = {"top_k": (20, FILE), "top_p": (0.8, FILE)}
    assert used == {
        "answer": {"temperature": (0, "default")} | penalty,
        "chat": {"temperature": (0.7, FILE)} | filters | penalty,
        "greedy": {"temperature": (0, "request")} | penalty,
        "warmer": {"temperature": (0.9, "request")} | filters | penalty,
        "off": {"temperature": (0, "default")},
    }
    assert (receipts["chat"].seed is None, receipts["greedy"].seed is None) == (False, True)
    assert "temperature 0.7, top_k 20, top_p 0.8, repetition_penalty 1.3 from " + FILE in str(
        receipts["chat"]
    )
    assert "not applied: encoder_no_repeat_ngram_size 3 (not supported)" in str(receipts["answer"])
    assert receipts["off"].sampling_text == ""
    assert all(receipt.warnings == () for receipt in receipts.values()), "nobody gave a top_k"


def test_info_shows_them(sampled: Path, mtmd: Any) -> None:
    reported = mtmd("info", sampled).out
    assert "temperature 0.7, top_k 20, top_p 0.8, repetition_penalty 1.3" in reported
    assert "not applied  encoder_no_repeat_ngram_size 3 (not supported)" in reported
    result = json.loads(mtmd("info", sampled, "--json").out)["sampling"]
    assert result["source"] == FILE and result["values"]["temperature"] == 0.7


def test_greedy_equals_transformers_with_the_same_file(tmp_path: Path) -> None:
    """Which takes the penalty of generation_config.json where it is greedy, too."""
    from transformers import GenerationConfig

    oracle = make.gemma3_text(tmp_path)
    path = tmp_path / FILE
    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | {"repetition_penalty": 1.4}))
    oracle.generation_config = GenerationConfig.from_pretrained(tmp_path)
    with load(tmp_path, dtype="fp32", device="cpu") as model:
        actual = model.answer(prompt="Describe the image.", max_tokens=24, ignore_eos=True)
        plain = model.answer(
            prompt="Describe the image.", max_tokens=24, ignore_eos=True, sampling="off"
        )
    ids = torch.tensor([actual.prompt_token_ids])
    expected = oracle.generate(ids, max_new_tokens=24, eos_token_id=None)[0, ids.shape[1] :]
    assert list(actual.output_token_ids) == expected.tolist()
    assert actual.output_token_ids != plain.output_token_ids, "the penalty changes nothing"


def test_a_batch_goes_on_with_the_settings_of_its_rows(
    sampled: Path, one: Path, mtmd: Any, tmp_path: Path
) -> None:
    out, other = tmp_path / "rows.jsonl", tmp_path / "other.png"
    shutil.copy(one, other)
    command = ("-p", "How many?", "-m", sampled, "--out", out, "--max-tokens", 2)
    assert mtmd("batch", one, *command).code == 0
    requested = tmp_path / "rows.jsonl.run.json"
    saved = json.loads(requested.read_text())
    assert (saved["version"], saved["sampling"]) == (2, {"repetition_penalty": 1.3})
    line = mtmd("batch", one, other, *command, "--sampling", "off", "--resume").refused()
    assert "found rows with sampling {'repetition_penalty': 1.3}, now it is {}" in line
    del saved["sampling"]
    requested.write_text(json.dumps(saved | {"version": 1}))
    line = mtmd("batch", one, other, *command, "--resume").refused()
    assert "did not use the model's own settings (repetition_penalty 1.3)" in line
    assert mtmd("batch", one, other, *command, "--sampling", "off", "--resume").code == 0
    assert out.read_text().count("\n") == 2
