"""Models fetched ahead of their use, listed and removed, on a hub that is a small server here."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_hub import COMMIT, FILES, GGUFS, REPOS, address, running_hub

from mtmd.base.errors import ModelError
from mtmd.checkpoint import cached_models
from mtmd.checkpoint import pull as pulling
from mtmd.checkpoint.cached_models import plan_removal, read_cache
from mtmd.checkpoint.hub import resolve_model
from mtmd.checkpoint.pull import Arriving, pull, size_text

READ = ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors")


@pytest.fixture
def endpoint() -> Iterator[str]:
    with running_hub() as server:
        yield address(server)


def test_a_model_is_fetched_once_and_its_checksums_compared(endpoint: str, tmp_path: Path) -> None:
    reported: list[Arriving] = []
    first = pull("org/good", endpoint=endpoint, cache_dir=tmp_path, report=reported.append)
    size = sum(len(FILES[name]) for name in READ)
    assert (first.files, first.bytes, first.fetched, first.unchecked) == (4, size, size, ())
    assert [arriving.read() for arriving in reported] == [(size, size)], "all of it has come"
    assert replace(reported[0], there=size - 7).read() == (7, size)
    assert replace(reported[0], blobs=tmp_path / "none").read() == (0, size), "before the first"
    assert {f.name for f in first.result.path.iterdir()} == set(READ)
    again = pull("org/good", endpoint=endpoint, cache_dir=tmp_path)
    assert (again.result, again.fetched) == (first.result, 0)


def test_what_was_fetched_is_found_without_the_hub(endpoint: str, tmp_path: Path) -> None:
    """A server that loads it waits for no network, and takes what was fetched and checked."""
    for name in ("org/good", "org/GGUF:BF16"):
        with pytest.raises(ModelError, match=f"is not in the local cache; `mtmd pull {name}`"):
            resolve_model(name, cache_dir=tmp_path, fetch=False)
        pulled = pull(name, endpoint=endpoint, cache_dir=tmp_path)
        assert resolve_model(name, cache_dir=tmp_path, fetch=False) == pulled.result


def test_a_gguf_comes_with_its_parts_and_its_projector(endpoint: str, tmp_path: Path) -> None:
    pulled = pull("org/GGUF:BF16", endpoint=endpoint, cache_dir=tmp_path)
    assert pulled.files == 3 and pulled.result.projector is not None


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"], ids=["LFS", "git"])
def test_a_file_that_is_not_the_hubs_is_removed(name: str, endpoint: str, tmp_path: Path) -> None:
    folder = pull("org/good", endpoint=endpoint, cache_dir=tmp_path).result.path
    file = (folder / name).resolve()
    data = file.read_bytes()
    file.write_bytes(data[:-1] + b"!")
    with pytest.raises(
        ModelError, match=rf"{name} is not what the hub has .* pull the model again"
    ):
        pull("org/good", endpoint=endpoint, cache_dir=tmp_path)
    assert not file.exists() and not (folder / name).is_symlink()
    pull("org/good", endpoint=endpoint, cache_dir=tmp_path)
    assert (folder / name).read_bytes() == data


def test_a_full_disk_is_told_before_anything_is_fetched(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: SimpleNamespace(free=pulling.SPARE + 7, total=9, used=9)
    )
    with pytest.raises(
        ModelError, match=r"'org/good' takes \d+ B, and 7 B are free at .*`mtmd rm`"
    ):
        pull("org/good", endpoint=endpoint, cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


REFUSED = {
    "org/pickles": "it has .bin files",
    "org/GGUF": "say which, as org/GGUF:TYPE",
    "org/outside:Q4_0": "names a file outside of its folder",
    "org/missing": "neither a local folder nor found",
    "org/broken": r"cannot be reached \(HTTP status 500\); check the network",
    "nothing": "no name on the Hugging Face hub",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_pulled(name: str, endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=REFUSED[name]):
        pull(name, endpoint=endpoint, cache_dir=tmp_path)


@pytest.fixture
def cache(endpoint: str, tmp_path: Path) -> Path:
    for name in ("org/good", "org/GGUF:Q4_K_M", "org/GGUF:BF16"):
        pull(name, endpoint=endpoint, cache_dir=tmp_path)
    (tmp_path / "models--org--notes" / "snapshots" / COMMIT).mkdir(parents=True)
    (tmp_path / "models--org--notes" / "snapshots" / COMMIT / "README.md").write_text("#")
    return tmp_path


def test_what_is_in_the_cache(cache: Path, tmp_path: Path) -> None:
    result = read_cache(cache)
    assert [(m.name, m.kind, m.whole) for m in result.models] == [
        ("org/GGUF:BF16", "GGUF", True),
        ("org/GGUF:Q4_K_M", "GGUF", True),
        ("org/good", "", True),
    ]
    assert result.others == ("org/notes",)
    assert result.models[2].bytes == sum(len(FILES[name]) for name in READ)
    assert read_cache(tmp_path / "none") == cached_models.Cache((), ())


def test_a_part_that_is_missing_is_seen(cache: Path) -> None:
    next(cache.rglob("big-BF16-00002-of-00002.gguf")).unlink()
    assert {m.name: m.whole for m in read_cache(cache).models}["org/GGUF:BF16"] is False


def test_one_gguf_of_two_is_removed(cache: Path) -> None:
    plan = plan_removal("org/GGUF:bf16", cache)
    parts = [data for name, data in GGUFS.items() if name.startswith("big-BF16")]
    shared = GGUFS["eyes-Q4_K_M.gguf"]  # the same content as a part: kept once, and still needed
    assert plan.bytes == sum(map(len, parts)) and shared in parts
    assert len(read_cache(cache).models) == 3, "nothing is deleted before it is asked for"
    plan.execute()
    assert [m.name for m in read_cache(cache).models] == ["org/GGUF:Q4_K_M", "org/good"]
    left = {p.name: p.read_bytes() for p in cache.rglob("*.gguf")}
    assert left == {n: GGUFS[n] for n in ("eyes-Q4_K_M.gguf", "mmproj-eyes-F16.gguf")}


def test_the_last_gguf_takes_its_projector_along(cache: Path) -> None:
    for kind in ("BF16", "Q4_K_M"):
        plan_removal(f"org/GGUF:{kind}", cache).execute()
    assert [m.name for m in read_cache(cache).models] == ["org/good"]
    assert not (cache / "models--org--GGUF").exists()


def test_a_whole_repository_is_removed(cache: Path) -> None:
    plan = plan_removal("org/good", cache)
    plan.execute()
    assert plan.bytes > 0 and not (cache / "models--org--good").exists()


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("org/god", "is not in the cache; did you mean 'org/good'"),
        ("org/GGUF:Q4_K", "did you mean 'org/GGUF:Q4_K_M'"),
        ("other/thing", "`mtmd list` lists them"),
        ("org/good@v9", f"at other revisions; found {COMMIT}, main"),
    ],
)
def test_what_is_not_there_cannot_be_removed(cache: Path, name: str, reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        plan_removal(name, cache)


def test_commands(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mtmd: Any
) -> None:
    monkeypatch.setattr(
        pulling,
        "pull",
        lambda name, progress: pull(name, progress, endpoint=endpoint, cache_dir=tmp_path),
    )
    monkeypatch.setattr(cached_models, "read_cache", lambda: read_cache(tmp_path))
    monkeypatch.setattr(cached_models, "plan_removal", lambda name: plan_removal(name, tmp_path))
    ran = mtmd("pull", "org/good")
    assert ran.code == 0 and "org/good: 21 B in 4 files, 21 B fetched, checksums right" in ran.out
    assert "already here" in mtmd("pull", "org/good").out
    ran = mtmd("list")
    assert [line.split()[0] for line in ran.out.splitlines()] == ["model", "demo", "org/good"]
    assert "expected one, or --yes" in mtmd("rm", "org/good").refused()
    assert mtmd("rm", "org/good", "--yes").out == "removed org/good, 21 B\n"
    assert "org/good" not in mtmd("list").out


def test_sizes_as_people_read_them() -> None:
    assert [size_text(n) for n in (0, 999, 9_900_000, 123_456_789, 10**12 * 2)] == [
        "0 B",
        "999 B",
        "9.9 MB",
        "123 MB",
        "2.0 TB",
    ]
    assert REPOS["org/good"] is FILES
