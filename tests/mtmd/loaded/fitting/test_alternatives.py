"""Models over several devices, and laid out by `fit`: the answers of one device, what the report and
the receipt tell, what is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from random_graphs import device

from mtmd.base.errors import DeviceMemoryError, OptionError
from mtmd.bench.shapes import random_checkpoint
from mtmd.checkpoint.open import open_checkpoint
from mtmd.kernels.backends import Backend, Cpu, Reference, several_backends
from mtmd.kernels.backends.target import Target
from mtmd.loaded.fitting.alternatives import Way, Ways, choose, chosen_by, saved_by
from mtmd.loading import DEMO_MODEL
from mtmd.model import Model
from mtmd.options.load import LoadOptions

MIB = 1 << 20
STAND_IN = ("--refuse", "gelu:/no node is called so/")  # a device of its own beside the CPU


def demo_on(*names: str, **chosen: Any) -> Model:
    devices: list[Backend] = [device(name) for name in names]
    settings = LoadOptions(dtype="fp32", **chosen)
    backends = [*devices, Cpu(native=False), Reference()]
    return Model(open_checkpoint(DEMO_MODEL), settings, backends, name="demo model")


@pytest.fixture(scope="module")
def needs() -> dict[str, int]:
    """Bytes of the demo model on one device, by part."""
    admission = demo_on("a", memory_limit="1GiB").loaded.admission
    (parts,) = admission.needed.parts().values()
    return {"all": parts.total, "cache": parts.cache, "weights": parts.weights + parts.tower}


def test_what_fits_one_device_lies_there(needs: dict[str, int], one: Path) -> None:
    with demo_on("a", "b", fit=True, memory_limit=needs["all"] * 2) as model:
        assert model.loaded.fit is not None and model.loaded.fit.chosen == "on a alone"
        assert model.loaded.layers == () and model.options.split == "none"
        assert model.answer(one, max_tokens=1).receipt.layout == "fit: on a alone"


def test_what_does_not_is_laid_over_devices_and_answers_the_same(
    needs: dict[str, int], one: Path, demo: Any
) -> None:
    expected = demo.answer(one, max_tokens=12)
    with demo_on("a", "b", fit=True, memory_limit=int(needs["all"] * 0.8)) as model:
        answer, report = model.answer(one, max_tokens=12), model.warm_up()
        assert answer.output_token_ids == expected.output_token_ids
        assert model.loaded.fit is not None
        assert model.loaded.fit.chosen == "layers over a, b" and model.options.split == "layer"
        limits = model.loaded.admission.limits
        assert limits["a"] == limits["b"] == int(needs["all"] * 0.8)
        stored, cache = model.runner.residency.bytes, model.runner.cache_bytes()
    for memory in model.loaded.fit.layouts[-1].memories:
        assert memory.weights + memory.encoder == stored[memory.space]
        assert memory.cache == cache[memory.space] and memory.fits
    assert report.fully_accelerated and not any(check.failed for check in report.checks)
    reported = answer.receipt.layout
    assert reported.startswith("fit: layers over a, b; a: layers 0 to 1") and "encoder" in reported
    assert "refused: on a alone, a needs " in reported and reported in str(answer.receipt)
    text = str(report)
    assert "refused: on a alone" in text and "chosen: layers over a, b" in text
    assert (
        ": does not fit (weights " in text and "\nlayers over devices\n  a: layers 0 to 1" in text
    )
    assert "copy blk.1.ffn_residual@b: a -> b" in text


def test_keys_and_values_go_to_the_host_where_that_is_enough(
    needs: dict[str, int], one: Path, demo: Any
) -> None:
    limit = needs["all"] - needs["cache"] * 9 // 10
    with demo_on("a", fit=True, memory_limit=limit) as model:
        assert model.options.no_kv_offload and set(model.runner.cache_bytes()) == {"cpu"}
        expected = demo.answer(one, max_tokens=4)
        assert model.answer(one, max_tokens=4).output_token_ids == expected.output_token_ids
        text = str(model.warmup_report)
    assert "fit: on a, keys and values on the host" in text
    assert "to do: use a shorter context, or more memory" in text


def test_an_override_may_name_a_device_that_has_no_layers(needs: dict[str, int]) -> None:
    limit = needs["all"] * 2
    model = demo_on("a", "b", fit=True, override_tensor=r"blk\.1\.ffn=b", memory_limit=limit)
    assert model.loaded.fit is not None and model.loaded.fit.chosen == "on a alone"
    assert {m.space for m in model.loaded.fit.layouts[0].memories} == {"a", "b"}


def test_nothing_fits_and_the_numbers_say_what_would(
    needs: dict[str, int], one: Path, mtmd: Any
) -> None:
    limit = needs["all"] - needs["cache"] * 2 // 5
    few = ("--fit", "--memory-limit", str(limit), "--dtype", "fp32")
    reported = mtmd("batch", one, "-o", "rows.jsonl", "--parallel", "4", *few).refused()
    assert "fit nowhere; what would: a context of 1024, or 2 at once (--parallel)" in reported
    assert "Refused: on cpu alone needs " in reported
    with pytest.raises(DeviceMemoryError, match="alone would not fit either"):
        demo_on(fit=True, memory_limit="1MiB")


def test_processes_share_what_layers_do_not_fit_into() -> None:
    """The token table is one of the parts that each device of layers has whole."""
    backends = [Target("cuda:80", "gpu0"), Target("cuda:80", "gpu1"), Reference()]
    chosen, room = LoadOptions(fit=True), {"gpu0": 50 * MIB, "gpu1": 50 * MIB}
    checkpoint = open_checkpoint(DEMO_MODEL)
    way, facts = choose(Ways(checkpoint, chosen, 2048, torch.bfloat16, backends, room))
    assert facts.chosen == way.name == "tensor parallelism of 2 ranks" and len(way.members) == 2
    assert [layout.fits for layout in facts.layouts] == [False, False, True]
    options = chosen_by(way, chosen)
    assert (options.fit, options.split, options.tp) == (False, "none", 2)
    assert set(way.parts()) == {"gpu0", "gpu1"} and way.layout.backends[0].name == "gpu0"


def test_what_a_quantized_file_saves_is_what_it_takes_less() -> None:
    def alone(kind: str) -> Way:
        checkpoint = random_checkpoint("smolvlm-256m", kind)
        backends = [Target("cuda:80"), Reference()]
        ways = Ways(checkpoint, LoadOptions(), 1024, torch.bfloat16, backends, {})
        return ways.alone

    plain, quantized = alone("BF16"), alone("Q8_0")
    less = plain.parts()["cuda:80"].weights - quantized.parts()["cuda:80"].weights
    assert saved_by(plain, "Q8_0")["cuda:80"] == less > 0
    assert saved_by(quantized, "Q4_K").get("cuda:80", 0) == 0


def test_layers_on_a_device_and_the_host_from_the_command_line(one: Path, mtmd: Any) -> None:
    plain = mtmd("describe", one, "--dtype", "fp32")
    ran = mtmd(
        "describe", one, "--dtype", "fp32", *STAND_IN, "--split", "layer", "--tensor-split", "3,1"
    )
    assert ran.code == 0 and ran.out == plain.out
    assert "limited: layers 0 to 2" in ran.err and "cpu: layer 3" in ran.err


def test_a_split_fills_the_device_before_the_host(needs: dict[str, int]) -> None:
    """As many layers as it holds, and no more."""
    plenty = demo_on("a", split="layer", memory_limit=needs["all"] * 2)
    assert [str(p) for p in plenty.loaded.layers] == ["a: layers 0 to 2, encoder", "cpu: layer 3"]
    tight = demo_on("a", split="layer", memory_limit=int(needs["all"] * 0.7))
    assert tight.loaded.layers[0].last < 2


@pytest.mark.parametrize(
    ("names", "chosen", "reported"),
    [
        ((), {"split": "layer"}, "the CPU alone, expected several devices"),
        (("a", "b"), {"split": "layer", "tensor_split": "1,1,1"}, "found 3 shares, expected 2"),
        ("abcde", {"split": "layer"}, "4 layers for 5 devices"),
        (("a", "b"), {"split": "layer", "tp": 2}, "split layer: found with tp"),
        (("a", "b"), {"fit": True, "no_kv_offload": True}, "fit: found with no_kv_offload"),
        (("a", "b"), {"split": "row"}, "split: found 'row', expected one of none, layer"),
        (("a", "b"), {"split": "layer", "tensor_split": "1,-1"}, "positive numbers"),
    ],
)
def test_refusals(names: Any, chosen: dict[str, Any], reported: str) -> None:
    with pytest.raises(OptionError, match=reported):
        demo_on(*names, **chosen)


@pytest.mark.parametrize("device", ["cuda:0,cuda:0", "cpu,tpu", "cuda:0,", "cuda:99999"])
def test_devices_that_are_none(device: str) -> None:
    with pytest.raises(OptionError, match="device"):
        several_backends(device)
