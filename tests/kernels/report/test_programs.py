"""Which programs are foreseen of attention that another kernel than ours may turn out to run."""

from __future__ import annotations

import pytest
import torch

from mtmd.kernels import ops
from mtmd.kernels.backends.gpu import Gpu
from mtmd.kernels.backends.target import Target
from mtmd.kernels.backends.vision_attention.measured_kernel import (
    OURS,
    AttentionChoice,
    ShapeClass,
    class_of,
)
from mtmd.kernels.gpu.triton_kernel import Program
from mtmd.kernels.graph import Node, graph_input
from mtmd.kernels.plan.scheduler import make_plan
from mtmd.kernels.report.programs import Programs
from mtmd.kernels.trials import Measured, Trial

OTHER = {(64, 64, 4), (128, 128, 8)}
CARRIED = {(64, 64, 4), (128, 64, 8)}


def attention(rows: int = 1024, head: int = 72, batch: int = 1) -> Node:
    q, k, v = (
        graph_input(name, (batch, rows, 16, head), torch.bfloat16, lambda b: b) for name in "qkv"
    )
    return ops.attention(q, k, v, scale=0.1, name="v.blk.0.attn")


def foreseen(device: Gpu | Target, *nodes: Node) -> dict[str, set[tuple[int, int, int]]]:
    """By function, rows and keys of a block, and warps."""
    result: dict[str, set[tuple[int, int, int]]] = {}
    for program in Programs().add_all([make_plan(nodes, [device])]).result.values():
        result.setdefault(_name(program), set()).add(_tile(program))
    return result


def _name(program: Program) -> str:
    return str(getattr(program.function, "fn", program.function).__name__)


def _tile(program: Program) -> tuple[int, int, int]:
    constants = program.call.constants
    return int(constants["ROWS"]), int(constants["KEYS"]), program.call.warps


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "hip:gfx942"])
def test_all_that_may_win_on_a_card_that_is_not_here(target: str) -> None:
    result, small = foreseen(Target(target), attention()), foreseen(Target(target), attention(64))
    assert len(small.pop("whole_kernel")) == 1 and not small, "nothing is measured of it"
    ours = foreseen(Target(target), attention(head=96))  # which the others do not take
    assert len(ours["whole_kernel"]) == 1 and len(ours) == 1
    assert result.pop("whole_kernel") > OTHER
    assert result == ({"carried_kernel": CARRIED} if target == "cuda:90" else {})


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    card = Gpu()
    card.attention = AttentionChoice()
    return card


def measured(card: Gpu, winner: str) -> None:
    names = [OURS, *card.attention._requested()]
    trials = tuple(Trial(name, 1.0 if name == winner else 2.0) for name in names)
    shape: ShapeClass = class_of(attention())
    card.attention._known[shape] = Measured("q, k", trials)


def test_what_was_measured_is_foreseen_for_every_shape_of_its_class(hopper: Gpu) -> None:
    nodes = [attention(), attention(999), attention(batch=3)]
    every = foreseen(hopper, *nodes)
    assert every["carried_kernel"] == CARRIED and every["whole_kernel"] > OTHER
    measured(hopper, "triton 128 x 64, carried")
    one = foreseen(hopper, attention(), attention(999))
    assert one["carried_kernel"] == {(128, 64, 8)} and len(one["whole_kernel"]) == 1
    measured(hopper, "triton 64 x 64")
    assert (64, 64, 4) in foreseen(hopper, attention())["whole_kernel"]
    assert "carried_kernel" not in foreseen(hopper, attention())
    for winner in (OURS, "torch flash"):
        measured(hopper, winner)
        assert len(foreseen(hopper, attention())["whole_kernel"]) == 1


def test_a_setting_leaves_others_out(hopper: Gpu) -> None:
    hopper.attention.setting = "torch"
    assert len(foreseen(hopper, attention())["whole_kernel"]) == 1
    hopper.attention.setting = "triton"
    assert foreseen(hopper, attention())["carried_kernel"] == CARRIED
