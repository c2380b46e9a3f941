"""What ranks exchange, against arithmetic done by hand."""

from __future__ import annotations

import pytest
import torch

from mtmd.kernels import ops
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.backends.target import Target
from mtmd.kernels.estimate.cards import CARDS, find_card
from mtmd.kernels.estimate.links import LINKS, OF_CARD, REACHED, exchange_s, links_of
from mtmd.kernels.estimate.roofline import MIDDLE, NVIDIA, estimate
from mtmd.kernels.graph import Node, graph_input
from mtmd.kernels.ops import OPS
from mtmd.kernels.parallel.shard import Member
from mtmd.kernels.plan.scheduler import make_plan

MIDDLE_OF, US = REACHED["middle"], 1e-6


@pytest.mark.parametrize(
    ("op", "size", "ranks", "link", "expected"),
    [
        # one token's 4,096 numbers in bf16: two steps of the low-latency protocol
        ("all_reduce", 8192, 2, "nvlink4", 3.6 + 2 * 0.47 + 8192 / (450e3 * 0.7 / 4)),
        ("all_reduce", 8192, 2, "pcie5", 3.6 + 2 * 1.0 + 8192 / (63015.385 * 0.7 / 4)),
        ("all_reduce", 8192, 4, "nvlink4", 3.6 + 6 * 0.47 + 1.5 * 8192 / (450e3 * 0.7 / 4)),
        # logits of 151,936 tokens
        ("all_gather", 303872, 2, "nvlink4", 3.6 + 0.47 + 151936 / (450e3 * 0.7 / 3)),
        # 512 tokens at once: bytes weigh more than steps
        ("all_reduce", 4 << 20, 2, "nvlink4", 8.4 + 2 * 3.4 + (4 << 20) / (450e3 * 0.7)),
        ("all_reduce", 4 << 20, 2, "pcie4", 8.4 + 2 * 5.7 + (4 << 20) / (31507.69 * 0.7)),
    ],
)
def test_times_by_hand(op: str, size: int, ranks: int, link: str, expected: float) -> None:
    """In microseconds."""
    actual = exchange_s(op, size, ranks, LINKS[link], MIDDLE_OF)
    assert actual == pytest.approx(expected * US, rel=1e-6)


def test_published_rates() -> None:
    rates = {name: link.bandwidth / 1e9 for name, link in LINKS.items()}
    assert rates["pcie4"] == pytest.approx(31.5, abs=0.01)
    assert rates["pcie5"] == pytest.approx(63.0, abs=0.02)
    assert (rates["nvlink3"], rates["nvlink4"], rates["nvlink5"]) == (300, 450, 900)
    assert set(OF_CARD) == set(CARDS) and all(link.source for link in LINKS.values())


@pytest.mark.parametrize(("ranks", "rate"), [(2, 64e3), (4, 192e3), (8, 448e3)])
def test_a_mesh_has_a_link_for_every_two_cards(ranks: int, rate: float) -> None:
    """Of MI300X, two share one link of their seven."""
    (link, _), size = links_of(CARDS["mi300x"], ranks), 64 << 20
    assert link.rate(ranks) == rate * 1e6
    actual = exchange_s("all_gather", size, ranks, link, MIDDLE_OF)
    expected = 8.4 + (ranks - 1) * 3.4 + size * (ranks - 1) / ranks / (rate * 0.7)
    assert actual == pytest.approx(expected * US, rel=1e-6)


@pytest.mark.parametrize(("card", "rate"), [("a100-80g", 100e9), ("h100", 150e9), ("h200", 150e9)])
def test_a_board_of_four_has_no_switch(card: str, rate: float) -> None:
    """Two of its cards share a third of their links; four have as much as with a switch."""
    for ranks in (2, 3, 4):
        switched, mesh, _ = links_of(CARDS[card], ranks)
        assert mesh.is_mesh and not switched.is_mesh
        assert mesh.rate(ranks) == rate * (ranks - 1)
        assert mesh.rate(ranks) <= switched.rate(ranks) == 3 * rate
        times = [exchange_s("all_reduce", 8 << 20, ranks, x, MIDDLE_OF) for x in (switched, mesh)]
        assert times[0] < times[1] if ranks < 4 else times[0] == times[1]
    assert not any(link.is_mesh for link in links_of(CARDS[card], 8))


def test_which_links_tie_so_many_cards() -> None:
    names = [link.name for link in links_of(CARDS["rtx3090"], 2)]
    assert names == ["nvlink-bridge", "pcie4"]
    assert [link.name for link in links_of(CARDS["rtx3090"], 4)] == ["pcie4"]
    assert links_of(find_card("cuda:90"), 2) == ()


def test_a_plan_with_collectives() -> None:
    """The link's time beside the card's, on the device and for the host."""
    x = graph_input("x", (1, 4096), torch.bfloat16, lambda batch: batch)
    w = graph_input("w", (4096, 4096), torch.bfloat16, lambda batch: batch)

    def planned(*outputs: Node) -> tuple[object, Target]:
        target = Target("cuda:90")
        return make_plan(outputs, [target, Cpu(), Reference()]), target

    alone = ops.matmul(x, w, name="y")
    summed = OPS["all_reduce"](alone, group=Member(0, 2), name="y.all_reduce")
    card, link = CARDS["h100"], LINKS["nvlink4"]
    plan, target = planned(summed)
    assert estimate(plan, target, card) is None  # nobody said over what
    actual = estimate(plan, target, card, link)
    one = estimate(*planned(alone), card)
    assert actual and one and one.exchange_ms == 0 and actual.launches == 2
    expected = exchange_s("all_reduce", 8192, 2, link, MIDDLE_OF) * 1e3
    assert actual.exchange_ms == pytest.approx(expected)
    # What is recorded is one launch more, the copy of its output
    of = NVIDIA[MIDDLE]
    assert actual.device_ms == pytest.approx(one.device_ms - of.floor * 1e3 + expected)
    more = MIDDLE_OF.host + of.step - of.torch_launch
    assert actual.host_ms == pytest.approx(one.host_ms + more * 1e3)
    assert actual.fast_ms < actual.ms < actual.slow_ms
