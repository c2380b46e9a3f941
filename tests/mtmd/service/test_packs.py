"""Small pictures of unequal sizes, of several clients, in one run of the tower."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stand_in import StandIn, StandInStream

from mtmd.base.errors import DeviceMemoryError
from mtmd.bench.shapes import random_checkpoint
from mtmd.clip.batch_shapes import foreseen_packs
from mtmd.clip.image.decode import Picture, open_picture
from mtmd.clip.warmup import encoder_graphs
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.backends.backend import Backend
from mtmd.model import Model
from mtmd.options.load import LoadOptions
from mtmd.prompt.bridge import Bridge
from mtmd.service.encode_queue import EncodeQueue, Job

CONFIG = {
    "model_type": "qwen3_vl",
    "text_config": {
        "model_type": "qwen3_vl_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 600,
        "max_position_embeddings": 512,
        "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default"},
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "deepstack_visual_indexes": [0],
    },
}
IMAGE = {"patch_size": 16, "size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 64}}
SIZES = ((64, 96), (96, 96), (160, 64), (128, 160))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = tmp_path_factory.mktemp("packs")
    (result / "config.json").write_text(json.dumps(CONFIG))
    (result / "preprocessor_config.json").write_text(json.dumps(IMAGE))
    return result


def loaded(folder: Path, *backends: Backend, **chosen: Any) -> Model:
    options = LoadOptions(device="cpu", dtype="fp32", context=256, **chosen)
    checkpoint = random_checkpoint(str(folder), "F32")
    return Model(checkpoint, options, backends and [*backends, Reference()])


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    result = loaded(folder)
    yield result
    result.close()


def noise(seed: int, size: tuple[int, int]) -> Picture:
    return open_picture(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def queued(model: Model, *owners: str) -> tuple[EncodeQueue, list[Job]]:
    """A picture of each owner, of sizes in turn, in a queue that knows none of them."""
    bridge = Bridge(model.encoder, model.checkpoint.tokenizer, model.loaded.admission)
    pictures = [noise(i, SIZES[i % len(SIZES)]) for i in range(len(owners))]
    queue = EncodeQueue(bridge)
    prepared = bridge.prepare(pictures)
    return queue, [queue.add(p, owner) for p, owner in zip(prepared, owners, strict=True)]


def each_alone(model: Model, jobs: list[Job]) -> list[torch.Tensor]:
    assert model.encoder is not None
    return [model.encoder.encode(job.prepared.plan.tiles)[0] for job in jobs]


def same(jobs: list[Job], expected: list[torch.Tensor]) -> None:
    for job, alone in zip(jobs, expected, strict=True):
        assert job.embeddings is not None
        torch.testing.assert_close(job.embeddings, alone, rtol=1e-4, atol=1e-5)


def test_several_clients_pictures_in_one_run(model: Model) -> None:
    queue, jobs = queued(model, "a", "b", "c", "d")
    assert set(queue.step(None)) == set(jobs) and not queue.busy
    assert (queue.batches, queue.tiles, queue.packed) == (1, 4, 4)
    same(jobs, each_alone(model, jobs))
    shares = [job.encode_ms / sum(j.encode_ms for j in jobs) for job in jobs]
    tokens = [job.prepared.plan.tokens for job in jobs]
    assert shares == pytest.approx([t / sum(tokens) for t in tokens]), "by how large they are"


def test_one_that_fails_fails_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, jobs = queued(model, "a", "b", "c")
    encoder, bad = model.encoder, jobs[1].prepared.plan.tiles[0]
    assert encoder is not None
    expected, steps, runs = each_alone(model, jobs), encoder.steps, []

    def failing(tiles: Any, **how: Any) -> Any:
        runs.append((len(tiles), how["alone"]))
        if any(t is bad for t in tiles):
            raise DeviceMemoryError("no memory for this picture")
        return (yield from steps(tiles, **how))

    monkeypatch.setattr(encoder, "steps", failing)
    while queue.busy:
        queue.step(None)
    assert runs == [(3, False), (1, True), (1, True), (1, True)]
    assert isinstance(jobs[1].error, DeviceMemoryError) and jobs[1].embeddings is None
    same(jobs[::2], expected[::2])


def test_many_of_one_client_leave_room_for_another(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtmd.clip.packing.MAX_ON_HOST", 4 * 30)  # 30 tokens
    queue, jobs = queued(model, "a", "a", "a", "a", "b")
    assert [job.prepared.plan.tokens for job in jobs] == [6, 9, 10, 20, 6]
    runs = []
    while queue.busy:
        runs.append({jobs.index(job) for job in queue.step(None)})
    assert runs == [{0, 4, 1}, {2, 3}]


def test_as_many_as_there_is_memory_for(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, jobs = queued(model, "a", "b", "c", "d")
    requested = []

    def may(_: Any, shapes: Any, alone: bool = False) -> bool:  # noqa: ARG001
        requested.append(len(shapes))
        return len(shapes) <= 2

    monkeypatch.setattr(queue.admission, "may_encode", may)
    assert set(queue.step(None)) == set(jobs[:2])
    assert requested == [4, 3, 2] and queue.packed == 2
    queue.step(None)
    assert not queue.busy and queue.packed == 4


def test_equal_pictures_are_a_batch_as_ever(model: Model) -> None:
    bridge = Bridge(model.encoder, model.checkpoint.tokenizer, model.loaded.admission)
    queue = EncodeQueue(bridge)
    jobs = [queue.add(p) for p in bridge.prepare([noise(i, SIZES[0]) for i in range(2)])]
    assert queue.step(None) == jobs and (queue.tiles, queue.packed) == (2, 0)


def test_a_device_that_is_launched_plans_no_new_size(folder: Path, model: Model) -> None:
    """Pictures of ever new sizes, alone or not, find a plan that is there, and are replayed."""
    device = StandIn()
    assert device.recorder is not None
    few = loaded(folder, device, Cpu())
    encoder = few.encoder
    assert encoder is not None and encoder.why_no_packs is None
    assert foreseen_packs(encoder) == encoder.strip.sizes  # type: ignore[union-attr]
    for tokens in foreseen_packs(encoder):
        encoder.pack_plan(tokens)
    assert few.loaded.admission.needed.recordings()["stand-in"] > 0
    planned, own = encoder._pack_plan.cache_info().misses, encoder._plan.cache_info().misses
    for count in (1, 1, 2, 3, 4):
        queue, jobs = queued(few, *"abcd"[4 - count :])
        queue.step(None)
        assert queue.batches == 1 and not queue.busy
        same(jobs, each_alone(model, jobs))  # of the CPU
    assert encoder._pack_plan.cache_info().misses == planned
    assert encoder._plan.cache_info().misses == own
    assert device.recorder.replays == 2, "of four runs of one length, after two"
    few.close()


def test_bytes_become_numbers_on_the_device(folder: Path, model: Model) -> None:
    side = StandInStream()
    alongside = loaded(folder, StandIn(records=False, side=side), Cpu())
    bridge = Bridge(alongside.encoder, alongside.checkpoint.tokenizer)
    preprocessing = alongside.encoder and alongside.encoder.preprocessing
    assert preprocessing is not None and preprocessing.why_host is None
    queue, pictures = EncodeQueue(bridge), [noise(i, size) for i, size in enumerate(SIZES)]
    jobs = [queue.add(p) for p in bridge.prepare(pictures)]
    assert all(job.prepared.plan.tiles[0].dtype == np.uint8 for job in jobs)
    side.events.clear()
    while queue.busy:
        queue.step(None)
    assert queue.batches == 1 and side.events.count("uploaded") == 1
    _, expected = queued(model, *"abcd")
    same(jobs, each_alone(model, expected))
    alongside.close()


def test_where_there_are_none(folder: Path, demo: Model, model: Model) -> None:
    off = loaded(folder, flash_attn="off")
    assert off.encoder is not None and demo.encoder is not None and model.encoder is not None
    assert "without flash attention" in (off.encoder.why_no_packs or "")
    assert "equal size" in (demo.encoder.why_no_packs or "")
    queue, jobs = queued(off, "a", "b")
    assert queue.step(None) == jobs[:1] and queue.packed == 0
    assert [g.label for g in encoder_graphs(model.encoder)][-1] == "pack"
    assert "pack" not in [g.label for g in encoder_graphs(off.encoder)]
    assert foreseen_packs(model.encoder) == (), "on a CPU they are of any length"
    off.close()
