"""The decoder's part of the warm-up: what its plans say, for a step of decode and for the largest
prefill, and one step run.
"""

from __future__ import annotations

import time
from dataclasses import replace

from mtmd.base.text import plural
from mtmd.kernels.report.check import run_check
from mtmd.kernels.report.facts import Check, GraphFacts, KVFacts, Placement
from mtmd.kernels.report.from_plans import graph_facts, placement
from mtmd.llm.engine.make_batch import make_batch
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.llm.state import KV, PAGE, KVType

CHECKED = 16  # tokens read before the step that is looked at
ROWS = (2, 4, 8)  # of a step with proposals
COARSE_TYPES = ("q4_0",)  # of keys
RUNS = 4  # of each, after one that does not count


def decoder_placement(runner: Runner) -> Placement:
    """Return what the preferred backend takes and refuses, at every size that was asked about and
    at those used since; nothing is run.
    """
    plans = [runner.plan(batch) for batch in runner.sizes().values()]
    return placement(
        "decoder",
        runner.flash,
        (*plans, *runner.fallbacks.values()),
        tuple(device.name for device in runner.devices),
    )


def decoder_graphs(runner: Runner) -> list[GraphFacts]:
    """Splits, copies and predicted memory; nothing is run or allocated."""
    cache = runner.cache_bytes()
    return [
        graph_facts(
            "decoder",
            label,
            f"{_tokens(batch.tokens)}, context {runner.context:,}",
            runner.plan(batch),
            cache,
        )
        for label, batch in runner.sizes().items()
    ]


def kv_facts(runner: Runner) -> KVFacts:
    """Return how keys and values are stored, and what they take, on all ranks together."""
    layers = [state for states in runner.family.layers for state in states]

    def size(pages: int, kv: KVType, *, keys: bool) -> int:
        return sum(
            state.type(runner.sequences + 1, pages, runner.dtype, kv).bytes
            for state in layers
            if isinstance(state, KV) == keys
        )

    return KVFacts(
        runner.kv.name,
        size(1, runner.kv, keys=True) // PAGE,
        size(runner.pages, runner.kv, keys=True),
        size(1, KVType.of("auto", runner.dtype), keys=True) // PAGE,
        size(1, runner.kv, keys=False),
        _cache_warning(runner),
    )


def _cache_warning(runner: Runner) -> str | None:
    """Why the cache's type is a poor one for the model: biases make single channels of keys so
    large that few bits for a row lose the others (Qwen2.5-Coder-0.5B: docs/LOG.md).
    """
    biased = any(name.endswith(".attn_k.bias") for name in runner.family.parameters())
    if runner.kv.keys.name in COARSE_TYPES and biased:
        return (
            f"{runner.kv.name} can make answers of this model useless: its keys have biases, "
            "which make single values large (docs/running.md); --kv-type q8_0 keeps them"
        )
    return None


def _tokens(count: int) -> str:
    return plural(count, "token")


def check_decoder(runner: Runner) -> Check:
    """Read a few tokens and compute the logits of the next."""
    tokens = _tokens_of(runner, min(CHECKED, runner.context - 1))
    runner = _for_trials(runner, len(tokens) + 1)
    cache = runner.new_cache()
    sequence = runner.begin(cache, 0)
    runner.prefill([Span(tokens)], cache, sequence)
    batch = make_batch([(sequence, [Span(tokens[:1])])], cache)
    one = batch.shape
    return run_check(
        "decoder", "one token decoded", runner.plan(one), runner.residency, runner.dtype, batch
    )


def measure_rows(runner: Runner) -> None:
    """Measure what a step of several rows costs, for one sequence, in steps of one row: tells the
    runner's `pace`, and leaves their plans behind.
    """
    read = min(CHECKED, runner.context - 1 - ROWS[-1])
    if read < 1:
        return
    tokens, trial = _tokens_of(runner, read), _for_trials(runner, read + ROWS[-1] + 1)
    cache = trial.new_cache()
    sequence = trial.begin(cache, 0)
    trial.prefill([Span(tokens)], cache, sequence)
    for number in range(RUNS + 1):
        for rows in (1, *ROWS):
            start = time.perf_counter()
            batch = make_batch([(sequence, [Span(_tokens_of(runner, rows))])], cache, rows=[rows])
            trial.forward(batch).argmax(-1).tolist()  # which waits for the device
            if number:
                runner.pace.record(1, rows, time.perf_counter() - start)
            elif trial is not runner:
                paged = trial.reads_pages
                shape = replace(batch.shape, pages=runner.pages) if paged else batch.shape
                runner.prepare(shape)


def _for_trials(runner: Runner, tokens: int) -> Runner:
    """Return the for trials by which so many tokens are read: by one with a small cache, where a
    second one like that of the service would take as much memory. Ranks have one cache in mind, all
    of them.
    """
    together = runner.sharding is not None or runner.lead is not None
    return runner if together or not runner.has_lasting_cache else runner.small(tokens)


def _tokens_of(runner: Runner, count: int) -> tuple[int, ...]:
    return tuple(i * 7919 % runner.family.vocabulary for i in range(count))
