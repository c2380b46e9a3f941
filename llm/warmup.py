"""The decoder's part of the warm-up: what its plans say, for a step of decode and for the largest prefill, and one step run."""
from __future__ import annotations

from mtmd.kernels.check import run_check
from mtmd.kernels.report import Check, GraphFacts, Placement, graph_facts, placement
from mtmd.llm.engine import Engine
from mtmd.llm.sequence import Span, make_batch

CHECKED = 16  # tokens read before the step that is looked at


def decoder_placement(engine: Engine) -> Placement:
    """What the preferred backend takes and refuses, at every size that was asked about and at those used since; nothing is run."""
    plans = [engine.plan(batch) for batch in engine.sizes().values()]
    return placement("decoder", engine.flash, (*plans, *engine.fallbacks.values()), engine.backends[0].name)


def decoder_graphs(engine: Engine) -> list[GraphFacts]:
    """Splits, copies and predicted memory; nothing is run or allocated."""
    cache = engine.cache_bytes()
    return [graph_facts("decoder", label, f"{_tokens(batch.tokens)}, context {engine.context}", engine.plan(batch), cache)
            for label, batch in engine.sizes().items()]


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count > 1 else ''}"


def check_decoder(engine: Engine) -> Check:
    """Read a few tokens and compute the logits of the next."""
    tokens = tuple(i * 7919 % engine.family.vocabulary for i in range(min(CHECKED, engine.context - 1)))
    cache = engine.new_cache()
    running = engine.begin(cache, 0)
    engine.prefill([Span(tokens)], cache, running)
    batch = make_batch([(running, [Span(tokens[:1])])], cache)
    one = batch.shape
    return run_check("decoder", "one token decoded", engine.plan(one), engine.plan(one, overwrite=False), engine.residency,
                     engine.backends[0], engine.dtype, batch)
