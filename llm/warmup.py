"""The decoder's part of the warm-up report: what its plans say, for a step of decode and for the largest prefill."""
from __future__ import annotations

from mtmd.kernels.report import GraphFacts, Placement, graph_facts, placement
from mtmd.llm.engine import PREFILL, Engine


def decoder_placement(engine: Engine) -> Placement:
    """What the preferred backend takes and refuses; nothing is run."""
    return placement("decoder", engine.flash, tuple(engine.plan(tokens) for tokens in _sizes(engine).values()), engine.backends[0].name)


def decoder_graphs(engine: Engine) -> list[GraphFacts]:
    """Splits, copies and predicted memory; nothing is run or allocated."""
    cache = engine.cache_bytes()
    return [graph_facts("decoder", label, f"{tokens} token{'s' if tokens > 1 else ''}, context {engine.context}", engine.plan(tokens),
                        cache) for label, tokens in _sizes(engine).items()]


def _sizes(engine: Engine) -> dict[str, int]:
    return {"decode": 1, "prefill": min(PREFILL, engine.context)}
