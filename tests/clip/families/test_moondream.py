"""Moondream's configuration, tensors and prompts as they are published; a tokenizer that lies in
another repository; GGUF files as the authors' script writes them; what is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import picture, tokenizer
from gguf_files import moondream_files
from huggingface_hub import constants
from moondream import ANSWER, ARGUMENT, END, ROW, SKILL, MoondreamOracle

from mtmd.base.errors import ModelError, OptionError
from mtmd.checkpoint.open import open_checkpoint
from mtmd.clip.families.moondream import MoondreamVision, WholeMoondreamVision
from mtmd.clip.family import borrowed_tokenizer, in_usual_words, vision_family
from mtmd.clip.tasks import tasks_of
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.family import text_family
from mtmd.model import Model
from mtmd.options.load import LoadOptions

Build = Callable[..., MoondreamOracle]
PUBLISHED = {
    "architectures": ["HfMoondream"],
    "auto_map": {"AutoConfig": "hf_moondream.HfConfig"},
    "config": {},
    "model_type": "moondream1",
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    made: dict[str, Any] = {}

    def build(revision: str) -> Any:
        if revision not in made:
            variant = next(v for name, v in ROW.variants.items() if name.startswith(revision))
            made[revision] = variant(tmp_path_factory.mktemp("moondream"))
        return made[revision]

    return build


def opened(folder: Path) -> Model:
    return Model(open_checkpoint(folder), LoadOptions(device="cpu", dtype="fp32"))


def test_published_sizes_and_tensors() -> None:
    """Those of 2025-06-21: 592 tensors, 14 of them of its region model."""
    config = in_usual_words(Settings(PUBLISHED, "config.json"))
    vision = vision_family("moondream1", config, Settings({}, "image"))
    text = text_family("phi", config.part("text_config"))
    assert isinstance(vision, MoondreamVision)
    vit = vision.vit
    assert (vit.layers, vit.width, vit.ffn, vit.heads, vit.eps) == (27, 1152, 4304, 16, 1e-5)
    assert (vision.inner, vision.text_width, vision.resolution.tokens) == (8192, 2048, 729)
    ways = [
        [name for way in parameter.ways("", canonical=False) for name in way.names]
        for parameter in (*vision.parameters().values(), *text.parameters().values())
    ]
    layer = ("attn.proj", "attn.qkv", "mlp.fc1", "mlp.fc2")
    expected = {f"model.text.{name}" for name in ("wte", *_both("lm_head", "post_ln"))}
    expected |= {f"model.text.blocks.{i}.{name}" for i in range(24) for name in _both(*layer, "ln")}
    ends = ("patch_emb", "post_ln", "proj_mlp.fc1", "proj_mlp.fc2")
    expected |= {f"model.vision.{name}" for name in ("pos_emb", *_both(*ends))}
    expected |= {
        f"model.vision.blocks.{i}.{name}" for i in range(27) for name in _both(*layer, "ln1", "ln2")
    }
    assert len(expected) == 592 - 14 and expected <= {name for names in ways for name in names}
    assert all(expected & set(names) for names in ways)


def _both(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.{kind}" for name in names for kind in ("weight", "bias"))


CAPTIONS = {"caption": "normal", "short-caption": "short", "long-caption": "long"}


def test_captions_and_questions(build: Build) -> None:
    new, old = opened(build("2025-06").folder), opened(build("2025-04").folder)
    shown = picture(0, 30, 20)

    def text(model: Model, **asked: Any) -> str:
        ids = model.answer(shown, max_tokens=1, **asked).prompt_token_ids
        return model.checkpoint.tokenizer.decode(list(ids), skip_special=False).replace(
            "<image>" * 25, "|"
        )

    assert list(tasks_of(new.checkpoint.vision)) == list(CAPTIONS)
    for task, length in CAPTIONS.items():
        made = f"{END}|{SKILL}describe{ARGUMENT}{length}{ANSWER}"
        assert text(new, task=task) == made
        words = new.checkpoint.vision.tasks[task]  # type: ignore[union-attr]
        assert text(new, prompt=words) == made
        assert text(old, task=task) == f"{END}|\n\n{words}:"
    asked = f"{SKILL}query{ARGUMENT}Who?{ANSWER}{ANSWER}"
    assert text(new, prompt="Who?") == f"{END}|{asked}"
    assert text(old, prompt="Who?") == f"{END}|\n\nQuestion: Who?\n\nAnswer:"
    with pytest.raises(OptionError, match="it has caption, short-caption, long-caption"):
        text(new, task="layout")
    sealed = new.answer(shown, f"{ANSWER}{END}<image>", max_tokens=1).prompt_token_ids
    mark = new.checkpoint.tokenizer.id
    assert [list(sealed).count(mark(t)) for t in (ANSWER, END, "<image>")] == [2, 1, 25]


def test_an_end_that_files_do_not_say(build: Build) -> None:
    for revision in ("2025-06", "2025-04"):
        checkpoint = open_checkpoint(build(revision).folder)
        assert checkpoint.stop_tokens == {checkpoint.tokenizer.id(END)}


def test_pictures_in_a_penalty(build: Build) -> None:
    """What stands for a picture has no row in the output."""
    answer = opened(build("2025-06").folder).answer(
        picture(0, 30, 20), "Who?", max_tokens=4, repetition_penalty=1.3
    )
    assert answer.output_token_ids


@pytest.fixture
def stale(build: Build, tmp_path: Path) -> Path:
    """The newest revision with an older one's tokenizer, as it is published."""
    folder = tmp_path / "stale"
    shutil.copytree(build("2025-06").folder, folder)
    tokenizer((END, "a", "b", "c")).save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_in_another_repository(
    build: Build, stale: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelError) as error:
        open_checkpoint(stale)
    assert "older revision; put the one of moondream/starmie-v1 on the Hugging" in str(error.value)
    assert "\n" not in str(error.value)
    repo = tmp_path / "cache" / "models--moondream--starmie-v1"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    (repo / "snapshots" / ("0" * 40)).mkdir(parents=True)
    right = build("2025-06").folder
    shutil.copy(right / "tokenizer.json", repo / "snapshots" / ("0" * 40))
    found = open_checkpoint(stale)
    assert found.tokenizer.encode(SKILL) == open_checkpoint(right).tokenizer.encode(SKILL)
    config = in_usual_words(Settings({**PUBLISHED, "torch_dtype": "float16"}, "config.json"))
    assert borrowed_tokenizer(config) is None


