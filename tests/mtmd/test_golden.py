"""Checkpoints and answers that were made elsewhere, by transformers in fp32: the same prompt ids and greedy tokens from here.

They lie beside the repository, in `../shared/golden`; where they do not, these tests are skipped.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtmd import Finished, load
from mtmd.model import user_message

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "gemma3"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="GOLDEN CHECKPOINTS ARE MISSING: there is no ../shared/golden")


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())
    return found


def test_tokens(expected: dict[str, Any]) -> None:
    model = load(GOLDEN / "hf", dtype="fp32")
    message = user_message([GOLDEN / name for name in expected["images"]], expected["prompt"])
    *_, last = model.stream([message], max_tokens=len(expected["greedy_token_ids"]), ignore_eos=True)
    assert isinstance(last, Finished)
    assert list(last.answer.prompt_token_ids) == expected["prompt_token_ids"]
    assert list(last.answer.output_token_ids) == expected["greedy_token_ids"]
