"""Quality that a number type costs: how far a model's next-token probabilities are from those of a
reference, over a text and a picture.

Every position of the text is compared twice: read in stretches, as a prompt is, and token by token,
as an answer is written, which other kernels compute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtmd.base.errors import ModelError, MtmdError, OptionError
from mtmd.base.text import mib
from mtmd.bench.subject import picture
from mtmd.bench.table import columns
from mtmd.clip.token_budget import Budget
from mtmd.kernels.checkpoint.canonical import PLAIN_KINDS
from mtmd.kernels.dtype import name_of
from mtmd.llm.engine.make_batch import make_batch
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.loading import load
from mtmd.model import Model
from mtmd.options.by_name import options
from mtmd.options.load import LoadOptions

TEXT = Path(__file__).parent / "text.txt"  # the first pages of Alice's Adventures in Wonderland
TEXT_BYTES_MAX = 8 << 20
POSITIONS, POSITIONS_MAX = 512, 1 << 15
TOKENS_MIN = 8  # tokens that a text has to have
STRETCH = 256  # tokens of a prompt that are read at once
SLACK = 16
LOGITS_BYTES_MAX = 4 << 30  # of the reference's, in memory
RESOLUTION = 256  # pixels a side of the picture
KV_TOKENS = 1024  # for which the cache's bytes are told
WIDTH = 88
AS_LOADED = "as loaded"
# Rows of the table where none are named: weights of models that are stored as plain numbers, the
# types of keys and values, and activations in 8 bits.
USUAL: Mapping[str, tuple[str, ...]] = {
    "weights": ("FP8", "Q8_0", "Q6_K", "Q4_K_M"),
    "kv_type": ("q8_0", "fp8", "q8_0/q4_0", "q4_0"),
    "activations": ("int8",),
}
LEGEND = (
    "KL: mean divergence of the next token's probabilities from the reference's, in nats, the text "
    "read as a prompt or written token by token; p99: of one position in a hundred, written; same "
    "top: positions with the reference's most probable token; picture: squared error of a "
    "picture's embeddings, relative. KV cache: of 1,024 tokens."
)


@dataclass(frozen=True)
class Divergence:
    """Mean, 99th percentile and maximum over all positions of the Kullback-Leibler divergence of
    the next token from the reference's, in nats; the share of positions with the same most probable
    token; the text's perplexity.
    """

    mean: float
    p99: float
    maximum: float
    same_top: float
    perplexity: float


@dataclass(frozen=True)
class Quality:
    """One way of loading the model. `read`: the text read as a prompt; `written`: token by token.
    `picture_nmse`: the squared error of one picture's embeddings relative to the reference's, None
    where the model or the reference has no encoder. `kv_bytes`: of the cache of 1,024 tokens.
    """

    name: str
    dtype: str
    weight_bytes: int
    kv_bytes: int
    load_s: float
    read: Divergence
    written: Divergence
    picture_nmse: float | None


@dataclass(frozen=True)
class QualityReport:
    """`reference` is what the others are compared with, `perplexity` its own; `positions` of how
    many tokens. `left_out`: usual rows that this model cannot have, each with the reason.
    """

    model: str
    reference: str
    positions: int
    perplexity: float
    rows: tuple[Quality, ...]
    left_out: tuple[str, ...] = ()

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Reference:
    ids: tuple[int, ...]
    vocabulary: int
    logits: Tensor  # log probabilities, fp32 [positions, vocabulary]
    picture: Tensor | None


def measure_quality(
    model: str | None,
    variants: Mapping[str, Mapping[str, Any]],
    base: Mapping[str, Any],
    *,
    reference: str | None = None,
    text: str | None = None,
    positions: int = POSITIONS,
    report: Callable[[str], None] = lambda _: None,
) -> QualityReport:
    """The model loaded with each of `variants`, options of loading by what the row is called,
    beside those of `base`; compared with `reference`, or else the model itself, computed in fp32.
    Without variants as it is, and with the usual types of weights, of keys and values, and of
    activations.

    One model at a time is in memory. Raises MtmdError, for variants before anything is loaded.
    """
    chosen = {name: {**base, **values} for name, values in variants.items()}
    if not variants:
        chosen = {AS_LOADED: dict(base)}
        for option, kinds in USUAL.items():
            rows_of = {} if option in base else {f"{option}={kind}": kind for kind in kinds}
            chosen |= {name: {**base, option: kind} for name, kind in rows_of.items()}
    for values in chosen.values():
        options(LoadOptions, values)
    text = TEXT.read_text(encoding="utf-8") if text is None else text
    named = reference or model
    report("loading the reference")
    with load(named, **{**base, "dtype": "fp32", "context": positions + SLACK}) as first:
        against = _reference(first, text, positions, report)
        shown = f"{first.name}, fp32"
    rows, left_out = list[Quality](), list[str]()
    is_plain = True
    for name, values in chosen.items():
        if not is_plain and not variants and name.startswith("weights="):
            continue
        report(f"loading {name}")
        start = time.perf_counter()
        try:
            loaded = load(model, **{**values, "context": positions + SLACK})
        except MtmdError as error:
            if variants or name == AS_LOADED:
                raise
            left_out.append(f"{name}: {error}")
            continue
        with loaded:
            load_s = time.perf_counter() - start
            model_name = loaded.name
            text_weights = loaded.checkpoint.text_weights
            if name == AS_LOADED:
                stored = map(text_weights.file.kind, text_weights.sources)
                is_plain = all(kind in PLAIN_KINDS for kind in stored)
            rows.append(_compare(loaded, name, load_s, against, report))
    perplexity = _perplexity(against.logits, against.ids)
    return QualityReport(
        model_name if rows else shown,
        shown,
        len(against.ids),
        perplexity,
        tuple(rows),
        tuple(left_out),
    )


def _reference(
    model: Model, text: str, positions: int, report: Callable[[str], None]
) -> _Reference:
    runner = model.runner
    ids = tuple(model.checkpoint.tokenizer.encode(text)[:positions])
    vocabulary = runner.family.vocabulary
    if len(ids) < TOKENS_MIN:
        raise OptionError(
            f"quality: found a text of {len(ids)} tokens, expected at least {TOKENS_MIN}; give a "
            "longer file"
        )
    if (size := 4 * len(ids) * vocabulary) > LOGITS_BYTES_MAX:
        raise OptionError(
            f"positions: {len(ids)} of a vocabulary of {vocabulary} take {size >> 20} MiB, "
            f"expected at most {LOGITS_BYTES_MAX >> 20}; compare fewer"
        )
    report("the reference reads")
    rows = model.exclusively(lambda: log_probabilities(runner, ids, STRETCH))
    return _Reference(ids, vocabulary, rows, _embeddings(model))


def _compare(
    model: Model, name: str, load_s: float, against: _Reference, report: Callable[[str], None]
) -> Quality:
    runner = model.runner
    if runner.family.vocabulary != against.vocabulary:
        raise ModelError(
            f"{model.name} has a vocabulary of {runner.family.vocabulary}, the reference one of "
            f"{against.vocabulary}; expected two of the same model"
        )
    ways = []
    for what, stretch in (("reads", STRETCH), ("writes", 1)):
        report(f"{name} {what}")
        ways.append(model.exclusively(partial(_divergence, runner, against, stretch)))
    seen = _embeddings(model)
    nmse = None
    if seen is not None and against.picture is not None and seen.shape == against.picture.shape:
        error = (seen.double() - against.picture.double()).square().sum()
        nmse = float(error / against.picture.double().square().sum())
    weights = sum(
        part.weights.type_of(parameter, model.dtype).bytes  # as they lie in memory
        for part in (runner, model.encoder)
        if part is not None
        for parameter in part.family.parameters()
    )
    kv = sum(runner.cache_bytes(KV_TOKENS, 1).values())
    return Quality(name, name_of(model.dtype), weights, kv, load_s, ways[0], ways[1], nmse)


def log_probabilities(runner: Runner, ids: tuple[int, ...], stretch: int) -> Tensor:
    """fp32 [T, V] on the host, of the token after each of `ids`, which are read so many at once."""
    return torch.cat([rows for _, rows in _stretches(runner, ids, stretch)])


def _stretches(runner: Runner, ids: tuple[int, ...], stretch: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the first position of each stretch and its log probabilities, fp32 [T, V]."""
    cache = runner.new_cache()
    sequence = runner.begin(cache, 0)
    for first in range(0, len(ids), stretch):
        read = ids[first : first + stretch]
        batch = make_batch([(sequence, [Span(read)])], cache, rows=[len(read)])
        logits = runner.forward(batch)[: len(read)]
        yield first, logits.float().log_softmax(-1).cpu()
        sequence.done = sequence.total = sequence.position = first + len(read)


