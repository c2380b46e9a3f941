"""Ranks on several cards as text of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator

from mtmd.base.text import mib
from mtmd.inspect.ranks_facts import LinkFacts
from mtmd.kernels.estimate.roofline import UNCONFIRMED, Estimate
from mtmd.kernels.report.facts import RanksFacts

Row = Callable[[str, Estimate, str, int], str]
WIDTH = 80


def render_ranks(facts: RanksFacts, links: tuple[LinkFacts, ...], row: Row) -> Iterator[str]:
    """`row` writes an estimate as those above are written."""
    count = len(facts.ranks)
    yield f"{f'{count} such cards, --tp {count}':<31}{'middle':>8}{'slow to fast':>18}"
    for one in links:
        over = f"over {one.title}, {one.gb_per_s:,.4g} GB/s each way ({one.source})"
        yield from _wrapped(f"  {over}, {UNCONFIRMED}")
        for what, time, unit, tokens in (
            ("encode, a picture", one.encode, "ms", 0),
            (f"prefill of {one.prefill_tokens}", one.prefill, "tok/s", one.prefill_tokens),
            ("decode", one.decode, "tok/s", 1),
        ):
            if time is not None:
                yield row(f"  {what}", time, unit, tokens)
        shares = [
            f"{what} {time.exchange_ms:.2g} of {time.device_ms:.2g}"
            for what, time in (
                ("encode", one.encode),
                ("prefill", one.prefill),
                ("decode", one.decode),
            )
            if time is not None
        ]
        if shares:
            yield from _wrapped(f"    exchanging, ms of the device's: {', '.join(shares)}")
    if not links:
        yield from _wrapped("  no times: name a card whose links are known")
    largest = max(facts.ranks, key=lambda r: r.weight_bytes)
    yield from _wrapped(
        f"  largest rank: weights {mib(largest.weight_bytes)}, cache {mib(largest.cache_bytes)}, "
        f"compute {mib(largest.compute_bytes)}"
    )
    for c in facts.collectives:
        yield from _wrapped(f"  {c.graph}, {c.label}: {c.count} {c.op} of {mib(c.bytes)} together")
    for saved in facts.refused:
        more = f" and {len(saved.names) - 1} more" if len(saved.names) > 1 else ""
        yield from _wrapped(
            f"  WARNING: {saved.names[0]}{more} whole on every rank: {saved.reason}"
        )


def _wrapped(text: str) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent + "  ", break_on_hyphens=False)
