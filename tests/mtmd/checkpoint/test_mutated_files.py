"""505 mutated model files (`make hostile` has 5,000): each is refused with an error of ours, in
one line, or loads and answers, within 5 s and 1 GiB.

The cases run in processes of their own (tests/support/mutated_worker.py). A failure names its kind and
seed; to see one again:
    python tests/support/mutated_worker.py SEEDS SCRATCH KIND SEED SEED+1
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mutations_gguf
import pytest
from mutated_files import Worker, failures, make_seeds

from mtmd.base.errors import ModelError
from mtmd.checkpoint.open import open_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured through /proc")

COUNTS = {
    "config": 110,
    "processor": 60,
    "tokenizer": 85,
    "template": 60,
    "safetensors": 60,
    "gguf": 100,
    "bombs": 15,
    "files": 15,
}


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeds(tmp_path_factory.mktemp("seeds"))


@pytest.fixture(scope="module")
def worker(seeds: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(seeds, tmp_path_factory.mktemp("worker"))
    yield worker
    worker.close()


def test_sound_files_load(seeds: Path, worker: Worker) -> None:
    result = worker.run("none", 0, len(list(seeds.iterdir())))
    assert [
        (f["what"], f["outcome"], f["message"]) for f in result if f["outcome"] != "loaded"
    ] == []


@pytest.mark.parametrize("kind", COUNTS)
def test_mutated_files(kind: str, worker: Worker) -> None:
    result = worker.run(kind, 0, COUNTS[kind])
    wrong = failures(result)
    assert not wrong, "\n".join([f"{len(wrong)} of {len(result)} {kind} files", *wrong])
    outcomes = Counter(f["outcome"] for f in result)
    assert outcomes["loaded"] > len(result) // 50 and outcomes["ModelError"] > len(result) // 20, (
        outcomes
    )
    assert len({f["message"].partition(":")[2][:30] for f in result}) > len(result) // 20, (
        "the damage reaches few checks"
    )


def edited(name: str, *path: str, value: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        root = holder = json.loads((folder / name).read_text())
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value
        (folder / name).write_text(json.dumps(root))

    return edit


def long_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "é" * 300}})
    )


def odd_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "two\u2028lines"}})
    )


def no_tokens(folder: Path) -> None:
    file = mutations_gguf.read((folder / "text.gguf").read_bytes())
    key = next(k for k in file.keys if k.name == b"tokenizer.ggml.tokens")
    key.type, key.value = 4, 7
    (folder / "text.gguf").write_bytes(mutations_gguf.write(file))


RESULT = {  # by longer campaigns than the one above
    "a long name": ("gemma3", long_shard, "expected the name of a file"),
    "a name that is no line": ("gemma3", odd_shard, r"lacks the shard two\\u2028lines"),
    "half a surrogate pair": (
        "gemma3",
        edited("tokenizer_config.json", "image_token", value="\ud800"),
        "expected the token's text",
    ),
    "a kind that is no text": (
        "qwen2_vl",
        edited("config.json", "model_type", value={}),
        "model_type is",
    ),
    "more than a head that turns": (
        "qwen3_next",
        edited("config.json", "rope_parameters", value={"partial_rotary_factor": 1e308}),
        "inf dimensions of a head of 48 are rotated, expected no more than it has",
    ),
    "tokens that are a number": (
        "gguf",
        no_tokens,
        "text.gguf: gemma3: tokenizer.ggml.tokens is 7, expected a list",
    ),
    "huge tiles": (
        "idefics3",
        edited("preprocessor_config.json", "max_image_size", "longest_edge", value=12_000),
        "up to 1024 wide",
    ),
    "huge tiles, few": (
        "lfm2_vl",
        edited("processor_config.json", "image_processor", "tile_size", value=1 << 20),
        "at most 16,777,216",
    ),
}


@pytest.mark.parametrize("case", RESULT)
def test_found_before(case: str, seeds: Path, tmp_path: Path) -> None:
    source, edit, message = RESULT[case]
    shutil.copytree(seeds / source, tmp_path / "model")
    edit(tmp_path / "model")
    with pytest.raises(ModelError, match=message) as refused:
        open_checkpoint(tmp_path / "model")
    assert str(refused.value).isprintable()
