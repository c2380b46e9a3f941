from __future__ import annotations

from pathlib import Path

import checkpoints as make
import gemma3_gguf
import gguf
import pytest

from mtmd.checkpoint.facts import _FILE_TYPES, CheckpointFacts, facts_of
from mtmd.checkpoint.open import open_checkpoint
from mtmd.loading import DEMO_MODEL


def test_of_the_demo() -> None:
    checkpoint = open_checkpoint(DEMO_MODEL)
    assert facts_of(checkpoint) == CheckpointFacts(
        "safetensors", "gemma3", checkpoint.weight_bytes // 2, 256, "BF16"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("facts") / "hf"
    make.gemma3(path, text={"num_hidden_layers": 6, "layer_types": gemma3_gguf.LAYERS})
    return path


def test_of_a_gguf_and_its_projector(folder: Path) -> None:
    model, projector = gemma3_gguf.write(folder, folder.parent / "gguf")
    result, of_folder = (
        facts_of(open_checkpoint(model, projector)),
        facts_of(open_checkpoint(folder)),
    )
    assert (result.format, result.architecture) == ("gguf", "gemma3")
    assert (result.parameters, result.width) == (of_folder.parameters, of_folder.width)
    assert (result.weight_type, of_folder.weight_type) == ("F32", "F32")


def test_names_of_mixtures() -> None:
    """As gguf has them: MOSTLY_Q4_K_M is Q4_K_M."""
    theirs = {kind.value: kind.name.removeprefix("MOSTLY_") for kind in gguf.LlamaFileType}
    assert {**theirs, 0: "F32"}.items() >= _FILE_TYPES.items()
