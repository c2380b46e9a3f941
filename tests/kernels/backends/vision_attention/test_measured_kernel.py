"""The choice among kernels, by a clock that says what the test wants: who may win, who is refused,
what is remembered, and what becomes of a kernel that fails later.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mtmd.base.errors import DeviceError
from mtmd.kernels.backends.vision_attention import measured_kernel as module
from mtmd.kernels.backends.vision_attention import saved_measurements as saved_module
from mtmd.kernels.backends.vision_attention.measure import measure
from mtmd.kernels.backends.vision_attention.measured_kernel import OURS, AttentionChoice, class_of
from mtmd.kernels.backends.vision_attention.saved_measurements import BYTES_MAX, Saved
from mtmd.kernels.gpu.flash_attention.cases import TOLERANCE, largest_error
from mtmd.kernels.graph import graph_input
from mtmd.kernels.kernel import Kernel
from mtmd.kernels.ops import attention
from mtmd.kernels.ops.attention import attention as op

CARD = {"card": "a card", "torch": "1", "triton": "2"}


def node(rows=300, batch=1, bounds=False, **options):
    q = graph_input("q", (batch, rows, 2, 16), torch.float32, lambda _: None)
    limits = graph_input("b", (rows, 2), torch.int32, lambda _: None) if bounds else None
    return attention(q, q, q, None, limits, name="attn", scale=0.25, **options)


def right(*inputs, **options):
    return op.reference(*inputs, **options)


def ours(*inputs):
    """Our kernel as the device would run the node."""
    return right(*inputs, scale=0.25)


class Clock:
    """Runs what it times, once, and says what it was told to say of it."""

    device = torch.device("cpu")

    def __init__(self, **ms):
        self.ms, self.requested = {k.replace("_", " "): v for k, v in ms.items()}, []
        self.bytes, self.first_bytes = 0, None

    def kernels(self, **runs):
        def timed(name, run):
            def call(*inputs, **options):
                self.last = name
                return run(*inputs, **options)

            return call

        names = {k.replace("_", " "): v for k, v in runs.items()}
        return {
            name: run if isinstance(run, Kernel) else Kernel(run=timed(name, run))
            for name, run in names.items()
        }

    def seconds(self, run):
        run()
        self.requested.append(self.last)
        return self.ms[self.last] / 1e3

    def extra_bytes(self, run):
        run()
        result, self.first_bytes = self.first_bytes or self.bytes, None
        return result


def error(result, inputs, options):
    return largest_error("attention", result, inputs, options)


def learn(choice, clock, nodes, ours=None):
    kernel = ours or clock.kernels(triton=right)["triton"]
    return choice.learn(nodes, clock, kernel, error, TOLERANCE)


@pytest.fixture
def every_size(monkeypatch):
    monkeypatch.setattr(module, "MIN_FLOPS", 0)


@pytest.mark.usefixtures("every_size")
@pytest.mark.parametrize(
    ("ms", "chosen"),
    [
        ({"triton": 2.0, "a": 1.0, "b": 1.5}, "a"),
        ({"triton": 2.0, "a": 3.0, "b": 1.5}, "b"),
        ({"triton": 1.0, "a": 0.98, "b": 2.0}, OURS),  # within what clocks differ by
        ({"triton": 1.0, "a": 5.0, "b": 2.0}, OURS),
    ],
)
def test_the_fastest_runs(ms, chosen):
    clock = Clock(**ms)
    choice = AttentionChoice(candidates=clock.kernels(a=right, b=right))
    assert choice.way(node())[::2] == (OURS, "not measured")
    result = learn(choice, clock, [node()])
    assert choice.way(node()).name == result.classes[0].chosen == chosen
    assert [t.ms for t in result.classes[0].measured.trials] == [ms["triton"], ms["a"], ms["b"]]
    assert choice.learned is result and not result.unasked
    ran = choice.lower(node(), ours)(*torch.randn(3, 1, 300, 2, 16).unbind(0))
    assert ran.shape == (1, 300, 2, 16) and choice.used == {class_of(node()): chosen}


@pytest.mark.usefixtures("every_size")
def test_forced():
    clock = Clock(triton=1.0, torch_a=5.0, torch_b=2.0, triton_c=0.5)
    candidates = clock.kernels(torch_a=right, torch_b=right, triton_c=right)
    choice = AttentionChoice(candidates=candidates, setting="torch")
    assert choice.way(node())[::2] == ("torch a", "requested, not measured")
    learn(choice, clock, [node()])
    assert choice.way(node()).name == "torch b" and clock.requested == [
        "triton",
        "torch a",
        "torch b",
    ]
    assert choice.way(node(bounds=True)).name == "torch b"  # these kernels refuse nothing
    choice.setting = "triton"
    assert choice.way(node())[::2] == (OURS, "not measured")
    clock.requested.clear()
    learn(choice, clock, [node()])
    assert choice.way(node()).name == "triton c" and clock.requested == ["triton", "triton c"]
    choice.setting = "auto"  # all that was tried is known together
    assert choice.way(node()).name == "triton c"
    assert learn(choice, clock, [node()]).classes[0].kept and len(clock.requested) == 2


def fails(*inputs, **options):  # noqa: ARG001
    raise RuntimeError("no kernel \x1b[31mfor\n  this")


def short(*inputs, **options):  # noqa: ARG001
    raise torch.OutOfMemoryError("of 9 GiB")


def wrong(*inputs, **options):
    return right(*inputs, **options) * 1.001


def late_nan(*inputs, **options):
    result = right(*inputs, **options)
    result[:, -1] = torch.nan
    return result


def turned(*inputs, **options):
    return right(*inputs, **options).transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.usefixtures("every_size")
@pytest.mark.parametrize(
    ("run", "words"),
    [
        (fails, "RuntimeError: no kernel ?[31mfor this"),
        (short, "not enough memory to try it"),
        (wrong, "its result is wrong: error"),
        (turned, "expected fp32"),
        (Kernel(run=right, rejects=lambda *_, **__: "not on Sundays"), "not on Sundays"),
    ],
)
def test_who_is_refused_never_wins_and_says_why(run, words):
    clock = Clock(triton=2.0, a=1.0, b=1.5)
    choice = AttentionChoice(candidates=clock.kernels(a=run, b=right))
    trials = learn(choice, clock, [node()]).classes[0].measured.trials
    assert trials[1].ms is None and words in str(trials[1].refused)
    assert choice.way(node()).name == "b" and "a" not in clock.requested


@pytest.mark.usefixtures("every_size")
def test_a_nan_in_a_row_that_is_compared_is_wrong():
    clock = Clock(triton=2.0, a=1.0)
    choice = AttentionChoice(candidates=clock.kernels(a=late_nan))
    assert "error nan" in learn(choice, clock, [node(rows=9)]).classes[0].measured.trials[1].refused


@pytest.mark.usefixtures("every_size")
def test_more_memory_than_the_plan_has_for_it_is_refused():
    clock = Clock(triton=2.0, a=1.0)
    choice = AttentionChoice(candidates=clock.kernels(a=right))
    clock.bytes = 4 << 20  # as torch rounds
    assert learn(choice, clock, [node(rows=20)]).classes[0].chosen == "a"
    clock.bytes += 1
    trial = learn(choice, clock, [node()]).classes[0].measured.trials[1]
    assert trial.refused == "it uses 4.00 MiB in addition to its result, expected at most 0.00 MiB"


@pytest.mark.usefixtures("every_size")
def test_memory_that_another_took_meanwhile_is_not_counted():
    clock = Clock(triton=1.0, a=0.5)
    choice = AttentionChoice(candidates=clock.kernels(a=right))
    clock.first_bytes = 1 << 30
    trials = learn(choice, clock, [node()]).classes[0].measured.trials
    assert [trial.refused for trial in trials] == [None, None]


def test_a_fault_of_the_device_ends_it():
    def faults(*inputs, **options):  # noqa: ARG001
        raise torch.AcceleratorError("an illegal memory access")

    with pytest.raises(DeviceError, match=r"while a attention was tried .*illegal.*triton"):
        measure(node(), Clock().kernels(a=faults), Clock(), error, 1.0)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_are_compared_stand_for_all(causal):
    """Of 300 rows every second is: of causal ones with the keys that it saw."""
    clock = Clock(triton=1.0)
    result = measure(node(causal=causal), clock.kernels(triton=right), clock, error, 1e-5)
    assert result.trials[0].ms == 1.0


@pytest.mark.usefixtures("every_size")
def test_a_class_is_measured_once_by_its_largest():
    clock = Clock(triton=2.0, a=1.0)
    choice = AttentionChoice(candidates=clock.kernels(a=right))
    result = learn(choice, clock, [node(rows=n) for n in (257, 300, 290, 20)])
    assert [c.measured.node for c in result.classes] == [
        "q fp32 [1, 300, 2, 16], k fp32 [1, 300, 2, 16]",
        "q fp32 [1, 20, 2, 16], k fp32 [1, 20, 2, 16]",
    ]
    assert result.classes[0].shape == "fp32, 2 heads of 16, up to 1 x 512 rows over 512 keys"


def test_small_nodes_and_those_nobody_else_takes_are_ours():
    choice = AttentionChoice()
    assert choice.way(node())[::2] == (OURS, "below 1 GFLOP")
    assert choice.workspace(node(), 7) == 7
    large = node(rows=4000, bounds=True)
    assert "bounds of its own" in choice.way(large).why and choice.workspace(large, 7) == 7
    assert choice.workspace(node(rows=4000), 7) > 4 * 2 * 4000
    result = learn(choice, Clock(), [node(), node(), large])
    assert not result.classes and [count for _, count in result.unasked] == [2, 1]
    choice.lower(large, ours)
    assert choice.used == {}


@pytest.mark.usefixtures("every_size")
def test_one_that_fails_when_it_is_launched_is_not_asked_again(caplog):
    clock, does = Clock(triton=2.0, a=1.0), [right]
    candidates = clock.kernels(a=lambda *inputs, **options: does[0](*inputs, **options))
    choice = AttentionChoice(candidates=candidates)
    learn(choice, clock, [node()])
    run = choice.lower(node(), ours)
    does[0] = fails
    q, k, v = torch.randn(3, 1, 300, 2, 16).unbind(0)
    expected = ours(q, k, v)
    assert torch.equal(run(q, k, v), expected) and torch.equal(run(q, k, v), expected)
    assert caplog.text.count("a attention refused") == 1
    assert choice.way(node()).name == OURS and choice.used == {class_of(node()): OURS}
    does[0] = short
    choice.failed.clear()
    with pytest.raises(torch.OutOfMemoryError):
        choice.lower(node(), ours)(q, k, v)


@pytest.mark.usefixtures("every_size")
def test_what_was_measured_is_kept_for_the_same_card_and_versions(tmp_path):
    clock = Clock(triton=2.0, a=1.0)
    first = AttentionChoice(Saved(lambda: CARD, tmp_path), clock.kernels(a=right, b=wrong))
    learn(first, clock, [node()])
    again = AttentionChoice(Saved(lambda: CARD, tmp_path), clock.kernels(a=right, b=wrong))
    assert again.way(node()).name == "a"  # before any warm-up
    clock.requested.clear()
    result = learn(again, clock, [node(), node(rows=20)])
    assert [c.kept for c in result.classes] == [True, False] and len(clock.requested) == 2
    assert result.classes[0].measured == first.learned.classes[0].measured
    other = AttentionChoice(Saved(lambda: {**CARD, "torch": "3"}, tmp_path), again.candidates)
    assert other.way(node()).name == OURS
    assert len(list(tmp_path.iterdir())) == 1
    third = Saved(lambda: CARD, tmp_path)
    assert third.get(str(class_of(node()))) and third.get(str(class_of(node(rows=20))))


@pytest.mark.usefixtures("every_size")
@pytest.mark.parametrize(
    ("run", "is_lasting"), [(short, False), (fails, False), (wrong, True), (turned, True)]
)
def test_only_what_lasts_is_kept_for_good(run, is_lasting, tmp_path):
    """The next warm-up tries again what was refused for a shortage, or by a library's words."""
    clock = Clock(triton=2.0, a=1.0)
    first = AttentionChoice(Saved(lambda: CARD, tmp_path), clock.kernels(a=run))
    learn(first, clock, [node()])
    again = AttentionChoice(Saved(lambda: CARD, tmp_path), clock.kernels(a=right))
    assert again.way(node())[::2] == (OURS, "the others were refused when they were measured")
    (result,) = learn(again, clock, [node()]).classes
    assert (result.kept, result.chosen) == ((True, OURS) if is_lasting else (False, "a"))
    third = AttentionChoice(Saved(lambda: CARD, tmp_path), clock.kernels(a=right))
    assert third.way(node()).name == result.chosen


