"""Memory decides before anything runs: pictures are shrunk, put off or refused with the numbers,
batches made smaller; nothing hangs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from qwen2_vl import qwen2_vl
from stand_in import StandIn
from torch.profiler import ProfilerActivity, profile

from mtmd.base.errors import DeviceMemoryError, OptionError
from mtmd.base.text import mib
from mtmd.checkpoint.open import open_checkpoint
from mtmd.clip.image.decode import Picture, open_picture
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.token_budget import Budget
from mtmd.events import Answer, Finished
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.plan.graph_replay import recordings_bytes
from mtmd.kernels.plan.scheduler import Plan
from mtmd.loaded import memory_admission as module
from mtmd.loaded.fitting import needed_memory
from mtmd.loaded.memory_admission import Admission
from mtmd.loaded.predicted_memory import predicted_bytes
from mtmd.loading import load
from mtmd.model import Model
from mtmd.options.load import LoadOptions
from mtmd.prompt.bridge import Bridge
from mtmd.prompt.conversation import user_message
from mtmd.service.encode_queue import EncodeQueue, Job
from mtmd.service.service import Service, Ticket

COUNT = "How many shapes are there?"
NOTE = re.compile(
    r"shrunk from (\d+) to (\d+) tokens: encoding it as it is needs ([\d.]+ [MK]iB), ([\d.]+ [MK]iB) are free"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that shows a picture in 2 to 64 tokens, as its size asks for."""
    result = tmp_path_factory.mktemp("dynamic")
    qwen2_vl(result, pixels=(28 * 28 * 2, 28 * 28 * 64))
    return result


@pytest.fixture(scope="module")
def plenty(folder: Path) -> Iterator[Model]:
    result = dynamic(folder)
    yield result
    result.close()


@pytest.fixture
def service() -> Iterator[Service]:
    result = load(device="cpu").service
    yield result
    result.close()


def dynamic(folder: Path, **chosen: Any) -> Model:
    return load(folder, device="cpu", context=256, parallel=2, **chosen)


