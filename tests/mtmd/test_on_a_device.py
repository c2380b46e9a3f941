"""The demo model on the device that `pytest --device` asks for answers as the ops' references do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from requested_device import RequestedDevice

from mtmd.kernels.backends import Reference
from mtmd.model import Model
from mtmd.options.load import LoadOptions
from mtmd.prompt.conversation import user_message

QUESTIONS = ("How many shapes are there?", "Describe the image.")


@pytest.fixture(scope="module")
def there(demo: Model, requested_device: RequestedDevice) -> Iterator[Model]:
    options = LoadOptions(device=requested_device.name, dtype="fp32")
    with Model(demo.checkpoint, options) as model:
        yield model


@pytest.fixture(scope="module")
def expected(demo: Model) -> Iterator[Model]:
    with Model(demo.checkpoint, LoadOptions(dtype="fp32"), [Reference()]) as model:
        yield model


def test_the_demo_model_answers_as_its_references(
    there: Model, expected: Model, world: dict[int, Path], requested_device: RequestedDevice
) -> None:
    """One after the other, then together. Where steps are recorded they are from the third on."""
    count, describe = QUESTIONS
    pictures = list(world.values())
    requested = [*((picture, count) for picture in pictures), (pictures[-1], describe)]
    right = [expected.answer(*one).text for one in requested]
    assert len(set(right)) == len(requested), "the answers say little of the pictures"
    assert [there.answer(*one).text for one in requested] == right
    assert [a.text for a in there.answers(pictures, count)] == right[:-1]
    kind = requested_device.name.partition(":")[0]
    assert {b.device.type for b in there.backends[:1]} == {kind}
    assert f"on {kind}" in str(there.warmup_report)


def test_embeddings_are_those_of_the_references(there: Model, expected: Model, one: Path) -> None:
    spans = [
        next(
            s.embeddings
            for s in m.spans([user_message(one, QUESTIONS[0])])
            if s.embeddings is not None
        )
        for m in (there, expected)
    ]
    actual, right = (t.cpu().double() for t in spans)
    assert float((actual - right).square().sum() / right.square().sum()) <= 1e-8
    assert torch.isfinite(actual).all()
