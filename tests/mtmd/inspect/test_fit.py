"""`mtmd fit`: the ways in which a model lies in memories that are not here, beside what is predicted
of one card and what a model loaded there is let take; the text, the JSON, and what is refused.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtmd import MtmdError, OptionError, predict
from mtmd.checkpoint.open import open_checkpoint
from mtmd.cli import parser
from mtmd.clip.image.device_resize import TAKEN_BYTES
from mtmd.commands.arguments import options_in
from mtmd.inspect import fit as module
from mtmd.inspect.fit import FitReport, fit
from mtmd.inspect.fit_facts import SERVED
from mtmd.kernels.backends import Reference
from mtmd.kernels.plan import free_memory
from mtmd.kernels.report.facts import LayoutFacts
from mtmd.llm.state import PAGE
from mtmd.loaded.fitting.needed_memory import NeededMemory
from mtmd.loading import DEMO_MODEL
from mtmd.model import Model
from mtmd.options.load import LoadOptions

MIB = 1 << 20

GOLDEN = Path(__file__).parent / "golden" / "demo_fit.txt"
TWO = ("602MiB", "602MiB")  # of which the driver leaves 90 MiB each
BY_HOST = ("--preprocess", "host")  # a GPU that resizes pictures takes 120 MiB for it


class Host(Reference):
    """Whose kernels take the same memory on every CPU."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.name = "cpu"


@pytest.fixture(scope="module")
def two() -> FitReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Cpu", Host)
        return fit(memory=TWO, host_memory="20MiB", preprocess="host")


def named(report: FitReport, start: str) -> LayoutFacts:
    return next(layout for layout in report.layouts if layout.name.startswith(start))


def test_the_report_for_people(two: FitReport) -> None:
    """Written by `GOLDEN.write_text(str(two) + "\\n")` here."""
    assert str(two) + "\n" == GOLDEN.read_text()
    assert max(map(len, str(two).splitlines())) <= 80


def test_every_way_is_there_and_the_first_that_fits_is_chosen(two: FitReport) -> None:
    names = [layout.name for layout in two.layouts]
    assert names == [
        "on gpu0 alone",
        "layers over gpu0, gpu1",
        "tensor parallelism of 2 ranks",
        "layers over gpu0, gpu1 and the host",  # which has least on the host
        "on gpu0, keys and values on the host",
        "layers over gpu0, gpu1, keys and values on the host",
        "on the host alone",
    ]
    assert two.chosen == next(layout.name for layout in two.layouts if layout.fits) == names[1]
    shared, split = named(two, "tensor"), named(two, "layers over gpu0, gpu1")
    alone = named(two, "on gpu0 alone").memories[0]
    assert shared.ranks == 2 and [(p.first, p.last) for p in split.layers] == [(0, 1), (2, 3)]
    assert sum(m.cache for m in split.memories) == alone.cache
    tied = 640 * 256 * 2
    for layout in (shared, split):
        whole = sum(m.weights for m in layout.memories)
        assert alone.weights <= whole <= alone.weights + tied + 100_000, layout.name
    host = named(two, "on gpu0, keys")
    assert host.cache_on_host and host.memories[0].cache == 0
    assert {m.space: m.cache for m in host.memories} == {"gpu0": 0, "cpu": alone.cache}


def test_one_device_needs_what_is_predicted_of_a_card(two: FitReport) -> None:
    """And the most answers at once fit, where one more does not."""
    card = predict("cuda:80", memory=TWO[0], preprocess="host", compile=False)
    alone = named(two, "on gpu0 alone")
    assert (alone.memories[0].needed, alone.memories[0].available) == (
        card.needed_bytes,
        card.usable_bytes,
    )
    assert (alone.most_answers, alone.longest_context) == (card.most_answers, card.longest_context)
    assert alone.most_answers == 2
    for answers, expected in ((2, True), (3, False)):
        actual = predict(
            "cuda:80", memory=TWO[0], preprocess="host", compile=False, parallel=answers
        )
        assert actual.fits(actual.needed_bytes) is expected


