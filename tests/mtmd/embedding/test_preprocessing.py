"""Pictures of a dual encoder prepared on a device, here a stand-in: the host's vectors, and where it
was done, told.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dual_encoders import clip
from PIL import Image
from stand_in import StandIn, StandInStream

from mtmd.base.errors import DeviceMemoryError, OptionError
from mtmd.clip.image.device_resize import TAKEN_BYTES
from mtmd.embedding import embedder as module
from mtmd.embedding.dual_checkpoint import open_dual
from mtmd.embedding.embedder import Embedder
from mtmd.kernels.backends import Cpu, Reference
from mtmd.options.load import LoadOptions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("clip")
    clip(made)
    return made


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for width, height in ((50, 30), (32, 32), (41, 90), (64, 20), (33, 33))
    ]


def alongside(folder: Path, **options: Any) -> tuple[Embedder, StandIn]:
    device = StandIn(records=False, fuses=False, side=StandInStream())
    chosen = LoadOptions(dtype="fp32", **options)
    return Embedder(open_dual(folder), chosen, [device, Cpu(), Reference()]), device


def test_vectors_are_those_of_the_host_and_the_receipt_says_where(
    folder: Path, pictures: list[Image.Image]
) -> None:
    there, device = alongside(folder)
    actual, receipt = vars(there.embeddings(pictures, "a cat")).values()
    host, other = alongside(folder, preprocess="host")
    expected, reported = vars(host.embeddings(pictures, "a cat")).values()
    assert np.array_equal(actual, expected)
    assert (
        receipt.preprocessed == "4 of 5 resized, normalised on stand-in"
    )  # one is as it should be
    assert " ms (4 of 5 resized, normalised on stand-in), encode " in str(receipt)
    assert receipt.asdict()["preprocessed"] == receipt.preprocessed
    assert reported.preprocessed == "on the host: asked for"
    assert (
        "uploaded" in device.sides["resize"].events and "uploaded" in device.sides["encode"].events
    )
    assert "uploaded" not in other.sides["resize"].events
    texts = there.embeddings(texts="a cat").receipt
    assert texts.preprocessed == "" and "encode" in str(texts)


def test_the_report_compares_both_ways(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = alongside(folder)
    assert "preprocessing: on stand-in (requested: auto" in str(model.warmup_report)
    facts = model.warm_up().preprocessing
    assert facts is not None and facts.why_host is None and facts.device_ms is not None
    monkeypatch.setattr(model.images, "numbers", lambda plan: [t * 0 for t in plan.numbers()])
    text = str(model.warm_up())
    assert "preprocessing: on the HOST" in text and "the device's tiles are not the host's" in text
    plain = Embedder(open_dual(folder), LoadOptions(dtype="fp32"), [Reference()])
    assert plain.warmup_report.preprocessing is None
    picture = Image.new("RGB", (40, 30))
    assert torch.equal(*(torch.from_numpy(m.embed(picture)) for m in (model, plain)))


def test_what_pictures_are_resized_in_is_part_of_what_is_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda _: TAKEN_BYTES)
    alongside(folder, preprocess="host")
    with pytest.raises(DeviceMemoryError, match=r"has 120\.00 MiB free; use --preprocess host"):
        alongside(folder)


def test_what_recorded_runs_keep_is_part_of_what_is_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of images and of texts."""
    refused = []
    monkeypatch.setattr(module, "free_bytes", lambda _: 1)
    for records in (False, True):
        device = StandIn(records=records, fuses=False)
        with pytest.raises(DeviceMemoryError, match="needs") as reported:
            Embedder(open_dual(folder), LoadOptions(dtype="fp32"), [device, Cpu(), Reference()])
        refused.append(str(reported.value))
    plain, more = (float(re.search(r"needs ([\d.]+) MiB", r)[1]) for r in refused)  # type: ignore
    assert more > 1.5 * plain


def test_the_command_hands_it_on(mtmd: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []

    def made(_: object, chosen: LoadOptions, **__: object) -> None:
        requested.append(chosen.preprocess)
        raise OptionError("enough")

    monkeypatch.setattr(module, "Embedder", made)
    for more in ((), ("--preprocess", "host")):
        assert "enough" in mtmd("embed", "--query", "a cat", "a.png", "-m", folder, *more).refused()
    assert requested == ["auto", "host"]
