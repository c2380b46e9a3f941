"""What the decoder's part of the warm-up says of a model's cache."""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.kernels.report.report_text import kv_text
from mtmd.llm.engine.runner import Runner
from mtmd.llm.warmup import kv_facts
from mtmd.loading import load


class WithBiases:
    """A family whose keys have biases, as Qwen2.5's."""

    def __init__(self, family: Any) -> None:
        self.family = family

    def __getattr__(self, name: str) -> Any:
        return getattr(self.family, name)

    def parameters(self) -> dict[str, Any]:
        own = dict(self.family.parameters())
        return {**own, "blk.0.attn_k.bias": next(iter(own.values()))}


@pytest.mark.parametrize(
    ("kv_type", "biased", "expected"),
    [
        ("q4_0", True, True),
        ("q4_0/q8_0", True, True),
        ("q8_0/q4_0", True, False),
        ("fp8", True, False),
        ("q8_0", True, False),
        ("auto", True, False),
        ("q4_0", False, False),
    ],
)
def test_a_type_that_is_too_coarse_for_keys_with_biases(
    kv_type: str, biased: bool, expected: bool
) -> None:
    with load("demo", threads=1) as model:
        like = model.runner
        runner = Runner(
            like.family, like.weights, like.backends, dtype=like.dtype, context=64, kv_type=kv_type
        )
        if biased:
            runner.family = WithBiases(runner.family)
        facts = kv_facts(runner)
    assert (facts.warning is not None) == expected
    assert ("; WARNING: " in kv_text(facts, "fp32")) == expected
    if expected:
        assert facts.warning.startswith(f"{kv_type} can make answers of this model useless")
        assert facts.warning.endswith("--kv-type q8_0 keeps them")
