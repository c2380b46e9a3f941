"""`mtmd serve --engine-process` through HTTP, in processes of its own, with the demo model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from dual_encoders import clip
from processes import descendants
from served import NEIGHBOUR, Served, engines_of, served
from serving import data_url, image_part, user

from mtmd import Model
from mtmd.commands.serve import DEVICE_FAILED

APART = ("--engine-process", "--no-warmup", "--threads", "1")


def asked(server: Served, path: str, body: dict[str, Any] | None = None) -> str:
    headers = {"Authorization": f"Bearer {NEIGHBOUR}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(server.url + path, data, headers), timeout=60) as response:
        text: str = response.read().decode()
    return text


def test_the_demo_model_is_served_as_it_answers_alone(demo: Model, one: Path) -> None:
    """Two processes are started for it, which takes seconds: each imports torch."""
    alone = demo.answer(one, "Describe the image.", max_tokens=40)
    picture = image_part(data_url(one.read_bytes()))
    chat: dict[str, Any] = {"messages": [user(picture, "Describe the image.")], "max_tokens": 40}
    with served(*APART) as server:
        answer = json.loads(asked(server, "/v1/chat/completions", chat))
        assert answer["choices"][0]["message"]["content"] == alone.text
        assert answer["usage"]["completion_tokens"] == alone.receipt.output_tokens
        stream = asked(server, "/v1/chat/completions", chat | {"stream": True})
        lines = [line[6:] for line in stream.splitlines() if line.startswith("data: {")]
        pieces = [c["delta"].get("content") for s in lines for c in json.loads(s)["choices"]]
        assert "".join(p for p in pieces if p) == alone.text and len(lines) > 5
        with pytest.raises(HTTPError) as refused:
            asked(server, "/v1/chat/completions", chat | {"temperature": -1})
        with refused.value as response:
            assert response.code == 400
        metrics = asked(server, "/metrics")
        assert "mtmd_finished_total 2.0" in metrics and "mtmd_images_total 2.0" in metrics
        assert "mtmd_time_to_first_token_seconds_count 2.0" in metrics
        stats = json.loads(asked(server, "/api/stats"))
        assert (
            stats["model"] == demo.name and stats["cpu_seconds"] > stats["engine_cpu_seconds"] > 0
        )
        assert stats["resident_bytes"] > stats["engine_bytes"] > 50 << 20
        assert json.loads(asked(server, "/api/verdict?speed=1"))["title"]
        assert json.loads(asked(server, "/ready")) == {"status": "ready"}
        cores = sorted(os.sched_getaffinity(0))
        assert sorted(os.sched_getaffinity(server.process.pid)) == cores[: max(1, len(cores) // 2)]
        for others in set(descendants(server.process.pid)) - {server.process.pid}:
            assert sorted(os.sched_getaffinity(others)) == cores
    assert server.problems == []


def test_a_server_whose_engine_crashes_ends_for_whoever_starts_it_again() -> None:
    """As above."""
    with served(*APART) as server:
        os.kill(server.engines()[0], signal.SIGSEGV)
        assert server.process.wait(30) == DEVICE_FAILED
        assert "Fatal Python error: Segmentation fault" in server.log.read_text()
    assert any(
        "the engine's process has ended (by SIGSEGV)" in problem for problem in server.problems
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
        *APART,
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            end = time.monotonic() + 60
            while not (found := engines_of(process.pid)) and time.monotonic() < end:
                time.sleep(0.05)
            os.kill(found[0], signal.SIGKILL)
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == DEVICE_FAILED
    assert "mtmd serve: the engine's process has ended (by SIGKILL)" in told
    assert "Traceback" not in told


def test_a_dual_encoder_has_no_such_process(tmp_path: Path, mtmd: Any) -> None:
    clip(tmp_path)
    ran = mtmd("serve", "--port", 0, "--no-history", "-m", tmp_path, "--engine-process")
    assert ran.code == 2 and ran.err.startswith(f"mtmd serve: --engine-process: found {tmp_path}")
    assert "a dual encoder, expected a model that writes" in ran.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--models", "cache"), "--engine-process: found beside --models"),
        (("--ray", "auto"), "--engine-process: found beside --ray"),
    ],
    ids=["models", "ray"],
)
def test_where_there_is_more_than_one_engine_it_is_refused(
    words: tuple[str, ...], told: str, mtmd: Any
) -> None:
    assert told in mtmd("serve", "--port", 0, "--engine-process", *words).refused()