@pytest.mark.usefixtures("every_size")
def test_too_much_memory_is_tried_again(tmp_path):
    clock = Clock(triton=2.0, a=1.0)
    clock.bytes = 1 << 30
    learn(AttentionChoice(Saved(lambda: CARD, tmp_path), clock.kernels(a=right)), clock, [node()])
    clock.bytes = 0
    again = AttentionChoice(Saved(lambda: CARD, tmp_path), clock.kernels(a=right))
    assert learn(again, clock, [node()]).classes[0].chosen == "a"


@pytest.mark.usefixtures("every_size")
def test_what_plans_each_shape_is_asked_only_where_there_is_one_or_it_was_asked_for():
    clock = Clock(triton=2.0, torch_cuDNN=0.5, torch_flash=1.0)
    candidates = clock.kernels(torch_cuDNN=right, torch_flash=right)
    choice = AttentionChoice(candidates=candidates)
    learn(choice, clock, [node()])
    assert choice.way(node()).name == "torch flash" and "torch cuDNN" not in clock.requested
    assert "plans each shape separately" in choice.left_out()["torch cuDNN"]
    choice.one_shape = True
    assert learn(choice, clock, [node()]).classes[0].chosen == "torch cuDNN"
    assert not choice.left_out()
    choice.one_shape = False  # a time that is kept from another model says nothing of this one
    assert choice.way(node()).name == "torch flash"
    choice.setting = "torch"
    assert choice.way(node()).name == "torch cuDNN" and not choice.left_out()


