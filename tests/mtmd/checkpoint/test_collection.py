"""Which models are in a folder, a list, the cache."""

from __future__ import annotations

import errno
import json
import os
from types import SimpleNamespace

import pytest

from mtmd.base.errors import ModelError, OptionError
from mtmd.checkpoint import collection
from mtmd.checkpoint.cached_models import Cache, CachedModel
from mtmd.checkpoint.collection import Source, read_sources


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
    result = {s.name: s for s in read_sources([str(tmp_path)])}
    assert {name: (s.bytes, s.kind) for name, s in result.items()} == {
        "alone-Q8_0": (50, "GGUF"),
        "org/deep": (200, "qwen3_vl"),
        "seeing/big-Q4_K_M": (105, "GGUF"),
        "tiny": (100, "gemma3"),
    }
    assert result["seeing/big-Q4_K_M"].model.endswith("big-Q4_K_M-00001-of-00002.gguf")


def test_models_one_by_one(tmp_path):
    checkpoint(tmp_path / "with, comma")
    result = read_sources([str(tmp_path / "with, comma"), "demo, org/there", "org/new:Q4_K_M"])
    assert [(s.name, s.is_here) for s in result] == [
        ("with, comma", True),
        ("demo", True),
        ("org/there", True),
        ("org/new:Q4_K_M", False),
    ]


def test_one_that_holds_no_model_does_not_keep_the_others(tmp_path, monkeypatch):
    """`mtmd serve --models demo --models cache` where nothing was fetched yet."""
    monkeypatch.setattr(collection, "read_cache", lambda: SimpleNamespace(models=[]))
    reported = []
    result = read_sources(["demo", "cache", str(tmp_path)], reported.append)
    assert [s.name for s in result] == ["demo"]
    assert (
        "the cache is empty" in reported[0]
        and "holds no checkpoint" in reported[1]
        and len(reported) == 2
    )
    with pytest.raises(ModelError, match="the cache is empty"):
        read_sources(["cache", str(tmp_path)])


def test_all_that_were_fetched():
    assert read_sources(["cache"]) == [Source("org/there", "org/there", 500, "gemma3")]


def test_one_that_is_named_twice_is_there_once_and_same_names_are_told_apart(tmp_path):
    checkpoint(tmp_path / "a" / "m")
    checkpoint(tmp_path / "b" / "m")
    result = read_sources([str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "a" / "m")])
    assert [s.name for s in result] == ["a/m", "b/m"]
    gguf(tmp_path / "c" / "x" / "m.gguf")
    gguf(tmp_path / "d" / "x" / "m.gguf")
    given = [str(tmp_path / name) for name in ("a", "c/x", "d/x")]
    assert [s.name for s in read_sources(given)] == [f"{tmp_path.name}/a/m", "c/x/m", "d/x/m"]
    checkpoint(tmp_path / "hub" / "org" / "there")
    names = [s.name for s in read_sources([str(tmp_path / "hub"), "org/there"])]
    assert names == ["hub/org/there", "org/there"]


def test_what_holds_no_model_is_told(tmp_path, monkeypatch):
    with pytest.raises(ModelError, match="holds no checkpoint and no GGUF"):
        read_sources([str(tmp_path)])
    with pytest.raises(ModelError, match="no/such/place"):
        read_sources(["no/such/place"])
    monkeypatch.setattr(collection, "MAXIMUM", 1)
    with pytest.raises(OptionError, match="found more than 1, expected"):
        read_sources(["demo,org/there"])
    for name in "ab":
        checkpoint(tmp_path / name)
    with pytest.raises(OptionError, match=f"found more than 1 in {tmp_path}, expected"):
        read_sources([str(tmp_path)])
    monkeypatch.setattr(collection, "MAX_ENTRIES", 3)
    with pytest.raises(OptionError, match="holds more than 3 files and folders"):
        read_sources([str(tmp_path)])


def test_what_cannot_be_read_is_left_out_and_told(tmp_path):
    """The server starts all the same."""
    models = tmp_path / "models"
    checkpoint(models / "tiny")
    (models / "tiny" / "other.safetensors").symlink_to("nowhere")
    gguf(models / "good.gguf", 50)
    (models / "good.gguf").with_name("lost.gguf").symlink_to(tmp_path / "deleted.gguf")
    (models / "mmproj-lost.gguf").symlink_to("nowhere")
    (models / "gone").symlink_to(tmp_path / "deleted")
    (models / "round.gguf").symlink_to("round.gguf")
    (models / "text.gguf").write_text("no weights")
    os.mkfifo(models / "pipe.gguf")
    reported = []
    result = {s.name: s.bytes for s in read_sources([str(models)], reported.append)}
    assert result == {"good": 50, "tiny": 100}
    assert reported == [
        f"models: {models}: skipped 4: a link that leads nowhere "
        "(gone, lost.gguf, mmproj-lost.gguf, ...)",
        f"models: {models}: skipped 1: cannot be read, {os.strerror(errno.ELOOP)} (round.gguf)",
        f"models: {models}: skipped 1: named so, and no GGUF (text.gguf)",
    ]
    with pytest.raises(ModelError, match=r"holds no .* \(skipped 1: named so, and no GGUF"):
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "text.gguf").write_text("no weights")
        read_sources([str(tmp_path / "empty")])


def test_a_folder_and_a_file_that_may_not_be_read_are_left_out_and_told(tmp_path, monkeypatch):
    gguf(tmp_path / "good.gguf")
    gguf(tmp_path / "closed.gguf")
    gguf(tmp_path / "private" / "x.gguf")
    scan, first = os.scandir, collection.is_gguf

    def refusing(path):
        if os.path.basename(path) == "private":  # noqa: PTH119
            raise PermissionError(13, "Permission denied")
        return scan(path)

    def closed(path):
        if path.name == "closed.gguf":
            raise ModelError("cannot be read") from PermissionError(13, "Permission denied")
        return first(path)

    monkeypatch.setattr(collection.os, "scandir", refusing)
    monkeypatch.setattr(collection, "is_gguf", closed)
    reported = []
    assert [s.name for s in read_sources([str(tmp_path)], reported.append)] == ["good"]
    (line,) = reported
    assert line.endswith("skipped 2: cannot be read, Permission denied (closed.gguf, private)")


def test_links_are_followed_each_folder_once_and_not_into_the_depths_of_another_disk(tmp_path):
    disk, models = tmp_path / "disk", tmp_path / "models"
    checkpoint(disk / "one")
    checkpoint(disk / "org" / "two")
    gguf(disk / "three.gguf")
    models.mkdir()
    (models / "round").symlink_to(models)
    (models / "three.gguf").symlink_to(disk / "three.gguf")
    (models / "one").symlink_to(disk / "one")
    (models / "there").symlink_to(disk)
    assert [s.name for s in read_sources([str(models)])] == ["three", "one", "there/three"]


def test_it_takes_as_many_steps_as_there_are_files(tmp_path, monkeypatch):
    for number in range(60):
        gguf(tmp_path / f"m{number}-00001-of-00002.gguf", 4)
        gguf(tmp_path / f"m{number}-00002-of-00002.gguf", 5)
    sizes = []
    size = collection._size
    monkeypatch.setattr(collection, "_size", lambda path: sizes.append(path) or size(path))
    monkeypatch.setattr(collection.Path, "glob", None)
    result = read_sources([str(tmp_path)])
    assert {s.bytes for s in result} == {9} and len(result) == 60
    assert len(sizes) == 120
