"""The receipt tells the truth, in JSON and on a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mtmd.loading import load
from mtmd.model import Model
from mtmd.receipt import ImageReceipt, Receipt, SamplingReceipt

IMAGE = ImageReceipt((640, 480), (96, 96), 1, 9, "ab" * 32, False, ())


def receipt(**changed: Any) -> Receipt:
    values: dict[str, Any] = {
        "model": "demo model",
        "images": (IMAGE,),
        "image_tokens": 9,
        "prompt_tokens": 30,
        "reused_tokens": 0,
        "output_tokens": 20,
        "proposed_tokens": 0,
        "accepted_tokens": 0,
        "finish": "stop",
        "queued_ms": 0.3,
        "preprocess_ms": 2.6,
        "encode_ms": 12.0,
        "prefill_ms": 40.2,
        "decode_ms": 200.0,
        "device": "cpu",
        "dtype": "fp32",
        "attention": {"encoder": "flash", "decoder": "explicit"},
        "speculation": "auto",
        "seed": None,
        "warnings": (),
    }
    return Receipt(**(values | changed))


def test_as_a_mapping_it_is_a_copy_of_every_record() -> None:
    one = receipt(sampling={"top_p": SamplingReceipt(0.9, "request")}, adapters={"a": 0.5})
    assert one.asdict() == asdict(one)
    assert one.asdict()["adapters"] is not one.adapters


def test_text() -> None:
    assert str(receipt()).splitlines() == [
        "image 1: 640 x 480 seen as 96 x 96, 1 tile, 9 tokens",
        "30 prompt tokens, 20 output tokens (stop); preprocess 3 ms, encode 12 ms, prefill 40 ms, "
        "decode 200 ms, 100 tokens/s",
        "demo model on cpu, fp32; encoder: flash attention; decoder: explicit attention",
    ]


def test_text_of_the_unusual() -> None:
    reported = ImageReceipt(
        (10, 20),
        (192, 96),
        2,
        18,
        "",
        True,
        ("transparent parts laid on white", "only the first frame was read"),
    )
    lines = str(
        receipt(
            images=(IMAGE, reported),
            seed=7,
            warnings=("6 nodes refused", "slow"),
            output_tokens=0,
            decode_ms=0.0,
        )
    ).splitlines()
    assert lines[1] == (
        "image 2: 10 x 20 seen as 192 x 96, 2 tiles, 18 tokens, from the cache; transparent parts "
        "laid on white; "
        "only the first frame was read"
    )
    assert lines[2].endswith("decode 0 ms"), "no speed of nothing"
    assert lines[3].endswith("; seed 7") and lines[4:] == [
        "warning: 6 nodes refused",
        "warning: slow",
    ]
    assert len(str(receipt(images=())).splitlines()) == 2
    waited = str(receipt(images=(), reused_tokens=12, queued_ms=250.4)).splitlines()[0]
    assert waited.startswith(
        "30 prompt tokens (12 from the cache), 20 output tokens (stop); waited 250 ms, "
        "preprocess 3 ms"
    )
    copied = str(receipt(images=(), proposed_tokens=14, accepted_tokens=11)).splitlines()[0]
    assert copied.endswith("100 tokens/s, 11 of 14 proposed tokens accepted")


def test_kernels_that_were_compiled_meanwhile_are_told() -> None:
    line = str(receipt(images=(), kernels_compiled=15, compile_ms=391.2)).splitlines()[0]
    assert line.endswith(
        "100 tokens/s; meanwhile 15 kernels were compiled in 391 ms, kept for later answers"
    )


def test_the_first_answer_on_a_machine_tells_what_it_compiled(one: Path, tmp_path: Path) -> None:
    code = (
        "import mtmd; model = mtmd.load(threads=1); "
        f"told = [model.answer({str(one)!r}, max_tokens=2).receipt for _ in range(2)]; "
        "print(*(r.kernels_compiled for r in told), told[0].compile_ms > 0)"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    ran = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        ).stdout.split()
        for _ in range(2)
    ]
    assert int(ran[0][0]) > 0 and ran[0][2] == "True"
    assert ran[1] == ["0", "0", "False"], "their code lay on disk"


def test_json_has_every_field() -> None:
    values = json.loads(json.dumps(receipt().asdict()))
    assert set(values) == {f.name for f in fields(Receipt)} and set(values["images"][0]) == {
        f.name for f in fields(ImageReceipt)
    }
    assert values["images"][0]["original_size"] == [640, 480] and values["attention"] == {
        "encoder": "flash",
        "decoder": "explicit",
    }


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 70, 4), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "clear.png")
    Image.fromarray(pixels[:, :, :3]).save(tmp_path / "wide.bmp")
    return [tmp_path / "clear.png", tmp_path / "wide.bmp"]


def test_what_is_told_is_what_was_done(demo: Model, pictures: list[Path]) -> None:
    begin = time.perf_counter()
    answer = demo.answer(pictures, "What is this?", max_tokens=5, ignore_eos=True)
    took = (time.perf_counter() - begin) * 1e3
    reported, family = answer.receipt, demo.encoder.family  # type: ignore[union-attr]
    _, height, width = family.resolution.tile_type().shape
    assert [i.original_size for i in reported.images] == [(70, 40)] * 2 and {
        i.processed_size for i in reported.images
    } == {(width, height)}
    assert ["white" in "".join(i.notes) for i in reported.images] == [True, False]
    image_token = demo.checkpoint.tokenizer.id(family.image_token)
    assert (
        reported.image_tokens
        == answer.prompt_token_ids.count(image_token)
        == sum(i.tokens for i in reported.images)
        > 0
    )
    assert (
        reported.prompt_tokens == len(answer.prompt_token_ids)
        and reported.output_tokens == len(answer.output_token_ids) == 5
    )
    assert reported.finish == "length" and reported.seed is None and reported.warnings == ()
    times = reported.preprocess_ms, reported.encode_ms, reported.prefill_ms, reported.decode_ms
    assert min(times) > 0 and sum(times) <= took
    assert (reported.model, reported.device, reported.dtype) == (
        "demo model",
        demo.backends[0].name,
        demo.warmup_report.dtype,
    )
    assert reported.attention == {"encoder": "flash", "decoder": "flash"}
    assert reported.threads is not None and 1 <= reported.threads <= torch.get_num_threads()


def test_refusals_are_told_and_change_no_answer(demo: Model, one: Path) -> None:
    reported = demo.answer(one)
    head = demo.encoder.family.vit.width // demo.encoder.family.vit.heads  # type: ignore[union-attr]
    for rules, kernel, words in [
        (
            [f"attention:head={head}"],
            "explicit",
            [f"head size {head} is not supported; runs on limited, as explicit attention"],
        ),
        (["pool2d", "*:batch>1"], None, ["op pool2d is not supported; runs on cpu"]),
        (
            ["matmul"],
            "flash",
            [
                "matmul nodes of the encoder refused by limited",
                "matmul nodes of the decoder refused by limited",
            ],
        ),
    ]:
        limited = load(device="cpu", refuse=rules).answer(one)
        assert limited.text == reported.text and limited.receipt.device == "limited"
        assert all(any(w in warning for warning in limited.receipt.warnings) for w in words), (
            limited.receipt.warnings
        )
        assert kernel is None or limited.receipt.attention["encoder"] == kernel


def test_attention_that_runs_elsewhere_is_told(one: Path) -> None:
    model = load(device="cpu", refuse=["attention"], flash_attn="on")
    attention = model.answer(one, max_tokens=1).receipt.attention
    layers = model.encoder.family.vit.layers  # type: ignore[union-attr]
    assert attention["encoder"] == f"flash, {layers} of {layers} nodes on another backend"
    assert load(device="cpu", flash_attn="off").answer(one, max_tokens=1).receipt.attention == {
        "encoder": "explicit",
        "decoder": "explicit",
    }


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ({"top_k": 5, "top_p": 0.5, "seed": 4}, "top_k, top_p"),
        ({"min_p": 0.1}, "min_p"),
        ({"top_k": 0, "top_p": 1, "seed": 4}, None),
        ({"temperature": 1.0, "top_k": 5, "seed": 4}, None),
        ({"repetition_penalty": 1.2}, None),
    ],
    ids=str,
)
def test_options_that_do_nothing_at_temperature_0_are_told(
    demo: Model, chosen: dict[str, Any], names: str | None
) -> None:
    warnings = demo.answer(prompt="x", max_tokens=1, **chosen).receipt.warnings
    reported = f"{names}: no effect at temperature 0, which takes the most probable token; give a "
    assert warnings == (() if names is None else (f"{reported}temperature above 0",))


def test_json_that_was_cut_is_told(demo: Model, one: Path) -> None:
    schema = {"const": {"number": 1}}
    cut = demo.answer(one, json_schema=schema, max_tokens=3)
    assert cut.receipt.finish == "length"
    assert cut.receipt.warnings == (
        "the answer was cut before its JSON ended; give more max_tokens",
    )
    stopped = demo.answer(one, json_schema=schema, stop="number")
    assert stopped.receipt.warnings == ("a stop text cut the answer before its JSON ended",)
    whole = demo.answer(one, json_schema=schema)
    assert json.loads(whole.text) == {"number": 1} and whole.receipt.warnings == ()
    # All of it is there, though there was no room for a token that ends it
    exact = demo.answer(one, json_schema=schema, max_tokens=whole.receipt.output_tokens)
    assert exact.receipt.finish == "length" and exact.receipt.warnings == ()


def test_no_library_is_loaded_in_the_first_answers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mtmd.kernels.plan.native_run", None)  # importing it fails
    with pytest.raises(ImportError, match="native_run"):
        load()
