"""Types of keys and values, as they are given."""

from __future__ import annotations

import re

import pytest

from mtmd.base.errors import OptionError
from mtmd.options.load import LoadOptions

EQUAL = {
    "q8_0": "q8_0",
    "Q8_0/Q4_0": "q8_0/q4_0",
    "q8_0/q8_0": "q8_0",
    "fp8_e4m3/q4_0": "fp8/q4_0",
    "f32": "fp32",
    "bfloat16/Q8_0": "bf16/q8_0",
    "q4_0/f32": "q4_0/fp32",
    "bf16/bf16": "bf16",
}


@pytest.mark.parametrize("given", EQUAL)
def test_one_type_or_two(given: str) -> None:
    assert LoadOptions(kv_type=given).kv_type == EQUAL[given]


@pytest.mark.parametrize("given", ["q5_1", "q8_0/", "/q8_0", "q8_0/auto", "q8_0/q4_0/q4_0", ""])
def test_others_are_refused(given: str) -> None:
    words = f"kv_type: found {given!r}, expected one of auto, bf16, fp32, q8_0, q4_0, fp8"
    with pytest.raises(OptionError, match=f"{re.escape(words)}(, or KEYS/VALUES, each one of|$)"):
        LoadOptions(kv_type=given)
