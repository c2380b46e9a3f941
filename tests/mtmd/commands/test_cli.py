"""The command line: every option does something, refusals are one line, stdout holds the answer and
nothing else.
"""

from __future__ import annotations

import _thread
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mtmd import cli
from mtmd.__main__ import main as begin
from mtmd.base.interrupts import end_at_interrupts
from mtmd.cli import main
from mtmd.commands.models import listing
from mtmd.events import Answer, Finished, TextPiece
from mtmd.llm.engine.runner import Runner
from mtmd.loading import DEMO_MODEL, load
from mtmd.model import Model

COUNT = "How many shapes are there?"
COMMAND = [sys.executable, "-m", "mtmd.cli"]


def answer(mtmd: Any, *arguments: object) -> dict[str, Any]:
    """What `describe --json` prints."""
    ran = mtmd("describe", *arguments, "--json")
    assert ran.code == 0 and ran.err == "" and ran.out.count("\n") == 1, ran
    values: dict[str, Any] = json.loads(ran.out)
    return values


def report(mtmd: Any, *arguments: object) -> dict[str, Any]:
    """What `warmup --json --no-run` prints."""
    ran = mtmd("warmup", "--json", "--no-run", *arguments)
    assert ran.code == 0 and ran.err == "", ran
    values: dict[str, Any] = json.loads(ran.out)
    return values


def test_describe(one: Path, mtmd: Any) -> None:
    ran = mtmd("describe", one, "-p", COUNT)
    assert (ran.code, ran.out) == (0, "One.\n")
    image, tokens, where = ran.err.splitlines()
    assert image.startswith("image 1: ") and where.startswith("demo model on ")
    assert " output tokens (stop); " in tokens and "preprocess " in tokens
    assert "\r" not in ran.err and "\x1b" not in ran.err, "no bars where stderr is no terminal"


def test_json(one: Path, mtmd: Any, demo: Model) -> None:
    values = answer(mtmd, one, "-p", COUNT)
    assert (
        list(values) == ["text", "prompt_token_ids", "output_token_ids", "receipt", "tool_calls"]
        and values["text"] == "One."
    )
    receipt = values["receipt"]
    assert {
        "images",
        "videos",
        "image_tokens",
        "audio",
        "audio_tokens",
        "prompt_tokens",
        "output_tokens",
        "proposed_tokens",
        "accepted_tokens",
        "speculation",
        "threads",
        "ranks",
        "layout",
        "preprocess_ms",
        "preprocessed",
        "kernels_compiled",
        "compile_ms",
        "sampling",
        "sampling_unused",
        "model_notes",
        "repeated_tokens",
        "thinking_tokens",
        "encode_ms",
        "prefill_ms",
        "decode_ms",
        "kv_type",
        "kv_bytes",
        "activations",
        "adapters",
        "device",
        "queued_ms",
        "reused_tokens",
        "dtype",
        "attention",
        "warnings",
        "finish",
        "seed",
        "model",
    } == set(receipt)
    assert {
        "original_size",
        "processed_size",
        "tiles",
        "tokens",
        "sha256",
        "cached",
        "notes",
        "box_scale",
    } == set(receipt["images"][0])
    with Image.open(one) as image:
        assert receipt["images"][0]["original_size"] == list(image.size)
    assert (
        len(values["prompt_token_ids"]) == receipt["prompt_tokens"]
        and len(values["output_token_ids"]) == receipt["output_tokens"]
    )
    assert demo.checkpoint.tokenizer.decode(values["output_token_ids"]) == "One."


def test_several_images_in_order(world: dict[int, Path], mtmd: Any) -> None:
    there, back = (
        answer(mtmd, *paths, "-p", COUNT)["receipt"]["images"]
        for paths in ((world[1], world[2]), (world[2], world[1]))
    )
    assert len(there) == 2 and [i["sha256"] for i in there] == [i["sha256"] for i in reversed(back)]


