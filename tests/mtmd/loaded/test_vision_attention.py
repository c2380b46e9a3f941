"""The kernel of the encoder's attention, on a card that is the CPU with a clock of its own: asked
for, measured, told in report and receipt, and the same embeddings by any.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dual_encoders import clip
from stand_in import StandInStream

from mtmd.base.errors import OptionError
from mtmd.clip.blocks import VitParams
from mtmd.clip.encoder import BATCH, Encoder
from mtmd.clip.families.gemma3 import Gemma3Vision
from mtmd.clip.image.pixels import Normalize
from mtmd.clip.preprocessing import Preprocessing
from mtmd.clip.resolution.fixed_square import FixedSquare
from mtmd.clip.token_budget import Budget
from mtmd.embedding.dual_checkpoint import open_dual
from mtmd.embedding.embedder import Embedder, _Watch
from mtmd.kernels.backends import Cpu, Limited, Reference
from mtmd.kernels.backends.gpu import Gpu
from mtmd.kernels.backends.vision_attention import measured_kernel as module
from mtmd.kernels.backends.vision_attention.measured_kernel import AttentionChoice
from mtmd.kernels.backends.vision_attention.saved_measurements import Saved
from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import Kernel
from mtmd.kernels.ops import attention
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.loaded import report
from mtmd.loaded.vision_attention import ask_for, know_shapes, reported, vision_attention
from mtmd.options.load import LoadOptions
from mtmd.service.receipts import model_warnings

FAMILY = Gemma3Vision(
    vit=VitParams(layers=2, width=48, ffn=64, heads=2, eps=1e-6, gelu="tanh"),
    patch=14,
    text_width=32,
    resolution=FixedSquare(
        side=56,
        tokens=4,
        normalize=Normalize((0.5,) * 3, (0.5,) * 3, 1 / 255),
        resample="bilinear",
        edge=56,
    ),
)


SOME = module.ShapeClass("bf16", 16, 72, 1, 4096, 4096, False, True)


class Noise:
    def __init__(self):
        self.shapes = {name: p.shape for name, p in FAMILY.parameters().items()}

    def type_of(self, name, dtype):
        return Type.contiguous(self.shapes[name], dtype)

    def read(self, name, dtype):
        shape = self.shapes[name]
        generator = torch.Generator().manual_seed(sorted(self.shapes).index(name))
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    def quant(self, name):  # noqa: ARG002
        return None

    def order(self, name):  # noqa: ARG002
        return None


class Card(Gpu):
    """Its kernels run in Triton's interpreter."""

    compiles = True
    queue_bytes = 0

    def __init__(self, folder, **candidates):
        super().__init__()
        self.device, self.recorder = torch.device("cpu"), None
        saved = Saved(lambda: {"card": "a card", "torch": "1"}, folder)
        self.attention = AttentionChoice(saved, candidates)

    def rejects(self, node):
        return self.choose(node).reason

    def synchronize(self):
        pass


class Clock:
    """Each kernel that it is asked about is faster than the one before."""

    device = torch.device("cpu")

    def __init__(self):
        self.left = 0.009

    def seconds(self, run):
        run()
        self.left -= 0.001
        return self.left

    def extra_bytes(self, run):  # noqa: ARG002
        return 0


def runs(calls):
    def run(*inputs, **options):
        calls.append(inputs[0].shape)
        return attention.reference(*inputs, **options)

    return Kernel(run=run)


def encoder(*backends):
    return Encoder(FAMILY, Noise(), [*backends, Cpu(), Reference()], dtype=torch.float32)


@pytest.fixture
def every_size(monkeypatch):
    monkeypatch.setattr(module, "MIN_FLOPS", 0)


@pytest.mark.usefixtures("every_size")
def test_what_is_measured_runs_and_is_told(tmp_path):
    calls: list[tuple[int, ...]] = []
    card = Card(
        tmp_path, fast=runs(calls), never=Kernel(run=runs([]).run, rejects=lambda *_, **__: "no")
    )
    subject, budget = encoder(card), Budget()
    rng = np.random.default_rng(5)
    tiles = [rng.uniform(-1, 1, (3, 56, 56)).astype(np.float32) for _ in range(BATCH + 1)]
    expected = encoder(Reference()).encode(tiles)
    before = subject.encode(tiles)
    assert not calls and reported(subject) == "triton"
    requested = vision_attention(subject, budget, measure=False)
    assert requested is not None and requested.found.classes == ()

    facts = vision_attention(subject, budget, measure=True, probe=Clock())
    assert facts is not None
    assert [(c.chosen, c.kept) for c in facts.found.classes] == [("fast", False)] * 3  # 1, 2, 4
    calls.clear()
    after = subject.encode(tiles)
    assert [shape[0] for shape in calls] == [BATCH] * 2 + [1] * 2  # two layers of each batch
    assert reported(subject) == "fast"
    for actual in (before, after):
        for one, needed in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, needed, rtol=1e-4, atol=1e-4)

    text = str(WarmupReport("tiny", "a", "b", "fp32", (), (), (), vision_attention=facts))
    assert "attention of the encoder: requested auto (card a card, torch 1)" in text
    assert "2 heads of 24, up to 4 x 16 rows over 16 keys, parts of one tensor: fast" in text
    assert "(measured now, q fp32 [4, 16, 2, 24], k fp32 [4, 16, 2, 24])" in text
    assert "fast                 7.000 ms\n    triton               8.000 ms" in text
    assert "never            refused: no" in text and f"kept in {tmp_path}" in text
    again = vision_attention(encoder(Card(tmp_path, fast=runs([]))), budget, True, probe=Clock())
    assert again is not None and all(c.kept for c in again.found.classes)


