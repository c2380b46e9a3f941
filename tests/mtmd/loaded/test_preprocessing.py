"""Pictures prepared and encoded beside the decoder, on a stand-in for a GPU: the same tiles and
answers to the bit, nothing between two queues out of order, and where it was done, told.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from stand_in import StandIn, StandInStream

from mtmd.clip.encoder import BATCH, Encoder
from mtmd.clip.image import device_resize as module
from mtmd.clip.image.device_normalize import normalized, tables
from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD, Normalize, fused
from mtmd.clip.preprocessing import Preprocessing
from mtmd.clip.resolution.closest_grid import StretchedTiling
from mtmd.clip.resolution.fixed_square import FixedSquare
from mtmd.clip.resolution.longest_edge import LongestEdgeTiling
from mtmd.clip.resolution.smart_resize import DynamicResolution
from mtmd.clip.resolution.whole_or_tiles import AdaptiveTiling
from mtmd.clip.token_budget import Budget
from mtmd.clip.warmup import preprocessing_facts
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.loaded.predicted_memory import predicted_bytes
from mtmd.loaded.report import preprocessed_where
from mtmd.model import Model
from mtmd.options.load import LoadOptions
from mtmd.prompt.bridge import Prepared
from mtmd.prompt.conversation import user_message
from mtmd.receipt import ImageReceipt
from mtmd.service.encode_queue import EncodeQueue

NORMALIZE = Normalize(CLIP_MEAN, CLIP_STD, 1 / 255)


def picture(width=61, height=47, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def square(**changes):
    given = {"side": 28, "tokens": 4, "normalize": NORMALIZE, "resample": "bicubic", "edge": 28}
    return FixedSquare(**{**given, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", [NORMALIZE, fused(NORMALIZE)], ids=["plain", "fused"])
def test_every_byte_becomes_the_hosts_number(way, dtype):
    every = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    tiles = np.stack([np.concatenate((every, 255 - every, every[:, ::-1])) for _ in range(2)])
    both = np.concatenate((tiles, tiles), 1)  # two frames
    other = Normalize((0.5,) * 3, (0.5,) * 3, 1 / 255)
    result = normalized(torch.from_numpy(both), tables([way, other], dtype))
    for line, tile, by in zip(result, both, (way, other), strict=True):
        assert torch.equal(line, torch.from_numpy(by.planes(tile)).to(dtype))


WAYS = {
    "square": square(),
    "on a ground": square(ground=(1, 2, 3), resample="lanczos"),
    "cut in the middle": square(stretched=False, saved=14, resample="bilinear"),
    "any size": DynamicResolution(14, 2, 28 * 28, 28 * 28 * 4, NORMALIZE, "bicubic"),
    "longest edge": LongestEdgeTiling(28, 4, 56, True, 2, NORMALIZE, "lanczos"),
    "stretched": StretchedTiling(28, 4, 1, 4, fused(NORMALIZE), "box"),
}


@pytest.mark.parametrize("name", WAYS)
def test_tiles_are_the_hosts_to_the_bit(name):
    way, side = WAYS[name], StandInStream()
    ways = Preprocessing(way, side)
    for number, (width, height) in enumerate(((61, 47), (20, 31), (28, 28), (9, 70))):
        pixels = picture(width, height, number)
        expected, plan = way.prepare(pixels), ways.prepare(lambda p=pixels: way.prepare(p))
        assert plan.tiles[0].dtype == np.uint8 and plan.normalize == way.normalize
        for actual, tile in zip(plan.numbers(), expected.tiles, strict=True):
            assert np.array_equal(actual, tile)
        assert (plan.sizes, plan.tokens, plan.notes) == (expected.sizes, expected.tokens, ())
    assert ways.resized_there >= 3 and "uploaded" in side.events


def test_what_torchvision_resizes_stays_on_the_host_and_is_normalised_there():
    way = AdaptiveTiling(14, 2, 1, 4, 2.0, 28, 2, 4, True, fused(NORMALIZE), "bilinear")
    ways = Preprocessing(way, StandInStream())
    plan = ways.prepare(lambda: way.prepare(picture()))
    assert ways.resized_there == 0 and plan.tiles[0].dtype == np.uint8 and not plan.notes
    for result, tile in zip(plan.numbers(), way.prepare(picture()).tiles, strict=True):
        assert np.array_equal(result, tile)


def test_why_the_host_does_it(monkeypatch):
    way, pixels = square(), picture()
    expected = way.prepare(pixels)
    for side, setting, words in (
        (StandInStream(), "host", "asked for"),
        (None, "auto", "the device has no queue beside that of the decoder"),
    ):
        ways = Preprocessing(way, side, setting)
        plan = ways.prepare(lambda: way.prepare(pixels))
        assert ways.why_host == words and plan.normalize is None
        assert np.array_equal(plan.tiles[0], expected.tiles[0])
    monkeypatch.setattr(module, "vertical_first", lambda *_: False)  # as Pillow 12 did
    ways = Preprocessing(way, StandInStream())
    plan = ways.prepare(lambda: way.prepare(pixels))
    (note,) = plan.notes
    assert note.startswith("resized on the host: its result is not Pillow's from ")
    assert np.array_equal(plan.numbers()[0], expected.tiles[0]) and ways.resized_there == 0


def alongside(demo, **options):
    """The demo model's encoder and decoder on a stand-in with a queue for pictures."""
    side = StandInStream()
    backends = [StandIn(records=False, fuses=False, side=side), Cpu(), Reference()]
    chosen = LoadOptions(dtype="fp32", **options)
    return Model(demo.loaded.checkpoint, chosen, backends, name="demo"), side