# Options of `describe` with what must be seen in the JSON, given that of a plain run.
Seen = Callable[[dict[str, Any], dict[str, Any]], bool]
HOT = ("--temperature", 9, "--seed", 3, "--ignore-eos", "--max-tokens", 12)
EFFECTS: dict[str, tuple[tuple[object, ...], Seen]] = {
    "--prompt": (
        ("--prompt", "Describe this picture, please."),
        lambda got, plain: got["prompt_token_ids"] != plain["prompt_token_ids"],
    ),
    "--system": (
        ("--system", "Be brief."),
        lambda got, plain: len(got["prompt_token_ids"]) > len(plain["prompt_token_ids"]),
    ),
    "--max-tokens": (
        ("--max-tokens", 2),
        lambda got, plain: (
            got["receipt"]["finish"] == "length"
            and got["output_token_ids"] == plain["output_token_ids"][:2]
        ),
    ),
    "--ignore-eos": (
        ("--ignore-eos", "--max-tokens", 40),
        lambda got, plain: (
            got["receipt"]["output_tokens"] == 40 > plain["receipt"]["output_tokens"]
        ),
    ),
    "--stop": (
        ("--stop", "never said", "--stop", " at"),
        lambda got, plain: got["text"] == plain["text"].split(" at")[0] != plain["text"],
    ),
    "--temperature": (
        HOT,
        lambda got, plain: got["text"][:12] != plain["text"][:12] and got["receipt"]["seed"] == 3,
    ),
    "--top-k": (
        (*HOT, "--top-k", 1),
        lambda got, plain: got["output_token_ids"] == plain["output_token_ids"][:12],
    ),
    "--top-p": (
        (*HOT, "--top-p", 1e-6),
        lambda got, plain: got["output_token_ids"] == plain["output_token_ids"][:12],
    ),
    "--min-p": (
        (*HOT, "--min-p", 1),
        lambda got, plain: got["output_token_ids"] == plain["output_token_ids"][:12],
    ),
    "--repetition-penalty": (
        ("--repetition-penalty", 100),
        lambda got, plain: got["output_token_ids"] != plain["output_token_ids"],
    ),
    "--device": (("--device", "cpu"), lambda got, _: got["receipt"]["device"] == "cpu"),
    "--dtype": (("--dtype", "bf16"), lambda got, _: got["receipt"]["dtype"] == "bf16"),
    "--weights": (
        ("--weights", "Q8_0"),
        lambda got, _: got["receipt"]["model_notes"][0].endswith("to Q8_0"),
    ),
    "--kv-type": (
        ("--kv-type", "q8_0"),
        lambda got, plain: (
            got["receipt"]["kv_type"] == "q8_0"
            and got["receipt"]["kv_bytes"] < plain["receipt"]["kv_bytes"]
        ),
    ),
    "--flash-attn": (
        ("--device", "cpu", "--flash-attn", "off"),
        lambda got, plain: (
            got["receipt"]["attention"] == {"encoder": "explicit", "decoder": "explicit"}
            and got["text"] == plain["text"]
        ),
    ),
    "--override-tensor": (
        ("--device", "cpu", "--override-tensor", r"v\.blk\.0\.attn$=reference"),
        lambda got, plain: (
            "1 of" in got["receipt"]["attention"]["encoder"] and got["text"] == plain["text"]
        ),
    ),
    "--refuse": (
        ("--device", "cpu", "--refuse", "pool2d"),
        lambda got, plain: (
            "op pool2d is not supported" in got["receipt"]["warnings"][0]
            and got["text"] == plain["text"]
        ),
    ),
    "--threads": (
        ("--threads", 2),
        lambda got, plain: torch.get_num_threads() == 2 and got["text"] == plain["text"],
    ),
    "--speculate": (
        ("--speculate", 4, "--ignore-eos", "--max-tokens", 60),
        lambda got, plain: (
            got["receipt"]["speculation"] == "up to 4 tokens"
            and got["receipt"]["proposed_tokens"] >= got["receipt"]["accepted_tokens"] > 0
            and got["text"].startswith(plain["text"])
        ),
    ),
    "--context": (
        ("--context", 40, "--ignore-eos"),
        lambda got, _: got["receipt"]["prompt_tokens"] + got["receipt"]["output_tokens"] == 40,
    ),
}


def options_of(verb: str) -> set[str]:
    """As the help text lists them."""
    text = io.StringIO()
    with redirect_stdout(text), pytest.raises(SystemExit):
        main([verb, "--help-all"])
    return {
        word.rstrip(",")
        for line in text.getvalue().splitlines()
        if line.startswith("  -")
        for word in line.split()
        if word[:2] == "--"
    }


# tests/mtmd/prompt/test_videos.py, tests/families/test_sound_of_videos.py
VIDEOS = {"--fps", "--max-frames", "--from", "--to", "--no-sound"}
# tests/mtmd/ranks, tests/mtmd/loaded/fitting
RANKS = {"--tp", "--tensor-split", "--no-kv-offload", "--split", "--fit"}
LORA = {"--lora", "--adapter"}  # tests/mtmd/checkpoint/test_adapters.py, tests/families
# tests/llm/sampling/test_ngrams.py, tests/mtmd/checkpoint/test_sampling.py
NGRAMS = {"--no-repeat-ngram", "--no-repeat-window", "--no-repeat-except"}
ACTIVATIONS = {"--activations"}  # tests/kernels/plan/test_int8_products.py
TASKS = {"--task"}  # tests/families/test_tasks.py
THINKING = {"--think", "--think-budget", "--chat-template-kwargs"}  # tests/mtmd/thinking
IN_TEST_GGUF = {
    "--mmproj",
    "--chat-template",
    "--image-min-tokens",
    "--image-max-tokens",
    "--detail",
}  # tests/mtmd/checkpoint/test_gguf.py


def test_every_option_of_describe_is_tried_here() -> None:
    assert options_of("describe") == {
        *EFFECTS,
        *ACTIVATIONS,
        "--seed",
        "--json-schema",
        "--json",
        "--quiet",
        "--model",
        "--help",
        "--help-all",
        "--sampling",  # these in tests/mtmd/checkpoint/test_sampling.py and service/test_service.py
        "--stop-repeating",
        *THINKING,
        *LORA,
        *TASKS,
        *NGRAMS,
        *IN_TEST_GGUF,
        "--memory-limit",  # tests/mtmd/loaded/test_memory_admission.py
        "--isolate",  # tests/mtmd/test_isolate.py
        *RANKS,
        "--kernels",  # tests/mtmd/inspect/test_save_kernels.py
        "--vision-attention",  # tests/mtmd/loaded/test_vision_attention.py
        "--no-graphs",  # tests/kernels/backends/test_side_stream.py
        "--preprocess",  # tests/mtmd/loaded/test_preprocessing.py
        *VIDEOS,
        "--each",  # tests/mtmd/commands/test_new_user.py
        "--prepare-ahead",  # tests/mtmd/service/test_many.py
        "--allow-remote-media",  # tests/mtmd/prompt/urls/test_remote_media.py
    }


