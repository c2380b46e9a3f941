"""A tokenizer of each kind, with its special tokens named."""

from __future__ import annotations

import pytest
from small_tokenizers import KINDS, NAMES

from mtmd.llm.tokenizer.tokenizer import Tokenizer


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(KINDS[request.param](), NAMES)
