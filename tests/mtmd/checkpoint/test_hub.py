"""Finding a model: folders, and a hub that is a small server on this machine."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from fake_hub import COMMIT, ERRORS, FILES, REPOS, FakeHub, address, running_hub

from mtmd.base.errors import ModelError
from mtmd.checkpoint import hub
from mtmd.checkpoint.hub import (
    NotInCacheError,
    Result,
    cached_tokenizer,
    check_name,
    resolve_adapter,
    resolve_model,
)
from mtmd.llm.tokenizer import vocabulary_files
from mtmd.llm.tokenizer.tokenizer import FAIRSEQ_PIECES, PIECES


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with running_hub() as server:
        yield server


@pytest.fixture
def endpoint(server: ThreadingHTTPServer) -> str:
    return address(server)


@pytest.fixture
def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_local_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "good").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "_fetch", None)  # not to be called
    assert resolve_model(tmp_path) == Result(tmp_path) and resolve_model(str(tmp_path)) == Result(
        tmp_path
    )
    assert resolve_model("org/good") == Result(Path("org/good"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org") == Result(tmp_path / "org")
    (tmp_path / "text.gguf").write_bytes(b"GGUF")
    assert resolve_model("text.gguf") == Result(Path("text.gguf"))


GGUF_CHOICES = {
    "org/GGUF:Q4_K_M": ("eyes-Q4_K_M.gguf", "mmproj-eyes-F16.gguf", []),
    "org/GGUF:q8_0@v1": ("eyes-Q8_0.gguf", "mmproj-eyes-F16.gguf", []),
    "org/GGUF:BF16": (
        "big-BF16-00001-of-00002.gguf",
        "mmproj-eyes-F16.gguf",
        ["big-BF16-00002-of-00002.gguf"],
    ),
    "org/GGUF:F16": ("F16/one-F16.gguf", "mmproj-eyes-F16.gguf", []),
    "org/blind:Q4_0": ("a-q4_0.gguf", None, []),
}


@pytest.mark.parametrize("name", GGUF_CHOICES)
def test_a_type_chooses_a_gguf_and_its_projector(
    name: str, endpoint: str, closed_port: str, tmp_path: Path
) -> None:
    expected, projector, parts = GGUF_CHOICES[name]
    actual = resolve_model(name, endpoint=endpoint, cache_dir=tmp_path)
    folder = next(p for p in actual.path.parents if p.name == COMMIT)
    assert actual.path == folder / expected and actual.projector == (
        folder / projector if projector else None
    )
    fetched = {f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()}
    assert fetched == {expected, *parts, *([projector] if projector else [])}
    assert resolve_model(name, endpoint=closed_port, cache_dir=tmp_path) == actual


NO_NAMES = [
    "nothing",
    "./org/name",
    "/no/such/folder",
    "a/b/c",
    "",
    "org/name@",
    "org/na me",
    "-x/y",
    "a--b/c",
    "../x",
    "org/x.git",
    "é/x",
]


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_is_neither_a_folder_nor_a_name(
    name: str, closed_port: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    is_path = not name or name[:1] in "./" or name.count("/") > 1
    reported = (
        "found no such file or folder, expected a checkpoint folder, a GGUF"
        if is_path
        else "is no folder here and no name on the Hugging Face hub; expected a checkpoint folder"
    )
    with pytest.raises(ModelError, match=reported):
        resolve_model(
            name if name else str(tmp_path / "gone"),
            endpoint=closed_port,
            cache_dir=tmp_path / "cache",
        )


def test_a_name_may_end_as_a_file_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("someone/some-model.GGUF", "org/name.gguf", "org/name.gguf:Q4_0", "o/n.gguf@v1"):
        assert not check_name(name), name
    paths = ("here/name.gguf", "name.gguf", "./org/name.gguf", "~/name.gguf", "a/b/name.gguf")
    for path in (*paths, "/org/name.gguf", "C:/name.gguf", "C:\\name.gguf", "C:\\models"):
        with pytest.raises(ModelError, match="found no such file or folder, expected"):
            check_name(path)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="found an empty file, expected a GGUF file, the folder"):
        resolve_model(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["org/good", "org/good@v1", f"org/good@{COMMIT}"])
def test_only_what_is_read_is_fetched(
    name: str, server: ThreadingHTTPServer, endpoint: str, tmp_path: Path
) -> None:
    folder = resolve_model(name, endpoint=endpoint, cache_dir=tmp_path).path
    result = {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }
    assert result == {
        name: FILES[name]
        for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors")
    }
    assert not any(
        path.endswith((".bin", ".gguf", ".py", ".md")) or "onnx" in path or "consolidated" in path
        for path in server.requested
    )


def test_every_file_that_a_tokenizer_is_read_from_is_fetched() -> None:
    pair = {vocabulary_files.VOCABULARY, vocabulary_files.MERGES}
    names = {PIECES, FAIRSEQ_PIECES, *pair, vocabulary_files.RANKS}
    assert {name for name in names if not name.endswith(".json")} == {*hub.TOKENIZER_FILES}


def test_a_tokenizer_of_another_repository_is_fetched(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = b'{"model_type": "moondream1", "auto_map": {}, "torch_dtype": "bfloat16"}'
    other = "moondream/starmie-v1"
    monkeypatch.setitem(REPOS, "org/borrows", {**FILES, "config.json": config})
    monkeypatch.setitem(ERRORS, other, (404, "RepoNotFound"))
    with pytest.raises(ModelError) as error:
        resolve_model("org/borrows", endpoint=endpoint, cache_dir=tmp_path)
    assert str(error.value).startswith(f"{other}, whose tokenizer the model has, could not be fetc")
    assert "\n" not in str(error.value) and cached_tokenizer(other, tmp_path) is None
    monkeypatch.delitem(ERRORS, other)
    monkeypatch.setitem(REPOS, other, {"tokenizer.json": b"the newer one", "README.md": b"#"})
    resolve_model("org/borrows", endpoint=endpoint, cache_dir=tmp_path)
    folder = cached_tokenizer(other, tmp_path)
    assert folder is not None and (folder / "tokenizer.json").read_bytes() == b"the newer one"
    assert not (folder / "README.md").exists()


def test_a_fetched_model_is_found_without_the_hub(
    endpoint: str, closed_port: str, tmp_path: Path
) -> None:
    first = resolve_model("org/good", endpoint=endpoint, cache_dir=tmp_path)
    assert resolve_model("org/good", endpoint=closed_port, cache_dir=tmp_path) == first


def test_what_is_fetched_is_the_commit_that_was_looked_at(
    endpoint: str, closed_port: str, tmp_path: Path
) -> None:
    result = resolve_model("org/moving", endpoint=endpoint, cache_dir=tmp_path)
    assert result.path.name == COMMIT
    assert resolve_model("org/moving", endpoint=closed_port, cache_dir=tmp_path) == result


@pytest.mark.parametrize("progress", [True, False])
def test_bars_only_when_asked(
    progress: bool,
    endpoint: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars

    enable_progress_bars()  # other tests turn them off
    monkeypatch.setenv("TQDM_POSITION", "-1")  # huggingface_hub then shows bars without a terminal
    resolve_model("org/good", progress, endpoint=endpoint, cache_dir=tmp_path)
    out, err = capfd.readouterr()
    assert out == "" and ("Fetching" in err) == progress
    assert not are_progress_bars_disabled()


REFUSED = {
    "org/pickles": r"has no model\.safetensors on the Hugging Face hub; it has \.bin files, which this version does not read",
    "org/blind": r"has GGUF files on the Hugging Face hub; say which, as org/blind:TYPE, of a-q4_0\.gguf",
    "org/GGUF:Q5_0": r"expected one GGUF file of type Q5_0 in the repository, found F16/one-F16\.gguf, big-BF16",
    "org/GGUF:IQ4_XS": r"found 2 of that type \(x-IQ4_XS\.gguf, y-IQ4_XS\.gguf\); choose",
    "org/GGUF:Q4_K": "expected one GGUF file of type Q4_K in the repository, found",
    "org/empty:Q4_0": "found none at all",
    "org/empty": r"has no model\.safetensors on the Hugging Face hub; choose",
    "org/gated": "is gated .*; accept its terms .* log in",
    "org/missing": "neither a local folder nor found on the Hugging Face hub; check the spelling",
    "org/private": "log in .* if it is private",
    "org/good@v9": "no such revision",
    "org/forbidden": "HTTP status 403",
    "org/broken": r"cannot be reached \(HTTP status 500\)",
    "org/busy": r"cannot be reached \(HTTP status 429\)",
    "org/nonsense": "cannot be reached",
    "org/silent": r"cannot be reached \(.*Timeout",
}


def watch_naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the caller's thread sleeps from here on, as it would between retries; the server's
    threads sleep as before.
    """
    naps: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(
        time,
        "sleep",
        lambda s: (naps.append if threading.current_thread() is threading.main_thread() else sleep)(
            s
        ),
    )
    return naps


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_clear_line(
    name: str,
    endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if name == "org/silent":
        monkeypatch.setattr(hub, "TIMEOUT_S", 0.5)
    naps = watch_naps(monkeypatch)
    with pytest.raises(ModelError, match=REFUSED[name]) as caught:
        resolve_model(name, endpoint=endpoint, cache_dir=tmp_path)
    text = str(caught.value)
    assert (
        f"model {name!r}" in text
        and "\n" not in text
        and "http:" not in text
        and "secret" not in text
        and len(text) < 300
    )
    assert naps == []  # no rounds of retries
    cached(tmp_path, "config.json")
    with pytest.raises(ModelError, match=r"give a local folder; did you mean 'org/x'\?"):
        resolve_model("org/xs", endpoint=closed_port, cache_dir=tmp_path)
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.rglob("*.bin"))