def test_where_nothing_fits_it_says_what_would(mtmd: Any) -> None:
    ran = mtmd("fit", "--host-memory", "38MiB", "--dtype", "fp32")
    assert ran.code == 3 and "result: fits nowhere (as requested it needs " in ran.out
    needed = json.loads(mtmd("fit", "--host-memory", "38MiB", "--dtype", "fp32", "--json").out)
    needed = needed["layouts"][0]["memories"][0]["needed"]
    shown = f"(as requested it needs {needed / MIB:.1f} MiB usable of cpu: on cpu alone); what"
    assert shown in " ".join(ran.out.split())
    for usable, code in ((needed, 0), (needed - MIB, 3)):
        size = str(usable * 16 // 15 + 1)
        assert mtmd("fit", "--host-memory", size, "--dtype", "fp32").code == code
    reported = " ".join(ran.out.split("what would fit: ")[1].split())
    fewer = next(p for p in reported.split("; or ") if p.endswith("at once (--parallel)"))
    count = fewer.split()[0]
    words = ("fit", "--host-memory", "38MiB", "--dtype", "fp32", "--parallel", count)
    assert mtmd(*words).code == 0
    none = mtmd("fit", "--host-memory", "1MiB")
    assert none.code == 3 and "would not fit either" in " ".join(none.out.split())


def test_where_pictures_do_not_fit_it_says_what_text_alone_may_have(
    mtmd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NeededMemory, "encode", lambda *_: {"cpu": 64 * MIB})
    requested = ("fit", "--dtype", "fp32", "--parallel", "1", "--host-memory")
    ran = mtmd(*requested, "40MiB")
    reported = " ".join(ran.out.split())
    assert ran.code == 3
    assert "longest context: none with pictures, 2,048 without" in reported
    assert "what would fit: text without pictures (a picture needs " in reported
    more = float(reported.split("(a picture needs ")[1].split(" MiB more of cpu)")[0])
    for memory, pictures in ((40 + more, False), (40 + 1.1 * more, True)):
        size = str(int(memory * MIB))
        result = json.loads(mtmd(*requested, size, "--json").out)["layouts"][0]
        assert bool(result["longest_context"]) is pictures
        assert (result["longest_text"] is None) is pictures
    short = " ".join(mtmd(*requested, "30MiB").out.split())
    assert "; what would fit: text without pictures in a context of 512 (a picture" in short
    assert "smaller or no pictures or a Q4_K file alone would not fit either" in " ".join(
        mtmd(*requested, "9MiB").out.split()
    )
    sized = " ".join(mtmd(*requested, "40MiB", "--image", "40x30").out.split())
    assert "(a picture of 40 x 30 pixels needs " in sized


def test_text_alone_may_have_more_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NeededMemory, "encode", lambda *_: {"cpu": 64 * MIB})
    result = fit(host_memory="40MiB", dtype="fp32", parallel=1, context=256).layouts[0]
    assert (result.longest_context, result.longest_text) == (0, 2048)
    monkeypatch.setattr(NeededMemory, "encode", lambda *_: {"cpu": 14 * MIB})
    many = str(fit(host_memory="40MiB", dtype="fp32", parallel=64))
    assert many.endswith("what would fit: text without pictures in a context of 64"), (
        "one answer alone would have room for a picture, so none is told to lack any"
    )


