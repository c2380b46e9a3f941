"""Runs of tokens that do not come a second time: transformers' and the authors' rules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from mtmd.base.errors import OptionError
from mtmd.llm.engine.prompt import Prompt
from mtmd.llm.engine.spans import Span
from mtmd.llm.sampling.ngrams import repeated_ends
from mtmd.llm.sampling.sampler import Sampler, Sampling

VOCABULARY = 5


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_ends_are_transformers(size):
    draw = np.random.default_rng(size)
    process = NoRepeatNGramLogitsProcessor(size)
    for length in (*range(1, 12), 60):
        tokens = draw.integers(0, VOCABULARY, length).tolist()
        scores = process(torch.tensor([tokens]), torch.zeros(1, VOCABULARY))
        expected = {t for t in range(VOCABULARY) if scores[0, t] == -torch.inf}
        assert repeated_ends(tokens, size) == expected, tokens


@pytest.mark.parametrize("window", [0, 4, 9, 30])
def test_a_window_is_of_prompt_and_answer(window):
    """The rule of DeepSeek-OCR's code, which walks over the last tokens and spares some."""
    draw, size, spared = np.random.default_rng(window), 3, (1,)
    sampling = Sampling(no_repeat_ngram=size, no_repeat_window=window, no_repeat_except=spared)
    for _ in range(40):
        read, written = (draw.integers(0, VOCABULARY, n).tolist() for n in draw.integers(1, 20, 2))
        prompt = Prompt([Span(tuple(read))], Sampler(sampling))
        tokens = [*read, *written]
        start = max(0, len(tokens) - window) if window else 0
        expected = {
            tokens[i + size - 1]
            for i in range(start, len(tokens) - size + 1)
            if tokens[i : i + size - 1] == tokens[len(tokens) - size + 1 :]
        }
        assert prompt.forbidden(written) == expected - set(spared)


def test_ends_come_neither_before_min_tokens_nor_again():
    sampling = Sampling(no_repeat_ngram=2)
    prompt = Prompt([Span((1, 2, 1))], Sampler(sampling), stop=frozenset({4}), min_tokens=2)
    assert prompt.forbidden([]) == {2, 4} and prompt.forbidden([3, 1]) == {2, 3}
    assert Prompt([Span((1, 2, 1))], Sampler(Sampling())).forbidden([]) == frozenset()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"no_repeat_ngram": -1}, "no_repeat_ngram"),
        ({"no_repeat_ngram": 2000}, "no_repeat_ngram"),
        ({"no_repeat_window": -1}, "no_repeat_window"),
        ({"no_repeat_except": (-1,)}, "no_repeat_except"),
        ({"no_repeat_except": 3}, "no_repeat_except"),
    ],
)
def test_options_that_are_refused(options, words):
    with pytest.raises(OptionError, match=words):
        Sampling(**options)
