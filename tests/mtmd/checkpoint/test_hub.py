"""Finding a model: folders, and a hub that is a small server on this machine."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mtmd.checkpoint import hub
from mtmd.checkpoint.hub import Found, resolve_model
from mtmd.kernels.errors import ModelError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEXT_COMMIT = COMMIT[::-1]
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "chat_template.jinja": b"x",
    "model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "README.md": b"#",
    "pytorch_model.bin": b"pickle",
    "model.gguf": b"GGUF",
    "onnx/model.safetensors": b"copy",
    "consolidated.safetensors": b"copy",
    "run.py": b"import os",
}
GGUFS = {
    "eyes-Q4_K_M.gguf": b"GGUF",
    "eyes-Q8_0.gguf": b"GGUF8",
    "big-BF16-00001-of-00002.gguf": b"GGUF",
    "big-BF16-00002-of-00002.gguf": b"2",
    "mmproj-eyes-F16.gguf": b"GGUFp",
    "mmproj-eyes-Q8_0.gguf": b"GGUFq",
    "README.md": b"#",
    "F16/one-F16.gguf": b"GGUF",
    "x-IQ4_XS.gguf": b"1",
    "y-IQ4_XS.gguf": b"2",
}
REPOS = {
    "org/good": FILES,
    "org/moving": FILES,  # its branch has a new commit by the time that files are asked for
    "org/pickles": {"config.json": b"{}", "pytorch_model.bin": b"x"},
    "org/empty": {},
    "org/GGUF": GGUFS,
    "org/blind": {"a-q4_0.gguf": b"GGUF"},
}
ERRORS = {
    "org/gated": (403, "GatedRepo"),
    "org/missing": (404, "RepoNotFound"),
    "org/private": (401, ""),
    "org/forbidden": (403, ""),
    "org/broken": (500, ""),
    "org/busy": (429, ""),
}


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


class FakeHub(BaseHTTPRequestHandler):
    """What snapshot_download asks for: model info, the tree of files, and the files. Requests are
    kept in `server.asked`.
    """

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.asked.append(path)
        parts = path.strip("/").split("/")
        repo = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if repo in ERRORS:
            self.answer(
                b"{}",
                ERRORS[repo][0],
                {
                    "X-Error-Code": ERRORS[repo][1],
                    "X-Error-Message": "https://hub/?token=secret " * 30,
                },
            )
        elif repo == "org/nonsense":
            self.answer(b"<html>")
        elif repo == "org/silent":
            time.sleep(1.5)
        elif parts[0] == "api":
            self.answer_api(repo, parts)
        else:
            self.answer_file(REPOS[repo], "/".join(parts[4:]))

    do_HEAD = do_GET

    def answer_api(self, repo: str, parts: list[str]) -> None:
        files = REPOS[repo]
        if parts[4:5] == ["tree"]:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": digest(data)}
                for name, data in files.items()
            ]
            return self.answer(json.dumps(tree).encode())
        if parts[5:] not in ([], ["main"], ["v1"], [COMMIT]):
            return self.answer(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
        siblings = [{"rfilename": name} for name in files]
        info = {
            "id": repo,
            "sha": NEXT_COMMIT if repo == "org/moving" and parts[5:] == ["main"] else COMMIT,
            "siblings": siblings,
            "private": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
        }
        return self.answer(json.dumps(info).encode())

    def answer_file(self, files: dict[str, bytes], name: str) -> None:
        data = files[name]
        self.answer(data, 200, {"ETag": f'"{digest(data)}"', "X-Repo-Commit": COMMIT})

    def answer(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def endpoint(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture
def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_local_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "good").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "_fetch", None)  # not to be called
    assert resolve_model(tmp_path) == Found(tmp_path) and resolve_model(str(tmp_path)) == Found(
        tmp_path
    )
    assert resolve_model("org/good") == Found(Path("org/good"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org") == Found(tmp_path / "org")
    (tmp_path / "text.gguf").write_bytes(b"GGUF")
    assert resolve_model("text.gguf") == Found(Path("text.gguf"))


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
    found = resolve_model(name, endpoint=endpoint, cache_dir=tmp_path)
    folder = next(p for p in found.path.parents if p.name == COMMIT)
    assert found.path == folder / expected and found.projector == (
        folder / projector if projector else None
    )
    fetched = {f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()}
    assert fetched == {expected, *parts, *([projector] if projector else [])}
    assert resolve_model(name, endpoint=closed_port, cache_dir=tmp_path) == found


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
    with pytest.raises(
        ModelError,
        match="is no folder here and no name on the Hugging Face hub; expected a checkpoint "
        "folder, a GGUF",
    ):
        resolve_model(
            name if name else str(tmp_path / "gone"),
            endpoint=closed_port,
            cache_dir=tmp_path / "cache",
        )


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="is a file; expected a GGUF, the folder"):
        resolve_model(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["org/good", "org/good@v1", f"org/good@{COMMIT}"])
def test_only_what_is_read_is_fetched(
    name: str, server: ThreadingHTTPServer, endpoint: str, tmp_path: Path
) -> None:
    folder = resolve_model(name, endpoint=endpoint, cache_dir=tmp_path).path
    found = {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }
    assert found == {
        name: FILES[name]
        for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors")
    }
    assert not any(
        path.endswith((".bin", ".gguf", ".py", ".md")) or "onnx" in path or "consolidated" in path
        for path in server.asked
    )


def test_a_fetched_model_is_found_without_the_hub(
    endpoint: str, closed_port: str, tmp_path: Path
) -> None:
    first = resolve_model("org/good", endpoint=endpoint, cache_dir=tmp_path)
    assert resolve_model("org/good", endpoint=closed_port, cache_dir=tmp_path) == first


def test_what_is_fetched_is_the_commit_that_was_looked_at(
    endpoint: str, closed_port: str, tmp_path: Path
) -> None:
    found = resolve_model("org/moving", endpoint=endpoint, cache_dir=tmp_path)
    assert found.path.name == COMMIT
    assert resolve_model("org/moving", endpoint=closed_port, cache_dir=tmp_path) == found


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


def test_a_download_that_breaks_off(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeHub, "answer_file", lambda self, *_: self.answer(b"", 404))
    with pytest.raises(
        ModelError,
        match=r"'org/good' could not be fetched from the Hugging Face hub \(.*\); check network and disk space",
    ):
        resolve_model("org/good", endpoint=endpoint, cache_dir=tmp_path)