def test_what_is_told_of_this_machine_is_what_fit_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of caches on the host one is counted, as a loaded model is let work; and it is told."""
    monkeypatch.setattr(free_memory, "system_bytes", lambda *_: 50 << 20)
    free_memory.look_again()
    reported = fit()
    with Model(open_checkpoint(DEMO_MODEL), LoadOptions(fit=True)) as model:
        taken, report = model.loaded.fit, str(model.warmup_report)
    free_memory.look_again()
    assert taken is not None and taken.chosen == reported.chosen == "on cpu alone"
    assert taken.layouts[0].memories == reported.layouts[0].memories
    assert "of caches on cpu that of one answer is counted, others wait for room" in report
    given = fit(host_memory="50MiB")
    assert not given.fits, "a given amount is one to keep: every cache counts"
    assert [d.counted for d in (*reported.devices, *given.devices)] == [1, 4]
    assert reported.layouts[0].most_answers == given.layouts[0].most_answers == 2
    assert "keys and values of 1 are counted" in str(reported) and "counted" not in str(given)


def test_a_context_that_is_advised_fits(mtmd: Any) -> None:
    """Also one below 1,024 tokens; and one page more does not."""
    requested = ("fit", "--host-memory", "32MiB", "--dtype", "fp32", "--parallel", "1")
    advised = int(mtmd(*requested).out.split("what would fit: a context of ")[1].split(";")[0])
    assert 512 < advised < 1024
    assert mtmd(*requested, "--context", str(advised)).code == 0
    assert mtmd(*requested, "--context", str(advised + PAGE)).code == 3


def test_a_host_of_unknown_size_makes_nothing_fit(mtmd: Any) -> None:
    """A script learns from the exit code whether the GPU is enough."""
    ran = mtmd("fit", "--memory", "597MiB", *BY_HOST, "--json")
    result = json.loads(ran.out)
    assert ran.code == 3 and result["chosen"] is None and not result["fits"]
    assert result["advice"][0] == "a context of 1024", "of the GPU alone"
    host = next(one for one in result["layouts"] if one["name"] == "on the host alone")
    assert not host["fits"] and host["memories"][0]["fits"] is None
    text = " ".join(mtmd("fit", "--memory", "597MiB", *BY_HOST).out.split())
    assert "UNKNOWN on the host alone" in text
    assert "usable of cpu: layers over gpu0 and the host; it would fit with a cont" in text
    assert mtmd("fit", "--memory", "597MiB", *BY_HOST, "--host-memory", "1GiB").code == 0
    tiny = " ".join(mtmd("fit", "--memory", "10B").out.split())
    assert tiny.endswith("usable of cpu: on the host alone")


def test_a_gpu_that_resizes_pictures_needs_memory_for_that(two: FitReport) -> None:
    """Once, where the encoder is, and none where ranks share it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Cpu", Host)
        resizes = fit(memory=("673MiB", "545MiB"), host_memory="20MiB")
    for start, more in (("on gpu0 alone", [TAKEN_BYTES]), ("tensor", [0, 0])):
        both = zip(named(resizes, start).memories, named(two, start).memories, strict=True)
        assert [result.needed - without.needed for result, without in both] == more, start
    shared = [m.needed for m in named(resizes, "layers over gpu0, gpu1").memories]
    assert max(shared) > TAKEN_BYTES > min(shared)


@pytest.mark.parametrize(
    "given", [{"memory": "8GiB"}, {"memory": 8 << 30}, {"memory": np.int64(8 << 30)}]
)
def test_one_memory_needs_no_list(given: dict[str, Any]) -> None:
    report = fit(host_memory=None, **given, context=64)
    assert [d.name for d in report.devices] == ["gpu0", "cpu"]
    assert report.devices[0].memory_bytes == 8 << 30


def test_one_card_and_none_need_no_list() -> None:
    assert fit(target="rtx4090", context=64).devices[0].what == "rtx4090"
    assert [d.name for d in fit(memory=None, target=None, context=64).devices] == ["cpu"]


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ({"memory": 2.5}, "memory: found 2.5, expected bytes"),
        ({"memory": [None]}, r"memory: found \[None\], expected bytes"),
        ({"memory": True}, "memory: found True"),
        ({"memory": {"8GiB": 1}}, "memory: found {"),
        ({"target": [3]}, r"target: found \[3\], expected names"),
        ({"target": b"rtx4090"}, "target: found b'rtx4090'"),
        ({"host_memory": [1]}, r"host_memory: found \[1\]"),
        ({"model": 3}, "model is an object of type int"),
        ({"random_weights": 3}, "random_weights"),
        ({"random_weights": "gemma-3-4b", "weights": 3}, "weights"),
    ],
    ids=str,
)
def test_arguments_of_other_kinds(given: dict[str, Any], reported: str) -> None:
    with pytest.raises(MtmdError, match=reported):
        fit(**given)


def test_for_programs(mtmd: Any) -> None:
    ran = mtmd("fit", "--target", "rtx4090,rtx3090", "--json")
    result = json.loads(ran.out)
    assert ran.code == 0 and result["schema"] == 1 and result["fits"]
    assert set(result) == {
        "schema", "model", "dtype", "context", "context_most", "answers", "picture_size",
        "picture_tokens", "devices", "layouts", "chosen", "advice", "fits", "kv_type",
        "served",
    }  # fmt: skip
    assert [d["what"] for d in result["devices"]] == ["rtx4090", "rtx3090", "the host"]
    assert set(result["layouts"][0]) == {
        "name", "memories", "layers", "ranks", "cache_on_host", "reason", "longest_context",
        "most_answers", "longest_text", "fits",
    }  # fmt: skip
    assert set(result["layouts"][0]["memories"][0]) == {
        "space", "weights", "encoder", "cache", "compute", "available", "needed", "fits",
    }  # fmt: skip


