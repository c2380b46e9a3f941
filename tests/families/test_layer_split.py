"""Families with their layers over several devices: the tokens of one device, both formats, recurrent
states, caches that layers share, experts, the encoder on the device that has room.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from common import Oracle, picture
from gguf_files import decoder, pixtral_projector
from random_graphs import device
from stand_in import StandIn
from table import CASES

from mtmd.checkpoint.open import open_checkpoint
from mtmd.inspect.fit import fit
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.checkpoint.canonical import CanonicalWeights
from mtmd.llm.engine.spans import Span
from mtmd.model import Model
from mtmd.options.load import LoadOptions

Build = Callable[[str, str], Oracle]
FAMILIES = ("gemma3", "gemma4", "qwen3_next", "lfm2_vl", "qwen3_vl", "pixtral")
TOKENS = 8
MESSAGES = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Describe a red circle"},
            {"type": "image", "image": picture(0, 70, 50)},
        ],
    }
]
QUESTION = [{"role": "user", "content": [{"type": "text", "text": "Describe a red circle"}]}]


def loaded(path: Path, *shares: float, **chosen: object) -> Model:
    """On the CPU, or, with shares, over as many devices."""
    settings = LoadOptions(
        dtype="fp32",
        context=256,
        parallel=2,
        split="layer" if shares else "none",
        tensor_split=shares,
        **chosen,  # type: ignore[arg-type]
    )
    devices = [device(f"card {i}") for i in range(len(shares))]
    return Model(open_checkpoint(path), settings, [*devices, Cpu(native=False), Reference()])


class Fusing(StandIn):
    """A device for which graphs are rewritten, as for a GPU."""

    def __init__(self, name: str) -> None:
        super().__init__(records=False)
        self.name = self.space = name


def greedy(model: Model) -> list[int]:
    runner = model.runner
    cache = runner.new_cache()
    sequence = runner.begin(cache, 0)
    logits = runner.prefill(model.spans(MESSAGES if model.encoder else QUESTION), cache, sequence)
    tokens: list[int] = []
    for _ in range(TOKENS):
        tokens.append(int(logits.argmax()))
        logits = runner.read([(sequence, [Span((tokens[-1],))])], cache)[0]
    for name, tensor in cache.tensors.items():
        assert tensor.nbytes == runner.state_bytes()[name]
    return tokens


def check(model: Model) -> None:
    """What each device holds is what was predicted, and what crosses is told."""
    runner, plan = model.runner, model.runner.plan(model.runner.sizes()["decode"])
    assert runner.split is not None
    names = {d.name for d in runner.split.devices}
    assert {s.backend.name for s in plan.steps} == names
    report = model.warmup_report
    assert report.elsewhere == 0 and report.fully_accelerated, str(report)
    assert [part.device for part in report.layers] == [d.name for d in runner.split.devices]
    stores = {s.node.inputs[0].name: s.backend.name for s in plan.steps if s.node.op == "kv_store"}  # type: ignore[union-attr]
    for name, location in stores.items():
        layer = int(name.partition(".")[2])
        (part,) = [p for p in report.layers if p.first <= layer <= p.last]
        assert part.device == location
    decode = next(g for g in report.graphs if g.label == "decode")
    assert decode.copies and all(c.name in str(report) for c in decode.copies[:12])
    predicted = {
        space: sum(
            p.weight_bytes.get(space, 0)
            for p in (plan, *([model.encoder.plan(1, _tile(model))] if model.encoder else []))
        )
        for space in names
    }
    stored = model.runner.residency.bytes
    assert predicted == {space: stored[space] for space in names}


def _tile(model: Model) -> tuple[int, ...]:
    assert model.encoder is not None
    return model.encoder.family.resolution.tile_type().shape


@pytest.mark.parametrize("row", FAMILIES)
def test_layers_over_devices_answer_as_one_device_does(build: Build, row: str) -> None:
    variant = [name for kind, name in CASES if kind == row][-1]
    folder = build(row, variant).folder
    whole = loaded(folder)
    depth = len(whole.checkpoint.text.layers)
    split = loaded(folder, *[1.0] * min(depth, 3))
    assert greedy(split) == greedy(whole)
    check(split)


@pytest.mark.parametrize("row", ("gemma4", "qwen3_next"))
def test_devices_for_which_nodes_are_fused(build: Build, row: str) -> None:
    folder = build(row, [name for kind, name in CASES if kind == row][-1]).folder
    checkpoint = open_checkpoint(folder)
    settings = LoadOptions(dtype="fp32", context=256, parallel=2, split="layer")
    devices = [Fusing(name) for name in ("a", "b")]
    split = Model(checkpoint, settings, [*devices, Cpu(native=False), Reference()])
    ops = {s.node.op for s in split.runner.plan(split.runner.sizes()["decode"]).steps}
    assert {"paged_attention", "add_norm"} <= ops
    assert greedy(split) == greedy(loaded(folder))
    check(split)


def test_out_of_gguf_with_the_cache_on_the_host(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = build("pixtral", next(name for kind, name in CASES if kind == "pixtral"))
    decoder(oracle.folder, tmp_path / "text.gguf", "llama")
    pixtral_projector(oracle.folder, tmp_path / "mmproj.gguf")
    expected = greedy(loaded(tmp_path / "text.gguf"))
    split = loaded(tmp_path / "text.gguf", 2, 1)
    assert greedy(split) == expected
    check(split)
    host = loaded(tmp_path / "text.gguf", 2, 1, no_kv_offload=True)
    assert greedy(host) == expected
    assert set(host.runner.cache_bytes()) == {"cpu"}

    def refuse(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(CanonicalWeights, "read", refuse)
    files = oracle.folder, tmp_path / "text.gguf"
    actual = [fit(f, memory=["1GiB"], dtype="fp32", context=256, parallel=2) for f in files]
    assert [report.chosen for report in actual] == ["on gpu0 alone"] * 2
    assert actual[0].layouts == actual[1].layouts, "headers of both formats say the same"
    assert actual[0].layouts[0].memories[0].cache == sum(host.runner.cache_bytes().values())
