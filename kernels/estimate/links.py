"""Links between cards, as their makers publish them, and how long ranks exchange values over them.

    steps   = 2 (N - 1) of an all_reduce, N - 1 of an all_gather, on N cards in a ring
    handed  = bytes x steps / N                             sent by each card, and received
    rate    = a link's; in a mesh, N - 1 times that of one
    simple  = (8.4 us + steps x wait) x late + handed / (rate x el)
    low     = (3.6 us + steps x low wait) x late + handed / (rate x el x part)
    time    = min(simple, low)

That is the model by which NCCL chooses between its protocols (nccl, src/graph/tuning.cc: rings of
one machine, Simple and LL, of which LL carries a flag with every word: `part` is a quarter of the
rate in sums, a third in gathers). `el`, the part of the published rate that is reached, and `late`
are assumptions with a range. **Nothing here was run on several GPUs.**
"""

from __future__ import annotations

from dataclasses import dataclass

from mtmd.kernels.estimate.cards import GIGA, Card

US = 1e-6
SIMPLE_S, LOW_S = 8.4 * US, 3.6 * US
PARTS = {"all_reduce": 1 / 4, "all_gather": 1 / 3}
ANY = 64


@dataclass(frozen=True)
class Link:
    """`bandwidth`: bytes a second that a card sends, and as many that it receives; in a mesh, where
    every two cards have a link of their own, over each of these. `wait` and `low_wait`: seconds of
    a step by either protocol. `maximum` cards are tied together so.
    """

    name: str
    title: str
    bandwidth: int
    wait: float
    low_wait: float
    maximum: int
    source: str
    is_mesh: bool = False

    def rate(self, ranks: int) -> int:
        """Bytes a second that each of so many cards sends to all others together."""
        return self.bandwidth * (ranks - 1) if self.is_mesh else self.bandwidth


def _direct(
    name: str, title: str, gb_per_s: float, maximum: int, source: str, is_mesh: bool = False
) -> Link:
    return Link(name, title, round(gb_per_s * GIGA), 3.4 * US, 0.47 * US, maximum, source, is_mesh)


def _pcie(name: str, title: str, transfers: int) -> Link:
    """16 lanes of so many 10^9 transfers a second, of which 128 bits of 130 are data."""
    rate = round(transfers * GIGA * 16 / 8 * 128 / 130)
    source = f"PCI Express Base Specification: {transfers} GT/s, 128b/130b"
    return Link(name, title, rate, 5.7 * US, 1.0 * US, ANY, source)


LINKS = {
    link.name: link
    for link in (
        _direct("nvlink-bridge", "NVLink bridge, GeForce", 56.25, 2,
                "NVIDIA Ampere GA102 GPU Architecture whitepaper: four links"),
        _direct("nvlink3", "NVLink 3, switched", 300, 8,
                "NVIDIA A100 datasheet: 600 GB/s both ways"),
        _direct("nvlink3-mesh", "NVLink 3, board of four", 100, 4,
                "NERSC, Perlmutter: 4 of a card's 12 links to each other one, 25 GB/s each way",
                is_mesh=True),
        _direct("nvlink4", "NVLink 4, switched", 450, 8,
                "NVIDIA H100 datasheet: 900 GB/s both ways"),
        _direct("nvlink4-mesh", "NVLink 4, board of four", 150, 4,
                "a third of a card's 18 links of 25 GB/s (H100 and H200 datasheets: 900 GB/s); so "
                "in JUPITER, between four GH200",
                is_mesh=True),
        _direct("nvlink4-bridge", "NVLink 4 bridge, PCIe cards", 300, 2,
                "NVIDIA H100 datasheet, PCIe: 600 GB/s both ways"),
        _direct("nvlink5", "NVLink 5, switched", 900, 8,
                "NVIDIA DGX B200 datasheet: 1.8 TB/s both ways"),
        _direct("infinity", "Infinity Fabric", 64, 8,
                "AMD Instinct MI300X data sheet: 7 links, 128 GB/s both ways each", is_mesh=True),
        _pcie("pcie4", "PCI Express 4.0 x16", 16),
        _pcie("pcie5", "PCI Express 5.0 x16", 32),
    )
}  # fmt: skip
OF_CARD = {
    "rtx3060": ("pcie4",), "rtx3090": ("nvlink-bridge", "pcie4"), "rtx4090": ("pcie4",),
    "rtx5090": ("pcie5",), "a10": ("pcie4",), "l4": ("pcie4",), "l40s": ("pcie4",),
    "a100-40g": ("nvlink3", "nvlink3-mesh", "pcie4"),
    "a100-80g": ("nvlink3", "nvlink3-mesh", "pcie4"),
    "h100": ("nvlink4", "nvlink4-mesh", "pcie5"), "h100-pcie": ("nvlink4-bridge", "pcie5"),
    "h200": ("nvlink4", "nvlink4-mesh", "pcie5"), "b200": ("nvlink5", "pcie5"),
    "mi300x": ("infinity", "pcie5"), "rx7900xtx": ("pcie4",),
}  # fmt: skip


@dataclass(frozen=True)
class Reached:
    """part: of a link's published rate (el); late: by which waiting takes longer; host: seconds in
    which the host launches one collective.
    """

    part: float
    late: float
    host: float


REACHED = {
    "slow": Reached(0.5, 2.0, 60 * US),
    "middle": Reached(0.7, 1.0, 25 * US),
    "fast": Reached(0.9, 1.0, 12 * US),
}


def links_of(card: Card, ranks: int) -> tuple[Link, ...]:
    """Return what may tie so many of these cards together, the fastest first: the same card comes
    on boards with a switch and without. Nothing for an architecture, which many cards have.
    """
    return tuple(LINKS[name] for name in OF_CARD.get(card.name, ()) if LINKS[name].maximum >= ranks)


def exchange_s(op: str, size: int, ranks: int, link: Link, reached: Reached) -> float:
    """Seconds of one collective, of values that are `size` bytes when they are whole."""
    steps = 2 * (ranks - 1) if op == "all_reduce" else ranks - 1
    moving = size * steps / ranks / (link.rate(ranks) * reached.part)
    simple = SIMPLE_S + steps * link.wait
    low = LOW_S + steps * link.low_wait
    return min(simple * reached.late + moving, low * reached.late + moving / PARTS[op])
