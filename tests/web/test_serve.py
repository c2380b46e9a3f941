"""The command, in a process of its own, with the demo model."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import openai
import pytest
from dual_encoders import clip
from serve_command import address, serving
from serving import data_url, image_part, user

from mtmd import load, load_embedder
from mtmd.cli import main
from mtmd.web.store.store import Store

SHAPES = (Path(__file__).parents[2] / "examples" / "shapes.png").read_bytes()


JSON = {"Content-Type": "application/json"}
FORWARD = '''
import sys
from mtmd.engine_process import process
from mtmd.cli import main
from mtmd.commands import serve
from mtmd.web import server
replace = """
import os, sys, threading
from mtmd.llm.engine.runner import Runner
Runner.forward = lambda *_: {}
"""
process._BOOT = process._BOOT.replace("main(int", "exec(" + repr(replace) + "); main(int")
serve.ENDING_S = server.CLOSING_S = 0.5
sys.exit(main())
'''
EXIT = "--on-engine-failure", "exit"
HANGS = FORWARD.format("(print('runs', file=sys.stderr, flush=True), threading.Event().wait())")
ABORTS = FORWARD.format("os.abort()")


@pytest.fixture(scope="module")
def python():
    return [sys.executable]


def test_the_demo_model_is_served_as_it_answers_alone():
    alone = load(threads=1).answer(SHAPES, "Describe the image.")
    with serving("--no-history") as (process, stated):
        assert "demo model on cpu" in stated and "not kept" in stated
        with openai.OpenAI(
            base_url=f"{address(stated)}/v1", api_key="unused", max_retries=0, timeout=60
        ) as client:
            messages = [user(image_part(data_url(SHAPES)), "Describe the image.")]
            result = client.chat.completions.create(
                model="demo model", messages=messages, max_tokens=256
            )
            assert result.choices[0].message.content == alone.text
            assert (
                result.usage.prompt_tokens == alone.receipt.prompt_tokens
                and result.usage.completion_tokens == alone.receipt.output_tokens
            )
            chunks = list(
                client.chat.completions.create(
                    model="demo model",
                    messages=messages,
                    stream=True,
                    stream_options={"include_usage": True},
                    logprobs=True,
                    top_logprobs=2,
                )
            )
            assert (
                "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == alone.text
            )
            receipt = chunks[-1].usage.model_extra["mtmd_receipt"]
            assert receipt["images"][0]["cached"] and receipt["images"][0]["original_size"] == [
                256,
                256,
            ]
            reported = [
                t
                for c in chunks
                if c.choices and c.choices[0].logprobs
                for t in c.choices[0].logprobs.content
            ]
            assert len(reported) >= receipt["output_tokens"] - 1 and all(
                len(t.top_logprobs) == 2 and t.logprob <= 0 for t in reported
            )
            count = client.post(
                "/chat/completions/input_tokens", body={"messages": messages}, cast_to=object
            )
            assert count["input_tokens"] == alone.receipt.prompt_tokens and count["mtmd"][
                "image_tokens"
            ] == [alone.receipt.image_tokens]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, "stopped\n", "")


def test_a_dual_encoder_is_served(python, tmp_path):
    clip(tmp_path / "tiny clip")
    with serving("-m", str(tmp_path / "tiny clip"), "--dtype", "fp32", python=python) as (
        process,
        stated,
    ):
        assert "tiny clip on cpu" in stated and "/ready shows the progress" in stated
        body = json.dumps({"input": ["a cat", {"image": data_url(SHAPES)}]}).encode()
        with urlopen(Request(f"{address(stated)}/v1/embeddings", body, JSON)) as actual:
            rows = [row["embedding"] for row in json.load(actual)["data"]]
        model = load_embedder(tmp_path / "tiny clip", threads=1)
        expected = [*model.embed(texts="a cat"), *model.embed(SHAPES)]
        assert np.abs(np.float32(rows) - np.stack(expected)).max() < 1e-5
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, "stopped\n", "")


def test_a_dual_encoder_has_no_use_for_a_chats_options(capsys, tmp_path):
    clip(tmp_path / "c")
    assert main(["serve", "-m", str(tmp_path / "c"), "--port", "0", "--context", "99"]) == 2
    reported = capsys.readouterr().err
    assert "--context: " in reported and "dual encoder" in reported


def test_an_answer_under_way_is_told_that_the_server_ends(python, tmp_path):
    with serving(
        "--drain",
        "0",
        "--data",
        str(tmp_path / "data"),
        "--host",
        "0.0.0.0",
        "--insecure-no-auth",
        "--cors-origin",
        "*",
        python=python,
    ) as (process, stated):
        assert str(tmp_path / "data") in stated
        url = address(stated).replace("0.0.0.0", "127.0.0.1")
        with openai.OpenAI(
            base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60
        ) as client:
            stream = client.chat.completions.create(
                model="demo model",
                messages=[user("Describe the image.")],
                stream=True,
                extra_body={"ignore_eos": True},
            )
            next(iter(stream))
            process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="shutting down"):
                list(stream)
        err = process.communicate(timeout=30)[1]
        assert process.returncode == 0
        assert (
            err.count("WARNING: ") == 2 and "--insecure-no-auth" in err and "--cors-origin" in err
        )


def test_a_device_that_hangs_ends_the_server_for_whoever_starts_it_again(python):
    with (
        serving(
            *EXIT, "--no-history", "--hang-limit", "1", program=("-c", HANGS), python=python
        ) as (process, stated),
        openai.OpenAI(
            base_url=f"{address(stated)}/v1", api_key="unused", max_retries=0, timeout=60
        ) as client,
    ):
        with pytest.raises(openai.InternalServerError) as reported:
            client.chat.completions.create(model="demo model", messages=[user("hi")])
        assert (reported.value.status_code, reported.value.code) == (503, "device_failed")
        assert "Traceback" not in reported.value.message and "File" not in reported.value.message
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (70, "")
    assert "ERROR the device hangs: it has done nothing for" in err and "in wait" in err
    *_, last = err.splitlines()
    assert re.fullmatch(r"mtmd serve: the device hangs: .* s in the midst of a step; .*", last)


def test_a_server_that_is_to_stop_does_not_wait_for_a_device_that_hangs(python):
    with serving("--no-history", "--hang-limit", "0", program=("-c", HANGS), python=python) as (
        process,
        stated,
    ):
        body = json.dumps({"messages": [user("hi")], "stream": True}).encode()
        with urlopen(Request(f"{address(stated)}/v1/chat/completions", body, JSON), timeout=30):
            assert "runs\n" in iter(process.stderr.readline, "")  # before that, nothing hangs
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (70, "")
    assert err.splitlines()[-1].startswith("mtmd serve: the device has not ended what it does")


def test_a_crash_of_native_code_tells_where_it_was(python):
    program = ("-c", ABORTS)
    with serving(*EXIT, "--no-history", program=program, python=python) as (process, stated):
        with (
            openai.OpenAI(
                base_url=f"{address(stated)}/v1", api_key="unused", max_retries=0, timeout=60
            ) as client,
            pytest.raises(openai.InternalServerError, match="by SIGABRT"),
        ):
            client.chat.completions.create(model="demo model", messages=[user("hi")])
        _, err = process.communicate(timeout=30)
    assert process.returncode == 70
    assert "Fatal Python error: Aborted" in err and "run_loop.py" in err


def test_what_the_server_keeps_is_its_users_alone(tmp_path):
    """In a folder that was there, with a database from before that others could read, whatever the
    umask. And systemd, if it is there, is told when it answers and when it ends.
    """
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(20)
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    Store(data).close()
    (data / "conversations.db").chmod(0o644)
    (data / "images").chmod(0o755)
    env = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
    with manager, serving("--data", str(data), umask=0, env=env) as (process, stated):
        reported = [manager.recv(4096).decode() for _ in range(2)]
        assert reported == ["STATUS=loading", f"READY=1\nSTATUS=serving at {address(stated)}"]
        requested = Request(f"{address(stated)}/api/images?name=a.png", SHAPES)
        with urlopen(requested, timeout=20) as result:
            sha256 = json.load(result)["sha256"]
        with urlopen(Request(f"{address(stated)}/api/conversations", b"{}", JSON), timeout=20):
            pass
        modes = {p.relative_to(data).as_posix(): p.stat().st_mode & 0o777 for p in data.rglob("*")}
        process.send_signal(signal.SIGTERM)
        assert manager.recv(4096).startswith(b"STOPPING=1\n")
        _, err = process.communicate(timeout=30)
    assert modes.pop("images") == 0o700 and f"images/{sha256}" in modes
    assert {"conversations.db", "conversations.db-wal"} <= set(modes)
    assert set(modes.values()) == {0o600}
    assert "WARNING: other users of this machine could read conversations.db, images in the" in err


def test_keys_of_a_file_and_of_the_environment(python, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("anna:the-key-that-anna-has\n")
    keys.chmod(0o644)
    arguments = ["--no-history", "--api-key-file", str(keys), "--api-key", "a-key-on-the-line"]
    env = {"MTMD_API_KEYS": "ben:the-key-that-ben-has-"}
    with serving(*arguments, "--access-log", env=env, python=python) as (process, stated):
        for key in ("the-key-that-anna-has", "the-key-that-ben-has-", "a-key-on-the-line"):
            with openai.OpenAI(base_url=f"{address(stated)}/v1", api_key=key) as client:
                assert [m.id for m in client.models.list()] == ["demo model"]
        with (
            openai.OpenAI(base_url=f"{address(stated)}/v1", api_key="of nobody here") as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert "WARNING: every user of this machine can see the key of --api-key in `ps`" in err
    assert "WARNING: every user of this machine can read the keys in --api-key-file" in err
    names = re.findall(r"INFO req-\w+ (\S+) GET /v1/models (\d+) ", err)
    assert names == [("anna", "200"), ("ben", "200"), ("key-1", "200"), ("-", "401")]
    assert not any(key in err for key in ("that-anna-has", "that-ben-has", "on-the-line"))


@pytest.mark.parametrize(
    "arguments, reported",
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--api-key", "SECRET"], "--api-key: found a key of 6 characters, expected at least 16"),
        (["--api-key-file", "/no/such"], "--api-key-file: it cannot be read"),
        (["--hang-limit", "-1"], "--hang-limit: found"),
        (["--hang-limit", "nan"], "--hang-limit: found"),
        (["--queue", "0"], "queue"),
        (["--max-connections", "0"], "--max-connections: found 0"),
        (["--max-connections-per-address", "0"], "--max-connections-per-address: found 0"),
        (["--max-request", "0"], "--max-request: found 0 MiB"),
        (["--max-storage", "-1"], "--max-storage: found -1 GiB"),
        (["--port", "70000"], "port"),
        (["--media-path", "/no/such"], "--media-path: found"),
        (["--port", "x"], "port"),
        (["--cors-origin", "example.org"], "--cors-origin: found"),
        (["--port", "0", "--dtype", "fp8"], "dtype"),
    ],
)
def test_a_wrong_call_is_told_in_one_line(arguments, reported, capsys):
    try:
        code = main(["serve", "--no-history", *arguments])
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert code == 2 and reported in err and err.count("\n") == 1


def test_a_port_in_use_is_told_before_a_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr("mtmd.commands.serve._load", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--no-history", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot be listened on" in capsys.readouterr().err
