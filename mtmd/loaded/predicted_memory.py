"""What a model will take once it answers, from what its plans say; told before a weight is read."""

from __future__ import annotations

from mtmd.clip.warmup import encoder_graphs
from mtmd.llm.warmup import decoder_graphs
from mtmd.loaded.fitting.needed_memory import CACHE_PART, MARGIN
from mtmd.loaded.loaded_model import LoadedModel


def predicted_bytes(loaded: LoadedModel) -> dict[str, int]:
    """By memory space: the weights of all graphs, what is counted of a full cache, and the most
    that the largest picture or prompt computes with, with the margin by which it is admitted.
    """
    encoder = encoder_graphs(loaded.encoder) if loaded.encoder else []
    graphs = [*encoder, *decoder_graphs(loaded.runner)]
    caches, limited = loaded.admission.counted_caches, loaded.options.memory_limit is not None
    taken: dict[str, int] = {}
    for graph in graphs:
        for space in (*graph.weight_bytes, *graph.cache_bytes, *graph.compute_bytes):
            taken.setdefault(space, 0)
    for space in taken:
        weights = {
            g.graph: max(o.weight_bytes.get(space, 0) for o in graphs if o.graph == g.graph)
            for g in graphs
        }
        compute = max(g.compute_bytes.get(space, 0) for g in graphs)
        compute += compute // MARGIN
        if limited:  # of which a part is kept for encoded pictures
            compute += compute // (CACHE_PART - 1) + CACHE_PART
        taken[space] = sum(weights.values()) + caches.get(space, 0) + compute
    return {space: count for space, count in taken.items() if count}
