"""Whether the table of outputs is the token table: every family's decoder against transformers,
where config.json and tensors say different things.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from common import Oracle, literal
from safetensors.torch import load_file, save_file
from table import ROWS
from timm_stand_in import timm_here

from mtmd.base.errors import ModelError
from mtmd.checkpoint.open import open_checkpoint
from mtmd.kernels.backends.cpu import Cpu
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span

Build = Callable[[str, str], Oracle]
Tensors = dict[str, torch.Tensor]
TOKENS = (5, 9, 3, 7, 11, 2)
HEAD = "lm_head.weight"
TABLES = ("embed_tokens.weight", "model.embeddings.weight", "backbone.embeddings.weight")
NOT_FROM_THE_HEAD = ("llama4", "instructblip", "nemotron_h", "nemotron_vl")
# The tables of one are of different lengths, of two outputs have another name (`test_bart.py`,
# `test_blip.py`); of the others transformers has no class.
LEFT_OUT = ("mllama", "trocr", "donut", "florence2", "blip")
NO_CLASS = ("minicpmv", "moondream", "phi4_siglip", "step3_vl")
TIED = [row for row in ROWS if row not in LEFT_OUT + NO_CLASS]
pytestmark = [pytest.mark.filterwarnings("ignore:.*"), pytest.mark.parametrize("row", TIED)]


def spoilt(
    oracle: Oracle, folder: Path, tie: bool | None, change: Callable[[Tensors, str], object]
) -> Path:
    """A copy of a checkpoint: what its configuration says of the tables, and its tensors changed,
    given the name of the token table.
    """
    shutil.copytree(oracle.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        for key in ("tie_word_embeddings", "tie_embedding"):
            part.pop(key, None)
    if tie is not None:
        config["tie_word_embeddings"] = tie
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    (table,) = (name for name in tensors if name.endswith(TABLES))
    heads = [name for name in tensors if name.endswith(HEAD)]
    for name in heads:
        del tensors[name]
    change(tensors, table)
    if HEAD in tensors:  # under the name that the model saves it
        names = (*heads, *oracle.model.state_dict())
        tensors[next(name for name in names if name.endswith(HEAD))] = tensors.pop(HEAD)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def other_head(tensors: Tensors, table: str) -> None:
    noise = torch.randn(tensors[table].shape, generator=torch.Generator().manual_seed(1))
    tensors[HEAD] = (noise * 0.1).to(tensors[table].dtype)


def head_of_one_other_row(tensors: Tensors, table: str) -> None:
    tensors[HEAD] = tensors[table].clone()
    filled = tensors[HEAD].any(dim=1).nonzero().flatten()  # Gemma 3n's last rows are zeros
    tensors[HEAD][filled[-3]] *= -1


def copied_head(tensors: Tensors, table: str) -> None:
    tensors[HEAD] = tensors[table].clone()


def only_the_head(tensors: Tensors, table: str) -> None:
    tensors[HEAD] = tensors.pop(table)


def no_head(tensors: Tensors, table: str) -> None:
    pass


@torch.no_grad()
def theirs(oracle: Oracle, folder: Path) -> torch.Tensor:
    with timm_here():
        model = type(oracle.model).from_pretrained(folder, dtype=torch.float32).eval()
    literal(model)
    inner = getattr(model, "language_model", None)  # of BLIP-2 a whole model, its head inside
    result: torch.Tensor = (inner if hasattr(inner, "lm_head") else model)(
        torch.tensor([TOKENS])
    ).logits[0, -1]
    return result


def ours(folder: Path) -> tuple[torch.Tensor, Any]:
    checkpoint = open_checkpoint(folder)
    runner = Runner(
        checkpoint.text, checkpoint.text_weights, [Cpu()], dtype=torch.float32, context=32
    )
    return runner.prefill([Span(TOKENS)], runner.new_cache()), checkpoint


@pytest.mark.parametrize("change", [other_head, head_of_one_other_row, copied_head, only_the_head])
def test_tensors_decide(
    row: str, change: Callable[[Tensors, str], object], build: Build, tmp_path: Path
) -> None:
    if change is only_the_head and row in NOT_FROM_THE_HEAD:
        pytest.skip("the reference does not take the table from the head")
    oracle = build(row, next(iter(ROWS[row].variants)))
    folder = spoilt(oracle, tmp_path / "model", True, change)
    expected, (actual, checkpoint) = theirs(oracle, folder), ours(folder)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    differs = change in (other_head, head_of_one_other_row)
    assert any("lm_head.weight differs from" in note for note in checkpoint.notes) == differs


def test_a_head_of_its_own_and_nothing_said(row: str, build: Build, tmp_path: Path) -> None:
    """As published: the model's default may be another, which is no contradiction."""
    oracle = build(row, next(iter(ROWS[row].variants)))
    folder = spoilt(oracle, tmp_path / "model", None, other_head)
    expected, (actual, checkpoint) = theirs(oracle, folder), ours(folder)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert checkpoint.notes == open_checkpoint(oracle.folder).notes


def test_no_head_and_nothing_said(row: str, build: Build, tmp_path: Path) -> None:
    """As the model's configuration class has it; without a word of it the head is missing."""
    oracle = build(row, next(iter(ROWS[row].variants)))
    folder = spoilt(oracle, tmp_path / "model", None, no_head)
    stated = type(oracle.model.config)()
    if not hasattr(stated, "tie_word_embeddings"):
        stated = type(oracle.model.config.get_text_config())()
    if stated.tie_word_embeddings:
        torch.testing.assert_close(ours(folder)[0], theirs(oracle, folder), rtol=1e-4, atol=1e-4)
        return
    with pytest.raises(ModelError, match=r"tensor lm_head.weight is missing"):
        ours(folder)
