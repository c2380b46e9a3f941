"""`mtmd info`: what it tells is what is there, and nothing is read or run for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints as make
import gemma3_gguf
import numpy as np
import pytest
from qwen2_vl import qwen2_vl
from qwen3_vl import qwen3_vl
from safetensors import safe_open

from mtmd import load
from mtmd.base.errors import ImageError
from mtmd.clip.resolution.smart_resize import DynamicResolution
from mtmd.inspect.info import SIZES, model_info
from mtmd.inspect.info_text import COLUMNS, count, render
from mtmd.kernels.checkpoint.open_weights import GgufFile, SafetensorsWeights
from mtmd.kernels.plan.executor import Executor
from mtmd.loading import DEMO_MODEL
from mtmd.model import Model

GOLDEN = Path(__file__).parents[4] / "shared" / "golden"
WIDE = {
    "num_hidden_layers": 6,
    "layer_types": gemma3_gguf.LAYERS,
    "hidden_size": 256,
    "intermediate_size": 256,
}
PROJECTION = "mm.input_projection.weight"  # which is turned when it is read
KINDS = {f"blk.{layer}.ffn_gate.weight": "TQ2_0" for layer in range(6)} | {
    "blk.1.ffn_up.weight": "Q8_0",
    PROJECTION: "Q8_0",
}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF with seven tensors that are taken as they are, and a projector with one that is not."""
    folder = tmp_path_factory.mktemp("quantized")
    make.gemma3(folder / "hf", text=WIDE)
    return gemma3_gguf.write(folder / "hf", folder / "gguf", kinds=KINDS)[0]


