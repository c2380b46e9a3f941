"""Describes what ranks on cards that are not here would do over one kind of link, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from mtmd.kernels.estimate.roofline import Estimate


@dataclass(frozen=True)
class LinkFacts:
    """Estimates of the rank that has most to do, at the context asked for: `prefill` of
    `prefill_tokens`, `decode` of one token, `encode` of a picture of the warm-up's size.
    `gb_per_s` is as published, of a card to all others, each way; `source` says where.
    """

    link: str
    title: str
    gb_per_s: float
    source: str
    prefill_tokens: int
    prefill: Estimate | None
    decode: Estimate | None
    encode: Estimate | None