def test_an_answer_is_the_same_and_says_where(demo, one):
    expected = demo.answer(one, max_tokens=6)
    model, side = alongside(demo)
    with model:
        actual = model.answer(one, max_tokens=6)
        assert actual.text == expected.text
        assert actual.receipt.preprocessed == "on stand-in"
        assert " ms (on stand-in), encode " in str(actual.receipt)
        assert expected.receipt.preprocessed == ""
        again = model.answer(one, max_tokens=1).receipt
        assert again.images[0].cached and again.preprocessed == ""
        assert "uploaded" in model.runner.backends[0].sides["resize"].events
    events = list(dict.fromkeys(side.events))
    assert events == [
        "let first",
        "followed",
        "uploaded",
        "marked",
        "asked",
        "waited",
        "handed over",
    ]
    host, _ = alongside(demo, preprocess="host")
    with host:
        assert host.answer(one, max_tokens=1).receipt.preprocessed == "on the host: asked for"


def test_what_pictures_are_resized_in_is_kept_from_all_else(demo, monkeypatch):
    """Of a limit, and of what is free at any time."""
    monkeypatch.setattr("mtmd.loaded.memory_admission.free_bytes", lambda _: 1 << 30)
    left, free = [], []
    for setting in ("auto", "host"):
        model, _ = alongside(demo, memory_limit=1 << 30, preprocess=setting)
        with model:
            admission = model.loaded.admission
            left.append(admission.room["stand-in"] + admission.embedding_cache_bytes)
            free.append(admission.free_now()["stand-in"])
            assert predicted_bytes(model.loaded)["stand-in"] > module.TAKEN_BYTES * (
                setting == "auto"
            )
    assert left[1] - left[0] == free[1] - free[0] == module.TAKEN_BYTES


def test_a_receipt_tells_what_the_device_did_not_do(demo, monkeypatch):
    model, _ = alongside(demo)
    first, second = picture(120, 90, 1), picture(90, 120, 2)
    monkeypatch.setattr(module, "MAX_BYTES", 3 * 120 * 120 - 1)
    with model:
        reported = model.answer([picture(130, 120), first, second], max_tokens=1).receipt
        assert reported.preprocessed == "2 of 3 resized, normalised on stand-in"
        monkeypatch.setattr(module, "MAX_BYTES", 0)
        reported = model.answer([first, picture(80, 70)], max_tokens=1).receipt
        assert [one.cached for one in reported.images] == [True, False]
        assert reported.preprocessed == "normalised on stand-in"


def test_of_frames_only_the_last_is_done_on_the_device(demo):
    model, _ = alongside(demo)
    plan = prepared(model)
    frames = replace(plan, resized_there=False)
    assert preprocessed_where(model.loaded.encoder, [frames]) == "normalised on stand-in"
    numbers = model.encoder.family.resolution.prepare(picture(120, 90))
    assert preprocessed_where(model.loaded.encoder, [numbers]) == ""
    expected = "1 of 3 resized, 2 of 3 normalised on stand-in"
    assert preprocessed_where(model.loaded.encoder, [plan, frames, numbers]) == expected


def test_what_is_left_to_wait_for_is_told(demo):
    model, side = alongside(demo)
    side.polls = 5
    plan = prepared(model)
    seen = list(model.encoder.steps(plan.tiles[:1], ways=[plan.normalize]))
    assert [w is None for w in seen].count(False) == 5 and len(set(seen[-5:])) == 1
    assert all(w is None for w in seen[:-5]) and "waited" not in side.events