@pytest.fixture(scope="module")
def plain(one: Path) -> dict[str, Any]:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["describe", str(one), "--json", "--device", "cpu"]) == 0
    values: dict[str, Any] = json.loads(out.getvalue())
    assert (
        len(values["output_token_ids"]) >= 12
        and " at" in values["text"]
        and values["receipt"]["seed"] is None
    )
    return values


@pytest.mark.parametrize("option", EFFECTS)
def test_every_option_does_something(
    option: str, one: Path, mtmd: Any, plain: dict[str, Any]
) -> None:
    arguments, seen = EFFECTS[option]
    assert option in arguments
    got = answer(mtmd, one, *arguments)
    assert seen(got, plain), (got, plain)


def test_seed(one: Path, mtmd: Any) -> None:
    drawn = [answer(mtmd, one, *HOT[:2], *HOT[4:], "--seed", seed) for seed in (3, 3, 4)]
    assert (
        drawn[0]["output_token_ids"] == drawn[1]["output_token_ids"] != drawn[2]["output_token_ids"]
    )
    assert [d["receipt"]["seed"] for d in drawn] == [3, 3, 4]


def test_an_option_is_called_as_it_was_given(one: Path, mtmd: Any) -> None:
    assert (
        mtmd("describe", one, "--memory-limit", "20")
        .refused()
        .startswith("mtmd describe: --memory-limit: found 20, which is bytes, expected a unit")
    )
    assert (
        "image_min_tokens is 9"
        in mtmd(*("describe", one, "--image-min-tokens", 9, "--image-max-tokens", 3)).refused()
    ), "of two options at once, the names in Python"


def test_json_schema(one: Path, mtmd: Any, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"enum": ["yes", "no"]}', encoding="utf-8-sig")
    assert answer(mtmd, one, "--json-schema", file)["text"] in ('"yes"', '"no"')
    assert answer(mtmd, one, "--json-schema", ' {"enum": ["no"]}')["text"] == '"no"'
    assert (
        "cannot be read (No such file or directory)"
        in mtmd("describe", one, "--json-schema", tmp_path / "none").refused()
    )
    file.write_text('{"type": "colour"}')
    assert "Invalid type: colour" in mtmd("describe", one, "--json-schema", file).refused()


