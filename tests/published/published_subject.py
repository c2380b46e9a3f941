"""A published model and what is compared: transformers' answers, ours, those of a server."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from published_conversations import CONVERSATIONS, TEXTS
from published_models import MODELS
from serve_command import address, serving
from transformers_oracle import Oracle

import mtmd
from mtmd import Finished, RawPrompt

TOKENS = 24  # of an answer
THREADS = torch.get_num_threads()


class Subject:
    """A published model: its file, transformers' with it, ours, and a server of it. Each is made
    when a test first asks for it.
    """

    def __init__(self, name: str, folder: Path, stack: ExitStack):
        self.name, self.published = name, MODELS[name]
        self.path = self.published.path(folder)
        self.results: dict[str, Any] = {}
        self._stack = stack
        self._expected: dict[str, str] = {}

    @cached_property
    def oracle(self) -> Oracle:
        return Oracle(self.path)

    @cached_property
    def fp32(self) -> mtmd.Model:
        return self._stack.enter_context(self.load(dtype="fp32"))

    @cached_property
    def url(self) -> str:
        """The address of `mtmd serve` with the model in fp32."""
        words = ["-m", str(self.path), "--dtype", "fp32", "--threads", str(THREADS), "--no-history"]
        _, stated = self._stack.enter_context(serving(*words))
        return address(stated)

    def expected(self, prompt: Any) -> str:
        """What transformers answers to messages, or adds to a text."""
        key = json.dumps(prompt)
        if key not in self._expected:
            ids = self.oracle.prompt_ids(prompt)
            given = RawPrompt(prompt) if isinstance(prompt, str) else prompt
            *_, last = self.fp32.service.submit(given, max_tokens=TOKENS)
            assert isinstance(last, Finished)
            guess = last.answer.output_token_ids
            self._expected[key] = self.oracle.text(self.oracle.greedy(ids, TOKENS, guess))
        return self._expected[key]

    def load(self, **chosen: Any) -> mtmd.Model:
        return mtmd.load(self.path, threads=THREADS, **chosen)


def of(*names: str) -> pytest.MarkDecorator:
    """Runs a test on these models."""
    return pytest.mark.parametrize("subject", names, indirect=True)


def prompts_of(name: str) -> dict[str, Any]:
    """What a model is asked: conversations, or texts to go on with if it has no template."""
    return CONVERSATIONS if MODELS[name].has_template else TEXTS


CHAT = [name for name, model in MODELS.items() if model.has_template]
BASE = [name for name in MODELS if name not in CHAT]