def test_the_decoder_goes_on_while_the_device_encodes(demo):
    """A mark that is not reached is no reason to stay, unless there is nothing else to do."""
    for alone in (False, True):
        model, side = alongside(demo)
        side.polls = 5
        receipt = ImageReceipt((9, 9), (9, 9), 1, 1, "a", False, ())
        queue = EncodeQueue(model.prompts.bridge)
        job = queue.add(Prepared(("a", Budget(), ""), prepared(model), receipt))
        calls = 1
        while not queue.step(60.0, alone):
            calls += 1
        assert job.embeddings is not None and job.encode_ms > 0
        assert (calls, side.events.count("waited")) == ((1, 1) if alone else (6, 0))


def prepared(model):
    ways = model.encoder.preprocessing
    return ways.prepare(lambda: ways.resolution.prepare(picture(120, 90)))


def test_a_batch_may_mix_ways(demo):
    model, _ = alongside(demo)
    encoder = model.encoder
    assert isinstance(encoder, Encoder)
    plan, as_bytes = encoder.family.resolution.prepare(picture(120, 90)), prepared(model)
    (alone,) = encoder.encode(plan.tiles[:1])
    way = as_bytes.normalize
    (there,) = encoder.encode(as_bytes.tiles[:1], way=way)
    mixed = encoder.steps([plan.tiles[0], as_bytes.tiles[0]], ways=[None, way])
    result = None
    try:
        while True:
            next(mixed)
    except StopIteration as done:
        result = done.value
    assert torch.equal(alone, there) and BATCH > 1
    for rows in result:
        torch.testing.assert_close(rows, alone, rtol=1e-5, atol=1e-5)


def test_what_is_to_be_done_on_the_host_is_done_there_whatever_comes(demo):
    """Frames of videos are bytes always, and a picture may be from before the warm-up found out."""
    model, side = alongside(demo)
    encoder, plan = model.encoder, prepared(model)
    (expected,) = encoder.encode(plan.tiles[:1], way=plan.normalize)
    assert "uploaded" in side.events
    encoder.preprocessing.why_host = "the device's tiles are not the host's"
    side.events.clear()
    (actual,) = encoder.encode(plan.tiles[:1], way=plan.normalize)
    assert "uploaded" not in side.events and torch.equal(actual, expected)


def test_the_tables_of_a_way_are_sent_once(demo, monkeypatch):
    made = []
    monkeypatch.setattr(
        "mtmd.clip.encoder.tables", lambda ways, dtype: made.append(ways) or tables(ways, dtype)
    )
    model, _ = alongside(demo)
    plan = prepared(model)
    for _ in range(3):
        model.encoder.encode(plan.tiles[:1] * BATCH, way=plan.normalize)
    assert made == [[plan.normalize]]


def test_what_leaves_the_devices_thread_is_done_and_is_handed_over(demo):
    """The thread has a queue of its own there, the caller's thread another."""
    model, side = alongside(demo)
    handed = []
    side.hand_over = lambda value: (side._note("handed over", inside=False), handed.append(value))
    with model:
        result = model.prompt([user_message(picture(120, 90), "what is it?")])
        assert side.events[-2:] == ["waited for the caller", "handed over"]
        assert [id(value) for value in handed[-1:]] == [id(result.embeddings[0])]
        side.events.clear()
        assert model.exclusively(lambda: 5) == 5 and side.events[-1] == "waited for the caller"


def test_an_encode_that_is_given_up_leaves_its_queue(demo):
    model, side = alongside(demo)
    plan = model.encoder.family.resolution.prepare(picture(120, 90))
    steps = model.encoder.steps(plan.tiles[:1])
    next(steps)
    steps.close()
    assert not side.inside


def reported(facts):
    return str(WarmupReport("tiny", "a", "b", "fp32", (), (), (), preprocessing=facts))


def test_the_warm_up_tries_and_tells(demo, monkeypatch):
    assert preprocessing_facts(demo.encoder, True) is None
    model, _ = alongside(demo)
    facts = preprocessing_facts(model.encoder, False)
    assert "preprocessing: on stand-in (requested: auto)\n" in reported(facts)
    facts = preprocessing_facts(model.encoder, True)
    assert facts.resized_there >= 1 and "equal to the bit" in reported(facts)
    ways = model.encoder.preprocessing
    monkeypatch.setattr(
        type(model.encoder), "numbers", lambda *_: [tile + 1 for tile in _[1].numbers()]
    )
    facts = preprocessing_facts(model.encoder, True)
    text = "preprocessing: on the HOST (requested: auto; the device's tiles are not the host's)"
    assert text in reported(facts) and ways.why_host == "the device's tiles are not the host's"
