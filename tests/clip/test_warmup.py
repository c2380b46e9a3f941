"""The warm-up: what it decides, what it prints, and that fallbacks compute the same.

The printed reports are compared with files in `golden/`; `python tests/clip/test_warmup.py` writes
them anew.
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from mtmd.clip.blocks import VitParams
from mtmd.clip.encoder import BATCH, Encoder
from mtmd.clip.families.gemma3 import Gemma3Vision
from mtmd.clip.image.pixels import Normalize
from mtmd.clip.resolution.fixed_square import FixedSquare
from mtmd.clip.warmup import check_encoder, encoder_graphs, encoder_placement
from mtmd.kernels.backends import Backend, Cpu, Limited, Reference
from mtmd.kernels.graph import Type
from mtmd.kernels.plan.scheduler import Override
from mtmd.kernels.report.warmup_report import WarmupReport

GOLDEN = Path(__file__).parent / "golden"
FAMILY = Gemma3Vision(
    vit=VitParams(layers=3, width=144, ffn=200, heads=2, eps=1e-6, gelu="tanh"),
    patch=14,
    text_width=64,
    resolution=FixedSquare(
        side=56,
        tokens=4,
        normalize=Normalize((0.5,) * 3, (0.5,) * 3, 1 / 255),
        resample="bilinear",
        edge=56,
    ),
)
SCENARIOS: dict[
    str, tuple[str, tuple[str, ...], tuple[str, ...]]
] = {  # flash_attn, refuse rules, overrides
    "all_taken": ("auto", (), ()),
    "head_72_auto": ("auto", ("attention:head=72",), ()),
    "head_72_on": ("on", ("attention:head=72",), ()),
    "off": ("off", (), ()),
    "one_layer_mixed": ("auto", (r"attention:/v\.blk\.1\./",), ()),
    "no_form_of_it": ("auto", (r"*:/v\.blk\.1\.attn$/",), ()),
    "pool2d": ("auto", ("pool2d",), ()),
    "batch": ("auto", ("*:batch>1",), ()),
    "override": ("auto", (), (r"v\.blk\.1\.=cpu",)),
}


class Noise:
    """Weights of a family, the same for everyone who asks."""

    def __init__(self) -> None:
        self.shapes = {name: p.shape for name, p in FAMILY.parameters().items()}

    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        return Type.contiguous(self.shapes[name], dtype)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = self.shapes[name]
        generator = torch.Generator().manual_seed(sorted(self.shapes).index(name))
        return (
            torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 1.0)
        ).to(dtype)

    def quant(self, name: str) -> str | None:  # noqa: ARG002
        return None

    def order(self, name: str) -> str | None:  # noqa: ARG002
        return None


def encoder(
    scenario: str, weights: Noise | None = None, dtype: torch.dtype = torch.float32
) -> Encoder:
    flash, rules, overrides = SCENARIOS[scenario]
    backends: list[Backend] = [Limited(Cpu(), rules), Cpu(), Reference()]
    return Encoder(
        FAMILY,
        weights or Noise(),
        backends,
        dtype=dtype,
        flash_attn=flash,
        overrides=[Override.parse(o) for o in overrides],
    )


def report(scenario: str) -> WarmupReport:
    with patch("torch.get_num_threads", return_value=1):  # kernels take memory per thread
        subject = encoder(scenario)
        result, graphs = encoder_placement(subject), encoder_graphs(subject)
    return WarmupReport(
        "tiny",
        "limited",
        "a machine of the tests",
        "fp32",
        (result.flash,),
        result.refused,
        tuple(graphs),
    )


def tiles(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.uniform(-1, 1, (3, 56, 56)).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_printed_report(scenario: str) -> None:
    assert str(report(scenario)) + "\n" == (GOLDEN / f"{scenario}.txt").read_text()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_fallbacks_compute_the_same(scenario: str) -> None:
    expected = Encoder(FAMILY, Noise(), [Reference()], dtype=torch.float32).encode(tiles(BATCH + 1))
    for actual, requested in zip(encoder(scenario).encode(tiles(BATCH + 1)), expected, strict=True):
        torch.testing.assert_close(actual, requested, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scenario", "state", "accelerated"),
    [
        ("no_form_of_it", "mixed", False),
        ("all_taken", "on", True),
        ("head_72_auto", "off", False),
        ("head_72_on", "on", False),
        ("off", "off", False),
        ("one_layer_mixed", "mixed", False),
        ("pool2d", "on", False),
        ("batch", "on", False),
        ("override", "mixed", False),
    ],
)
def test_flash_state(scenario: str, state: str, accelerated: bool) -> None:
    result = report(scenario)
    assert result.flash[0].state == state
    assert result.fully_accelerated is accelerated


def test_refused_attention_stays_on_the_device_under_auto_and_goes_to_the_cpu_under_on() -> None:
    auto, on = report("head_72_auto"), report("head_72_on")
    assert [r.runs_on for r in auto.refused] == ["limited, as explicit attention"]
    assert auto.graphs[0].splits == 1 and not auto.graphs[0].copies
    assert [r.runs_on for r in on.refused if r.op == "attention"] == ["cpu"]
    assert on.graphs[0].splits == 2 * FAMILY.vit.layers + 1
    # q, k, v to the CPU and the result back, for every layer
    assert [(c.source, c.destination) for c in on.graphs[0].copies] == [
        *[("limited", "cpu")] * 3,
        ("cpu", "limited"),
    ] * FAMILY.vit.layers
    assert on.graphs[0].copies[0].bytes == 16 * 144 * 4


def test_only_refused_nodes_are_rebuilt() -> None:
    plan = encoder("one_layer_mixed").plan(1, (3, 56, 56))
    kinds = {s.node.name: s.node.op for s in plan.steps if s.node.name.endswith(".attn")}
    assert kinds == {
        "v.blk.0.attn": "attention",
        "v.blk.1.attn": "attn_mix",
        "v.blk.2.attn": "attention",
    }


def test_refused_pool_is_a_split_with_copies() -> None:
    result = report("pool2d").graphs[0]
    assert result.splits == 3
    assert [(c.name, c.bytes) for c in result.copies] == [
        ("v.post_ln@cpu", 16 * 144 * 4),
        ("mm.pool@limited", 4 * 144 * 4),
    ]


def test_what_is_accepted_for_one_tile_and_refused_for_four() -> None:
    """llama.cpp PR 19884: asked about a batch of one, refused at a batch of four. Both are asked
    about, and reported.
    """
    result = report("batch")
    assert result.graphs[0].splits == 1 and result.graphs[0].ops_by_backend == {
        "limited": result.graphs[0].nodes
    }
    assert result.graphs[1].ops_by_backend["cpu"] > 0
    assert {r.reason for r in result.refused} == {f"batch {BATCH} is not supported"}


def test_check_finds_a_wrong_kernel() -> None:
    class Wrong(Cpu):
        def lower(self, node, in_place=False):  # type: ignore[no-untyped-def]
            kernel = super().lower(node, in_place)
            return (lambda *a: kernel(*a) * 1.001) if node.name == "v.blk.1.ffn_up" else kernel

    good = check_encoder(encoder("all_taken"))
    assert good.first_nan is None and not good.failed and good.steady_ms > 0
    bad = check_encoder(Encoder(FAMILY, Noise(), [Wrong()], dtype=torch.float32))
    assert bad.worst[0][:2] == ("matmul", "v.blk.1.ffn_up") and "v.blk.1.ffn_up" in bad.failed[0]


def test_check_finds_the_first_nan() -> None:
    class Broken(Noise):
        def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
            tensor = super().read(name, dtype)
            return tensor.fill_(torch.nan) if name == "v.blk.1.ffn_up.bias" else tensor

    check = check_encoder(encoder("all_taken", Broken()))
    assert check.first_nan == "v.blk.1.ffn_up"
    assert "NaN first at v.blk.1.ffn_up" in check.failed


def test_check_in_bf16() -> None:
    check = check_encoder(encoder("all_taken", dtype=torch.bfloat16))
    assert not check.failed and check.worst[0][2] > 1e-9, (
        "bf16 rounds: an error of nothing would mean nothing was compared"
    )


def test_json_has_the_same_facts() -> None:
    import json

    result = json.loads(json.dumps(report("pool2d").asdict()))
    assert result["fully_accelerated"] is False
    assert result["refused"][0]["op"] == "pool2d" and result["refused"][0]["tensors"][0] == {
        "role": "dst",
        "dtype": "fp32",
        "shape": [1, 4, 144],
        "strides": [576, 144, 1],
    }


if __name__ == "__main__":
    for name in SCENARIOS:
        (GOLDEN / f"{name}.txt").write_text(f"{report(name)}\n")
