"""A model that writes what a test says, as far as it may: where that token may not come, the most
probable one that may.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import mtmd.service.request_maker as request_maker
from mtmd.llm.sampling.logit_rows import Row, tensor_of
from mtmd.llm.sampling.sampler import Sampler


class Scripted(Sampler):
    def __init__(self, settings: Any, tokens: Sequence[int]):
        super().__init__(settings)
        self.tokens, self.before = list(tokens), 0

    def __call__(
        self,
        logits: Row,
        seen: Sequence[int] = (),
        written: Sequence[int] = (),
        forbidden: Any = (),
    ) -> int:
        for token in written[self.before :]:  # also those that it was not asked for
            if self.tokens[:1] == [token]:
                del self.tokens[0]
        self.before = len(written)
        values = tensor_of(logits).float()
        if self.tokens and self.tokens[0] not in forbidden and values[self.tokens[0]].isfinite():
            return self.tokens[0]
        return super().__call__(logits, seen, written, forbidden)


@contextmanager
def writes(model: Any, text: str, *, ends: bool = True) -> Iterator[None]:
    """All answers of the model are this text, and end with it."""
    checkpoint = model.loaded.checkpoint
    tokens = checkpoint.tokenizer.encode(text)
    if ends:
        tokens = [*tokens, max(checkpoint.stop_tokens)]
    with patch.object(request_maker, "Sampler", lambda settings: Scripted(settings, tokens)):
        yield