def noise(seed: int = 0, height: int = 280, width: int = 336) -> np.ndarray:
    """By default 12 x 10 cells of 28 pixels: more than 64 tokens."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def needs(plan: Plan) -> int:
    return plan.compute_bytes["cpu"] + plan.compute_bytes["cpu"] // 8


def tile_needs(model: Model, height: int, width: int, batch: int = 1) -> int:
    assert model.encoder
    return needs(model.encoder.plan(batch, (3, height, width)))


def prepared(model: Model, pixels: np.ndarray, tokens: int) -> ImagePlan:
    assert model.encoder
    return model.encoder.family.resolution.prepare(pixels, Budget(max_tokens=tokens))


def limit_for(model: Model, size: int) -> int:
    """The memory limit that leaves `size` bytes for encoding, beside a step of the decoder."""
    runner, encoder = model.runner, model.encoder
    assert encoder
    plans = (
        runner.plan(runner.sizes()["prefill"]),
        encoder.plan(1, encoder.family.resolution.tile_type().shape),
    )
    weights = sum(plan.weight_bytes["cpu"] for plan in plans)
    room = size + needs(runner.plan(runner.sizes()["decode"]))
    return weights + runner.cache_bytes()["cpu"] + room * 8 // 7 + 1


def answer(ticket: Ticket) -> Answer:
    *_, last = ticket
    assert isinstance(last, Finished)
    return last.answer


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """As if so many bytes were free at the moment, and nothing was known of before."""
    monkeypatch.setattr(module, "SEEN_MAX_S", -1.0)
    monkeypatch.setattr(Admission, "free_now", lambda _: {"cpu": size})


def queued(model: Model, *pictures: Picture) -> tuple[EncodeQueue, list[Job]]:
    """In a queue that knows none of them."""
    bridge = Bridge(model.encoder, model.checkpoint.tokenizer, model.loaded.admission)
    queue = EncodeQueue(bridge)
    return queue, [queue.add(p) for p in bridge.prepare(pictures)]


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (1000, 1000),
        ("1000B", 1000),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("500MB", 500_000_000),
        ("1.5Gi", 3 << 29),
        ("64k", 64_000),
        ("2TiB", 2 << 40),
        (np.int64(7), 7),
        (None, None),
    ],
)
def test_sizes(given: Any, size: int | None) -> None:
    assert LoadOptions(memory_limit=given).memory_limit == size


@pytest.mark.parametrize(
    "given",
    [
        "",
        "8 apples",
        "-1",
        "GiB",
        "1e9",
        0,
        -5,
        1.5,
        True,
        "0",
        "0.1",
        "9999999TiB",
        "8GiB2",
        [],
        "٣GiB",
    ],
)
def test_what_is_no_size(given: Any) -> None:
    with pytest.raises(OptionError, match=r"memory_limit: found .* expected"):
        LoadOptions(memory_limit=given)


def test_a_picture_is_shrunk_to_what_fits(folder: Path, plenty: Model) -> None:
    """To the most tokens that fit, said with the numbers, the same for counting, asking, and asking
    again.
    """
    whole = plenty.prompts.bridge.prepare([open_picture(noise())])[0]
    assert whole.plan.shrunk_from is None and whole.receipt.notes == ()
    needed, room = (
        needs(plenty.encoder.plan(1, whole.plan.tiles[0].shape)),
        tile_needs(plenty, 168, 196),
    )  # type: ignore[union-attr]
    model = dynamic(folder, memory_limit=limit_for(plenty, room))
    try:
        requested = [user_message(noise(), "What is this?")]
        result = answer(model.service.submit(requested, max_tokens=4)).receipt.images[0]
        match = NOTE.fullmatch(result.notes[-1])
        assert match and len(result.notes) == 1
        assert (int(match[1]), int(match[2])) == (whole.plan.tokens, result.tokens) and match[
            3
        ] == mib(needed)
        assert (
            result.tokens < whole.plan.tokens
            and tile_needs(model, *reversed(result.processed_size)) <= room < needed
        )
        for budget in range(result.tokens + 1, whole.plan.tokens):
            more = prepared(plenty, noise(), budget)
            assert (
                more.tokens <= result.tokens or tile_needs(plenty, *reversed(more.sizes[0])) > room
            )
        assert model.service.count(requested).image_tokens == (result.tokens,)
        again = answer(model.service.submit(requested, max_tokens=4)).receipt.images[0]
        assert again.cached and (again.tokens, again.notes) == (result.tokens, result.notes)
        small = answer(
            model.service.submit([user_message(noise(1, 84, 84), "What is this?")], max_tokens=1)
        ).receipt.images[0]
        assert small.notes == () and small.tokens == 9
        stats = model.service.stats()
        assert (stats.images, stats.images_shrunk, stats.images_refused) == (3, 2, 0)
    finally:
        model.close()


def test_a_shrunk_picture_is_that_of_a_smaller_budget(folder: Path, plenty: Model) -> None:
    model = dynamic(folder, memory_limit=limit_for(plenty, tile_needs(plenty, 140, 140)))
    shrunk = model.answer(noise(2), max_tokens=8)
    size = shrunk.receipt.images[0].processed_size
    chosen = dynamic(
        folder,
        image_max_tokens=next(
            n for n in range(1, 65) if prepared(plenty, noise(2), n).sizes[0] == size
        ),
    )
    same = chosen.answer(noise(2), max_tokens=8)
    model.close()
    chosen.close()
    assert NOTE.search(shrunk.receipt.images[0].notes[-1]) and not NOTE.search(
        "".join(same.receipt.images[0].notes)
    )
    assert shrunk.output_token_ids == same.output_token_ids


@pytest.mark.parametrize(
    ("room", "chosen"),
    [((84, 112), {}), ((140, 112), {"image_min_tokens": 20})],
    ids=["a quarter", "asked for"],
)
def test_no_smaller_than_the_least(
    folder: Path, plenty: Model, room: tuple[int, int], chosen: dict[str, int]
) -> None:
    size = tile_needs(plenty, *room) - 100
    model = dynamic(folder, memory_limit=limit_for(plenty, size), **chosen)
    with pytest.raises(DeviceMemoryError) as caught:
        model.service.submit([user_message(noise(), "What is this?")])
    message = str(caught.value)
    assert (
        message.startswith("encoding a picture of 336 x 280 pixels needs ")
        and "cannot be shown small enough" in message
    )
    numbers = [
        float(n) * 2 ** (20 if unit == "M" else 10)
        for n, unit in re.findall(r"([\d.]+) ([MK])iB", message)
    ]
    assert len(numbers) == 2 and numbers[0] > numbers[1] and abs(numbers[1] / size - 1) < 0.1
    assert model.service.stats().images_refused == 1 and model.service.stats().requests == 0
    assert answer(
        model.service.submit([{"role": "user", "content": "Hello?"}], max_tokens=3)
    ).output_token_ids
    model.close()


def test_a_picture_of_fixed_size_is_refused(demo: Model, one: Path, mtmd: Any) -> None:
    assert demo.encoder
    size = tile_needs(demo, *demo.encoder.family.resolution.tile_type().shape[1:])
    fits, short = (
        load(device="cpu", context=1024, parallel=1, memory_limit=n) for n in _around(size)
    )
    assert fits.describe(one, COUNT) == "One."
    with pytest.raises(
        DeviceMemoryError,
        match=r"needs .*B, .*B are free beside weights and caches, and it cannot be shown small enough",
    ):
        short.describe(one, COUNT)
    fits.close()
    short.close()
    assert short.encoder and not short.runner.residency.bytes, "nothing was read for it"
    line = mtmd("describe", one, "--device", "cpu", "--memory-limit", "2MiB").refused()
    assert re.search(
        r"--memory-limit: found 2\.00 MiB, expected at least [\d.]+ MiB for the weights, a full cache and a step",
        line,
    )


def _around(size: int) -> tuple[int, int]:
    model = load(device="cpu", context=1024, parallel=1)
    return limit_for(model, size), limit_for(model, size * 9 // 10)


def test_the_least_limit_that_is_told_will_do(folder: Path) -> None:
    with pytest.raises(OptionError) as caught:
        dynamic(folder, memory_limit="1KiB")
    minimum = float(re.findall(r"at least ([\d.]+) MiB", str(caught.value))[0])
    assert dynamic(folder, memory_limit=f"{minimum + 0.01:.2f}MiB").loaded.admission.room["cpu"] > 0
    with pytest.raises(OptionError, match="memory_limit"):
        dynamic(folder, memory_limit=f"{minimum - 0.1:.2f}MiB")


def test_a_limit_is_no_more_than_there_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needed_memory, "free_bytes", lambda _: 160 << 20)
    for requested, limit in ((None, 150 << 20), ("1TiB", 150 << 20), ("100MiB", 100 << 20)):
        assert dynamic(folder, memory_limit=requested).loaded.admission.limits == {"cpu": limit}
    with_all, alone = dynamic(folder, memory_limit="100MiB"), dynamic(folder)
    cache = alone.runner.cache_bytes()["cpu"]
    used = [
        m.loaded.admission.limits["cpu"] - m.loaded.admission._alongside_weights["cpu"]
        for m in (with_all, alone)
    ]
    assert used[0] - used[1] == cache - cache // 2, (
        "without a limit, memory of the second sequence's cache is not set aside"
    )


def test_where_nobody_knows_everything_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in (module, needed_memory):
        monkeypatch.setattr(one, "free_bytes", lambda _: None)
    model = dynamic(folder)
    admission, encoder = model.loaded.admission, model.encoder
    assert encoder and admission.limits == {}
    assert admission.may_encode(encoder, [(3, 28 * 80, 28 * 80)] * 4)
    assert model.answer(noise(), max_tokens=2).receipt.images[0].notes == ()
    model.close()


def test_weights_not_yet_read_are_not_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in (module, needed_memory):
        monkeypatch.setattr(one, "free_bytes", lambda _: 1 << 30)
    model = dynamic(folder)
    before = model.loaded.admission.free_now()["cpu"]
    model.answer(noise(), max_tokens=1)
    model.close()
    assert (1 << 30) - before == model.runner.residency.bytes[
        "cpu"
    ] > 0 and model.loaded.admission.free_now() == {"cpu": 1 << 30}


def test_encoded_pictures_are_cached_within_the_limit(folder: Path, plenty: Model) -> None:
    model = dynamic(folder, memory_limit=limit_for(plenty, tile_needs(plenty, 224, 224)))
    room = model.loaded.admission.room["cpu"]
    assert (
        model.loaded.admission.embedding_cache_bytes
        == (room + model.loaded.admission.embedding_cache_bytes) // 8
        < 1 << 28
    )
    for seed in range(model.loaded.admission.embedding_cache_bytes // (9 * 72 * 4) + 5):
        prepared = model.prompts.bridge.prepare([open_picture(noise(seed, 84, 84))])[0]
        model.prompts.bridge.cache.put(prepared.key, prepared.plan, torch.zeros(9, 72))
    assert (
        0
        <= model.loaded.admission.embedding_cache_bytes - model.prompts.bridge.cache.stored
        < 9 * 72 * 4
    )


def test_a_prediction_allocates_nothing(folder: Path) -> None:
    """Of a batch that would take gigabytes."""
    model = dynamic(folder)
    assert model.encoder
    shape = (3, 28 * 160, 28 * 160)
    model.encoder.plan(4, (3, 56, 56)).compute_bytes  # noqa: B018 (what is made once is not counted)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model.loaded.admission.may_encode(model.encoder, [shape] * 4)
        predicted = model.encoder.plan(4, shape).compute_bytes["cpu"]
    taken = sum(
        max(e.nbytes(), 0) for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"
    )
    assert predicted > 1 << 30 and taken < 1 << 16 and not model.runner.residency.bytes


def test_a_batch_is_reduced(plenty: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four equal tiles, memory for one to four of them."""
    step = needs(plenty.runner.plan(plenty.runner.sizes()["decode"]))
    expected = [p.clone() for p in (queue_out(plenty, 4))]
    for maximum, batches in ((4, 1), (3, 2), (2, 2), (1, 4)):
        free(monkeypatch, tile_needs(plenty, 112, 112, maximum) + step)
        queue, jobs = queued(plenty, *(open_picture(noise(i, 112, 112)) for i in range(4)))
        for _ in range(batches):
            queue.step(None)
        assert (queue.batches, queue.tiles, queue.busy) == (batches, 4, False)
        assert all(
            j.embeddings is not None and torch.allclose(j.embeddings, e, atol=1e-5)
            for j, e in zip(jobs, expected, strict=True)
        )


