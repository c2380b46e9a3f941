"""Describes what several processes that share a model are predicted to take, and to tell each
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from mtmd.base.text import plural
from mtmd.kernels.graph import Node
from mtmd.kernels.parallel.shard import Member, SavedWhole, Sharding, collectives
from mtmd.kernels.plan.scheduler import Plan, make_plan
from mtmd.kernels.report.facts import CollectiveFacts, RankFacts, RanksFacts, SavedWholeFacts
from mtmd.loaded.loaded_model import LoadedModel


def ranks_facts(loaded: LoadedModel) -> RanksFacts | None:
    """None where a model has one rank. Every rank's plans are made here; nothing is run."""
    sharding = loaded.runner.sharding
    return None if sharding is None else planned_ranks(loaded, sharding.shares)


def planned_ranks(loaded: LoadedModel, shares: Sequence[float]) -> RanksFacts:
    """Return what ranks with these `shares` would take, whether there are such or not."""
    facts = [_rank(loaded, rank, shares) for rank in range(len(shares))]
    _, own, saved = facts[0]
    reported = [
        CollectiveFacts(graph, label, op, count, size)
        for (graph, label), plan in own.items()
        for op, (count, size) in collectives(s.node for s in plan.steps).items()
    ]
    return RanksFacts(tuple(f for f, *_ in facts), tuple(reported), tuple(saved))


def ranks_warnings(loaded: LoadedModel) -> tuple[str, ...]:
    """One line for each kind of projection that could not be shared out."""
    return tuple(
        f"{plural(len(k.names), 'projection')} of the {k.graph} on every rank: {k.reason}"
        for graph, part in (("encoder", loaded.encoder), ("decoder", loaded.runner))
        if part is not None and part.sharding is not None
        for k in _saved(graph, part.sharding.kept_whole)
        if k.refused
    )


Plans = dict[tuple[str, str], Plan]
"""By graph and by the name of its size."""


def rank_plans(
    loaded: LoadedModel, rank: int, shares: Sequence[float]
) -> tuple[Plans, dict[str, Sharding]]:
    """One rank's plans at the sizes of a warm-up, and how each graph was shared out."""
    runner, encoder, member = loaded.runner, loaded.encoder, Member(rank, len(shares))
    shardings = {"decoder": Sharding(member, shares)}

    def planned(outputs: Sequence[Node], sharding: Sharding) -> Plan:
        return make_plan(sharding.rewrite(outputs), loaded.backends, runner.overrides)

    plans = {
        ("decoder", label): planned(runner.whole_graph(batch), shardings["decoder"])
        for label, batch in runner.sizes().items()
    }
    if encoder:
        shardings["encoder"] = Sharding(member, shares)
        for label, (batch, tile) in encoder.sizes().items():
            graph = [encoder.whole_graph(batch, tile.shape)]
            plans["encoder", label] = planned(graph, shardings["encoder"])
    return plans, shardings


def _rank(
    loaded: LoadedModel, rank: int, shares: Sequence[float]
) -> tuple[RankFacts, Plans, list[SavedWholeFacts]]:
    plans, shardings = rank_plans(loaded, rank, shares)
    text = shardings["decoder"]
    saved = [
        one
        for graph in ("encoder", "decoder")
        if graph in shardings
        for one in _saved(graph, shardings[graph].kept_whole)
    ]
    weights: dict[object, int] = {}
    for plan in plans.values():
        for node, space in plan.leaves:
            if node.op == "weight":
                weights[node.attrs["source"], node.name, node.type, space[0]] = node.type.bytes
    return (
        RankFacts(
            rank,
            shares[rank],
            sum(weights.values()),
            sum(prod(t.shape) * t.dtype.itemsize for t in text.states.values()),
            max(sum(plan.compute_bytes.values()) for plan in plans.values()),
        ),
        plans,
        saved,
    )


def _saved(graph: str, saved: Sequence[SavedWhole]) -> list[SavedWholeFacts]:
    """Return those of one reason together; where a reason names its node, the first stands for
    all.
    """
    together: dict[tuple[str, bool], list[str]] = {}
    for one in saved:
        together.setdefault((one.reason.partition(" (")[0], one.refused), []).append(one.name)
    return [
        SavedWholeFacts(graph, reason, tuple(dict.fromkeys(names)), refused)
        for (reason, refused), names in together.items()
    ]
