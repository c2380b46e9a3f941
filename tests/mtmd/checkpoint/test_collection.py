"""Which models are in a folder, a list, the cache."""

from __future__ import annotations

import json

import pytest

from mtmd.checkpoint import collection
from mtmd.checkpoint.cached_models import Cache, CachedModel
from mtmd.checkpoint.collection import Source, read_sources
from mtmd.kernels.errors import ModelError, OptionError


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    models = (
        CachedModel("org/there", "gemma3", 500, 0.0, True),
        CachedModel("org/half", "gemma3", 100, 0.0, False),
    )
    monkeypatch.setattr(collection, "read_cache", lambda: Cache(models, ()))


def checkpoint(folder, size=100, kind="gemma3"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    (folder / "model.safetensors").write_bytes(b"0" * size)


def gguf(path, size=96):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF" + b"0" * (size - 4))


def test_a_folder_of_checkpoints_and_ggufs(tmp_path):
    checkpoint(tmp_path / "tiny", 100)
    checkpoint(tmp_path / "org" / "deep", 200, "qwen3_vl")
    gguf(tmp_path / "alone-Q8_0.gguf", 50)
    gguf(tmp_path / "seeing" / "big-Q4_K_M-00001-of-00002.gguf", 70)
    gguf(tmp_path / "seeing" / "big-Q4_K_M-00002-of-00002.gguf", 30)
    gguf(tmp_path / "seeing" / "mmproj-big-f16.gguf", 5)
    (tmp_path / "notes.txt").write_text("x")
    found = {s.name: s for s in read_sources([str(tmp_path)])}
    assert {name: (s.bytes, s.kind) for name, s in found.items()} == {
        "alone-Q8_0": (50, "GGUF"),
        "org/deep": (200, "qwen3_vl"),
        "seeing/big-Q4_K_M": (105, "GGUF"),
        "tiny": (100, "gemma3"),
    }
    assert found["seeing/big-Q4_K_M"].model.endswith("big-Q4_K_M-00001-of-00002.gguf")


def test_models_one_by_one(tmp_path):
    checkpoint(tmp_path / "with, comma")
    found = read_sources([str(tmp_path / "with, comma"), "demo, org/there", "org/new:Q4_K_M"])
    assert [(s.name, s.is_here) for s in found] == [
        ("with, comma", True),
        ("demo", True),
        ("org/there", True),
        ("org/new:Q4_K_M", False),
    ]


def test_all_that_were_fetched():
    assert read_sources(["cache"]) == [Source("org/there", "org/there", 500, "gemma3")]


def test_one_that_is_named_twice_is_there_once_and_same_names_are_told_apart(tmp_path):
    checkpoint(tmp_path / "a" / "m")
    checkpoint(tmp_path / "b" / "m")
    found = read_sources([str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "a" / "m")])
    assert [s.name for s in found] == [str(tmp_path / "a" / "m"), str(tmp_path / "b" / "m")]


def test_what_holds_no_model_is_told(tmp_path, monkeypatch):
    with pytest.raises(ModelError, match="holds no checkpoint and no GGUF"):
        read_sources([str(tmp_path)])
    with pytest.raises(ModelError, match="no/such/place"):
        read_sources(["no/such/place"])
    monkeypatch.setattr(collection, "MOST", 1)
    with pytest.raises(OptionError, match="found 2"):
        read_sources(["demo,org/there"])