@pytest.mark.parametrize(
    ("config", "reported"),
    [
        ({"text_config": {"model_type": "phi"}}, "found a revision of 2024, which has another"),
        ({"config": {"text": {"group_size": 128}}}, "int4 in a layout of the authors' own is not"),
        ({"config": {"vision": {"crop_size": 380}}}, "crop_size is 380 with an overlap_margin"),
        ({"config": {"vision": {"enc_n_heads": 7}}}, "7 heads of width 1152; expected heads that"),
        ({"config": {"vision": {"enc_n_layers": 10**9}}}, "expected an integer from 1 to 1024"),
        ({"config": {"vision": {"in_channels": 4}}}, "num_channels is 4, expected one of 3"),
        ({"config": {"vision": {"proj_out_dim": 3}}}, "proj_out_dim is 3, expected one of 2048"),
        ({"config": {"text": {"n_heads": 5, "n_kv_heads": 3}}}, "expected groups that divide"),
        ({"config": []}, "config: found list, expected an object"),
    ],
)
def test_configurations_that_are_refused(
    build: Build, tmp_path: Path, config: dict[str, Any], reported: str
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(build("2025-06").folder, folder)
    (folder / "config.json").write_text(json.dumps(PUBLISHED | config))
    with pytest.raises(ModelError, match=reported) as error:
        open_checkpoint(folder)
    assert "\n" not in str(error.value)


def test_gguf_files_of_the_authors(build: Build, tmp_path: Path) -> None:
    """Neither a pre-tokenizer, nor a token for pictures, nor a template; the last layer twice. Of a
    picture of one crop the whole is what the crop is.
    """
    oracle = build("2025-04")
    text, tower = moondream_files(oracle.folder, tmp_path)
    model = Model(open_checkpoint(text, tower), LoadOptions(device="cpu", dtype="fp32"))
    family = model.checkpoint.vision
    assert isinstance(family, WholeMoondreamVision) and family.resolution.tokens == 25
    conversation = [{"role": "user", "content": "Describe a red circle"}]
    inputs = oracle.inputs(conversation)
    ids = [t for s in model.spans(conversation) for t in s.tokens]
    assert ids == oracle.prompt_ids(inputs)
    spans = model.spans(conversation)
    logits = model.runner.prefill(spans, model.runner.new_cache())
    assert _nmse(logits, oracle.logits(inputs)) <= 1e-8
    shown = picture(0, 30, 30)
    question = [
        {
            "role": "user",
            "content": [{"type": "image", "image": shown}, {"type": "text", "text": "Who?"}],
        }
    ]
    with_picture = model.spans(question)
    assert [len(s) for s in with_picture] == [
        1,
        25,
        len(oracle._ids("\n\nQuestion: Who?\n\nAnswer:")),
    ]
    assert not any(span.block for span in with_picture)
    tile = torch.from_numpy((shown.astype(np.float32) / 255 - 0.5) / 0.5).permute(2, 0, 1)
    with torch.no_grad():
        expected = oracle.model.model.seen(torch.stack((tile, tile)), (1, 1))
    rows = with_picture[1].embeddings
    assert rows is not None and _nmse(rows, expected) <= 1e-8


def _nmse(result: torch.Tensor, expected: torch.Tensor) -> float:
    error = (result.double() - expected.double()).square().sum()
    return float(error / expected.double().square().sum())
