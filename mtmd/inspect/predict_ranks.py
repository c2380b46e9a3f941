"""A model shared out among several cards that are not here: what each rank would take, and how
long a step would be over each link that may tie them together.
"""

from __future__ import annotations

from collections.abc import Sequence

from mtmd.inspect.ranks_facts import LinkFacts
from mtmd.kernels.backends.target import Target
from mtmd.kernels.estimate.cards import Card
from mtmd.kernels.estimate.links import links_of
from mtmd.kernels.estimate.roofline import estimate
from mtmd.kernels.report.facts import RanksFacts
from mtmd.loaded.ranks_report import planned_ranks, rank_plans
from mtmd.model import Model


def shared_out(
    model: Model, target: Target, card: Card, shares: Sequence[float]
) -> tuple[RanksFacts, tuple[LinkFacts, ...]]:
    """`shares` of the work by rank, as for `load`."""
    maximum = max(range(len(shares)), key=lambda rank: shares[rank])
    plans, _ = rank_plans(model.loaded, maximum, shares)
    sizes = model.runner.sizes()

    facts = []
    for link in links_of(card, len(shares)):
        times = {key: estimate(plan, target, card, link) for key, plan in plans.items()}
        facts.append(
            LinkFacts(
                link.name,
                link.title,
                link.rate(len(shares)) / 1e9,
                link.source,
                sizes["prefill"].tokens,
                times["decoder", "prefill"],
                times["decoder", "decode"],
                times.get(("encoder", "warm-up")),
            )
        )
    return planned_ranks(model.loaded, shares), tuple(facts)
