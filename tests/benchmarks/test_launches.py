"""Launches of models by their published shapes, as benchmarks/gpu_kernels/launches.py counts them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from mtmd.kernels.backends.target import Target

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu_kernels"
# Of an encoder's layer: two norms with their residuals, four products, attention; and beside them a
# GELU that cuBLAS does not have, queries and keys that turn, or a gate.
ENCODERS = {
    "smolvlm-256m": 7,
    "gemma-3-4b": 7,
    "llava-1.5-7b": 8,
    "internvl3-2b": 8,
    "qwen3-vl-8b": 8,
    "pixtral-12b": 9,
}
OUTSIDE = 56  # the first and the last layer, what comes before and behind, mergers between
SAVED = 3  # layers of Qwen3-VL whose sums are kept for the end, and made alone


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("launches")


@pytest.mark.parametrize("shape", ENCODERS)
def test_an_encoders_layer_takes_at_most(launches: ModuleType, shape: str) -> None:
    target = Target("cuda:90")
    plan = launches.plans(launches.model_on(target, shape, "BF16"))["encode"]
    result = launches.counted(plan, target)
    few = sorted(result.layers)[: len(result.layers) - SAVED]
    assert set(few) == {ENCODERS[shape]} and max(result.layers) <= ENCODERS[shape] + 1
    assert result.launches - len(result.layers) * ENCODERS[shape] <= OUTSIDE


# In Q4_K_M half of the layers have matrices of two types, which are not read in one launch.
@pytest.mark.parametrize(("weights", "maximum"), [("BF16", 20), ("Q4_K_M", 22)])
def test_layers_with_the_delta_rule_and_experts(
    launches: ModuleType, weights: str, maximum: int
) -> None:
    target = Target("cuda:90")
    plan = launches.plans(launches.model_on(target, "qwen3-next-80b-a3b", weights))["decode"]
    result = launches.counted(plan, target)
    assert max(result.layers) <= maximum and result.launches <= 48 * maximum + 12


def test_one_by_one_and_rewritten(
    launches: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "DECODERS", (("smolvlm-256m", "BF16"),))
    monkeypatch.setattr(launches, "ENCODERS", ("smolvlm-256m",))
    assert launches.main([]) == 0
    decoder, encoder = (
        line.strip("| ").split(" | ")
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| smolvlm-256m")
    )
    assert decoder[:5] == ["smolvlm-256m", "BF16", "30", "19", "10"]
    assert encoder[:5] == ["smolvlm-256m", "12", "1x1024", "12", "7"]
    assert int(decoder[5]) > int(decoder[6]) and int(encoder[5]) > int(encoder[6])
    assert launches.main(["--ops", "smolvlm-256m"]) == 0
    out = capsys.readouterr().out
    assert "| decode | add_norm | 0 | " in out and "| encode | add_layer_norm | 0 | 24 |" in out
    assert launches.main(["--ops", "nobody"]) == 2