@pytest.mark.usefixtures("every_size")
def test_asked_for(tmp_path):
    calls: list[tuple[int, ...]] = []
    card = Card(tmp_path, **{"torch fast": runs(calls), "triton fast": runs([])})
    ask_for("torch", [Limited(card, ()), Cpu()])
    tile = np.zeros((3, 56, 56), np.float32)
    encoder(card).encode([tile])
    assert len(calls) == 2
    ask_for("triton", [card, Cpu()])
    subject = encoder(card)
    subject.encode([tile])
    assert len(calls) == 2 and reported(subject) == "triton"
    facts = vision_attention(subject, Budget(), True, probe=Clock())
    assert facts is not None and facts.setting == "triton"
    assert {c.chosen for c in facts.found.classes} == {"triton fast"} and len(calls) == 2


@pytest.mark.usefixtures("every_size")
def test_a_kernel_that_plans_each_shape_is_left_out_where_tiles_have_many(tmp_path):
    card = Card(tmp_path, **{"torch cuDNN": runs([]), "torch flash": runs([])})
    subject = encoder(card)
    facts = vision_attention(subject, Budget(), True, probe=Clock())
    assert facts is not None and {c.chosen for c in facts.found.classes} == {"torch flash"}
    text = str(WarmupReport("tiny", "a", "b", "fp32", (), (), (), vision_attention=facts))
    assert "  torch cuDNN is left out: it plans each shape separately" in text
    know_shapes(subject)
    facts = vision_attention(subject, Budget(), True, probe=Clock())
    assert facts is not None and not facts.left_out and card.attention.one_shape
    sizes = {"warm-up": (1, Type.contiguous((3, 56, 56), torch.float32))}
    sizes["largest"] = (1, Type.contiguous((3, 84, 56), torch.float32))
    subject.sizes = lambda: sizes
    know_shapes(subject)
    assert not card.attention.one_shape


@pytest.mark.usefixtures("every_size")
def test_nothing_is_resized_on_the_device_while_it_is_measured(tmp_path):
    card, busy = Card(tmp_path, fast=runs([])), []
    subject = Encoder(FAMILY, Noise(), [card, Cpu(), Reference()], dtype=torch.float32)
    subject.preprocessing = Preprocessing(FAMILY.resolution, StandInStream())
    lock = subject.preprocessing._resizer._lock

    class Watching(Clock):
        def seconds(self, run):
            busy.append(lock.locked())
            return super().seconds(run)

    vision_attention(subject, Budget(), True, probe=Watching())
    assert busy and all(busy) and not lock.locked()


def test_an_embedder_measures_nothing_so_ours_runs_whatever_others_have_measured(tmp_path):
    clip(tmp_path)
    card = Card(tmp_path, **{"torch fast": runs([]), "triton fast": runs([])})
    chosen = LoadOptions(dtype="fp32")
    subject = Embedder(open_dual(tmp_path), chosen, [card, Cpu(), Reference()], name="tiny")
    assert card.attention.setting == "triton"
    report_now = subject.warmup_report
    assert "attention of the encoder: requested triton (card a card" in str(report_now)
    card.attention.used = {SOME: "triton fast"}
    result = subject._receipt([], [], [], _Watch()).attention
    (images,) = [by for by in result.values() if by.endswith(", by triton fast")]
    assert images.startswith("flash") and len(result) == 2


def test_a_device_without_a_choice(demo, mtmd, one):
    ask_for("auto", [Cpu()])
    with pytest.raises(OptionError, match="vision_attention torch: found the device cpu"):
        ask_for("torch", [Cpu(), Reference()])
    assert vision_attention(demo.encoder, Budget(), True) is None and reported(demo.encoder) == ""
    assert vision_attention(None, Budget(), True) is None and reported(None) == ""
    assert demo.warmup_report.vision_attention is None
    ran = mtmd("describe", one, "--device", "cpu", "--vision-attention", "triton")
    assert ran.code == 2 and "expected a GPU with Triton; leave the option out" in ran.err


def test_the_receipt_tells(demo, monkeypatch):
    plain = report.attention_report(demo.loaded)
    assert plain == report.attention_kernels(demo.loaded.placements)
    monkeypatch.setattr(report, "reported", lambda _: "torch cuDNN")
    assert report.attention_report(demo.loaded) == {**plain, "encoder": "flash, by torch cuDNN"}


def test_the_receipt_tells_that_nothing_is_recorded_any_more(demo, monkeypatch):
    assert not any("recorded" in text for text in model_warnings(demo.loaded))
    recorder = SimpleNamespace(given_up="3 runs could not be recorded; the last: no memory")
    card = SimpleNamespace(name="cuda:0", recorder=recorder)
    assert report.recording_warnings([card, Cpu(), card]) == (
        "steps are launched kernel by kernel on cuda:0, which is slower: "
        "3 runs could not be recorded; the last: no memory",
    )
    monkeypatch.setattr(demo.loaded, "backends", [card, *demo.loaded.backends])
    monkeypatch.setattr("mtmd.service.receipts.thread_warnings", lambda *_: ())
    assert model_warnings(demo.loaded)[-1].endswith("the last: no memory")


def test_several_kernels_are_told_apart(tmp_path):
    card = Card(tmp_path)
    subject = encoder(card)
    card.attention.used = {SOME: "a", replace(SOME, batch=2): "a", replace(SOME, batch=4): "b"}
    assert reported(subject) == "a (2 of 3 kinds of shapes), b (1 of 3 kinds of shapes)"