def _divergence(runner: Runner, against: _Reference, stretch: int) -> Divergence:
    each, same, right = list[float](), 0, list[float]()
    for first, rows in _stretches(runner, against.ids, stretch):
        for at, row in enumerate(rows, first):
            p, q = against.logits[at].double(), row.double()
            each.append(max(0.0, float((p.exp() * (p - q)).sum())))
            same += int(p.argmax() == q.argmax())
            if at + 1 < len(against.ids):
                right.append(float(q[against.ids[at + 1]]))
    return Divergence(
        float(np.mean(each)),
        float(np.quantile(each, 0.99)),
        max(each),
        same / len(each),
        math.exp(-float(np.mean(right))),
    )


def _perplexity(rows: Tensor, ids: tuple[int, ...]) -> float:
    following = torch.tensor(ids[1:])[:, None]
    return math.exp(-float(rows[:-1].gather(1, following).double().mean()))


def _embeddings(model: Model) -> Tensor | None:
    """fp32 [tokens, width] on the host, of one picture; None for a model without encoder."""
    encoder = model.encoder
    if encoder is None:
        return None
    made = encoder.preprocessing.resolution.prepare(picture(RESOLUTION), Budget())

    def work() -> Tensor:
        plan = encoder.preprocessing.prepare(lambda: made)
        rows = encoder.encode(list(plan.tiles), way=plan.normalize)
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in rows]).float().cpu()

    return model.exclusively(work)


def render_quality(report: QualityReport) -> str:
    """Plain text: a table of rows, and what its columns mean."""
    head = [
        *("", "weights", "KV cache", "KL read", "KL written", "p99", "same top", "perplexity"),
        "picture",
    ]
    rows = [
        [
            row.name,
            mib(row.weight_bytes),
            mib(row.kv_bytes),
            f"{row.read.mean:.6f}",
            f"{row.written.mean:.6f}",
            f"{row.written.p99:.4f}",
            f"{100 * row.written.same_top:.1f} %",
            f"{row.written.perplexity:.3f}",
            "" if row.picture_nmse is None else f"{row.picture_nmse:.1e}",
        ]
        for row in report.rows
    ]
    lines = [
        f"{report.model}, compared with {report.reference} (perplexity {report.perplexity:.3f}) at "
        f"{report.positions} positions of a text",
        "",
        *columns(head, rows),
        *(line for text in report.left_out for line in wrap(f"left out: {text}", WIDTH)),
        "",
        *wrap(LEGEND, WIDTH),
    ]
    return "\n".join(lines)
