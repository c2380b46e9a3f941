"""Checkpoint folders: what opens, and that each thing that can be wrong with one is told in one
line, by command and in Python.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints as make
import pytest
import torch
from safetensors.torch import load_file, save_file

from mtmd.base.errors import ModelError, MtmdError, PromptError
from mtmd.checkpoint.open import open_checkpoint
from mtmd.events import Finished
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.family import TextFamily, text_family
from mtmd.loading import DEMO_MODEL, load

Change = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo model to spoil."""
    copy = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return copy


def drop(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: str | bytes) -> Change:
    return lambda folder: (
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        and None
    )


def edit(file: str, *path: str, **values: Any) -> Change:
    """Set values of the JSON object at `path`; an ellipsis takes the key out."""

    def change(folder: Path) -> None:
        whole = json.loads((folder / file).read_text())
        part = whole
        for key in path:
            part = part[key]
        for key, value in values.items():
            part.pop(key, None) if value is ... else part.update({key: value})
        (folder / file).write_text(json.dumps(whole))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def apply(folder: Path) -> None:
        result = load_file(folder / "model.safetensors")
        change(result)
        save_file(result, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def cut(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def first(result: dict[str, torch.Tensor], part: str) -> str:
    return next(name for name in sorted(result) if part in name)


def only_gguf(folder: Path) -> None:
    drop("model.safetensors")(folder)
    write("model.gguf", b"GGUF\3\0\0\0")(folder)


def only_pickle(folder: Path) -> None:
    drop("model.safetensors")(folder)
    write("pytorch_model.bin", pickle.dumps({"w": 1}))(folder)


def pickle_as_safetensors(folder: Path) -> None:
    torch.save({"w": torch.zeros(3)}, folder / "model.safetensors")


def all_of(*changes: Change) -> Change:
    def apply(folder: Path) -> None:
        for change in changes:
            change(folder)

    return apply


def nested(**values: Any) -> Change:
    """Image settings where transformers 5 writes them, which count more than
    preprocessor_config.json.
    """
    return write("processor_config.json", json.dumps({"image_processor": values}))


def high_id(folder: Path) -> None:
    """An ordinary token far beyond the others, so that there are no more tokens than rows."""
    whole = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = whole["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.__getitem__)] = 100_000
    (folder / "tokenizer.json").write_text(json.dumps(whole))


NO_EOS = all_of(
    edit("generation_config.json", eos_token_id=...),
    edit("config.json", eos_token_id=...),
    edit("config.json", "text_config", eos_token_id=...),
)
SPOILED: dict[str, tuple[Change, str]] = {
    "a missing tensor": (
        tensors(lambda t: t.pop(first(t, "q_proj"))),
        r"tensor .*q_proj\.\w+ is missing; the checkpoint is incomplete",
    ),
    "an extra tensor": (
        tensors(lambda t: t.update(intruder=torch.zeros(2))),
        "tensor intruder is not part of the model",
    ),
    "extra tensors": (
        tensors(lambda t: t.update(a1=torch.zeros(2), a2=torch.zeros(2))),
        "tensor a1 and 1 more is not part",
    ),
    "a misshapen tensor": (
        tensors(lambda t: t.update({first(t, "up_proj"): torch.zeros(3, 5)})),
        r"up_proj\.\w+ has shape \[3, 5\], expected \[",
    ),
    "an integer tensor": (
        tensors(lambda t: t.update({first(t, "up_proj"): t[first(t, "up_proj")].to(torch.int8)})),
        "checkpoints quantized in this way are not read",
    ),
    "truncated weights": (cut, "model.safetensors is cut off: tensor .* ends at byte"),
    "no weights": (
        drop("model.safetensors"),
        r"has no weights: expected model\.safetensors or model\.safetensors\.index\.json",
    ),
    "empty weights": (write("model.safetensors", b""), "model.safetensors"),
    "weights that are text": (
        write("model.safetensors", "hello world, this is no weight file"),
        "model.safetensors",
    ),
    "GGUF": (only_gguf, r"model\.gguf is cut off"),
    "a pickle": (
        only_pickle,
        r"has no weights: .*; it has pytorch_model\.bin, which this version does not load",
    ),
    "a pickle by another name": (pickle_as_safetensors, r"model\.safetensors .*(not|expected)"),
    "no names of tokens": (
        drop("tokenizer_config.json"),
        "tokenizer_config.json is missing, expected it to tell bos_token, which the chat template",
    ),
    "no config": (
        drop("config.json"),
        "config.json is missing; expected a checkpoint folder in the Hugging Face layout",
    ),
    "config that is a list": (
        write("config.json", "[1]"),
        "config.json: found a JSON list, expected an object",
    ),
    "config without an architecture": (
        edit("config.json", model_type=...),
        "model_type is None, expected the name of an architecture",
    ),
    "an unknown architecture": (
        edit("config.json", model_type="gpt9"),
        r"architecture 'gpt9' is not supported; expected one of the \d+ that docs/models.md lists",
    ),
    "an unknown text architecture": (
        edit("config.json", "text_config", model_type="rwkv"),
        "model_type 'rwkv' is not supported for text; expected one of the",
    ),
    "a text architecture that is a list": (
        edit("config.json", "text_config", model_type=["a"]),
        r"text_config: model_type is \['a'\], expected the name",
    ),
    "text alone of an unknown kind": (
        edit("config.json", vision_config=None),
        "model_type 'gemma3' is not supported for text",
    ),
    "text_config that is a number": (
        edit("config.json", text_config=5),
        "text_config: found int, expected an object",
    ),
    "vision_config that is a list": (
        edit("config.json", vision_config=[]),
        "vision_config: found list, expected an object",
    ),
    "a size of 0": (
        edit("config.json", "text_config", hidden_size=0),
        "hidden_size is 0, expected an integer from 1",
    ),
    "a size that is text": (
        edit("config.json", "text_config", num_hidden_layers="four"),
        "num_hidden_layers is 'four', expected an integer",
    ),
    "a negative number": (
        edit("config.json", "text_config", rms_norm_eps=-1),
        "rms_norm_eps is -1, expected a number above 0",
    ),
    "no tokenizer": (
        drop("tokenizer.json"),
        r"tokenizer\.json cannot be read .*; expected a checkpoint folder with a tokenizer\.json",
    ),
    "a tokenizer too large": (
        edit("config.json", "text_config", vocab_size=8),
        r"(expected \[8, |vocabulary of 8)",
    ),
    "a tokenizer without an image token": (
        lambda f: (
            (f / "tokenizer.json").write_text(
                (f / "tokenizer.json").read_text().replace("<image_soft_token>", "<something_else>")
            )
            and None
        ),
        "tokenizer has no token '<image_soft_token>'",
    ),
    "a broken template": (write("chat_template.jinja", "{% if %}"), r"chat_template\.jinja"),
    "no end token": (
        all_of(NO_EOS, edit("tokenizer_config.json", eos_token=...)),
        r"config\.json, and no eos_token in tokenizer_config\.json; answers could not end",
    ),
    "end tokens that are text": (
        all_of(NO_EOS, edit("config.json", eos_token_id="<eos>")),
        r"config\.json: eos_token_id is '<eos>', expected a token's id or a list of ids",
    ),
    "image settings for another size": (
        edit("preprocessor_config.json", "size", height=64),
        "preprocessor_config.json: size is 64 x 96, expected 96 x 96",
    ),
    "the same in the newer file": (
        nested(size={"height": 64, "width": 96}),
        r"processor_config\.json: image_processor: size is 64 x 96, expected 96 x 96",
    ),
    "no image settings": (
        drop("preprocessor_config.json"),
        "preprocessor_config.json is missing; expected a checkpoint folder",
    ),
    "an image token of another tokenizer": (
        edit("config.json", image_token_index=262144),
        "image_token_index is 262144, expected 7, the id of <image_soft_token> in tokenizer.json",
    ),
    "the same by its newer name": (
        edit("config.json", image_token_index=..., image_token_id=8),
        "image_token_id is 8, expected 7",
    ),
    "an image token that is text": (
        edit("config.json", image_token_index="7"),
        "image_token_index is '7', expected 7",
    ),
    "a hole in the tokenizer": (
        high_id,
        "the tokenizer has a token with id 100000, the configuration a vocabulary of 640",
    ),
    "millions of layers": (
        edit("config.json", "vision_config", num_hidden_layers=10_000_000),
        "vision_config: num_hidden_layers is 10000000, expected an integer from 1 to 1024",
    ),
}
WRONG_ENDS = {
    "text": "5",
    "true": True,
    "nothing": [],
    "a list of text": ["5"],
    "a truth in a list": [5, True],
    "a fraction": 5.0,
    "negative": -1,
    "an object": {},
    "of sixty digits": 10**59,
    "of sixty digits in a list": [5, 10**59],
}
SPOILED |= {
    f"end tokens: {kind}": (
        edit("generation_config.json", eos_token_id=value),
        r"generation_config\.json: eos_token_id is .*, expected a token's id or a list of ids",
    )
    for kind, value in WRONG_ENDS.items()
}
JSON_FILES = sorted(p.name for p in DEMO_MODEL.glob("*.json"))
BROKEN = {"cut": b'{"a": ', "empty": b"", "binary": b"\xff\xfe\0\0\x80", "deep": b"[" * 100_000}
SPOILED |= {
    f"{file} {kind}": (write(file, content), file)
    for file in JSON_FILES
    for kind, content in BROKEN.items()
}


def test_a_copy_opens_and_is_named_by_its_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(folder).name == "model"
    monkeypatch.chdir(folder)
    assert load(".").name == "model"
    assert open_checkpoint(folder).stop_tokens == open_checkpoint(DEMO_MODEL).stop_tokens


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_checkpoint_is_refused_in_one_line(
    case: str, folder: Path, one: Path, mtmd: Any
) -> None:
    change, expected = SPOILED[case]
    change(folder)
    with pytest.raises(ModelError, match=expected) as caught:
        load(folder)
    assert isinstance(caught.value, MtmdError)
    line = mtmd("describe", one, "-m", folder).refused()
    assert str(caught.value)[:80] in line, "the command says what Python says"


NO_FOLDER = {
    "a gguf file": ("x.gguf", b"GGUF\3", "x.gguf is cut off"),
    "a weight file": (
        "model.safetensors",
        b"",
        "found an empty file, expected a GGUF file, the folder of a checkpoint",
    ),
    "a pickle": (
        "model.bin",
        b"\x80\4",
        "found another file, expected a GGUF file, the folder of a",
    ),
    "an empty file": ("x.gguf", b"", "found an empty file, expected a GGUF file"),
    "a pointer": ("x.gguf", b"version https://git-lfs.github.com/spec/v1\noid", "`git lfs pull`"),
    "a page": ("x.gguf", b"\n<!DOCTYPE html><html>", "found an HTML page, expected a GGUF file"),
}


@pytest.mark.parametrize("case", NO_FOLDER)
def test_a_file_for_a_model(case: str, tmp_path: Path, mtmd: Any) -> None:
    name, content, expected = NO_FOLDER[case]
    (tmp_path / name).write_bytes(content)
    assert expected in mtmd("warmup", "-m", tmp_path / name).refused()


def test_a_file_of_a_checkpoint_leads_to_its_folder(folder: Path, mtmd: Any) -> None:
    line = mtmd("warmup", "-m", folder / "model.safetensors").refused()
    assert f"did you mean its folder, {str(folder)!r}?" in line


@pytest.mark.parametrize(
    "name",
    [
        "./nowhere",
        "/no/such",
        "",
        "a\0b",
        "x" * 5000,
        "~nobody_at_all/x",
        "two\nlines",
        "\udcff",
        "a/b/c",
    ],
)
def test_a_model_that_is_nowhere(name: str, mtmd: Any, one: Path) -> None:
    reported = "is no folder here and no name on the Hugging Face hub; expected a checkpoint folder"
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        reported = (
            "found no such file or folder, expected a checkpoint folder, a GGUF file, org/name"
        )
    with pytest.raises(ModelError, match=re.escape(reported)):
        load(name)
    assert reported[:20] in mtmd("describe", one, "-m", name).refused()


@pytest.mark.parametrize("name", ["model.gguf", "./model.gguf", "there/model.Q4_K_M.gguf"])
def test_a_gguf_that_is_not_there_is_a_path(
    name: str, mtmd: Any, one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    line = mtmd("describe", one, "-m", name).refused()
    assert f"model {name!r}: found no such file or folder, expected a checkpoint folder" in line


def test_an_architecture_is_named_whatever_its_weights_are(tmp_path: Path) -> None:
    """Of BERT, with weights in a form that is not loaded either: another file would not help."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 8}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelError, match="model_type 'bert' is not supported for text; expected"):
        load(tmp_path)


@pytest.mark.parametrize("model", [5, b"demo", ["a"], object()], ids=lambda m: type(m).__name__)
def test_a_model_of_another_type(model: Any) -> None:
    with pytest.raises(
        ModelError, match=f"object of type {type(model).__name__}; expected a checkpoint folder"
    ):
        load(model)


def test_an_empty_folder(tmp_path: Path, mtmd: Any, one: Path) -> None:
    assert (
        "has no weights: expected model.safetensors"
        in mtmd("describe", one, "-m", tmp_path).refused()
    )


def test_weights_that_are_not_numbers_end_in_one_line(folder: Path, one: Path, mtmd: Any) -> None:
    tensors(lambda t: t[first(t, "layers.0.mlp.down_proj")].fill_(float("nan")))(folder)
    assert "logits; expected finite numbers" in mtmd("describe", one, "-m", folder).refused()


def test_end_tokens_come_from_the_first_file_that_has_them(folder: Path) -> None:
    assert open_checkpoint(folder).stop_tokens == {5, 1}
    edit("generation_config.json", eos_token_id=None)(folder)
    edit("config.json", eos_token_id=9)(folder)
    assert open_checkpoint(folder).stop_tokens == {9}
    edit("config.json", eos_token_id=...)(folder)
    assert open_checkpoint(folder).stop_tokens == {5}


def test_image_settings_in_the_newer_file_count_more(folder: Path) -> None:
    nested(size={"height": 96, "width": 96}, image_mean=[0.1, 0.2, 0.3])(folder)
    vision = open_checkpoint(folder).vision
    assert vision and vision.resolution.normalize.mean == (0.1, 0.2, 0.3)
    drop("preprocessor_config.json")(folder)
    open_checkpoint(folder)


def test_a_text_part_knows_the_model_it_is_part_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some decoders do something else at their end where they are not alone."""
    seen: list[Settings] = []

    def look(kind: str, settings: Settings) -> TextFamily:
        seen.append(settings)
        return text_family(kind, settings)

    monkeypatch.setattr("mtmd.checkpoint.stored.text_family", look)
    open_checkpoint(folder)
    assert [settings.get("part_of", None) for settings in seen] == ["gemma3"]


SCALES = "model.language_model.layers.0.mlp.up_proj.scales"
Change = Callable[[dict[str, torch.Tensor]], Any]
QUANTIZED: dict[str, tuple[dict[str, Any], Change, str]] = {
    "a method that is not read": (
        {"quantization_config": {"quant_method": "hqq", "bits": 4}},
        lambda t: t.pop(first(t, "up_proj")),
        r"its weights are quantized \(hqq, 4 bits, says config.json\) in a way that is not read; "
        "this version reads FP8, AWQ, GPTQ, .*; use such a checkpoint, the original one, or a GGUF",
    ),
    "no method": (
        {"compression_config": {"format": "packed"}},
        lambda t: t.pop(first(t, "up_proj")),
        r"quantized \(compression_config, says config.json\) in a way that is not read",
    ),
    "awq": (
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        lambda t: t.update(
            {
                first(t, "up_proj").replace("weight", "qweight"): torch.zeros(64, 12).int(),
                SCALES: t.pop(first(t, "up_proj"))[:1, :1].half().expand(1, 96).contiguous(),
            }
        ),
        "up_proj.weight is quantized, but .*up_proj.(qzeros|scales) is missing",
    ),
    "bitsandbytes": (
        {"text_config": {"quantization_config": {"quant_method": "bitsandbytes"}}},
        lambda t: t.update({first(t, "up_proj"): torch.zeros(64, 1, dtype=torch.uint8)}),
        "up_proj.weight is quantized, but .*up_proj.weight.quant_state.bitsandbytes__nf4 is missing",
    ),
    "mlx": (
        {"quantization": {"group_size": 64, "bits": 4}},
        lambda t: t.update({first(t, "up_proj"): torch.zeros(8, 2).to(torch.uint32)}),
        "up_proj.weight is quantized, but .*up_proj.scales is missing",
    ),
    "fp8": (
        {"quantization_config": {"quant_method": "fp8"}},
        lambda t: t.update({first(t, "up_proj"): t[first(t, "up_proj")].to(torch.float8_e4m3fn)}),
        "up_proj.weight is quantized, but .*up_proj.weight_scale is missing",
    ),
}


@pytest.mark.parametrize("case", QUANTIZED)
def test_quantized_weights_that_are_not_read_are_named(folder: Path, case: str) -> None:
    config, change, words = QUANTIZED[case]
    for key, value in config.items():
        if key == "text_config":
            edit("config.json", key, **value)(folder)
        else:
            edit("config.json", **{key: value})(folder)
    open_checkpoint(folder)  # the tensors are whole: what it was made from does not matter
    tensors(change)(folder)
    with pytest.raises(ModelError, match=words):
        open_checkpoint(folder)


def test_millions_of_layers_are_refused_before_they_are_named(folder: Path) -> None:
    for part in ("vision_config", "text_config"):
        copy = folder.with_name(part)
        shutil.copytree(folder, copy)
        edit("config.json", part, num_hidden_layers=1 << 20)(copy)
        with pytest.raises(
            ModelError,
            match=f"{part}: num_hidden_layers is 1048576, expected an integer from 1 to 1024",
        ):
            open_checkpoint(copy)


def test_text_alone_with_an_image_token_beyond_the_table(tmp_path: Path) -> None:
    """As gemma-3-1b-it is published: 262144 rows, and <image_soft_token> has id 262144."""
    reference = make.gemma3_text(tmp_path, seed=5)
    checkpoint = open_checkpoint(tmp_path)
    assert (
        checkpoint.vision is None
        and checkpoint.tokenizer.id("<image_soft_token>") == checkpoint.text.vocabulary
    )
    model = load(tmp_path, device="cpu", dtype="fp32")
    *_, last = model.stream(
        [{"role": "user", "content": "Describe <image_soft_token> a circle"}],
        max_tokens=24,
        ignore_eos=True,
    )
    assert isinstance(last, Finished)
    prompt = list(last.answer.prompt_token_ids)
    assert max(prompt) < checkpoint.text.vocabulary
    with torch.no_grad():
        sequence = reference.generate(
            torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False
        )[0].tolist()
    assert (
        list(last.answer.output_token_ids) == sequence[len(prompt) :]
        and len(set(sequence[len(prompt) :])) > 5
    )
    with pytest.raises(PromptError, match="has no image encoder"):
        model.describe(torch.zeros(8, 8, 3, dtype=torch.uint8).numpy(), "what?")
