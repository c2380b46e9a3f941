"""`mtmd convert`: files of every kind out of the demo model, each read back; what is refused, in one
line.
"""

from __future__ import annotations

import json
import struct
from contextlib import closing

import pytest
import torch

from mtmd import load
from mtmd.base.errors import ModelError
from mtmd.checkpoint.open import open_checkpoint
from mtmd.convert.convert import convert
from mtmd.convert.imatrix import read_imatrix
from mtmd.kernels.checkpoint.gguf_file import GgufFile
from mtmd.kernels.checkpoint.gguf_writer import write_gguf
from mtmd.kernels.checkpoint.safetensors_file import SafetensorsWeights
from mtmd.kernels.checkpoint.tensor_writer import Planned
from mtmd.kernels.cpu.quantize import quantize
from mtmd.loading import DEMO_MODEL

TURN = [{"role": "user", "content": "hello"}]


def answer(path):
    with closing(load(path, dtype="fp32")) as model:
        *_, last = model.stream(TURN, max_tokens=8, ignore_eos=True)
        return last.answer.output_token_ids


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The demo model as GGUF in F32."""
    out = tmp_path_factory.mktemp("plain") / "demo.gguf"
    convert("demo", out, to="F32")
    return out


def test_the_demo_model_out_of_gguf(plain, mtmd, tmp_path):
    assert answer(plain) == answer("demo")
    assert open_checkpoint(plain).vision is not None
    ran = mtmd("convert", "demo", tmp_path / "d.gguf", "--to", "q8_0", "--mmproj-to", "Q8_0")
    assert ran.code == 0 and "mmproj-d.gguf: Q8_0" in ran.out, ran
    kinds = {GgufFile(tmp_path / "mmproj-d.gguf").kind(n) for n in ("v.blk.0.ln1.weight",)}
    assert kinds == {"F32"}


def test_a_gguf_in_another_type(plain, tmp_path):
    """Keys and names as they were, and what weights lost that were quantized before."""
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    (made,) = convert(plain, first, to="Q8_0", text_only=True)
    assert made.nmse is None
    (made,) = convert(first, second, to="Q4_0", text_only=True)
    assert made.nmse is not None and 1e-4 < made.nmse < 2e-2
    file, source = GgufFile(second), GgufFile(plain)
    assert file.names() == source.names()
    changed = {"general.file_type", "general.quantization_version"}
    for key in set(source.metadata) - changed:
        assert file.metadata[key] == source.metadata[key], key
    assert answer(second)


def test_an_importance_matrix_weighs_errors(plain, tmp_path):
    name = "blk.0.ffn_up.weight"
    values = GgufFile(plain).read(name)
    sums = torch.rand(1, values.shape[1]) ** 4 * 8
    matrix = tmp_path / "imatrix.gguf"
    parts = [
        Planned(f"{name}.in_sum2", tuple(sums.shape), "F32", lambda: sums),
        Planned(f"{name}.counts", (1, 1), "F32", lambda: torch.full((1, 1), 4.0)),
    ]
    write_gguf(matrix, {"general.type": "imatrix"}, parts)
    old = tmp_path / "imatrix.dat"
    text = name.encode()
    head = struct.pack("<ii", 1, len(text)) + text + struct.pack("<ii", 4, sums.shape[1])
    old.write_bytes(head + sums.numpy().tobytes())
    for file in (matrix, old):
        assert torch.equal(read_imatrix(file)[name], sums[0] / 4)
        out = tmp_path / f"{file.suffix[1:]}.gguf"
        convert(plain, out, to="Q4_0", imatrix=file, text_only=True)
        assert torch.equal(GgufFile(out).read(name), quantize(values, "Q4_0", sums[0] / 4))


@pytest.mark.parametrize(
    "data",
    [b"", b"\x01", struct.pack("<i", 1 << 30), struct.pack("<ii", 1, 3) + b"abc" + b"\xff" * 8],
    ids=["empty", "short", "many", "negative"],
)
def test_matrices_that_are_none(data, tmp_path, plain):
    path = tmp_path / "m.dat"
    path.write_bytes(data)
    with pytest.raises(ModelError, match="importance matrix"):
        read_imatrix(path)
    with pytest.raises(ModelError, match="GGUF of another kind"):
        read_imatrix(plain)


def test_fp8_is_as_transformers_has_it(tmp_path):
    """Blocks of 128 x 128, each with a scale; the tower and the tables stay as they were."""
    (made,) = convert("demo", tmp_path / "fp8", to="FP8")
    assert made.path == tmp_path / "fp8"
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    described = config["quantization_config"]
    assert (described["quant_method"], described["weight_block_size"]) == ("fp8", [128, 128])
    file, source = SafetensorsWeights(tmp_path / "fp8"), SafetensorsWeights(DEMO_MODEL)
    scaled = [n for n in file.names() if n.endswith("_scale_inv")]
    assert scaled and set(file.names()) - set(scaled) == set(source.names())
    for name in source.names():
        values, stored = source.read(name), file.read(name)
        if f"{name}_scale_inv" not in scaled:
            assert torch.equal(values, stored)
            assert values.dim() != 2 or name.removesuffix(".weight") in (
                *described["modules_to_not_convert"],
            )
            continue
        scales = file.read(f"{name}_scale_inv")
        assert scales.shape == tuple(-(-size // 128) for size in values.shape)
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        back = stored.float() * wide[: values.shape[0], : values.shape[1]]
        lost = (back - values.float()).square().sum() / values.float().square().sum()
        assert float(lost) < 1e-3
    assert (tmp_path / "fp8" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (("x.gguf", "--to", "Q9"), "--to: found 'Q9', expected one of F32"),
        (("x", "--to", "Q8_0"), "expected a file that ends in .gguf"),
        (("no/x.gguf", "--to", "Q8_0"), "no is no folder; make it first"),
        (("x.gguf", "--to", "Q8_0", "--mmproj-to", "FP8"), "which no GGUF holds"),
        (("x.gguf", "--to", "Q8_0", "--imatrix", "no.dat"), "no.dat cannot be read"),
        (("f", "--to", "FP8", "--imatrix", "no.dat"), "imatrix: has no meaning for FP8"),
    ],
)
def test_refusals(arguments, reported, mtmd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert reported in mtmd("convert", "demo", *arguments).refused()
    assert not list(tmp_path.iterdir())


def test_files_that_are_there_are_not_written_over(mtmd, tmp_path, plain):
    (tmp_path / "x.gguf").write_bytes(b"mine")
    refused = mtmd("convert", "demo", tmp_path / "x.gguf", "--to", "Q8_0").refused()
    assert "is there already; remove it, or choose another name" in refused
    (tmp_path / "mmproj-y.gguf").write_bytes(b"mine")
    refused = mtmd("convert", "demo", tmp_path / "y.gguf", "--to", "Q8_0").refused()
    assert "mmproj-y.gguf is there already" in refused and not (tmp_path / "y.gguf").exists()
    refused = mtmd("convert", plain, tmp_path / "fp8", "--to", "FP8").refused()
    assert "holds no safetensors in plain numbers" in refused
