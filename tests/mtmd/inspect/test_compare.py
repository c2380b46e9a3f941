"""`mtmd compare`: equal where values are equal, and the first node named where they part."""

from __future__ import annotations

import gc
import json
import math
import shutil
import weakref
from pathlib import Path
from typing import Any

import checkpoints as make
import pytest
import torch
from safetensors.torch import load_file, save_file

from mtmd.inspect.compare import GRAPHS, Source, compare_models, fitting_tolerance, open_both
from mtmd.inspect.comparison import SAVED, SideFacts, beyond, nmse, saved
from mtmd.kernels.backends import Cpu
from mtmd.loading import DEMO_MODEL
from mtmd.model import Model
from mtmd.options.load import LoadOptions

CPU = ("--device", "cpu", "--threads", 1)


def reported(mtmd: Any, *arguments: object, code: int = 0) -> dict[str, Any]:
    """What `compare --json` prints."""
    ran = mtmd("compare", *arguments, *CPU, "--json")
    assert (ran.code, ran.err) == (code, "") and ran.out.count("\n") == 1, ran
    values: dict[str, Any] = json.loads(
        ran.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )
    return values


def copy_of_demo(
    folder: Path, part: str = "", by: float = 0.0, index: tuple[int, ...] = ()
) -> Path:
    """The demo model, `by` added to one value of the first tensor whose name has `part`."""
    target = folder / "other"
    shutil.copytree(DEMO_MODEL, target, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    if part:
        tensors = load_file(target / "model.safetensors")
        name = next(n for n in sorted(tensors) if part in n)
        tensors[name] = tensors[name].clone()
        tensors[name][index] += by
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_a_model_is_equal_to_itself(one: Path, world: dict[int, Path], mtmd: Any) -> None:
    result = reported(mtmd, DEMO_MODEL, DEMO_MODEL, "--image", one, "--image", world[2])
    assert (
        result["differences"] == [] and result["first"] is None and result["largest"]["nmse"] == 0
    )
    assert [(i["pixel_nmse"], i["embedding_nmse"], i["tiles_a"]) for i in result["images"]] == [
        (0, 0, [[96, 96]])
    ] * 2
    assert (
        result["logits"]["nmse"] == result["logits"]["worst_nmse"] == 0
        and result["logits"]["top_a"] == result["logits"]["top_b"]
    )
    assert result["agreed"] == len(result["tokens_a"]) == len(result["tokens_b"]) == 16
    assert result["only_a"] == result["only_b"] == {"count": 0, "first": None}
    assert (
        result["prompt"]["tokens_a"] == result["prompt"]["tokens_b"]
        and result["prompt"]["first"] is None
    )
    ran = mtmd("compare", DEMO_MODEL, DEMO_MODEL, "--image", one, *CPU)
    assert (
        ran.code == 0
        and "result: no difference beyond the tolerance" in ran.out
        and "every value the same" in ran.out
    )


def test_every_node_is_compared(one: Path, mtmd: Any) -> None:
    result = reported(mtmd, DEMO_MODEL, DEMO_MODEL, "--image", one, "-p", "hi")
    ran = mtmd("dump", one, "-p", "hi", "--json", *CPU)
    rows = json.loads(ran.out)
    assert (
        result["compared"] == len(rows)
        and result["in_part"] == sum(math.prod(r["shape"]) > SAVED for r in rows) > 0
    )
    text = reported(mtmd, DEMO_MODEL, DEMO_MODEL, "-p", "hi")
    assert (
        text["images"] == [] and text["compared"] == sum(r["graph"] == "decoder" for r in rows) - 1
    ), "no image_embd node"


def test_two_types(one: Path, mtmd: Any) -> None:
    same = reported(
        mtmd, DEMO_MODEL, DEMO_MODEL, "--image", one, "--dtype-b", "bf16", "--dtype", "fp32"
    )
    assert (same["a"]["dtype"], same["b"]["dtype"]) == ("fp32", "bf16")
    assert (
        1e-9 < same["images"][0]["embedding_nmse"] < 1e-3 and 1e-9 < same["logits"]["nmse"] < 1e-3
    )
    result = reported(
        mtmd,
        DEMO_MODEL,
        DEMO_MODEL,
        "--image",
        one,
        "--dtype-b",
        "bf16",
        "--tolerance",
        1e-9,
        code=1,
    )
    assert (result["first"]["graph"], result["first"]["name"], result["first"]["op"]) == (
        "encoder",
        "v.patch_embd",
        "patch_embed",
    )
    assert (result["first"]["dtype_a"], result["first"]["dtype_b"]) == ("fp32", "bf16") and result[
        "first"
    ]["nmse"] > 1e-9
    assert result["first"]["norm_a"] == pytest.approx(result["first"]["norm_b"], rel=1e-2)
    assert result["differences"] == ["embeddings of image 1", "node v.patch_embd", "logits"]


def test_explicit_attention_is_counted(one: Path, mtmd: Any, demo: Model) -> None:
    assert demo.encoder
    nodes = 2 * (demo.warmup_report.flash[0].nodes + demo.warmup_report.flash[1].nodes)
    result = reported(mtmd, DEMO_MODEL, DEMO_MODEL, "--image", one, "--flash-attn-b", "off")
    assert result["only_b"] == {
        "count": nodes,
        "first": ["encoder", "v.blk.0.attn.scores", "attn_scores"],
    }
    assert result["only_a"]["count"] == 0 and (
        result["a"]["flash"]["decoder"],
        result["b"]["flash"]["decoder"],
    ) == ("on", "off")
    turned = reported(
        mtmd,
        DEMO_MODEL,
        DEMO_MODEL,
        "--image",
        one,
        "--flash-attn-a",
        "off",
        "--flash-attn-b",
        "on",
    )
    assert (turned["only_a"], turned["only_b"]) == (result["only_b"], result["only_a"])


SPOILED = {
    "patch_embedding.bias": ("v.patch_embd", (71,)),
    "encoder.layers.2.self_attn.v_proj.weight": ("v.blk.2.attn_v", (9, 33)),
    "layers.1.self_attn.k_norm.weight": ("blk.1.attn_k_norm", (3,)),
    "layers.2.mlp.down_proj.weight": ("blk.2.ffn_down", (31, 7)),
}


@pytest.mark.parametrize("part", SPOILED)
def test_the_first_node_that_differs_is_named(
    part: str, one: Path, tmp_path: Path, mtmd: Any
) -> None:
    name, index = SPOILED[part]
    ran = mtmd(
        "compare", DEMO_MODEL, copy_of_demo(tmp_path, part, 3.0, index), "--image", one, *CPU
    )
    lines = ran.out.splitlines()
    assert ran.code == 1 and ran.err == "" and max(map(len, lines)) <= 100
    first = next(line for line in lines if line.startswith("first node beyond the tolerance: "))
    assert first.split()[6] == name and " NMSE " in first
    assert (
        lines[-1].startswith("result: DIFFERENT: ")
        and f"node {name}" in lines[-1]
        and "logits" in lines[-1]
    )
    assert ("embeddings of image 1" in lines[-1]) == name.startswith("v.")


def test_pixels(one: Path, tmp_path: Path, mtmd: Any) -> None:
    other = copy_of_demo(tmp_path)
    settings = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(
        json.dumps(settings | {"image_mean": [0.5, 0.5, 0.51]})
    )
    result = reported(mtmd, DEMO_MODEL, other, "--image", one, "--dtype", "bf16", code=1)
    assert 1e-6 < result["images"][0]["pixel_nmse"] < 1e-2 == result["tolerance"]["encoder"]
    assert result["differences"][0] == "pixels of image 1", (
        "prepared in fp32, whatever the compute type"
    )


def test_another_template(tmp_path: Path, mtmd: Any) -> None:
    source = (DEMO_MODEL / "chat_template.jinja").read_text()
    (tmp_path / "t.jinja").write_text(f"{source}!")
    result = reported(
        mtmd, DEMO_MODEL, DEMO_MODEL, "--chat-template-b", tmp_path / "t.jinja", "-p", "hi", code=1
    )
    count = result["prompt"]["tokens_a"]
    assert result["prompt"]["tokens_b"] == count + 1 and result["prompt"]["first"][:2] == [
        count,
        None,
    ]
    assert result["differences"][0] == "prompt token ids"
    ran = mtmd(
        "compare",
        DEMO_MODEL,
        DEMO_MODEL,
        "--chat-template-b",
        tmp_path / "t.jinja",
        "-p",
        "hi",
        *CPU,
    )
    assert f"DIFFERENT at token {count}: no more tokens in A, id " in ran.out
    assert (
        reported(mtmd, DEMO_MODEL, DEMO_MODEL, "--chat-template", tmp_path / "t.jinja", "-p", "hi")[
            "prompt"
        ]["tokens_a"]
        == count + 1
    )


def test_other_shapes_differ_without_a_number(tmp_path: Path, mtmd: Any) -> None:
    for name, width in (("a", 64), ("b", 48)):
        make.gemma3(tmp_path / name, text={"hidden_size": width})
    result = reported(mtmd, tmp_path / "a", tmp_path / "b", "-p", "hi", code=1)
    assert result["first"]["name"] == "token_embd" and result["first"]["nmse"] is None
    assert (result["first"]["shape_a"][1], result["first"]["shape_b"][1]) == (64, 48)
    ran = mtmd("compare", tmp_path / "a", tmp_path / "b", "-p", "hi", *CPU)
    assert "token_embd (embed), NMSE none, as shapes differ" in ran.out


def test_tokens_end_with_the_context(mtmd: Any) -> None:
    assert len(reported(mtmd, DEMO_MODEL, DEMO_MODEL, "-p", "hi", "--tokens", 3)["tokens_a"]) == 3
    result = reported(mtmd, DEMO_MODEL, DEMO_MODEL, "-p", "hi", "--tokens", 100, "--context", 20)
    assert result["prompt"]["tokens_a"] + len(result["tokens_a"]) == 20


def test_tokens_are_those_of_an_answer(one: Path, mtmd: Any, demo: Model) -> None:
    result = reported(mtmd, DEMO_MODEL, DEMO_MODEL, "--image", one, "-p", "hi")
    assert (
        tuple(result["tokens_a"])
        == demo.answer(one, "hi", max_tokens=16, ignore_eos=True).output_token_ids
    )


def test_the_first_model_is_gone_before_the_second_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    models = open_both(*(Source(DEMO_MODEL, LoadOptions(device="cpu")) for _ in range(2)))
    seen = [weakref.ref(part) for m in models for part in (m, m.runner, m.encoder)]
    alive: list[list[bool]] = []
    prompt = Model.prompt

    def watched(self: Model, *arguments: Any) -> Any:
        alive.append([r() is not None for r in seen])
        return prompt(self, *arguments)

    monkeypatch.setattr(Model, "prompt", watched)
    gc.disable()  # whoever is gone was let go on purpose
    try:
        assert (
            compare_models(models, [{"role": "user", "content": "hi"}], tokens=2).differences == ()
        )
    finally:
        gc.enable()
    assert alive == [[True] * 6, [False] * 3 + [True] * 3]


def test_decode_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is wrong at one row alone shows after the prompt, at equal values before."""
    run = Cpu.lower

    def lower(self: Cpu, node: Any, in_place: bool) -> Any:
        kernel = run(self, node, in_place)
        wrong = node.name == "blk.1.post_ffw_norm" and node.shape[0] == 1 and len(models) == 0
        return (lambda *inputs: kernel(*inputs) * 1.5) if wrong else kernel

    monkeypatch.setattr(Cpu, "lower", lower)
    # Node by node, as machine code has kernels of its own.
    monkeypatch.setattr(Cpu, "native", property(lambda _: False, lambda *_: None), raising=False)
    models = open_both(*(Source(DEMO_MODEL, LoadOptions(device="cpu")) for _ in range(2)))
    result = compare_models(models, [{"role": "user", "content": "hi"}], tokens=3)
    assert (
        result.first is None
        and result.logits.nmse == 0
        and result.logits.worst_nmse
        and result.logits.worst_nmse > 1e-8
    )
    assert result.differences == ("logits",)


def test_nmse() -> None:
    a, inf, nan = torch.tensor([3.0, 4.0]), math.inf, math.nan
    assert nmse(torch.tensor([3.0, 3.0]), a) == 1 / 25 and nmse(a, a) == 0
    assert (
        nmse(torch.zeros(2), torch.zeros(2)) == 0
        and nmse(a, torch.zeros(2)) == inf
        and nmse(torch.zeros(2), a) == 1
    )
    masked = torch.tensor([3.0, -inf, nan])
    assert nmse(masked, masked) == 0 and nmse(
        torch.tensor([4.0, -inf, nan]), masked
    ) == pytest.approx(1 / 9)
    for other in (
        [3.0, inf, nan],
        [3.0, 0.0, nan],
        [3.0, -inf, 0.0],
        [3.0, nan, nan],
        [3.0, -inf, inf],
        [nan, -inf, nan],
    ):
        assert (
            nmse(torch.tensor(other), masked) == inf and nmse(masked, torch.tensor(other)) == inf
        ), other
    assert (
        beyond(None, 1e9)
        and beyond(nan, 1e9)
        and beyond(inf, 1e9)
        and not beyond(0.0, 0.0)
        and beyond(1e-9, 0.0)
    )


def test_values_that_are_kept() -> None:
    small = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    result = saved(small.t())
    assert result.dtype == torch.float32 and result.tolist() == [0, 3, 1, 4, 2, 5]
    plain = torch.zeros(5)
    saved_of_it = saved(plain)
    plain += 1
    assert saved_of_it.tolist() == [0] * 5, "what is overwritten later is kept as it was"
    large = torch.arange(1024 * 1024)
    values = saved(large.reshape(1024, 1024)).long()
    assert (
        len(values) == SAVED <= 65_536
        and values.unique().numel() == SAVED
        and set(values.diff().tolist()) <= {16, 17}
    )
    assert (values % 1024).unique().numel() == 1024, "every column of a matrix is met"


def side(dtype: str, **types: tuple[str, ...]) -> SideFacts:
    return SideFacts("m", "cpu", "", dtype, types, {})


def test_a_tolerance_that_fits() -> None:
    fp32, bf16 = (
        side("fp32", encoder=("BF16",), decoder=("BF16", "F32")),
        side("bf16", encoder=("BF16",), decoder=("BF16",)),
    )
    assert fitting_tolerance(fp32, fp32) == dict.fromkeys(GRAPHS, 1e-8)
    assert (
        fitting_tolerance(fp32, bf16)
        == {"pixels": 1e-8, "encoder": 1e-2, "decoder": 1e-2}
        == fitting_tolerance(bf16, bf16)
    )
    q8, q4 = (
        side("fp32", encoder=("F16",), decoder=kinds)
        for kinds in (("Q8_0", "F32"), ("Q4_0", "Q8_0"))
    )
    assert fitting_tolerance(q4, q4) == dict.fromkeys(GRAPHS, 1e-8), (
        "the same blocks have the same values"
    )
    result = [fitting_tolerance(fp32, q)["decoder"] for q in (q8, q4)]
    assert (
        1e-8 < result[0] < 1e-2 < result[1] < 1 and fitting_tolerance(q4, fp32)["encoder"] == 1e-8
    )
    seeing = side("fp32", encoder=("Q4_0",), decoder=("F32",))
    assert (
        fitting_tolerance(fp32, seeing)["decoder"]
        == fitting_tolerance(fp32, seeing)["encoder"]
        == result[1]
    )


def test_every_option(mtmd: Any) -> None:
    lines = [
        line for line in mtmd("compare", "--help-all").out.splitlines() if line.startswith("  -")
    ]
    options = {word.rstrip(",") for line in lines for word in line.split() if word.startswith("--")}
    sides = {
        f"--{name}-{s}"
        for name in ("mmproj", "dtype", "device", "flash-attn", "chat-template", "kv-type")
        for s in "ab"
    }
    assert options == {
        "--help",
        "--help-all",
        "--model",
        "--image",
        "--prompt",
        "--tokens",
        "--tolerance",
        "--json",
        "--mmproj",
        "--chat-template",
        "--device",
        "--dtype",
        "--flash-attn",
        "--override-tensor",
        "--refuse",
        "--image-min-tokens",
        "--image-max-tokens",
        "--memory-limit",
        "--speculate",
        "--threads",
        "--context",
        "--tp",
        "--tensor-split",
        "--no-kv-offload",
        "--split",  # tests/mtmd/loaded/fitting
        "--fit",
        "--kernels",
        "--vision-attention",
        "--preprocess",
        "--no-graphs",
        "--lora",
        "--kv-type",
        "--weights",
        "--activations",
        *sides,
    }


REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "one model": (("DEMO",), "found one model, expected a second one"),
    "no such model": (("DEMO", "NONE"), "found no such file or folder"),
    "no such picture": (("DEMO", "DEMO", "--image", "NONE"), "found no such file"),
    "a tolerance below 0": (
        ("DEMO", "DEMO", "--tolerance=-1"),
        "tolerance: found -1.0, expected a number from 0",
    ),
    "a tolerance that is none": (("DEMO", "DEMO", "--tolerance", "nan"), "tolerance: found nan"),
    "no tokens": (("DEMO", "DEMO", "--tokens", 0), "tokens: found 0, expected an integer from 1"),
    "a type of one side": (
        ("DEMO", "DEMO", "--dtype-b", "int4"),
        "dtype: found 'int4', expected one of auto, bf16, fp32",
    ),
    "a device of one side": (
        ("DEMO", "DEMO", "--device-a", "tpu"),
        "device 'tpu': expected auto, cpu, cuda, cuda:N, mps, xpu or xpu:N",
    ),
    "a projector of a folder": (
        ("DEMO", "DEMO", "--mmproj-b", "x.gguf"),
        "has its own; give it with a GGUF file only",
    ),
    "an empty prompt": (("DEMO", "DEMO", "-p", ""), "the prompt is empty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_told_before_anything_runs(
    case: str, tmp_path: Path, mtmd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, expected = REFUSED[case]
    monkeypatch.setattr("mtmd.inspect.compare._run", lambda *_: pytest.fail("something was run"))
    locations = {"DEMO": DEMO_MODEL, "NONE": tmp_path / "none"}
    assert expected in mtmd("compare", *(locations.get(str(a), a) for a in arguments)).refused()


def test_images_for_a_model_that_sees_none(tmp_path: Path, one: Path, mtmd: Any) -> None:
    make.gemma3_text(tmp_path / "text")
    assert (
        "text has no image encoder and was given 1 image;"
        in mtmd("compare", DEMO_MODEL, tmp_path / "text", "--image", one).refused()
    )