@pytest.fixture
def mtmd(mtmd: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command line, where reading a weight and running a plan fail."""
    for kind in (SafetensorsWeights, GgufFile):
        monkeypatch.setattr(kind, "read", lambda *_: pytest.fail("a weight was read"))
    monkeypatch.setattr(Executor, "run", lambda *_: pytest.fail("something was run"))
    return mtmd


def reported(mtmd: Any, *arguments: object) -> dict[str, Any]:
    """What `info --json` prints."""
    ran = mtmd("info", *arguments, "--device", "cpu", "--json")
    assert (ran.code, ran.err) == (0, ""), ran
    values: dict[str, Any] = json.loads(ran.out)
    return values


def text(mtmd: Any, *arguments: object) -> list[str]:
    ran = mtmd("info", *arguments, "--device", "cpu")
    assert (ran.code, ran.err) == (0, ""), ran
    lines: list[str] = ran.out.splitlines()
    assert len(lines) < 60 and max(map(len, lines)) <= COLUMNS, "\n".join(lines)
    return lines


def test_a_folder(mtmd: Any, demo: Model) -> None:
    result = reported(mtmd)
    with safe_open(DEMO_MODEL / "model.safetensors", "np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # a file, no dictionary
        tensors = {name: int(np.prod(s.get_shape())) for name, s in slices.items()}
    assert result["parameters"] == sum(tensors.values()) and result["stored_bytes"] == 2 * sum(
        tensors.values()
    )
    assert (result["model"], result["format"], result["files"]) == (
        "demo model",
        "Hugging Face folder",
        ["model.safetensors"],
    )
    assert [(t["part"], t["kind"], t["used"], t["tensors"]) for t in result["types"]] == [
        ("encoder", "BF16", "fp32", 103),
        ("decoder", "BF16", "fp32", len(tensors) - 103),
    ]
    encoder, decoder = result["parts"]
    assert (encoder["family"], decoder["family"]) == ("gemma3", "gemma")
    assert (
        encoder["facts"]["vit.layers"] == 6
        and encoder["facts"]["vit.heads"] == 2
        and encoder["facts"]["vit.width"] == 144
    )
    assert (
        decoder["facts"]["layers"],
        decoder["facts"]["width"],
        decoder["facts"]["heads"],
        decoder["facts"]["groups"],
    ) == (4, 256, 4, 2)
    assert (result["vocabulary"], result["context_most"]) == (
        demo.checkpoint.text.vocabulary,
        demo.checkpoint.text.context,
    )
    token = demo.checkpoint.tokenizer.id
    assert result["image_token"] == {
        "name": "image token",
        "text": "<image_soft_token>",
        "id": token("<image_soft_token>"),
    }
    assert {(t["text"], t["id"]) for t in result["stop_tokens"]} == {
        (t, token(t)) for t in ("<eos>", "<end_of_turn>")
    }
    assert {t["name"]: t["id"] for t in result["tokens"]} == demo.checkpoint.tokenizer.special
    assert result["chat_template"] == "the model's own"


def test_what_the_files_say_against_each_other(demo: Model) -> None:
    note = "<end_of_turn>: ends of a turn, though the file's types differ"
    checkpoint = replace(demo.checkpoint, notes=(note,))
    with Model(checkpoint, demo.options) as model:
        assert model_info(model).notes == (note,)
        assert " ".join(render(model_info(model)).split()).endswith(f"note {note}")
        receipt = model.answer(prompt="hello", max_tokens=2).receipt
        assert (receipt.model_notes, receipt.warnings) == ((note,), ()), "nobody has to act on it"


def test_pictures_of_one_size(mtmd: Any) -> None:
    result = reported(mtmd)
    assert [tuple(p["size"]) for p in result["pictures"]] == list(SIZES) and result[
        "most_tokens"
    ] == 9
    assert {(p["tokens"], str(p["tile_sizes"]), p["refused"]) for p in result["pictures"]} == {
        (9, "[[96, 96]]", None)
    }
    assert "a picture    takes 9 tokens, whatever its size: 1 of 96 x 96" in text(mtmd)
    line = mtmd("info", "--image-max-tokens", 8).refused()
    assert "every picture takes 9 tokens with this model" in line and "--image-max-tokens 8" in line


def test_memory_is_that_of_the_warm_up(mtmd: Any) -> None:
    result, warm = (
        reported(mtmd, "--context", 512),
        json.loads(mtmd("warmup", "--no-run", "--device", "cpu", "--context", 512, "--json").out),
    )
    assert result["graphs"] == warm["graphs"] and result["context"] == 512
    weights = {g["graph"]: g["weight_bytes"]["cpu"] for g in result["graphs"]}
    cache = sum(result["cache_bytes"].values())
    assert [{"cpu": cache}] * 2 == [
        g["cache_bytes"] for g in result["graphs"] if g["graph"] == "decoder"
    ]
    assert result["peak_bytes"] == {
        "cpu": sum(weights.values())
        + cache
        + max(g["compute_bytes"]["cpu"] for g in result["graphs"])
    }
    assert weights == {
        part: sum(t["memory_bytes"] for t in result["types"] if t["part"] == part)
        for part in weights
    }
    longer = reported(mtmd, "--context", 2048)
    assert (
        longer["cache_bytes"]["keys and values"] > 3 * cache
        and longer["peak_bytes"]["cpu"] > result["peak_bytes"]["cpu"]
    )


def test_types_that_are_used_as_stored(mtmd: Any) -> None:
    result = reported(mtmd, "--dtype", "bf16")
    assert result["dtype"] == "bf16" and result["dequantized"] == []
    as_stored = [t for t in result["types"] if t["used"] == "as stored"]
    assert (
        all(t["memory_bytes"] == t["stored_bytes"] for t in as_stored)
        and sum(t["tensors"] for t in as_stored) > 100
    )
    assert all(t["memory_bytes"] == 2 * t["stored_bytes"] for t in reported(mtmd)["types"])


def test_tensors_that_are_dequantized(quantized: Path, mtmd: Any) -> None:
    result = reported(mtmd, quantized)
    assert (result["format"], result["files"]) == ("GGUF v3", ["text.gguf", "mmproj.gguf"])
    rows = {(t["part"], t["kind"]): t for t in result["types"] if t["kind"] != "F32"}
    assert {k: (r["tensors"], r["dequantized"], r["used"]) for k, r in rows.items()} == {
        ("decoder", "TQ2_0"): (6, False, "as stored"),
        ("decoder", "Q8_0"): (1, False, "as stored"),
        ("encoder", "Q8_0"): (1, True, "fp32"),
    }
    values, kept = 256 * 256, rows["decoder", "TQ2_0"]
    assert kept["stored_bytes"] == kept["memory_bytes"] == 6 * values // 256 * 66
    turned = rows["encoder", "Q8_0"]
    assert turned["memory_bytes"] == turned["stored_bytes"] // 34 * 32 * 4
    assert [d["name"] for d in result["dequantized"]] == [PROJECTION]
    (half,) = reported(mtmd, quantized, "--dtype", "bf16")["dequantized"]
    assert half["memory_bytes"] == turned["memory_bytes"] // 2
    lines = text(mtmd, quantized)
    assert any("Q8_0" in line and line.endswith("DEQUANTIZED to fp32 at load") for line in lines)
    assert any("TQ2_0" in line and line.endswith("as stored") for line in lines)
    told = " ".join(" ".join(lines).split())
    assert "dequantized as no kernel supports the stored form, " in told
    assert f"become {turned['memory_bytes'] / 2**20:.2f} MiB: {PROJECTION}" in told


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_was_told_is_what_a_run_takes(dtype: str, quantized: Path, one: Path) -> None:
    model = load(quantized, device="cpu", dtype=dtype)
    result = model_info(model)
    assert model.runner.residency.bytes == {}
    model.answer(one, "hi", max_tokens=2)
    assert model.runner.residency.bytes == {"cpu": sum(t.memory_bytes for t in result.types)}


def test_without_an_encoder(tmp_path: Path, mtmd: Any) -> None:
    make.gemma3_text(tmp_path / "text")
    result, lines = reported(mtmd, tmp_path / "text"), text(mtmd, tmp_path / "text")
    assert (
        [p["part"] for p in result["parts"]] == ["decoder"]
        and result["pictures"] == []
        and result["image_token"] is None
    )
    assert lines[0].startswith("text: reads text, ")
    assert not any(
        line.strip().startswith(word)
        for line in lines
        for word in ("a picture", "picture", "encoder", "image token")
    )


@pytest.fixture(scope="module")
def any_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose pictures take 6 to 30 tokens."""
    folder = tmp_path_factory.mktemp("any size")
    qwen3_vl(folder)
    return folder


def test_pictures_of_several_sizes(any_size: Path, mtmd: Any) -> None:
    result, family = reported(mtmd, any_size), load(any_size, device="cpu").checkpoint.vision
    assert family and result["most_tokens"] == family.resolution.max_tokens()
    for row, (width, height) in zip(result["pictures"], SIZES, strict=True):
        plan = family.resolution.prepare(
            np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
        )
        assert (row["size"], row["tokens"], row["tile_sizes"]) == (
            [width, height],
            plan.tokens,
            [list(s) for s in plan.sizes],
        )
    assert len({row["tokens"] for row in result["pictures"]}) > 1
    lines, wide = text(mtmd, any_size), result["pictures"][3]
    assert (
        f"  1920 x 1080  {wide['tokens']:7}  1 of {wide['tile_sizes'][0][0]} x "
        f"{wide['tile_sizes'][0][1]}" in lines
    )
    few = reported(mtmd, any_size, "--image-max-tokens", 12)
    assert (
        max(row["tokens"] for row in few["pictures"]) <= few["most_tokens"] < result["most_tokens"]
    )


def test_a_tensor_of_several_parameters_counts_once(tmp_path: Path, mtmd: Any) -> None:
    """The file holds queries, keys and values of the tower in one, which is three parameters."""
    qwen2_vl(tmp_path)
    result, file = reported(mtmd, tmp_path), SafetensorsWeights(tmp_path)
    assert result["parameters"] == sum(int(np.prod(file.meta(name)[0])) for name in file.names())
    assert result["stored_bytes"] == file.bytes and sum(
        t["tensors"] for t in result["types"]
    ) == len(file.names())


def test_a_size_that_is_not_taken(
    any_size: Path, mtmd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = DynamicResolution.prepare

    def choosy(self: DynamicResolution, pixels: Any, *budget: Any) -> Any:
        if pixels.shape[1] > 3000:
            raise ImageError("too wide; crop it")
        return prepare(self, pixels, *budget)

    monkeypatch.setattr(DynamicResolution, "prepare", choosy)
    assert reported(mtmd, any_size)["pictures"][-1] == {
        "size": [3840, 2160],
        "tokens": 0,
        "tile_sizes": [],
        "refused": "too wide; crop it",
    }
    assert "  3840 x 2160        -  refused: too wide; crop it" in text(mtmd, any_size)


@pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="GOLDEN CHECKPOINTS ARE MISSING: there is no ../shared/golden"
)
@pytest.mark.parametrize(
    "path",
    [
        "lfm2_vl/hf",
        "lfm2_vl/text-Q4_0.gguf",
        "smolvlm/text-BF16.gguf",
        "kquants/text-Q2_K.gguf",
        "llava/hf",
    ],
)
def test_models_of_every_kind_fit_the_terminal(path: str, mtmd: Any) -> None:
    lines = text(mtmd, GOLDEN / path)
    assert lines[1].startswith(
        "format       GGUF v3, 2 files: "
        if path.endswith("gguf")
        else "format       Hugging Face folder, 1 file"
    )
    assert any("conv" in line for line in lines if line.startswith("  cache: ")) == path.startswith(
        "lfm2"
    )


def test_every_option(mtmd: Any) -> None:
    lines = [line for line in mtmd("info", "--help-all").out.splitlines() if line.startswith("  -")]
    assert {
        word.rstrip(",") for line in lines for word in line.split() if word.startswith("--")
    } == {
        "--help",
        "--help-all",
        "--model",
        "--json",
        "--mmproj",
        "--chat-template",
        "--device",
        "--dtype",
        "--weights",
        "--activations",
        "--kv-type",
        "--lora",
        "--flash-attn",
        "--override-tensor",
        "--refuse",
        "--image-min-tokens",
        "--image-max-tokens",
        "--threads",
        "--context",
        "--memory-limit",
        "--speculate",
        "--tp",
        "--tensor-split",
        "--no-kv-offload",
        "--split",  # tests/mtmd/loaded/fitting
        "--fit",
        "--kernels",
        "--vision-attention",
        "--preprocess",
        "--no-graphs",
    }
    off = reported(mtmd, "--flash-attn", "off")
    assert off["graphs"] != reported(mtmd)["graphs"], "explicit attention takes more"
    assert reported(mtmd, "--refuse", "gelu")["graphs"][0]["splits"] > 1
    assert reported(mtmd, "--override-tensor", r"v\.blk\.0\.=reference")["graphs"][0]["splits"] > 1
    assert reported(mtmd, "--threads", 2)["device_name"].startswith("2 threads, ")
    assert reported(mtmd, "--chat-template", DEMO_MODEL / "chat_template.jinja")[
        "chat_template"
    ].endswith("chat_template.jinja")


def test_mistakes_are_one_line(mtmd: Any, tmp_path: Path, quantized: Path) -> None:
    assert "found no such file or folder" in mtmd("info", tmp_path / "none").refused()
    assert "expected no more arguments" in mtmd("info", DEMO_MODEL, DEMO_MODEL).refused()
    assert (
        "has its own; give it with a GGUF file only"
        in mtmd("info", DEMO_MODEL, "--mmproj", quantized).refused()
    )
    assert (
        "is a projector, which has no decoder"
        in mtmd("info", quantized.with_name("mmproj.gguf")).refused()
    )


def test_numbers() -> None:
    assert [count(n) for n in (0, 999, 1000, 1234, 4_940_000, 27_432_406_640)] == [
        "0",
        "999",
        "1 K",
        "1.23 K",
        "4.94 M",
        "27.4 B",
    ]
