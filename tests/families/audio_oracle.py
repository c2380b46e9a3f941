"""What transformers says of a random tiny checkpoint that takes audio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import Oracle, load_tokenizer, template_of


@dataclass
class AudioOracle:
    """`extract` makes model inputs of samples [N] each; `tiles` gives them as ours come; `text`
    stands for one recording of so many tokens.
    """

    folder: Path
    model: Any
    extract: Callable[[Sequence[np.ndarray]], dict[str, Any]]
    counts: Callable[[dict[str, Any]], list[int]]
    features: Callable[[dict[str, Any]], torch.Tensor]
    """[tokens of all, D]"""
    text: Callable[[int], str]

    def inputs(self, messages: list[dict[str, Any]], audio: Sequence[np.ndarray]) -> dict[str, Any]:
        """What transformers' processor would make of a conversation."""
        from transformers.utils.chat_template_utils import render_jinja_template

        made = self.extract(audio) if len(audio) else {}
        tokens = self.tokens or load_tokenizer(self.folder)
        (rendered,), _ = render_jinja_template(
            [self.arranged(messages)],
            chat_template=self.template or template_of(self.folder),
            add_generation_prompt=True,
            **tokens.special_tokens_map,
        )
        texts = rendered.split(self.marker)
        counts = self.counts(made) if made else []
        text = texts[0] + "".join(
            self.text(count) + rest for count, rest in zip(counts, texts[1:], strict=True)
        )
        ids = tokens(text, add_special_tokens=False, return_tensors="pt")
        return {**ids, **made}

    marker: str = "<|audio|>"
    shortest: int = 1  # samples that it takes
    tokens: Any = None  # the tokenizer, where it is no tokenizer.json
    template: str = ""  # where it is no file of its own
    seconds: float = 1.2001  # of the longest recording
    window: int = (
        16_000  # samples, behind which another window or block begins, or nothing is heard
    )
    several: tuple[float, ...] = (0.35, 0.6, 0.35)
    arranged: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list
    sees: Oracle | None = None
    """The same model with the processor of its pictures."""

    def inputs_with_pictures(
        self,
        messages: list[dict[str, Any]],
        audio: Sequence[np.ndarray],
        images: Sequence[np.ndarray],
    ) -> dict[str, Any]:
        """What transformers' processors make of recordings and pictures in one message."""
        assert self.sees is not None
        made = self.extract(audio)
        heard = iter([self.text(count) for count in self.counts(made)])
        (message,) = messages
        parts = [
            {"type": "text", "text": next(heard)} if part["type"] == "audio" else part
            for part in message["content"]
        ]
        # What is heard stands in the text already: the processor is not to look for recordings.
        with patch.object(self.sees.processor, "audio_token", None):
            return {**self.sees.inputs([{**message, "content": parts}], images), **made}

    @torch.no_grad()
    def logits(self, inputs: dict[str, Any]) -> torch.Tensor:
        result: torch.Tensor = self.model(**inputs).logits[0, -1]
        return result

    @torch.no_grad()
    def greedy(self, inputs: dict[str, Any], n: int) -> list[int]:
        result = self.model.generate(**inputs, max_new_tokens=n, do_sample=False)
        return [int(i) for i in result[0, inputs["input_ids"].shape[1] :]]
