"""Predicted against measured memory of encodes by published towers with fewer layers, each in a
process of its own.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux",
    reason="the peak resident size is read from /proc, which only Linux has",
)


@pytest.fixture(scope="module")
def memory() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "memory.py"
    spec = importlib.util.spec_from_file_location("memory", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_prediction_is_within_ten_percent_and_flash_is_five_times_smaller(
    memory: ModuleType,
) -> None:
    match = {form: memory.run("gemma-3", form) for form in ("flash", "explicit")}
    for result in match.values():
        assert 0.9 <= result["predicted"] / result["measured"] <= 1.1
    assert match["explicit"]["measured"] >= 5 * match["flash"]["measured"]
    assert match["explicit"]["predicted"] >= 5 * match["flash"]["predicted"]


@pytest.mark.parametrize("name", ["gemma-3n", "florence-2", "deepseek-ocr", "glm-ocr"])
def test_prediction_is_within_seven_percent(memory: ModuleType, name: str) -> None:
    result = memory.run(name)
    assert 0.93 <= result["predicted"] / result["measured"] <= 1.07