def test_quiet_and_model(one: Path, mtmd: Any, tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    assert (
        mtmd("describe", one, "-p", COUNT, "-m", folder)
        .err.splitlines()[-1]
        .startswith("my model on ")
    )
    ran = mtmd("describe", one, "-p", COUNT, "-m", folder, "--quiet")
    assert (ran.out, ran.err) == ("One.\n", "")


def test_every_option_of_warmup(mtmd: Any, tmp_path: Path) -> None:
    assert options_of("warmup") == {
        "--help",
        "--help-all",
        "--json",
        "--strict",
        "--no-run",
        "--model",
        "--device",
        "--dtype",
        "--flash-attn",
        "--override-tensor",
        "--refuse",
        "--threads",
        "--context",
        "--target",  # these in tests/mtmd/inspect/test_predict_target.py and test_prediction.py
        "--memory",
        "--random-weights",
        "--weights",
        "--activations",
        "--parallel",
        "--no-compile",
        "--save",  # these in tests/mtmd/inspect/test_save_kernels.py
        "--kernels",
        "--no-graphs",
        "--vision-attention",
        "--preprocess",
        "--memory-limit",
        "--speculate",
        "--kv-type",
        *LORA - {"--adapter"},
        *RANKS,
        *IN_TEST_GGUF - {"--detail"},
    }
    reported = report(
        mtmd,
        "--device",
        "cpu",
        "--dtype",
        "bf16",
        "--flash-attn",
        "off",
        "--threads",
        2,
        "--context",
        128,
        "--speculate",
        3,
    )
    assert reported["speculation"] == {"setting": "3", "refused": None, "costs": []}
    assert (reported["device"], reported["dtype"], reported["checks"]) == (
        "cpu",
        "bf16",
        [],
    ) and reported["device_name"].startswith("2 threads, ")
    assert {(f["setting"], f["state"]) for f in reported["flash"]} == {
        ("off", "off")
    } and not reported["fully_accelerated"]
    assert all("context 128" in g["size"] for g in reported["graphs"] if g["graph"] == "decoder")
    assert report(mtmd, "--threads", 1)["device_name"].startswith("1 thread, ")
    folder = tmp_path / "other"
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    assert report(mtmd, "-m", folder)["model"] == "other"


def test_override_with_a_stand_in_accelerator_moves_nodes(mtmd: Any) -> None:
    def encoder(*arguments: object) -> dict[str, Any]:
        reported = report(mtmd, "--device", "cpu", "--refuse", "pool2d:batch>1000", *arguments)
        return next(
            g for g in reported["graphs"] if (g["graph"], g["label"]) == ("encoder", "warm-up")
        )

    before, after = encoder(), encoder("--override-tensor", r"v\.blk\.3\..*=cpu")
    assert (
        set(before["ops_by_backend"]) == {"limited"}
        and before["splits"] == 1
        and before["copies"] == []
    )
    assert (
        after["ops_by_backend"]["cpu"] >= 10
        and after["splits"] == 3
        and after["nodes"] == before["nodes"]
    )
    assert sum(after["ops_by_backend"].values()) == after["nodes"]
    ways = [(c["source"], c["destination"]) for c in after["copies"]]
    assert set(ways) == {("limited", "cpu"), ("cpu", "limited")} and all(
        c["bytes"] > 0 for c in after["copies"]
    )
    assert [c["name"].split(".")[:3] for c in after["copies"] if c["source"] == "cpu"] == [
        ["v", "blk", "3"]
    ]
    assert set(after["weight_bytes"]) == {"limited", "cpu"}


def test_strict(mtmd: Any) -> None:
    saved = mtmd("warmup", "--device", "cpu", "--strict", "--no-run")
    assert saved.code == 0 and "result: everything runs on cpu as intended" in saved.out
    for arguments in (
        ["--refuse", "gelu"],
        ["--flash-attn", "off"],
        ["--override-tensor", "mm.pool=reference"],
    ):
        ran = mtmd("warmup", "--device", "cpu", "--strict", "--no-run", *arguments)
        assert (
            ran.code == 3
            and ran.err == ""
            and "result: not fully on the accelerated path" in ran.out
        )
        assert mtmd("warmup", "--device", "cpu", "--no-run", *arguments).code == 0


def test_warmup_runs_and_reports(mtmd: Any) -> None:
    ran = mtmd("warmup", "--device", "cpu", "--strict", "--refuse", "gelu")
    assert (
        ran.code == 3
        and "one image encoded: first run" in ran.out
        and "WARNING: " in ran.out
        and ran.err == ""
    )
    values = json.loads(mtmd("warmup", "--device", "cpu", "--json").out)
    assert [(c["graph"], c["first_nan"]) for c in values["checks"]] == [
        ("encoder", None),
        ("decoder", None),
    ]
    assert values["fully_accelerated"] is True


CALLS: dict[str, tuple[tuple[object, ...], str]] = {
    "an unknown command": (("fly",), "mtmd: command 'fly' is not known; see 'mtmd --help'"),
    "an abbreviated command": (
        ("desc", "IMAGE"),
        "mtmd: command 'desc' is not known; did you mean 'describe'? see 'mtmd --help'",
    ),
    "a misspelt option": (
        ("describe", "IMAGE", "--max-token", 3),
        "option '--max-token' is not known; did you mean '--max-tokens'?",
    ),
    "a command of others": (("run", "x"), "command 'run' is not known; did you mean 'chat'?"),
    "an option of others": (
        ("describe", "IMAGE", "--n-predict", 3),
        "option '--n-predict' is not known; did you mean '--max-tokens'?",
    ),
    "one like another of ours": (
        ("describe", "IMAGE", "--temp=0"),
        "option '--temp=0' is not known; did you mean '--temperature'?",
    ),
    "a short option of others": (
        ("serve", "-c", 4096),
        "option '-c' is not known; did you mean '--context'?",
    ),
    "layers on a GPU": (
        ("describe", "IMAGE", "-ngl", 99),
        "option '-ngl' is not known; a GPU is used if there is one, and --split layer",
    ),
    "an output file": (
        ("describe", "IMAGE", "-o", "x.txt"),
        "option '-o' is not known; results go to standard output; save them with > FILE",
    ),
    "a question for a conversation": (
        ("chat", "-p", "hi"),
        "option '-p' is not known; questions are typed, or read line by line from a pipe; for one question",
    ),
    "word by word": (
        ("describe", "IMAGE", "--stream"),
        "option '--stream' is not known; answers are always streamed; see",
    ),
    "the version in short": (("-V",), "option '-V' is not known; did you mean '--version'?"),
    "a question by another name": (
        ("describe", "IMAGE", "--question", "hi"),
        "option '--question' is not known; did you mean '--prompt'?",
    ),
    "workers": (("batch", "x", "--workers", 4, "--out", "a.csv"), "did you mean '--parallel'?"),
    "an option like none of ours": (
        ("serve", "--reload"),
        "option '--reload' is not known; see 'mtmd serve --help'",
    ),
    "a letter": (("serve", "-p", 80), "option '-p' is not known; see 'mtmd serve --help'"),
    "quiet in short": (
        ("describe", "IMAGE", "-q"),
        "option '-q' is not known; did you mean '--quiet'?",
    ),
    "pictures by an option": (
        ("describe", "--image", "IMAGE"),
        "option '--image' is not known; pictures and videos are given without an option",
    ),
    "an option of others that is not here": (
        ("warmup", "--n-predict", 3),
        "mtmd warmup: option '--n-predict' is not known",
    ),
    "help for an unknown command": (("help", "fly"), "command 'fly' is not known"),
    "one model to compare": (("compare",), "found one model, expected a second one, or an option"),
    "two pictures on stdin": (("describe", "-", "-"), "-: found twice, expected once"),
    "stdin twice for each": (("describe", "--each", "-", "-"), "found twice, expected once"),
    "stdin for a batch": (("batch", "-", "--out", "a.csv"), "--list - reads paths"),
    "a model that is not there": (
        ("describe", "IMAGE", "-m", "no_such"),
        "model 'no_such' is no folder here",
    ),
    "a template that is not there": (
        ("describe", "IMAGE", "--chat-template", "no_such.jinja"),
        "no_such.jinja: found no such file",
    ),
    "an option and its value": (
        ("batch", "IMAGE", "-p", "x", "--out", "rows.txt"),
        "mtmd batch: --out rows.txt: found the ending '.txt'",
    ),
    "a limit of memory for fit": (
        ("fit", "--memory-limit", "8GiB"),
        "--host-memory that of a machine without one",
    ),
    "the demo model removed": (("rm", "demo", "--yes"), "the demo model is part of the package"),
    "the demo model pulled": (("pull", "demo"), "the demo model is part of the package"),
    "a folder pulled": (
        ("pull", "examples"),
        "is no name on the Hugging Face hub; expected org/name",
    ),
    "a name of Ollama's pulled": (
        ("pull", "llava:7b"),
        "expected org/name, or org/name:TYPE for a",
    ),
    "a name of Ollama's removed": (
        ("rm", "llava"),
        "'llava' is not in the cache; `mtmd list` lists",
    ),
    "a model as llama.cpp is given it": (
        ("describe", "IMAGE", "-hf", "org/name"),
        "option '-hf' is not known; a model of the hub is given as -m org/name",
    ),
    "a model as llama.cpp is given it, where it has no option": (
        ("pull", "-hf", "org/name"),
        "option '-hf' is not known; a model of the hub is given as org/name alone",
    ),
    "no image": (("describe",), "required: IMAGE"),
    "an unknown option": (
        ("describe", "IMAGE", "--colour"),
        "mtmd describe: option '--colour' is not known",
    ),
    "an abbreviated option": (("describe", "IMAGE", "--max", 3), "option '--max' is not known"),
    "words after the prompt": (
        ("describe", "IMAGE", "-p", "how", "many"),
        "found 'many', expected no more arguments",
    ),
    "an unknown option of warmup": (
        ("warmup", "--seed", 3),
        "mtmd warmup: option '--seed' is not known",
    ),
    "an option with a line break": (("describe", "IMAGE", "--a\nb\x1b[31m"), "is not known"),
    "an image for warmup": (("warmup", "IMAGE"), "expected no more arguments"),
    "an option without its value": (("describe", "IMAGE", "-p"), "argument -p"),
    "max-tokens -3": (
        ("describe", "IMAGE", "--max-tokens", -3),
        "--max-tokens: found -3, expected an integer from 0 to",
    ),
    "max-tokens abc": (
        ("describe", "IMAGE", "--max-tokens", "abc"),
        "--max-tokens: found 'abc', expected a whole number",
    ),
    "max-tokens 1.5": (
        ("describe", "IMAGE", "--max-tokens", "1.5"),
        "found '1.5', expected a whole number",
    ),
    "max-tokens too big": (
        ("describe", "IMAGE", "--max-tokens", 10**30),
        "--max-tokens: found 1000000000",
    ),
    "max-tokens of 5000 digits": (
        ("describe", "IMAGE", "--max-tokens", "9" * 5000),
        "--max-tokens: found '999",
    ),
    "temperature nan": (
        ("describe", "IMAGE", "--temperature", "nan"),
        "temperature: found nan, expected a number from 0 (greedy) to 100",
    ),
    "temperature -1": (
        ("describe", "IMAGE", "--temperature", "-1"),
        "temperature: found -1.0, expected a number from 0 (greedy)",
    ),
    "temperature inf": (("describe", "IMAGE", "--temperature", "inf"), "temperature: found inf"),
    "top-p 2": (
        ("describe", "IMAGE", "--top-p", 2),
        "--top-p: found 2.0, expected a number from 0",
    ),
    "top-k -1": (("describe", "IMAGE", "--top-k", "-1"), "--top-k: found -1"),
    "min-p 7": (("describe", "IMAGE", "--min-p", 7), "--min-p: found 7.0"),
    "a penalty of 0": (
        ("describe", "IMAGE", "--repetition-penalty", 0),
        "--repetition-penalty: found 0.0",
    ),
    "seed -1": (("describe", "IMAGE", "--seed", "-1"), "seed: found -1"),
    "an empty stop": (("describe", "IMAGE", "--stop", ""), "stop: found ''"),
    "threads 0": (("describe", "IMAGE", "--threads", 0), "threads: found 0"),
    "context 3": (("describe", "IMAGE", "--context", 3), "context: found 3"),
    "a context beyond the model": (
        ("describe", "IMAGE", "--context", 1 << 23),
        "context: found 8388608, expected at most",
    ),
    "device tpu": (
        ("describe", "IMAGE", "--device", "tpu"),
        "device 'tpu': expected auto, cpu, cuda, cuda:N, mps, xpu or xpu:N",
    ),
    "device cuda:7": (("describe", "IMAGE", "--device", "cuda:7"), "device 'cuda:7': found "),
    "dtype int4": (
        ("warmup", "--dtype", "int4"),
        "dtype: found 'int4', expected one of auto, bf16, fp32",
    ),
    "flash-attn perhaps": (
        ("dump", "IMAGE", "--flash-attn", "perhaps"),
        "--flash-attn: found 'perhaps', expected one of auto, on, off",
    ),
    "an unknown target": (
        ("warmup", "--override-tensor", "v.blk=tpu"),
        "override target 'tpu': expected one of ",
    ),
    "no expression": (("warmup", "--override-tensor", "(=cpu"), "'(' is not a regular expression"),
    "no target": (("warmup", "--override-tensor", "v.blk"), "expected REGEX=DEVICE"),
    "an override of nothing": (
        ("warmup", "--override-tensor", "zzz=cpu"),
        "override 'zzz' matches no node or weight",
    ),
    "an unknown rule": (("warmup", "--refuse", "teleport"), "refuse rule 'teleport': expected"),
    "an empty prompt": (
        ("describe", "IMAGE", "-p", ""),
        "the prompt is empty; say what you want to know",
    ),
    "a blank prompt": (("describe", "IMAGE", "-p", " \n\t"), "the prompt is empty"),
    "a prompt in half a character": (("describe", "IMAGE", "-p", "\udcff"), "not valid Unicode"),
    "a prompt in a file that is not there": (
        ("describe", "IMAGE", "-p", "@no_such"),
        "--prompt: 'no_such' cannot be read (No such file or directory), expected a file with the "
        "text; for a text that begins with @ give @@no_such",
    ),
    "a system text in a folder": (
        ("describe", "IMAGE", "--system", "@/"),
        "--system: '/' cannot be read (Is a directory)",
    ),
    "a prompt in a picture": (("describe", "IMAGE", "-p", "@IMAGE"), "--prompt: found no UTF-8"),
    "a prompt in a file as in llama.cpp": (
        ("describe", "IMAGE", "-f", "question.txt"),
        "option '-f' is not known; a prompt in a file is given as --prompt @FILE",
    ),
    "picture and prompt on stdin": (
        ("describe", "-", "-p", "-"),
        "--prompt: found - twice, expected once: standard input is read once",
    ),
    "both texts on stdin": (("describe", "IMAGE", "-p", "-", "--system", "-"), "found - twice"),
    "paths and prompt on stdin": (
        ("batch", "--list", "-", "-p", "-", "--out", "a.csv"),
        "--prompt: found - twice",
    ),
    "a system text where questions come": (
        ("chat", "--system", "-"),
        "--system: found -, expected a text: standard input is what is said",
    ),
    "a prompt over the context": (
        ("describe", "IMAGE", "-p", "word " * 9000),
        "images included, and the context holds ",
    ),
    "a prompt over a smaller context": (
        ("describe", "IMAGE", "--context", 16),
        "images included, and the context holds 16, answer included",
    ),
    "too many images": (("describe", *["IMAGE"] * 5, "--context", 64), "and the context holds 64"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_call_is_one_line(case: str, one: Path, mtmd: Any) -> None:
    arguments, expected = CALLS[case]
    named = {"IMAGE": one, "@IMAGE": f"@{one}"}
    assert expected in mtmd(*(named.get(str(a), a) for a in arguments)).refused()


QUESTION = "How many shapes are there?"


def test_a_prompt_stands_in_a_file(one: Path, tmp_path: Path, mtmd: Any) -> None:
    file = tmp_path / "question.txt"
    file.write_bytes(b"\xef\xbb\xbf" + QUESTION.encode() + b"\r\n\n")
    for command in (("describe", one), ("describe", "--each", one)):
        result = mtmd(*command, "-p", f"@{file}", "--json")
        assert json.loads(result.out)["text"] == "One.", result
    out = tmp_path / "answers.jsonl"
    mtmd("batch", one, "-p", f"@{file}", "--out", out)
    assert mtmd("batch", one, "-p", QUESTION, "--out", out, "--resume").code == 0, "the same prompt"


@pytest.mark.parametrize("name", ["prompt", "system"])
def test_a_text_comes_from_standard_input(
    name: str, one: Path, mtmd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = []
    for text, data in ((QUESTION, b""), ("-", QUESTION.encode() + b"\n")):
        with io.TextIOWrapper(io.BytesIO(data)) as file:
            monkeypatch.setattr("sys.stdin", file)
            result.append(json.loads(mtmd("describe", one, f"--{name}", text, "--json").out))
    assert result[0]["text"] == result[1]["text"]
    assert result[0]["receipt"]["prompt_tokens"] == result[1]["receipt"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("data", "reported"),
    [
        (b"\n", "--prompt: found nothing in standard input, expected a text"),
        (b"x" * ((1 << 20) + 1), "--prompt: found more than 1,048,576 bytes in standard input"),
    ],
    ids=["nothing", "much"],
)
def test_what_is_no_prompt_on_standard_input(
    data: bytes, reported: str, one: Path, mtmd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with io.TextIOWrapper(io.BytesIO(data)) as file:
        monkeypatch.setattr("sys.stdin", file)
        assert reported in mtmd("describe", one, "-p", "-").refused()


def test_a_text_may_begin_with_an_at_sign(one: Path, mtmd: Any, demo: Model) -> None:
    result = json.loads(mtmd("describe", one, "-p", "@@x", "--json").out)
    assert result["receipt"]["prompt_tokens"] == demo.answer(one, "@x").receipt.prompt_tokens


def png_of(width: int, height: int) -> bytes:
    """A small PNG whose header lies about its size."""
    import struct
    import zlib

    data = io.BytesIO()
    Image.new("RGB", (1, 1)).save(data, "PNG")
    header = b"IHDR" + struct.pack(">II", width, height) + data.getvalue()[24:29]
    return (
        data.getvalue()[:12] + header + struct.pack(">I", zlib.crc32(header)) + data.getvalue()[33:]
    )


def jpeg() -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(
        data, "JPEG"
    )
    return data.getvalue()


PICTURES: dict[str, tuple[bytes | None, str]] = {
    "text.png": (b"this is no picture", "expected"),
    "empty.png": (b"", "found 0 bytes, expected"),
    "cut.jpg": (jpeg()[:700], "found a truncated JPEG"),
    "huge.png": (
        png_of(30_000, 30_000),
        "found 30,000 x 30,000 pixels, expected at most 128,000,000",
    ),
    "missing.png": (None, "found no such file"),
    "a\nline.png": (None, "a?line.png: found no such file"),
    "page.pdf": (b"%PDF-1.7\n", "found"),
    "archive.zip": (b"PK\3\4" + bytes(50), "found"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_what_is_no_picture_is_one_line(name: str, tmp_path: Path, mtmd: Any, one: Path) -> None:
    content, expected = PICTURES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    line = mtmd("describe", one, tmp_path / name).refused()
    assert (
        expected in line
        and "found" in line
        and ("expected" in line)
        and name.replace("\n", "?") in line
    )


def test_a_folder_is_no_picture(tmp_path: Path, mtmd: Any) -> None:
    advice = {
        "describe": "with --each, each picture in it is asked about",
        "dump": "give the picture files in it",
    }
    for verb, what in advice.items():
        reported = mtmd(verb, tmp_path).refused()
        assert f"found a folder, expected a picture file; {what}" in reported


class Screen(io.StringIO):
    """A terminal that both streams write to; `shows` is what can be read on it in the end."""

    def isatty(self) -> bool:
        return True

    def shows(self) -> list[str]:
        return [
            line.rsplit("\r\x1b[K", 1)[-1]
            for line in self.getvalue().removesuffix("\n").split("\n")
        ]


def on_a_terminal(*arguments: object, columns: int = 1000) -> tuple[int, Screen]:
    screen = Screen()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(screen), redirect_stderr(screen):
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("NO_COLOR", "1")
        return main([str(a) for a in arguments]), screen


def test_a_terminal_shows_progress_then_the_whole_answer(one: Path, plain: dict[str, Any]) -> None:
    code, screen = on_a_terminal("describe", one)
    assert (
        code == 0 and "encoded 0 of 1 tile" in screen.getvalue() and "reading " in screen.getvalue()
    )
    answer_line, image, *_ = screen.shows()
    assert answer_line == plain["text"] and image.startswith("image 1: ")


def test_a_terminal_shows_an_error_on_a_line_of_its_own(one: Path) -> None:
    code, screen = on_a_terminal("describe", one, "--context", 16)
    assert code == 2 and "encoded" not in screen.getvalue(), "what cannot fit is not encoded first"
    (line,) = screen.shows()
    assert line.startswith("mtmd describe: the prompt takes ")


@pytest.mark.parametrize("columns", [24, 44, 80])
def test_no_word_breaks_on_a_terminal(columns: int, one: Path, plain: dict[str, Any]) -> None:
    """Of an answer, a receipt, an error: only what is longer than a line."""
    code, screen = on_a_terminal("describe", one, columns=columns)
    taken_back = re.compile(r"(.*)\x1b\[(\d+)D\x1b\[K")
    lines = [taken_back.sub(lambda m: m[1][: -int(m[2])], line) for line in screen.shows()]
    assert code == 0 and max(map(len, lines)) <= columns
    assert plain["text"] in " ".join(line.strip() for line in lines)
    _, screen = on_a_terminal("describe", "nothing-of-this-name.png", columns=columns)
    assert "found no such file, expected a picture" in " ".join(screen.shows())


def interrupt_after(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does: while the device works, the main thread is interrupted."""
    forward, steps = Runner.forward, []

    def counted(self: Runner, *arguments: Any) -> torch.Tensor:
        steps.append(1)
        if len(steps) == tokens + 1:
            _thread.interrupt_main()
            time.sleep(0.2)
        return forward(self, *arguments)

    monkeypatch.setattr(Runner, "forward", counted)


@pytest.mark.parametrize("tokens", [0, 3])
def test_interrupted(
    tokens: int, one: Path, mtmd: Any, monkeypatch: pytest.MonkeyPatch, plain: dict[str, Any]
) -> None:
    interrupt_after(tokens, monkeypatch)
    ran = mtmd("describe", one)
    assert (ran.code, ran.err) == (130, "mtmd describe: interrupted\n")
    assert plain["text"].startswith(ran.out.rstrip("\n")) and bool(ran.out) == bool(tokens)
    if tokens:
        assert ran.out.endswith("\n")
        interrupt_after(tokens, monkeypatch)
        assert mtmd("describe", one, "--json").out == ""


def test_a_full_disk_is_one_line(
    one: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:  # noqa: ARG002
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert main(["describe", str(one), "-p", COUNT]) == 2
    assert capsys.readouterr().err == "mtmd describe: No space left on device: standard output\n"


def test_characters_that_the_terminal_does_not_have(
    one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(data, "ascii"))
    answer = Answer("één 👍", (), (), load(device="cpu").answer(one, COUNT).receipt)
    monkeypatch.setattr(
        Model, "stream", lambda *_, **__: iter([TextPiece(answer.text), Finished(answer)])
    )
    assert main(["describe", str(one), "--quiet"]) == 0
    assert data.getvalue() == b"\\xe9\\xe9n \\U0001f44d\n"


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def test_a_process_of_its_own(one: Path) -> None:
    ran = subprocess.run(
        [*COMMAND, "describe", one, "-p", COUNT],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "One.\n") and len(ran.stderr.splitlines()) == 3
    refused = subprocess.run(
        [*COMMAND, "warmup", "--dtype", "x"],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert refused.returncode == 2 and refused.stdout == "" and refused.stderr.count("\n") == 1


def test_a_reader_that_goes_away(one: Path) -> None:
    """As `mtmd dump ... | head -c 5`."""
    with subprocess.Popen(
        [*COMMAND, "dump", one], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout and process.stderr
        assert process.stdout.read(5) == b"encod"
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(60) == 0


def test_a_key_in_mid_answer(one: Path) -> None:
    command = [*COMMAND, "describe", one, "--ignore-eos", "--max-tokens", "100000"]
    # A test run in the background of a shell has interrupts ignored, and its children would inherit
    # that.
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        preexec_fn=listen,
    ) as process:
        assert process.stdout and process.stderr
        assert process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == b"mtmd describe: interrupted\n"


@pytest.mark.parametrize("error", ["ImportError", "ValueError"])
@pytest.mark.parametrize("comes", [True, False], ids=["Ctrl-C", "an error"])
def test_a_key_that_a_library_turns_into_an_error_of_its_import(
    comes: bool,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As numpy does, and pydantic."""
    (tmp_path / "turns_interrupts.py").write_text(
        "import signal\n"
        "try:\n"
        f"    {'signal.raise_signal(signal.SIGINT)' if comes else 'raise KeyboardInterrupt'}\n"
        "except KeyboardInterrupt:\n"
        f"    raise {error}('the module could not be made') from None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(listing, "run", lambda _: exec("import turns_interrupts"))
    if comes:
        assert main(["list"]) == 130
        assert capsys.readouterr().err == "mtmd list: interrupted\n"
    else:
        with pytest.raises((ImportError, ValueError), match="could not be made"):
            main(["list"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_key_before_the_command_has_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert begin() == 130 and capsys.readouterr().err == "mtmd: interrupted\n"
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("verb", "comes", "written", "reported"),
    [
        ("serve", "begun.patch = interrupt", "", "mtmd: interrupted"),
        ("list", "cli.main = interrupt", "", "mtmd: interrupted"),
        ("list", "listing.run = lambda _: __import__('once')", "", "mtmd list: interrupted"),
        ("list", "listing.run = imports('once')", "closed", "mtmd list: interrupted"),
        ("list", "listing.run = imports('fails')", "closed", "mtmd list: interrupted"),
        ("list", "listing.run = imports('twice')", "", "mtmd: interrupted"),
        ("list", "listing.run = interrupt", "", "mtmd list: interrupted"),
    ],
    ids=[
        *("as gevent is loaded", "as the command is imported", "in an import"),
        *("with a file open", "in an import that fails", "twice in an import", "in the command"),
    ],
)
def test_a_key_in_the_first_seconds_is_one_line(
    verb: str, comes: str, written: str, reported: str, tmp_path: Path
) -> None:
    """Also where an import would swallow it, and go on half done; what is open is closed."""
    swallows = (
        "import signal\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "except BaseException:\n"
        "    print('goes on', flush=True)\n"
    )
    (tmp_path / "once.py").write_text("import swallows\n")
    (tmp_path / "swallows.py").write_text(swallows)
    (tmp_path / "fails.py").write_text(f"{swallows}raise ValueError\n")
    (tmp_path / "twice.py").write_text(swallows * 2)
    code = (
        "import signal, sys\n"
        "from mtmd import __main__ as begun, cli\n"
        "from mtmd.commands.models import listing\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "interrupt = lambda *_: signal.raise_signal(signal.SIGINT)\n"
        "def imports(name):\n"
        "    def run(_):\n"
        "        try:\n"
        "            __import__(name)\n"
        "            print('goes on', flush=True)\n"
        "        finally:\n"
        "            print('closed', end='', flush=True)\n"
        "    return run\n"
        f"sys.argv = ['mtmd', {verb!r}]\n"
        f"{comes}\n"
        "sys.exit(begun.main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment(),
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, written, f"{reported}\n")


def test_an_answer_cannot_command_the_terminal(
    mtmd: Any, one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stream(*_: object, **__: object) -> Iterator[TextPiece]:
        yield TextPiece("\x1b]0;title\x07a \x1b[2Jcat")

    monkeypatch.setattr(Model, "stream", stream)
    assert mtmd("describe", one).out == "\ufffd]0;title\ufffda \ufffd[2Jcat\n"


@pytest.mark.skipif(os.name != "posix", reason="by a shell")
def test_closed_output_is_as_good_as_none(tmp_path: Path) -> None:
    """As some service managers start programs."""
    command = f"{shlex.quote(sys.executable)} -m mtmd list --json"
    for closed in (">&-", "<&- >&- 2>&-"):
        done = subprocess.run(
            ["sh", "-c", f"{command} {closed}"], capture_output=True, cwd=tmp_path
        )
        assert done.returncode == 0 and not done.stderr, closed


def test_a_key_while_all_greenlets_wait_is_no_traceback() -> None:
    """It is raised in gevent's hub then, which hands it on to the command."""
    code = (
        "from mtmd.__main__ import patch; patch()\n"
        "import signal, sys\n"
        "from threading import Event\n"
        "from gevent import get_hub\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "get_hub().loop.run_callback(signal.raise_signal, signal.SIGINT)\n"
        "try:\n"
        "    Event().wait()\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment(), timeout=60
    )
    assert (result.returncode, result.stderr) == (130, b"")


def test_a_key_while_another_greenlet_runs_reaches_the_command() -> None:
    """It would end the thread that is that greenlet, and no more."""
    code = (
        "from mtmd.__main__ import patch; patch()\n"
        "import os, signal, subprocess, sys\n"
        "from threading import Event, Thread\n"
        "from mtmd.cli import _interrupts_of_imports\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def press():\n"
        "    subprocess.Popen(['kill', '-INT', str(os.getpid())]).wait()\n"
        "try:\n"
        "    with _interrupts_of_imports():\n"
        "        Thread(target=press).start()\n"
        "        Event().wait(20)\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment(), timeout=60
    )
    assert (result.returncode, result.stderr) == (130, b"")


def test_a_thread_of_another_program_keeps_its_handler() -> None:
    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(end_at_interrupts).result()
    assert before is signal.default_int_handler and signal.getsignal(signal.SIGINT) is before
