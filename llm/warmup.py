"""The decoder's part of the warm-up report: what its plans say, for a step of decode and for the largest prefill."""
from __future__ import annotations

from mtmd.kernels.report import FlashFacts, GraphFacts, RefusedOp, flash_facts, graph_facts, refused_ops
from mtmd.llm.engine import PREFILL, Engine


def decoder_facts(engine: Engine) -> tuple[FlashFacts, list[RefusedOp], list[GraphFacts]]:
    """Nothing is run."""
    preferred, cache = engine.backends[0].name, engine.cache_bytes()
    plans = {"decode": (1, engine.plan(1)), "prefill": (min(PREFILL, engine.context), engine.plan(min(PREFILL, engine.context)))}
    facts = [graph_facts("decoder", label, f"{tokens} token{'s' if tokens > 1 else ''}, context {engine.context}", plan, cache)
             for label, (tokens, plan) in plans.items()]
    return (flash_facts("decoder", engine.flash, plans["prefill"][1], preferred),
            refused_ops("decoder", engine.flash, tuple(p for _, p in plans.values()), preferred), facts)