def queue_out(model: Model, count: int) -> list[torch.Tensor]:
    queue, jobs = queued(model, *(open_picture(noise(i, 112, 112)) for i in range(count)))
    while queue.busy:
        queue.step(None)
    return [j.embeddings for j in jobs if j.embeddings is not None]


def test_who_does_not_fit_now_waits_and_others_go_ahead(
    plenty: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = needs(plenty.runner.plan(plenty.runner.sizes()["decode"]))
    queue, (large, small) = queued(
        plenty, open_picture(noise(0, 196, 196)), open_picture(noise(0, 84, 84))
    )
    free(monkeypatch, tile_needs(plenty, 84, 84) + step)
    assert queue.step(None) == [small] and small.embeddings is not None
    assert (
        queue.step(None) == [] and queue.is_short and queue.busy and large.short_since is not None
    )
    free(monkeypatch, tile_needs(plenty, 196, 196) + step)
    assert (
        queue.step(None) == [large]
        and large.embeddings is not None
        and large.short_since is None
        and not queue.busy
    )


def test_who_waits_in_vain_is_told_the_numbers(
    plenty: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, (job, other) = queued(
        plenty, open_picture(noise(0, 196, 196)), open_picture(noise(1, 84, 84))
    )
    free(monkeypatch, 5 << 10)
    assert queue.step(None) == [] and job.error is None
    monkeypatch.setattr("mtmd.service.encode_queue.WAIT_S", 0.0)
    assert queue.step(None) == [job, other] and not queue.busy
    with pytest.raises(
        DeviceMemoryError,
        match=rf"needs {mib(tile_needs(plenty, 196, 196))}, .* are free at the moment",
    ):
        raise job.error or AssertionError("no error")


def test_no_memory_is_held_for_an_encode_that_was_given_up(plenty: Model) -> None:
    queue, (job,) = queued(plenty, open_picture(noise(0, 196, 196)))
    queue.step(0.0)
    assert queue._running is not None
    next(queue._running)
    assert plenty.loaded.admission.encoding is not None
    queue.leave(job)
    assert plenty.loaded.admission.encoding is None and not queue.busy


def test_the_decoder_leaves_what_an_encode_was_promised(
    plenty: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission, encoder = plenty.loaded.admission, plenty.encoder
    assert encoder
    plan, alongside = (
        plenty.runner.plan(plenty.runner.sizes()["prefill"]),
        encoder.plan(1, (3, 196, 196)),
    )
    monkeypatch.setattr(admission, "room", {"cpu": needs(plan) + needs(alongside) - 1})
    assert admission.may_decode(plan)
    monkeypatch.setattr(admission, "encoding", alongside)
    assert not admission.may_decode(plan)
    monkeypatch.setattr(admission, "room", {"cpu": needs(plan) + needs(alongside)})
    assert admission.may_decode(plan)
    free(monkeypatch, needs(plan) - 1)
    assert not admission.may_decode(plan)


def test_the_system_is_asked_the_more_rarely_the_less_a_step_takes(
    plenty: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission, plan = plenty.loaded.admission, plenty.runner.plan(plenty.runner.sizes()["decode"])
    need, now, requested = plan.rough_bytes["cpu"] * 9 // 8, 1000.0, list[float]()

    def free_now() -> dict[str, int]:
        requested.append(now)
        return {"cpu": free_bytes}

    monkeypatch.setattr(admission, "room", {"cpu": 1 << 40})
    monkeypatch.setattr(admission, "free_now", free_now)
    monkeypatch.setattr(admission, "_seen", ({}, 0.0))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    for parts, age_s in ((2, 0.0), (8, 0.2), (80, 2.0), (8000, 10.0)):
        free_bytes = (need + 1) * parts
        now += 100.0
        for _ in range(3):
            assert admission.may_decode(plan)
        if age_s:
            now += age_s * 0.99
            assert admission.may_decode(plan) and requested.count(now) == 0, parts
            now += age_s * 0.02
        assert admission.may_decode(plan) and requested[-1] == now, parts
    free_bytes = 0
    now += 100.0
    assert not admission.may_decode(plan)


def test_a_service_waits_for_memory_and_answers_others(
    service: Service, demo: Model, world: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(service.submit([user_message(world[1], COUNT)]))  # so that weights are there
    with monkeypatch.context() as short:
        free(short, 0)
        ticket = service.submit([user_message(world[2], COUNT)])
        text = answer(service.submit([{"role": "user", "content": "Hello"}], max_tokens=5))
        assert (
            len(text.output_token_ids) <= 5
            and service.stats().encode_batches == 1
            and service.stats().encoding == 1
        )
    assert answer(ticket).text == demo.describe(world[2], COUNT)
    free(monkeypatch, 0)
    monkeypatch.setattr("mtmd.service.encode_queue.WAIT_S", 0.0)
    with pytest.raises(DeviceMemoryError, match="are free at the moment"):
        answer(service.submit([user_message(world[3], COUNT)]))
    stats = service.stats()
    assert (stats.images_refused, stats.failed, stats.encoding) == (1, 1, 0)


def test_a_waiting_picture_can_be_cancelled(
    service: Service, world: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 0)
    ticket = service.submit([user_message(world[2], COUNT)])
    deadline = time.monotonic() + 20
    while service.stats().encoding == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    ticket.cancel()
    assert answer(ticket).receipt.finish == "cancelled" and service.stats().encoding == 0


def test_what_recorded_runs_keep_is_kept_from_all_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a limit, of what is free at any time, and in what is told: of both queues."""
    for one in (module, needed_memory):
        monkeypatch.setattr(one, "free_bytes", lambda _: 1 << 30)
    checkpoint, reported = open_checkpoint(folder), []
    for device in (StandIn(), StandIn(records=False)):
        chosen = LoadOptions(dtype="fp32", context=256, parallel=2)
        with Model(checkpoint, chosen, [device, Cpu(), Reference()]) as model:
            admission = model.loaded.admission
            room = admission.room["stand-in"] + admission.embedding_cache_bytes
            predicted = predicted_bytes(model.loaded)["stand-in"]
            reported.append((room, admission.free_now()["stand-in"], predicted))
            needed = admission.needed
            encoder = recordings_bytes((plan, 1) for plan in needed.encoder.largest_plans())  # type: ignore
            result = needed.recordings()
            assert (result == {}) is not device.records
            if device.records:
                step, prefill = needed.plans(256)
                decoder = recordings_bytes([(step, 16), (prefill, 1)])["stand-in"]
                assert result == {"stand-in": decoder + encoder["stand-in"]}
                copied = [sum(o.type.bytes for o in p.copied_out) for p in (step, prefill)]
                saved = result["stand-in"]
    (room, free, predicted), plain = reported[0], reported[1]
    assert plain[0] - room == plain[1] - free == saved > max(copied) > 0
    assert predicted - plain[2] >= saved
