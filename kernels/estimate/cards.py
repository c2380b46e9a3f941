"""Graphics cards by name, as their makers publish them. A product of sheets and not of
measurements: what of these rates a model gets is `roofline.py`'s to say.

Rates are dense (no sparsity) and for sums in fp32, which is what the kernels keep: on GeForce cards
that halves the rate of matrix instructions. fp32 is that of plain instructions, as torch multiplies
fp32 matrices unless TF32 is asked for. Memory is counted as makers do: GB of a card with HBM are
10^9 bytes but for those sold as GiB; GDDR cards have GiB.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

import torch

from mtmd.base.errors import OptionError
from mtmd.kernels.gpu.architectures import ARCHITECTURES, Architecture, architecture

TERA, GIGA, GIB = 10**12, 10**9, 1 << 30


@dataclass(frozen=True)
class Card:
    """`target` is its architecture; `multiprocessors` are SMs or compute units. Bytes a second,
    and operations a second by type; `bandwidth` and rates are None where only the architecture is
    known, `memory_bytes` where nobody said. `source`: where the numbers stand.
    """

    name: str
    title: str
    target: str
    multiprocessors: int | None = None
    memory_bytes: int | None = None
    bandwidth: int | None = None
    flops_16: int | None = None
    flops_32: int | None = None
    source: str = ""

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.target]

    @property
    def is_known(self) -> bool:
        """Return whether times can be estimated."""
        return self.bandwidth is not None

    def flops(self, dtype: torch.dtype) -> int:
        """Return the rate of matrix products of this type; what is neither bf16 nor fp16 counts as
        fp32.
        """
        rate = self.flops_16 if dtype in (torch.bfloat16, torch.float16) else self.flops_32
        assert rate is not None
        return rate


def _card(
    name: str,
    title: str,
    target: str,
    multiprocessors: int,
    memory: int,
    bandwidth_gb: float,
    tera_16: float,
    tera_32: float,
    source: str,
) -> Card:
    return Card(
        name,
        title,
        target,
        multiprocessors,
        memory,
        round(bandwidth_gb * GIGA),
        round(tera_16 * TERA),
        round(tera_32 * TERA),
        source,
    )


GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper, table 2 and appendix A"
ADA = "NVIDIA Ada GPU Architecture whitepaper, appendix A"
BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A"
A100 = "NVIDIA A100 Tensor Core GPU datasheet; A100 architecture whitepaper, table 1"
H100 = "NVIDIA H100 Tensor Core GPU datasheet; H100 architecture whitepaper, table 3"
CARDS = {
    card.name: card
    for card in (
        # name, title, target, SMs, memory, GB/s, bf16 and fp16, fp32 TFLOP/s, source
        _card(
            "rtx3060", "GeForce RTX 3060", "cuda:86", 28, 12 * GIB, 360, 25.5, 12.7,
            "NVIDIA's product page (28 SMs, 1.78 GHz, 192 bits at 15 Gbit/s); rate as of GA102",
        ),
        _card("rtx3090", "GeForce RTX 3090", "cuda:86", 82, 24 * GIB, 936, 71.2, 35.6, GA102),
        _card("rtx4090", "GeForce RTX 4090", "cuda:89", 128, 24 * GIB, 1008, 165.2, 82.6, ADA),
        _card("rtx5090", "GeForce RTX 5090", "cuda:120", 170, 32 * GIB, 1792, 209.5, 104.8,
              BLACKWELL),
        _card("a10", "NVIDIA A10", "cuda:86", 72, 24 * GIB, 600, 125, 31.2,
              "NVIDIA A10 Tensor Core GPU datasheet"),
        _card("l4", "NVIDIA L4", "cuda:89", 58, 24 * GIB, 300, 121, 30.3,
              "NVIDIA L4 Tensor Core GPU datasheet (given there with sparsity: halved)"),
        _card("l40s", "NVIDIA L40S", "cuda:89", 142, 48 * GIB, 864, 362.05, 91.6,
              "NVIDIA L40S datasheet"),
        _card("a100-40g", "NVIDIA A100 40GB", "cuda:80", 108, 40 * GIB, 1555, 312, 19.5, A100),
        _card("a100-80g", "NVIDIA A100 80GB SXM", "cuda:80", 108, 80 * GIB, 2039, 312, 19.5, A100),
        _card("h100", "NVIDIA H100 80GB SXM", "cuda:90", 132, 80 * GIB, 3350, 989.4, 66.9, H100),
        _card("h100-pcie", "NVIDIA H100 80GB PCIe", "cuda:90", 114, 80 * GIB, 2000, 756, 51.2,
              H100),
        _card("h200", "NVIDIA H200 141GB SXM", "cuda:90", 132, 141 * GIGA, 4800, 989.4, 66.9,
              "NVIDIA H200 Tensor Core GPU datasheet"),
        _card("b200", "NVIDIA B200 180GB", "cuda:100", 148, 180 * GIGA, 8000, 2250, 75,
              "NVIDIA DGX B200 datasheet, an eighth of it; Blackwell architecture brief"),
        _card("mi300x", "AMD Instinct MI300X", "hip:gfx942", 304, 192 * GIGA, 5300, 1307.4, 163.4,
              "AMD Instinct MI300X data sheet"),
        _card("rx7900xtx", "AMD Radeon RX 7900 XTX", "hip:gfx1100", 96, 24 * GIB, 960, 122.8, 61.4,
              "AMD's product page"),
    )
}  # fmt: skip
ALIASES = {
    "a100": "a100-80g", "a100-80gb": "a100-80g", "a100-40gb": "a100-40g", "h100-sxm": "h100",
    "7900xtx": "rx7900xtx", "3060": "rtx3060", "3090": "rtx3090", "4090": "rtx4090",
    "5090": "rtx5090",
}  # fmt: skip


def find_card(name: str, memory_bytes: int | None = None) -> Card:
    """A card by its name, however that is spelt (RTX 4090, rtx-4090), or an architecture (cuda:90);
    `memory_bytes` in place of its own memory. Raises OptionError naming what is near.
    """
    key = name.strip().lower()
    if key.startswith(("cuda:", "hip:")):
        known = architecture(key)
        return Card(key, f"any GPU of {key}", known.target, memory_bytes=memory_bytes)
    result = _by_spelling(key)
    if result is None:
        near = difflib.get_close_matches(_plain(key), [*CARDS, *ALIASES], 3, 0.5)
        near = list(dict.fromkeys(ALIASES.get(n, n) for n in near))
        names = ", ".join(near or CARDS)
        raise OptionError(
            f"target {name!r:.60}: expected a card ({'near it: ' if near else ''}{names}; "
            "--target list shows all) or an architecture such as cuda:90 or hip:gfx942"
        )
    return result if memory_bytes is None else replace(result, memory_bytes=memory_bytes)


def _by_spelling(name: str) -> Card | None:
    plain = _plain(name)
    for known in (*CARDS, *ALIASES):
        if _plain(known) == plain:
            return CARDS[ALIASES.get(known, known)]
    return None


def _plain(name: str) -> str:
    for word in ("nvidia", "geforce", "amd", "radeon", "instinct"):
        name = name.replace(word, "")
    return "".join(c for c in name if c.isalnum())