def test_offline_fails_at_once(
    closed_port: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps = watch_naps(monkeypatch)
    with pytest.raises(
        ModelError,
        match=r"is not in the local cache and the Hugging Face hub cannot be reached \(.*\); check the network",
    ):
        resolve_model("org/good", endpoint=closed_port, cache_dir=tmp_path)
    assert naps == []  # no rounds of retries


def cached(cache: Path, *files: str) -> Path:
    """A repository org/x in a cache, with these files; the note of what commit its branch is."""
    folder = cache / "models--org--x" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_bytes(b"")
    note = cache / "models--org--x" / "refs" / "main"
    note.parent.mkdir()
    note.write_text(COMMIT)
    return note


@pytest.mark.parametrize("fetch", [True, False])
def test_what_is_in_the_cache_is_told_where_it_is_not_what_was_asked_for(
    fetch: bool, closed_port: str, tmp_path: Path
) -> None:
    cached(tmp_path, "x-Q4_K_M.gguf", "mmproj-x-Q8_0.gguf")
    otherwise = r" and the .* hub cannot be reached \(.*\); check" if fetch else "; `mtmd pull org"
    with pytest.raises(
        NotInCacheError, match=rf"type Q8_0 in the local cache, found x-Q4_K_M\.gguf{otherwise}"
    ):
        resolve_model("org/x:Q8_0", endpoint=closed_port, cache_dir=tmp_path, fetch=fetch)


def test_a_cache_that_cannot_be_read_is_not_called_empty(closed_port: str, tmp_path: Path) -> None:
    note = cached(tmp_path, "model.safetensors")
    note.unlink()
    note.mkdir()
    with pytest.raises(ModelError, match=r"read in the local cache \(Is a directory\)"):
        resolve_model("org/x", endpoint=closed_port, cache_dir=tmp_path)


def test_a_download_that_breaks_off(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeHub, "answer_file", lambda self, *_: self.answer(b"", 404))
    with pytest.raises(
        ModelError,
        match=r"'org/good' could not be fetched from the Hugging Face hub \(.*\); check network and disk space",
    ):
        resolve_model("org/good", endpoint=endpoint, cache_dir=tmp_path)


def test_an_adapter_is_fetched_and_then_found(
    endpoint: str, closed_port: str, tmp_path: Path
) -> None:
    where = {"cache_dir": tmp_path / "cache"}
    folder = resolve_adapter("org/adapter", endpoint=endpoint, **where)
    files = ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(p.name for p in folder.iterdir()) == files
    assert resolve_adapter("org/adapter", endpoint=closed_port, **where) == folder
    assert resolve_adapter(str(folder)) == folder
    for name, words in (
        ("org/good", "has no adapter_config.json on the Hugging Face hub"),
        ("org/missing", "neither a local folder nor found on"),
        ("org/gated", "is gated"),
    ):
        with pytest.raises(ModelError, match=words):
            resolve_adapter(name, endpoint=endpoint, **where)
    with pytest.raises(ModelError, match="neither here nor could it be fetched"):
        resolve_adapter("org/good", endpoint=closed_port, **where)
