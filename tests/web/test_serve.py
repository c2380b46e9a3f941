"""The command, in a process of its own, with the demo model."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from serving import data_url, image_part, user

from mtmd import load
from mtmd.cli import main

SHAPES = (Path(__file__).parents[2] / "examples" / "shapes.png").read_bytes()


@contextmanager
def serving(*arguments):
    """The running command and the lines it said up to its address."""
    command = [
        sys.executable,
        "-m",
        "mtmd",
        "serve",
        "--port",
        "0",
        "--no-warmup",
        "--threads",
        "1",
        *arguments,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        lines = []
        while not lines or not lines[-1].startswith("serving at "):
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr.read()
        yield process, "".join(lines)
    finally:
        process.kill()
        process.communicate()


def address(said):
    return re.search(r"serving at (http://\S+),", said)[1]


def test_the_demo_model_is_served_as_it_answers_alone():
    alone = load(threads=1).answer(SHAPES, "Describe the image.")
    with serving("--no-history") as (process, said):
        assert "demo model on cpu" in said and "not kept" in said
        with openai.OpenAI(
            base_url=f"{address(said)}/v1", api_key="unused", max_retries=0, timeout=60
        ) as client:
            messages = [user(image_part(data_url(SHAPES)), "Describe the image.")]
            found = client.chat.completions.create(
                model="demo model", messages=messages, max_tokens=256
            )
            assert found.choices[0].message.content == alone.text
            assert (
                found.usage.prompt_tokens == alone.receipt.prompt_tokens
                and found.usage.completion_tokens == alone.receipt.output_tokens
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
            told = [
                t
                for c in chunks
                if c.choices and c.choices[0].logprobs
                for t in c.choices[0].logprobs.content
            ]
            assert len(told) >= receipt["output_tokens"] - 1 and all(
                len(t.top_logprobs) == 2 and t.logprob <= 0 for t in told
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


def test_an_answer_under_way_is_told_that_the_server_ends(tmp_path):
    with serving(
        "--data",
        str(tmp_path / "data"),
        "--host",
        "0.0.0.0",
        "--insecure-no-auth",
        "--cors-origin",
        "*",
    ) as (process, said):
        assert str(tmp_path / "data") in said
        url = address(said).replace("0.0.0.0", "127.0.0.1")
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


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--api-key", "short"], "api_key"),
        (["--queue", "0"], "queue"),
        (["--max-connections", "0"], "connections"),
        (["--max-connections-per-address", "0"], "per_address"),
        (["--max-request", "0"], "media"),
        (["--max-storage", "-1"], "storage"),
        (["--port", "70000"], "port"),
        (["--media-path", "/no/such"], "media_path"),
        (["--port", "x"], "port"),
        (["--cors-origin", "example.org"], "cors_origin"),
        (["--port", "0", "--dtype", "fp8"], "dtype"),
    ],
)
def test_a_wrong_call_is_told_in_one_line(arguments, told, capsys):
    try:
        code = main(["serve", "--no-history", *arguments])
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert code == 2 and told in err and err.count("\n") == 1


def test_a_port_in_use_is_told_before_a_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr("mtmd.commands.serve.load_from", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--no-history", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot be listened on" in capsys.readouterr().err
