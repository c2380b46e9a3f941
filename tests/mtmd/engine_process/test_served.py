"""`mtmd serve` through HTTP, in processes of its own, with the demo model."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from dual_encoders import clip
from processes import children, descendants
from served import NEIGHBOUR, Served, engines_of, served
from serving import data_url, image_part, user

from mtmd import Model
from mtmd.commands.serve import DEVICE_FAILED
from mtmd.loading import DEMO_MODEL

QUICK = ("--no-warmup", "--threads", "1")
EXIT = ("--on-engine-failure", "exit")

LIBRARIES = ("libtorch", "libtriton", "llvmlite", "numba")


def requested(
    server: Served,
    path: str,
    body: dict[str, Any] | bytes | None = None,
    kind: str = "application/json",
) -> str:
    headers = {"Authorization": f"Bearer {NEIGHBOUR}", "Content-Type": kind}
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    with urlopen(Request(server.url + path, data, headers), timeout=60) as response:
        text: str = response.read().decode()
    return text


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing after 60 s"
        time.sleep(0.05)


def libraries_of(pid: int) -> set[str]:
    """Of the heavy ones, those that a process has mapped; none where it has ended meanwhile."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return {name for name in LIBRARIES if name in maps}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """Two processes, which take seconds to start: one imports torch."""
    with served(*QUICK) as running:
        yield running
    assert running.problems == []


def test_the_demo_model_is_served_as_it_answers_alone(
    server: Served, demo: Model, one: Path
) -> None:
    alone = demo.answer(one, "Describe the image.", max_tokens=40)
    picture = image_part(data_url(one.read_bytes()))
    chat: dict[str, Any] = {"messages": [user(picture, "Describe the image.")], "max_tokens": 40}
    answer = json.loads(requested(server, "/v1/chat/completions", chat))
    assert answer["choices"][0]["message"]["content"] == alone.text
    assert answer["usage"]["completion_tokens"] == alone.receipt.output_tokens
    stream = requested(server, "/v1/chat/completions", chat | {"stream": True})
    lines = [line[6:] for line in stream.splitlines() if line.startswith("data: {")]
    pieces = [c["delta"].get("content") for s in lines for c in json.loads(s)["choices"]]
    assert "".join(p for p in pieces if p) == alone.text and len(lines) > 5
    with pytest.raises(HTTPError) as refused:
        requested(server, "/v1/chat/completions", chat | {"temperature": -1})
    with refused.value as response:
        assert response.code == 400
    metrics = requested(server, "/metrics")
    assert "mtmd_finished_total 2.0" in metrics and "mtmd_images_total 2.0" in metrics
    assert "mtmd_time_to_first_token_seconds_count 2.0" in metrics
    stats = json.loads(requested(server, "/api/stats"))
    assert stats["model"] == demo.name and stats["cpu_seconds"] > stats["engine_cpu_seconds"] > 0
    assert stats["resident_bytes"] > stats["engine_bytes"] > 50 << 20
    assert json.loads(requested(server, "/api/verdict?speed=1"))["title"]
    assert json.loads(requested(server, "/ready")) == {"status": "ready"}
    cores = sorted(os.sched_getaffinity(0))
    own = os.sched_getaffinity(server.process.pid)
    assert own <= set(cores) and len(own) == max(1, len(cores) // 2)
    for others in set(descendants(server.process.pid)) - {server.process.pid}:
        assert sorted(os.sched_getaffinity(others)) == cores


def file_form(data: bytes) -> tuple[bytes, str]:
    """A form that uploads a picture, and its type."""
    begin = b"--edge\r\nContent-Disposition: form-data; name="
    purpose = begin + b'"purpose"\r\n\r\nvision\r\n'
    file = begin + b'"file"; filename="one.png"\r\n\r\n' + data + b"\r\n--edge--\r\n"
    return purpose + file, "multipart/form-data; boundary=edge"


def ask_for_everything(server: Served, picture: bytes) -> None:
    """Each kind of route that there is, once."""

    def got(path: str, body: dict[str, Any] | None = None) -> Any:
        return json.loads(requested(server, path, body))

    shown = user(image_part(data_url(picture)), "Describe the image.")
    chat: dict[str, Any] = {"messages": [shown], "max_tokens": 8}
    text: dict[str, Any] = {"messages": [user("Hello")], "max_tokens": 8}
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    answers = "/v1/chat/completions"

    for page in ("/", "/diagnostics", "/docs", "/openapi.json", "/api/report", "/api/report.txt"):
        assert requested(server, page)
    for path in ("/v1/models", "/api/about", "/props", "/slots", "/warmup", "/load"):
        assert got(path)
    assert got("/health") and got("/ready") and requested(server, "/metrics")

    assert got(answers, chat)["usage"]["completion_tokens"] == 8
    assert "[DONE]" in requested(server, answers, chat | {"stream": True})
    tools = [{"type": "function", "function": function}]
    assert got(answers, text | {"tools": tools, "tool_choice": "required", "max_tokens": 40})
    formed = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    (choice,) = got(answers, text | {"response_format": formed, "max_tokens": 40})["choices"]
    assert json.loads(choice["message"]["content"]) == {"a": "b"}
    with pytest.raises(HTTPError) as refused:
        requested(server, answers, text | {"temperature": -1})
    with refused.value as response:
        assert response.code == 400

    assert got("/v1/completions", {"prompt": "Hello", "max_tokens": 4})["choices"]
    assert got("/v1/responses", {"input": "Hello", "max_output_tokens": 16})["output"]
    assert got("/v1/messages", text | {"model": "demo"})["content"]
    assert got("/api/generate", {"model": "demo", "prompt": "Hello", "stream": False})["done"]
    assert got(f"{answers}/input_tokens", chat)["mtmd"]["image_tokens"]
    assert got("/v1/messages/count_tokens", text | {"model": "demo"})["input_tokens"] > 0
    tokens = got("/tokenize", {"content": "Hello"})["tokens"]
    assert got("/detokenize", {"tokens": tokens})["content"]
    assert got("/apply-template", text)["prompt"]

    assert json.loads(requested(server, "/v1/files", *file_form(picture)))["id"]
    stored = json.loads(requested(server, "/api/images?name=one.png", picture, "image/png"))
    named = {"sha256": stored["sha256"], "name": stored["name"]}
    assert got("/api/count", {"text": "Hello", "images": [named]})["image_tokens"]
    conversation = got("/api/conversations", {})["id"]
    location = f"/api/conversations/{conversation}"
    stated = got(f"{location}/messages", {"text": "What is it?", "images": [named]})
    answer = got(f"{location}/answers", {"parent": stated["message"]["id"]})
    events = requested(server, f"/api/answers/{answer['id']}/events")
    last = json.loads(events.rpartition("data: ")[2])
    seen = last["receipt"]["images"][0]["sha256"]
    assert got(f"/api/processed/{seen}")["tiles"]
    assert got("/api/conversations") and got(location) and requested(server, f"{location}/export")
    assert got("/api/stats")["requests"] > 0 and got("/api/verdict?speed=1")["title"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="read of /proc")
def test_the_process_of_the_server_has_neither_torch_nor_compilers(
    server: Served, one: Path
) -> None:
    """Of a second library of that size, the start and the memory are saved."""
    ask_for_everything(server, one.read_bytes())
    engine = server.engines()[0]
    assert "libtorch" in libraries_of(engine)
    its = {engine, *children(engine)}
    others = {pid: libraries_of(pid) for pid in descendants(server.process.pid)}
    assert {pid: result for pid, result in others.items() if result and pid not in its} == {}


def test_a_server_whose_engine_crashes_may_end_for_whoever_starts_it_again() -> None:
    """Two processes."""
    with served(*QUICK, *EXIT) as server:
        os.kill(server.engines()[0], signal.SIGSEGV)
        assert server.process.wait(30) == DEVICE_FAILED
        assert "Fatal Python error: Segmentation fault" in server.log.read_text()
    assert any(
        "the model's process has ended (by SIGSEGV)" in problem for problem in server.problems
    )


def test_an_engine_that_ends_while_it_loads_ends_the_server_alike(tmp_path: Path) -> None:
    """It is killed as soon as it is there, when it has imported little."""
    command = [
        sys.executable,
        "-m",
        "mtmd",
        "serve",
        "--port",
        "0",
        "--data",
        str(tmp_path),
        *QUICK,
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            end = time.monotonic() + 60
            while not (result := engines_of(process.pid)) and time.monotonic() < end:
                time.sleep(0.05)
            os.kill(result[0], signal.SIGKILL)
            _, reported = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == DEVICE_FAILED
    assert "mtmd serve: the model's process has ended (by SIGKILL)" in reported
    assert "Traceback" not in reported


def test_closed_output_is_as_good_as_none(tmp_path: Path) -> None:
    """As some service managers start programs; what the engine's process opens takes no place of
    it either.
    """
    words = [sys.executable, "-m", "mtmd", "serve", "--port", "0", "--no-history", *QUICK]
    command = f"exec {shlex.join(words)} 2>&-"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, cwd=tmp_path) as process:
        try:
            assert process.stdout
            assert any(line.startswith(b"serving at ") for line in process.stdout)
            (engine,) = engines_of(process.pid)
            assert Path(f"/proc/{engine}/fd/2").readlink() == Path(os.devnull)
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_the_process_of_a_server_of_vectors_has_no_torch_either(tmp_path: Path) -> None:
    """Two processes."""
    clip(tmp_path / "clip")
    with served(*QUICK, "-m", str(tmp_path / "clip"), "--dtype", "fp32") as server:
        rows = json.loads(requested(server, "/v1/embeddings", {"input": ["a cat"]}))["data"]
        assert len(rows) == 1 and json.loads(requested(server, "/ready")) == {"status": "ready"}
        assert libraries_of(server.process.pid) == set()
        assert "libtorch" in libraries_of(server.engines()[0])
    assert server.problems == []


def test_each_of_several_models_is_a_process_that_ends_alone(tmp_path: Path) -> None:
    """Three are started, one of them twice."""
    for name in ("a", "b"):
        shutil.copytree(DEMO_MODEL, tmp_path / "models" / name)

    def chat(name: str) -> str:
        body = {"model": name, "messages": [user("Hello")], "max_tokens": 4}
        answer = json.loads(requested(server, "/v1/chat/completions", body))
        text: str = answer["choices"][0]["message"]["content"]
        return text

    def health() -> dict[str, Any]:
        state: dict[str, Any] = json.loads(requested(server, "/health"))
        return state

    with served(*QUICK, "--models", str(tmp_path / "models")) as server:
        expected = chat("a")
        until(lambda: len(server.engines()) == 1)  # the other model is looked at in one of its own
        (first,) = server.engines()
        assert chat("b") == expected
        (second,) = set(server.engines()) - {first}
        assert libraries_of(server.process.pid) == set()
        assert all("libtorch" in libraries_of(engine) for engine in (first, second))
        os.kill(first, signal.SIGKILL)
        until(lambda: "restarting" in health())
        assert health()["restarting"][0]["model"] == "a" and health()["status"] == "ok"
        with pytest.raises(HTTPError) as refused:
            chat("a")
        with refused.value as response:
            assert response.code == 503 and int(response.headers["Retry-After"]) >= 1
            assert json.load(response)["error"]["code"] == "engine_failed"
        assert chat("b") == expected
        until(lambda: "restarting" not in health())
        assert chat("a") == expected and second in server.engines()
        for engine in server.engines():
            assert os.sched_getaffinity(engine) == os.sched_getaffinity(0)
        requested(server, "/models/unload", {"model": "b"})
        until(lambda: second not in server.engines())
        assert chat("a") == expected
    assert all("by SIGKILL" in problem for problem in server.problems)
