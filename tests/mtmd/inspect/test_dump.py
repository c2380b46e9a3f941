"""Dumps: every node is there, and the first that differs is named."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtmd.base.errors import OptionError
from mtmd.inspect.dump import Row, compare, pattern, read_rows
from mtmd.loading import DEMO_MODEL
from mtmd.model import Model

ROW = Row(
    "encoder", "a", "add", "fp32", [2, 50], "cpu", 3.0, 10.0, [1.0, -1.0, 0.5], [0.25, 2.0, 1e-3]
)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory, one: Path) -> Path:
    from contextlib import redirect_stdout

    from mtmd.cli import main

    path = tmp_path_factory.mktemp("dump") / "own.json"
    with path.open("w") as file, redirect_stdout(file):
        assert main(["dump", str(one), "--json"]) == 0
    return path


def test_every_node_of_both_graphs_is_there(dumped: Path, demo: Model) -> None:
    rows = json.loads(dumped.read_text())
    assert set(rows[0]) == {
        "graph",
        "name",
        "op",
        "dtype",
        "shape",
        "device",
        "sum",
        "norm",
        "first",
        "last",
    }
    encoder = demo.encoder.plan(1, demo.encoder.family.resolution.tile_type().shape)  # type: ignore[union-attr]
    assert [r["name"] for r in rows if r["graph"] == "encoder"] == [
        s.node.name for s in encoder.steps
    ]
    decoder = [r for r in rows if r["graph"] == "decoder"]
    assert "image_embd" in {r["name"] for r in decoder} and decoder[-1]["name"] == "logits"
    assert (
        # the last token's, and a row of what batches are filled up with
        decoder[-1]["shape"] in ([rows, demo.checkpoint.text.vocabulary] for rows in (1, 2))
        and len(decoder[-1]["first"]) == len(decoder[-1]["last"]) == 3
    )


def test_values_are_those_of_the_node(dumped: Path, demo: Model, one: Path) -> None:
    from mtmd.clip.image.decode import open_picture

    pixels = open_picture(one.read_bytes()).pixels
    assert demo.encoder
    value = demo.encoder.encode(list(demo.encoder.family.resolution.prepare(pixels).tiles))[
        0
    ].double()
    row = next(r for r in read_rows(dumped) if r.name == "mm.input_projection")
    assert row.shape == [1, *value.shape] and row.device == "cpu" and row.dtype == "fp32"
    assert row.first + row.last == pytest.approx(
        [*value.flatten()[:3].tolist(), *value.flatten()[-3:].tolist()], rel=1e-4
    )
    assert (row.sum, row.norm) == pytest.approx((float(value.sum()), float(value.norm())), rel=1e-4)


def test_text(one: Path, mtmd: Any) -> None:
    ran = mtmd("dump", one, "-p", "hi", "--filter", r"^v\.blk\.1\.ln1$|^logits$")
    assert ran.code == 0 and ran.err == ""
    first, second = ran.out.splitlines()
    assert first.split()[:3] == ["encoder", "v.blk.1.ln1", "layer_norm"] and second.split()[:3] == [
        "decoder",
        "logits",
        "matmul",
    ]
    assert " sum " in first and " norm " in first and "..." in first


def test_without_a_picture(mtmd: Any) -> None:
    ran = mtmd("dump", "-p", "hi")
    assert ran.code == 0 and {line.split()[0] for line in ran.out.splitlines()} == {"decoder"}


def test_the_same_run_does_not_differ(dumped: Path, one: Path, mtmd: Any) -> None:
    ran = mtmd("dump", one, "--compare", dumped, "--threads", 1)
    assert ran.code == 0 and ran.out.startswith("no difference above 0.001 in ") and ran.err == ""
    assert mtmd("dump", one, "--compare", dumped, "--flash-attn", "off").code == 0, (
        "another way to the same values"
    )


def spoil(folder: Path, part: str, index: tuple[int, ...], by: float) -> Path:
    copy = folder / "spoiled"
    shutil.copytree(DEMO_MODEL, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    tensors = load_file(copy / "model.safetensors")
    name = next(n for n in sorted(tensors) if part in n)
    tensors[name] = tensors[name].clone()
    tensors[name][index] += by
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


# The middle of a tensor lies between the values that are kept: there the sum alone tells.
SPOILED = {
    "patch_embedding.weight": ("v.patch_embd", (70, 1)),
    "patch_embedding.bias": ("v.patch_embd", (71,)),
    "encoder.layers.1.mlp.fc1.bias": ("v.blk.1.ffn_up", (40,)),
    "encoder.layers.2.self_attn.v_proj.weight": ("v.blk.2.attn_v", (9, 33)),
    "mm_input_projection_weight": ("mm.input_projection", (5, 8)),
    "layers.1.self_attn.k_norm.weight": ("blk.1.attn_k_norm", (3,)),
    "layers.2.mlp.down_proj.weight": ("blk.2.ffn_down", (31, 7)),
}


@pytest.mark.parametrize("part", SPOILED)
def test_the_first_node_that_differs_is_named(
    part: str, dumped: Path, one: Path, tmp_path: Path, mtmd: Any
) -> None:
    name, index = SPOILED[part]
    folder = spoil(tmp_path, part, index, by=3.0)
    ran = mtmd("dump", one, "-m", folder, "--compare", dumped)
    assert ran.code == 1 and ran.err == ""
    reported, here, other = ran.out.splitlines()
    assert reported.startswith("first difference at ") and reported.split()[4] == name, reported
    assert here.startswith("  here ") and other.startswith("  other ")


def test_sums_and_ends_and_shapes_and_nan_count() -> None:
    assert compare([ROW], [ROW], 0.0).same
    assert compare([ROW], [replace(ROW, device="cuda:0", op="other")], 0.0).same
    changed = {
        "a middle value": replace(ROW, sum=3.5),
        "the first": replace(ROW, first=[1.1, -1.0, 0.5]),
        "a shape": replace(ROW, shape=[50, 2]),
        "a NaN": replace(ROW, last=[math.nan, 2.0, 1e-3]),
        "a NaN between": replace(ROW, sum=math.nan),
        "an infinity": replace(ROW, sum=math.inf),
    }
    for case, row in changed.items():
        for result in (compare([row], [ROW], 1e-3), compare([ROW], [row], 1e-3)):
            assert not result.same and "first difference at encoder a (add)" in result.text, case
    assert "other shape" in compare([ROW], [changed["a shape"]], 1e-3).text
    nan = replace(ROW, sum=math.nan, norm=math.nan, first=[math.nan] * 3)
    assert compare([nan], [nan], 0.0).same, "NaN in both is no difference between them"


def test_small_values_among_large_ones_may_differ() -> None:
    """1e-3 against a root mean square of 1: rounding, however large a part of the value itself."""
    assert compare([ROW], [replace(ROW, last=[0.25, 2.0, 1.1e-3])], 1e-3).same
    small = replace(ROW, sum=0.0, norm=0.0, first=[0.0] * 3, last=[0.0] * 3)
    assert (
        compare([small], [small], 0.0).same
        and not compare([small], [replace(small, sum=1e-9, norm=1e-9)], 1e-3).same
    )


def test_tolerance() -> None:
    other = replace(ROW, first=[1.02, -1.0, 0.5])
    assert compare([ROW], [other], 0.02).same and not compare([ROW], [other], 0.005).same


def test_repeated_names_are_counted() -> None:
    rows = [ROW, replace(ROW, sum=5.0)]
    assert compare(rows, rows, 0.0).same
    assert "relative 0.2" in compare([ROW, ROW], rows, 1e-3).text


def test_nothing_in_common_is_no_agreement() -> None:
    result = compare([ROW], [replace(ROW, name="b")], 1e-3)
    assert not result.same and "no node of this run is in the other dump" in result.text


@pytest.mark.parametrize("tolerance", [math.nan, -1.0, math.inf])
def test_a_tolerance_that_means_nothing(
    tolerance: float, one: Path, dumped: Path, mtmd: Any
) -> None:
    with pytest.raises(OptionError, match=r"tolerance: found .*expected a number from 0"):
        compare([ROW], [ROW], tolerance)
    assert (
        "tolerance: found"
        in mtmd(
            "dump", one, "--filter", "logits", "--compare", dumped, f"--tolerance={tolerance}"
        ).refused()
    )
    assert (
        "tolerance: found"
        in mtmd("dump", one, "--filter", "logits", f"--tolerance={tolerance}").refused()
    )


NO_DUMPS: dict[str, bytes] = {
    "text": b"hello",
    "nothing": b"",
    "binary": b"\x80\xff",
    "deep": b"[" * 100_000,
    "an object": b"{}",
    "numbers": b"[1, 2]",
    "a field too few": json.dumps([{k: v for k, v in ROW.asdict().items() if k != "sum"}]).encode(),
    "text for values": json.dumps([ROW.asdict() | {"first": "abc"}]).encode(),
    "text for a sum": json.dumps([ROW.asdict() | {"sum": "1"}]).encode(),
    "nothing for a sum": json.dumps([ROW.asdict() | {"sum": None}]).encode(),
    "a number beyond floats": json.dumps([ROW.asdict() | {"sum": 10**400}]).encode(),
}


@pytest.mark.parametrize("case", NO_DUMPS)
def test_what_is_no_dump(case: str, tmp_path: Path, one: Path, mtmd: Any) -> None:
    (tmp_path / "other.json").write_bytes(NO_DUMPS[case])
    assert (
        "expected the output of `mtmd dump --json`"
        in mtmd("dump", one, "--compare", tmp_path / "other.json").refused()
    )


def test_refusals(tmp_path: Path, one: Path, mtmd: Any) -> None:
    assert (
        "none.json: found no such file, expected one made by 'mtmd dump --json'"
        in mtmd("dump", one, "--compare", tmp_path / "none.json").refused()
    )
    assert "cannot be read (Is a directory)" in mtmd("dump", one, "--compare", tmp_path).refused()
    assert "filter 'zzz' matches no node" in mtmd("dump", one, "--filter", "zzz").refused()
    assert "filter '(' is not a regular expression" in mtmd("dump", one, "--filter", "(").refused()
    assert "not allowed with" in mtmd("dump", one, "--json", "--compare", "x.json").refused()
    with pytest.raises(OptionError, match="not a regular expression"):
        pattern("a{99999999999999}")


def test_bf16_is_near(dumped: Path, one: Path, mtmd: Any) -> None:
    """Rounding errors stay below a tolerance that fits the type, and are seen with a smaller
    one.
    """
    assert mtmd("dump", one, "--dtype", "bf16", "--compare", dumped, "--tolerance", 0.5).code == 0
    assert mtmd("dump", one, "--dtype", "bf16", "--compare", dumped, "--tolerance", 1e-4).code == 1
    assert torch.get_default_dtype() == torch.float32
