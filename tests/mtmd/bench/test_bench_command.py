"""`mtmd bench` as it is typed: what it measures, the page it writes, what it refuses."""

import json
import platform
import re

import pytest
import torch

from mtmd.bench import stages
from mtmd.kernels.cpu.native.compile import host
from mtmd.kernels.report.measured_speeds import multiplies_bf16

QUICK = ("--rounds", 1, "--decode", 2, "--context", "8", "--threads", "1")


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch):
    """Measuring what the machine can do takes longer than the model."""
    from mtmd.kernels.report import measured_speeds

    monkeypatch.setattr(measured_speeds, "READ_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(measured_speeds, "SIDE", {"cpu": 64})


def test_every_stage_is_measured_along_every_axis(mtmd, shape, tmp_path):
    page = tmp_path / "page.html"
    axes = ("--resolution", "48,64", "--images", "1,2", "--batch", "1,3", "--load", "0,1")
    quick = ("--rounds", 2, "--decode", 2, "--context", "8,16,32", "--threads", "1,2")
    ran = mtmd("bench", "--random-weights", shape, *axes, *quick, "--json", "--html", page)
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    assert {s["name"] for s in report["stages"]} == {
        "preprocess", "encode", "prefill", "decode", "first token",
    }  # fmt: skip
    assert all(len(s["ms"]) == 2 and s["least_ms"] > 0 for s in report["stages"])
    assert {(g["axis"], g["stage"]) for g in report["growth"]} >= {
        ("resolution", "encode"), ("images", "encode"), ("batch", "decode"),
        ("context", "prefill"), ("threads", "decode"), ("load", "decode"),
    }  # fmt: skip
    peaks = [s["peak_bytes"] for s in report["stages"] if s["peak_bytes"] is not None]
    assert (report["peak_bytes"] or 0) >= max(peaks, default=0)
    at_batch = [s for s in report["stages"] if s["point"]["batch"] == 3]
    assert [(s["name"], s["tokens"]) for s in at_batch] == [("decode", 3)]
    read, requested = ({s["point"]["context"]: s["tokens"] for s in report["stages"] if s["name"] == name
                    and s["point"]["images"] == 1 and s["point"]["resolution"] == 48}
                   for name in ("prefill", "first token"))  # fmt: skip
    assert [read[n] - read[8] for n in (8, 16, 32)] == [0, 8, 24]
    assert all(requested[n] > read[n] for n in read)  # with what the chat template adds
    assert {op["graph"] for op in report["ops"]} == {"encode", "decode"}
    assert all(min(m["explicit_bytes"], m["flash_bytes"]) > 0 for m in report["memory"])
    assert report["machine"]["read_gb_per_s"] > 0 and report["base"]["context"] == 8
    html = page.read_text()
    assert "<script" not in html and not re.search(r"(?:src|href|url)\s*[=(]", html)
    assert html.count("<svg") >= 7 and "nan" not in html.lower()


def test_the_table_of_a_model_of_text_alone(mtmd, tmp_path):
    config = {
        "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "head_dim": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "vocab_size": 700, "max_position_embeddings": 1024,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    ran = mtmd("bench", "--random-weights", tmp_path, "--weights", "Q8_0", *QUICK, "--no-ops")
    assert ran.code == 0, ran.err
    assert "random Q8_0" in ran.out and "prefill" in ran.out and "first token" in ran.out
    assert "encode" not in ran.out and "every op" not in ran.out


def test_the_demo_model_is_measured_by_default(mtmd):
    ran = mtmd("bench", *QUICK, "--no-ops", "--images", "1", "--resolution", "64")
    assert ran.code == 0 and ran.out.startswith("demo model"), ran.err
    assert "base: 1 x 64 px (1 tile, 9 tokens), 8 tokens of text" in ran.out
    assert "of roofline: 100 % is as fast as the ceilings above allow" in ran.out


@pytest.mark.parametrize("has", [True, False])
def test_a_cpu_without_bf16_has_no_rate_of_it(mtmd, monkeypatch, tmp_path, has):
    """Which torch would compute a number at a time: "0 GFLOP/s" says nothing."""
    monkeypatch.setattr(stages, "multiplies_bf16", lambda _: has)
    page = tmp_path / "page.html"
    ran = mtmd("bench", *QUICK, "--images", "0", "--html", page)
    assert ran.code == 0, ran.err
    assert bool(re.search(r"GB/s, bf16 [\d.]+ GFLOP/s, fp32 [\d.]+ GFLOP/s\n", ran.out)) is has
    assert ("GB/s, bf16 not in this CPU, fp32 " in ran.out) is not has
    assert ("not in this CPU" in page.read_text()) is not has


def test_which_cpu_has_bf16():
    cpu = torch.device("cpu")
    assert multiplies_bf16(torch.device("cuda"))
    has = host().has("avx512bf16") and host().has("avx512vl")
    assert multiplies_bf16(cpu) >= (has and torch.backends.mkldnn.is_available())
    assert multiplies_bf16(cpu) <= (host().has("avx2") or platform.machine() != "x86_64")


def test_a_copy_is_timed_with_proposals_and_without(mtmd):
    ran = mtmd("bench", *QUICK, "--no-ops", "--images", 0, "--copy", "--json")
    assert ran.code == 0, ran.err
    stages = {s["name"]: s for s in json.loads(ran.out)["stages"]}
    assert {"copy", "speculative copy", "decode"} <= set(stages)
    assert all(stages[n]["tokens_per_s"] > 0 for n in ("copy", "speculative copy"))
    assert "copy" not in mtmd("bench", *QUICK, "--no-ops", "--images", 0).out


def test_stages_can_be_chosen(mtmd):
    chosen = ("--stages", "encode, decode", "--resolution", "64", "--batch", "1,2", "--images", 1)
    ran = mtmd("bench", *QUICK, *chosen, "--json")
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    assert {s["name"] for s in report["stages"]} == {"encode", "decode"}
    (encode,) = (s for s in report["stages"] if s["name"] == "encode")
    assert encode["patches"] > 0 and encode["point"]["batch"] == 1
    encode_alone = mtmd("bench", *QUICK, *chosen[2:], "--stages", "encode", "--json")
    result = json.loads(encode_alone.out)
    assert [s["name"] for s in result["stages"]] == ["encode"], "a batch changes nothing of it"
    assert {op["graph"] for op in result["ops"]} == {"encode"} and result["memory"]
    decode_alone = mtmd("bench", *QUICK, *chosen[2:], "--stages", "decode", "--json")
    assert json.loads(decode_alone.out)["memory"] == []


def test_names_of_shapes_are_printed(mtmd):
    names = mtmd("bench", "--random-weights", "list").out.split()
    assert {"gemma-3-4b", "qwen3-vl-8b", "smolvlm-256m"} <= set(names)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("--batch", "1,x"), "batch: found '1,x', expected whole numbers between commas"),
        (("--batch", "0"), "batch: found 0, expected 1 to 1024"),
        (("--rounds", 0), "rounds: found 0"),
        (("--detail", "fine"), "detail: found 'fine', expected one of auto, low, high"),
        (("--weights", "Q9"), "weights: found 'Q9'"),
        (("--random-weights", "smolvlm-256m", "here"), "expected one of them"),
        (
            ("--random-weights", "smolvlm-256m", "--weights", "Q9"),
            "weights: found 'Q9', expected one of",
        ),
        (("--random-weights", "nobody"), "expected a config.json"),
        (("--random-weights", "qwen3-0.6b", "--images", "1"), "has no image encoder"),
        (("--stages", "encode,dance"), "stages: found 'dance', expected some of preprocess"),
        (("--html", "/nowhere/page.html"), "expected a file in a folder that exists"),
        (("--context", "999999"), "expected at most"),
        (
            ("--context", "2000", "--decode", "4"),
            "context: found 2000 tokens of text, beside 9 of pictures, 4 decoded and 256 for the "
            "chat template, expected at most 2048 in all, which demo model was made for",
        ),
        (("--device", "toaster"), "toaster"),
        (("--dtype", "fp8"), "dtype"),
    ],
)
def test_a_mistake_is_refused_in_a_line(mtmd, arguments, expected):
    assert expected in mtmd("bench", *arguments).refused()
