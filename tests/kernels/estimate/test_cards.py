"""Cards as published: golden numbers, what they have to agree with, and how they are asked for."""

from __future__ import annotations

import pytest
import torch

from mtmd.base.errors import OptionError
from mtmd.kernels.estimate.cards import ALIASES, CARDS, find_card
from mtmd.kernels.gpu.architectures import ARCHITECTURES, architecture

GIB = 1 << 30
GOLDEN = {  # target, multiprocessors, GB, GB/s, TFLOP/s in 16 bit and fp32
    "rtx3060": ("cuda:86", 28, 12 * GIB, 360, 25.5, 12.7),
    "rtx3090": ("cuda:86", 82, 24 * GIB, 936, 71.2, 35.6),
    "rtx4090": ("cuda:89", 128, 24 * GIB, 1008, 165.2, 82.6),
    "rtx5090": ("cuda:120", 170, 32 * GIB, 1792, 209.5, 104.8),
    "a10": ("cuda:86", 72, 24 * GIB, 600, 125, 31.2),
    "l4": ("cuda:89", 58, 24 * GIB, 300, 121, 30.3),
    "l40s": ("cuda:89", 142, 48 * GIB, 864, 362.05, 91.6),
    "a100-40g": ("cuda:80", 108, 40 * GIB, 1555, 312, 19.5),
    "a100-80g": ("cuda:80", 108, 80 * GIB, 2039, 312, 19.5),
    "h100": ("cuda:90", 132, 80 * GIB, 3350, 989.4, 66.9),
    "h100-pcie": ("cuda:90", 114, 80 * GIB, 2000, 756, 51.2),
    "h200": ("cuda:90", 132, 141 * 10**9, 4800, 989.4, 66.9),
    "b200": ("cuda:100", 148, 180 * 10**9, 8000, 2250, 75),
    "mi300x": ("hip:gfx942", 304, 192 * 10**9, 5300, 1307.4, 163.4),
    "rx7900xtx": ("hip:gfx1100", 96, 24 * GIB, 960, 122.8, 61.4),
}
# Operations of one multiprocessor in one cycle (multiply and add are two): products in 16 bit with
# sums in fp32, and fp32. GeForce cards do half of what their chips can.
A_CYCLE = {
    "cuda:80": (2048, 128),
    "cuda:86": (1024, 256),
    "cuda:89": (1024, 256),
    "cuda:90": (4096, 256),
    "cuda:100": (8192, 256),
    "cuda:120": (512, 256),
    "hip:gfx942": (2048, 256),
    "hip:gfx1100": (512, 256),
}


def test_the_table_is_as_published() -> None:
    result = {
        name: (
            c.target,
            c.multiprocessors,
            c.memory_bytes,
            c.bandwidth and c.bandwidth / 1e9,
            c.flops(torch.bfloat16) / 1e12,
            c.flops(torch.float32) / 1e12,
        )
        for name, c in CARDS.items()
    }
    assert result == GOLDEN and all(c.source and c.name == name for name, c in CARDS.items())
    assert all(c.flops(torch.float16) == c.flops(torch.bfloat16) for c in CARDS.values())
    assert set(ALIASES.values()) <= set(CARDS) and not set(ALIASES) & set(CARDS)


@pytest.mark.parametrize("name", CARDS)
def test_rates_agree_with_multiprocessors_and_a_clock(name: str) -> None:
    """Both rates come from one clock, within what boost clocks of the two differ; no card has more
    than 2.7 GHz or less than 1.3.
    """
    card = CARDS[name]
    product, plain = A_CYCLE[card.target]
    if name.startswith("rtx") and card.target in ("cuda:86", "cuda:89"):
        product //= 2
    assert card.multiprocessors and card.bandwidth and card.memory_bytes
    clocks = [
        card.flops(dtype) / card.multiprocessors / each / 1e9
        for dtype, each in ((torch.bfloat16, product), (torch.float32, plain))
    ]
    assert all(1.3 < clock < 2.7 for clock in clocks) and clocks[0] == pytest.approx(clocks[1], 0.1)
    # The whole memory is read in 10 to 90 ms on any card.
    assert 0.01 < card.memory_bytes / card.bandwidth < 0.09


@pytest.mark.parametrize(
    "text", ["rtx4090", "RTX 4090", " rtx-4090", "4090", "NVIDIA GeForce RTX 4090"]
)
def test_a_card_may_be_spelt_in_several_ways(text: str) -> None:
    assert find_card(text) is CARDS["rtx4090"]


def test_an_architecture_is_a_card_without_rates() -> None:
    card = find_card("CUDA:90", 24 * GIB)
    assert (card.target, card.memory_bytes, card.is_known) == ("cuda:90", 24 * GIB, False)
    assert find_card("h100", 40 * GIB).memory_bytes == 40 * GIB
    assert CARDS["h100"].memory_bytes == 80 * GIB


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("rtx4080", "near it: rtx4090"),
        ("h1000", "near it: h100"),
        ("mi300", "near it: mi300x"),
        ("tpu:1", "--target list"),
        ("cuda:91", "near it: cuda:90"),
        ("hip:gfx943", "near it: hip:gfx942"),
        ("cuda:9.0", "cuda:90"),
        ("", "--target list"),
        ("x" * 10_000, "--target list"),
    ],
    ids=lambda value: value[:12],
)
def test_an_unknown_card_is_refused_in_one_line_with_names_near_it(
    text: str, reported: str
) -> None:
    with pytest.raises(OptionError) as caught:
        find_card(text)
    message = str(caught.value)
    assert reported in message and "\n" not in message and len(message) < 400


def test_programs_at_once_by_hand() -> None:
    """Registers, shared memory, warps and programs: each holds once."""
    hopper, ada = architecture("cuda:90"), architecture("cuda:89")
    # 65,536 registers / (128 x 256 lanes) = 2; 228 KiB / (80 + 1) = 2; 64 warps / 8 = 8.
    assert hopper.programs_at_once(8, 128, 80 * 1024) == 2
    assert hopper.programs_at_once(8, 130, 0) == 1  # 136 x 256 lanes once, not twice
    assert hopper.programs_at_once(8, 32, 0) == 8 and ada.programs_at_once(8, 32, 0) == 6
    assert hopper.programs_at_once(1, 16, 0) == 32 and ada.programs_at_once(1, 16, 0) == 24
    assert hopper.programs_at_once(4, 40, 100 * 1024) == 2
    assert ada.programs_at_once(4, 40, 100 * 1024) == 0  # of 99 KiB
    mi300, navi = architecture("hip:gfx942"), architecture("hip:gfx1100")
    assert mi300.programs_at_once(4, 128, 0) == 4  # 512 / 128 waves on each of 4 parts
    assert mi300.programs_at_once(4, 128, 40 * 1024) == 1
    assert navi.programs_at_once(4, 192, 0) == 4  # 1,536 / 192 waves on each of 2 parts
    assert (mi300.warp, navi.warp, hopper.warp) == (64, 32, 32)


@pytest.mark.parametrize("target", ARCHITECTURES)
def test_an_architecture_holds_a_program_of_the_least_and_none_that_is_too_large(
    target: str,
) -> None:
    known = ARCHITECTURES[target]
    assert known.target == target and known.shared_per_program <= known.shared
    assert known.programs_at_once(1, 1, 0) == known.programs
    assert known.programs_at_once(1, 1, known.shared_per_program) == 1
    assert known.programs_at_once(1, 1, known.shared_per_program + 1) == 0
