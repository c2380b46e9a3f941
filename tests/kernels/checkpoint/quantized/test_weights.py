"""Weights that the formats' own packages have quantized become rows of blocks with the values that
these packages make of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import FORMATS
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mtmd.kernels.checkpoint.open_weights import QuantizedWeights, open_weights
from mtmd.kernels.quantization.blocks import BLOCKS, dequantize, row_bytes

NAME = "model.layers.0.mlp.up_proj"
with safe_open(Path(__file__).with_name("packages.safetensors"), "pt") as _packages:
    PACKAGES = {name: _packages.get_tensor(name) for name in _packages.keys()}  # noqa: SIM118
    SETTINGS: dict[str, Any] = json.loads(_packages.metadata()["settings"])


def folder(path: Path, settings: dict[str, Any], held: dict[str, Tensor]) -> Path:
    (path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    tensors = {f"{NAME}.{part}": tensor.contiguous() for part, tensor in held.items()}
    save_file({**tensors, "norm.weight": torch.ones(4)}, path / "model.safetensors")
    return path


def opened(path: Path) -> QuantizedWeights:
    file = open_weights(path)
    assert isinstance(file, QuantizedWeights)
    return file


def values(file: QuantizedWeights, name: str = f"{NAME}.weight") -> Tensor:
    rows, kind = file.read(name), file.kind(name)
    return dequantize(rows, kind) if kind in BLOCKS else rows


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).square().mean() / expected.square().mean())


@pytest.mark.parametrize("name", FORMATS)
def test_values(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtmd.kernels.checkpoint.quantized.parts.CHUNK_VALUES", 40 * 256)
    form, weight = FORMATS[name], torch.randn(160, 256, generator=torch.Generator().manual_seed(1))
    held, expected = form.quantize(weight.clone())
    file = opened(folder(tmp_path, form.settings, held))
    assert file.names() == [f"{NAME}.weight", "norm.weight"] and file.quantized == form.label
    assert file.kind(f"{NAME}.weight") == form.kind
    shape, dtype = file.meta(f"{NAME}.weight")
    rows = file.read(f"{NAME}.weight")
    assert (shape, rows.dtype) == ((160, 256), dtype)
    width = row_bytes(form.kind, 256) if form.kind in BLOCKS else 256
    assert rows.shape == (160, width)
    assert file.stored_bytes(f"{NAME}.weight") <= sum(t.nbytes for t in held.values())
    assert 0 < error(expected, weight) < 0.3
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    assert error(x @ values(file).t(), x @ expected.t()) < 1e-9


@pytest.mark.parametrize("name", SETTINGS)
def test_files_of_autoawq_gptqmodel_and_autoround(name: str, tmp_path: Path) -> None:
    """`packages.py` says how they were made, and which packages read the values out of them."""
    of_name = {
        key.rpartition("/")[2]: t for key, t in PACKAGES.items() if key.startswith(f"{name}/")
    }
    expected = of_name.pop("values")
    file = opened(folder(tmp_path, SETTINGS[name], of_name))
    assert error(values(file), expected) < 1e-12


@pytest.mark.parametrize("name", ["fp8", "fp8-row", "nvfp4", "nf4", "bnb-int8", "int8"])
def test_rows_of_no_whole_blocks(name: str, tmp_path: Path) -> None:
    form, weight = FORMATS[name], torch.randn(40, 144, generator=torch.Generator().manual_seed(1))
    held, expected = form.quantize(weight)
    file = opened(folder(tmp_path, form.settings, held))
    assert file.kind(f"{NAME}.weight") not in BLOCKS
    assert file.meta(f"{NAME}.weight") == ((40, 144), torch.float32)
    assert error(values(file), expected) < 1e-9


@pytest.mark.parametrize(("size", "loses"), [(1.0, False), (1e-2, False), (1e-5, True)])
def test_what_scales_too_small_for_fp16_lose_is_counted(
    size: float, loses: bool, tmp_path: Path
) -> None:
    form, weight = (
        FORMATS["mlx-8"],
        torch.randn(64, 256, generator=torch.Generator().manual_seed(1)),
    )
    held, expected = form.quantize(weight * size)
    file = opened(folder(tmp_path, form.settings, held))
    assert file.rounded == 0, "nothing is read yet"
    lost = error(values(file), expected)
    assert (lost > 1e-9) == loses
    assert file.rounded == (pytest.approx(lost, rel=1e-3) if loses else 0)


@pytest.mark.parametrize("name", ["awq", "gptq", "int8"])
def test_one_group_in_a_row(name: str, tmp_path: Path) -> None:
    form, weight = FORMATS[name], torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    held, expected = form.quantize(weight)
    assert error(values(opened(folder(tmp_path, form.settings, held))), expected) < 1e-9


@pytest.mark.parametrize("name", ["gptq-order", "int4-order"])
def test_blocks_with_columns_in_another_order(name: str, tmp_path: Path) -> None:
    form, weight = FORMATS[name], torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    held, expected = form.quantize(weight)
    file = opened(folder(tmp_path, form.settings, held))
    rows = file.rearranged(f"{NAME}.weight", turned=False)
    assert rows is not None and rows.kind == "U4_64" and rows.order is not None
    assert error(dequantize(rows.read(), rows.kind), expected[:, rows.order]) < 1e-9
    assert file.rearranged(f"{NAME}.weight", turned=True) is None
    assert file.rearranged("norm.weight", turned=False) is None


def test_stacked_matrices_with_rows_and_columns_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtmd.kernels.checkpoint.quantized.parts.CHUNK_VALUES", 40 * 256)
    form, weight = FORMATS["fp8"], torch.randn(3, 256, 192).mul_(torch.rand(3, 1, 192))
    made = [form.quantize(expert) for expert in weight]
    held = {part: torch.stack([h[part] for h, _ in made]) for part in made[0][0]}
    file = opened(folder(tmp_path, form.settings, held))
    rows = file.rearranged(f"{NAME}.weight", turned=True)
    assert rows is not None and rows.kind == "F8_64" and rows.order is None
    expected = torch.stack([value for _, value in made]).transpose(1, 2)
    assert error(dequantize(rows.read(), rows.kind), expected) < 1e-9
    assert error(values(file), expected.transpose(1, 2)) < 1e-9
