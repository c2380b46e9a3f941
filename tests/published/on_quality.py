"""The default number type against fp32, over real text: no further from transformers' fp32 than its
own bf16, as the Kullback-Leibler divergence of the next token has it.
"""

from __future__ import annotations

import json
import math

import torch
from published_models import MODELS
from published_subject import Subject, of
from torch import Tensor

from mtmd.bench.quality import STRETCH, TEXT, log_probabilities

POSITIONS_MIN = 495


def divergence(expected: Tensor, result: Tensor) -> float:
    """Mean over positions of the sum of p log(p / q), in nats."""
    rows = [
        (p.double().exp() * (p.double() - q.double())).sum()
        for p, q in zip(expected, result, strict=True)
    ]
    return float(torch.stack(rows).mean())


def perplexity(result: Tensor, ids: list[int]) -> float:
    following = torch.tensor(ids[1:])[:, None]
    return math.exp(-float(result[:-1].gather(1, following).mean()))


@of(*MODELS)
def test_the_default_precision_over_real_text(subject: Subject) -> None:
    ids = subject.oracle.prompt_ids(TEXT.read_text())
    assert len(ids) >= POSITIONS_MIN
    expected = subject.oracle.log_probabilities(ids)
    in_bf16 = subject.oracle.log_probabilities(ids, torch.bfloat16)
    theirs = divergence(expected, in_bf16)
    results = {
        "positions": len(ids),
        "transformers_bf16": theirs,
        "perplexity_fp32": perplexity(expected, ids),
        "perplexity_transformers_bf16": perplexity(in_bf16, ids),
    }
    del in_bf16
    read = subject.fp32.exclusively(
        lambda: log_probabilities(subject.fp32.runner, tuple(ids), STRETCH)
    )
    assert divergence(expected, read) <= 1e-6
    with subject.load() as model:
        read = model.exclusively(lambda: log_probabilities(model.runner, tuple(ids), STRETCH))
        results |= {"read": divergence(expected, read), "perplexity_read": perplexity(read, ids)}
        written = model.exclusively(lambda: log_probabilities(model.runner, tuple(ids), 1))
        results |= {"written": divergence(expected, written), "dtype": str(model.dtype)}
        results["perplexity_written"] = perplexity(written, ids)
    subject.results["quality"] = results
    print(json.dumps(results, indent=1))
    assert results["read"] <= theirs
    assert results["written"] <= theirs