def test_a_way_that_cannot_be_is_told_with_the_reason(two: FitReport) -> None:
    text = str(
        replace(two, layouts=(LayoutFacts("layers over 6", reason="4 layers for 6 devices"),))
    )
    assert "CANNOT BE   layers over 6: 4 layers for 6 devices" in text


def test_the_last_line_agrees_with_the_verdict(mtmd: Any) -> None:
    """Also where fewer answers at once fit than the server has by default."""
    requested = ("fit", "--host-memory", "64MiB", "--dtype", "fp32")
    ran = mtmd(*requested)
    text = " ".join(ran.out.split())
    assert ran.code == 0 and "'mtmd serve' with its 16 answers at once needs " in text
    most = int(text.split("and does not fit; with '--parallel ")[1].split("'")[0])
    assert 4 <= most < 16 and text.endswith("' it does")
    fits = mtmd(*requested, "--parallel", str(most))
    assert fits.code == 0
    shown = " ".join(fits.out.split())
    assert f"'mtmd serve --parallel {most}' up to " in shown
    assert f"when {most} answers at once fill their context" in shown
    assert mtmd(*requested, "--parallel", str(most + 1)).code == 3
    roomy = " ".join(mtmd("fit", "--host-memory", "1GiB", "--dtype", "fp32").out.split())
    assert "'mtmd serve' up to " in roomy and "when 16 answers at once fill" in roomy
    given = mtmd("fit", "--host-memory", "1GiB", "--parallel", "1").out
    assert "'mtmd serve --parallel 1' up to" in " ".join(given.split())
    assert "1 answer fills its context" in " ".join(given.split())
    args = parser().parse_args(["serve"])
    assert options_in(args, LoadOptions)["parallel"] == SERVED


def test_what_waits_for_room_on_this_machine_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers that have no room wait, as a server lets them."""
    monkeypatch.setattr(free_memory, "system_bytes", lambda *_: 64 << 20)
    free_memory.look_again()
    text = " ".join(str(fit(dtype="fp32")).split())
    free_memory.look_again()
    assert "result: fits on cpu alone" in text and "does not fit" not in text
    assert "if 16 answers at once filled their context: as that is more than usable" in text


def test_the_cards_are_listed(mtmd: Any) -> None:
    """`list` is what the refusal of an unknown card advises."""
    assert "--target list" in mtmd("fit", "--target", "tpu:1").refused()
    ran = mtmd("fit", "--target", "list")
    assert ran.code == 0 and "rtx4090" in ran.out
    assert ran.out == mtmd("warmup", "--target", "list").out


def test_this_machine_and_one_without_a_gpu(mtmd: Any) -> None:
    assert "the host, 1,024.0 MiB" in mtmd("fit", "--host-memory", "1GiB").out
    assert "cpu: free here" in mtmd("fit", "--dtype", "fp32").out


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (("--memory", "lots"), "memory: found 'lots'"),
        (("--memory", "8GiB,,8GiB"), "between commas"),
        (("--memory", "8GiB,8GiB", "--target", "h100,h100,h100"), "2 memories and 3 targets"),
        (("--target", "cuda:90"), "give memory beside it"),
        (("--target", "rtx9090"), "near it: rtx"),
        (("--image", "large"), "such as 1920x1080"),
        (("--image", "99999x1"), "up to 16384"),
        (("--context", "999999"), "context: found 999999"),
        (("--weights", "Q9"), "weights: found 'Q9'"),
        (("demo", "--random-weights", "gemma-3-4b"), "expected one of them"),
        (("no/where/at/all",), "no/where/at/all"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_refusals(arguments: tuple[str, ...], reported: str, mtmd: Any) -> None:
    assert reported in mtmd("fit", *arguments).refused()


@pytest.mark.parametrize(
    "chosen",
    [
        *({"tp": 2}, {"split": "layer"}, {"override_tensor": "x=cpu"}, {"kernels": "there"}),
        {"vision_attention": "torch"},
    ],
    ids=str,
)
def test_options_that_would_do_nothing_are_refused(chosen: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="leave"):
        fit(memory=TWO, **chosen)
