"""The Hugging Face hub as far as models are fetched from it: a small server on this machine."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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
    "org/adapter": {
        "adapter_config.json": b"{}",
        "adapter_model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
        "adapter_model.bin": b"pickle",
        "tokenizer.json": b"{}",
    },
    "org/blind": {"a-q4_0.gguf": b"GGUF"},
    "org/outside": {"../../a-Q4_0.gguf": b"GGUF"},
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


def facts(name: str, data: bytes) -> dict[str, object]:
    """Size and checksums: large files are kept by git's LFS, others by git itself."""
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    reported: dict[str, object] = {"size": len(data), "blobId": blob}
    if name.endswith((".safetensors", ".gguf")):
        digest = hashlib.sha256(data).hexdigest()
        reported["lfs"] = {"size": len(data), "sha256": digest, "pointerSize": 134}
    return reported


class FakeHub(BaseHTTPRequestHandler):
    """What snapshot_download asks for: model info, the tree of files, and the files. Requests are
    kept in `server.requested`.
    """

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.requested.append(path)
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
        siblings = [
            {"rfilename": name} | (facts(name, data) if "blobs=" in self.path else {})
            for name, data in files.items()
        ]
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
        data, whole = files[name], files[name]
        status, headers = 200, {"ETag": f'"{digest(whole)}"', "X-Repo-Commit": COMMIT}
        requested = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if requested and not self.server.ignores_ranges:
            start, last = int(requested[1]), min(int(requested[2]), len(whole) - 1)
            data, status = whole[start : last + 1], 206
            headers["Content-Range"] = f"bytes {start}-{last}/{len(whole)}"
            self.server.ranges.append((name, len(data)))
            if self.server.breaks and name.endswith((".safetensors", ".gguf")):
                self.server.breaks -= 1
                headers["Content-Length"] = str(len(data))
                data = data[: len(data) // 2]
        self.answer(data, status, headers)

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
            with suppress(ConnectionError):  # who has what it wanted leaves
                for at in range(0, len(data), 1 << 16):
                    self.server.sent += self.wfile.write(data[at : at + (1 << 16)])

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def running_hub() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        server.requested, server.ranges, server.ignores_ranges, server.sent = [], [], False, 0
        server.breaks = 0  # of the next parts, only a half comes
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def address(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"