@pytest.mark.parametrize("file", ["candidates.py", "measure.py", "tiles.py"])
def test_what_decides_how_kernels_are_called_and_measured_is_part_of_what_it_holds_for(
    file, monkeypatch
):
    before, read = saved_module._source(), Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda self: read(self) + b"# changed" * (self.name == file)
    )
    assert saved_module._source() != before


def test_without_a_card_or_a_folder_nothing_is_kept(monkeypatch):
    def no_card():
        raise RuntimeError("no driver")

    assert Saved(no_card).file is None and Saved(no_card).get("x") is None
    monkeypatch.setattr(
        "mtmd.kernels.backends.vision_attention.saved_measurements.cache_folder", lambda _: None
    )
    saved = Saved(lambda: CARD)
    saved.add("x", measure(node(), {}, Clock(), error, 1.0))
    assert saved.file is None


DAMAGED = {
    "cut off": lambda text: text[: len(text) // 2],
    "another format": lambda text: text.replace('"format": 2', '"format": 1'),
    "another card": lambda text: text.replace("a card", "b card"),
    "no list": lambda text: json.dumps({**json.loads(text), "shapes": [1, 2]}),
    "no outcome": lambda text: text.replace("2.0,", "null,"),
    "a time below 0": lambda text: text.replace("2.0,", "-2.0,"),
    "not a number": lambda text: text.replace("2.0,", "NaN,"),
    "too long": lambda text: text + " " * BYTES_MAX,
    "deep": lambda text: text.replace("2.0,", "[" * 100_000 + "]" * 100_000 + ","),
    "an escape": lambda text: text.replace('"triton"', '"tri\\u001bton"', 2),
    "bytes": lambda text: "\udcff" + text,
}


@pytest.mark.usefixtures("every_size")
@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_file_is_told_and_measured_anew(how, tmp_path, caplog):
    clock = Clock(triton=2.0, a=1.0)
    learn(AttentionChoice(Saved(lambda: CARD, tmp_path), clock.kernels(a=right)), clock, [node()])
    (file,) = tmp_path.iterdir()
    file.write_text(DAMAGED[how](file.read_text()), errors="surrogateescape")
    clock.requested.clear()
    choice = AttentionChoice(Saved(lambda: CARD, tmp_path), clock.kernels(a=right))
    assert choice.way(node()).name == OURS and "measured anew" in caplog.text
    learn(choice, clock, [node()])
    assert len(clock.requested) == 2
    assert AttentionChoice(Saved(lambda: CARD, tmp_path), choice.candidates).way(node()).name == "a"
