"""What is told about a card that is not here: memory as the plans and a loaded model have it, the
report for people and the one for programs, and what is refused. Nothing is compiled here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtmd import OptionError, predict
from mtmd.base.extras import install_command
from mtmd.bench.shapes import random_checkpoint
from mtmd.clip.image.device_resize import TAKEN_BYTES
from mtmd.clip.token_budget import Budget
from mtmd.inspect.prediction import SIZES, Needs, Prediction, usable_bytes
from mtmd.inspect.prediction_text import render_comparison
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.backends.target import Target
from mtmd.kernels.estimate.cards import find_card
from mtmd.llm.batch import BatchShape
from mtmd.model import Model
from mtmd.options.load import LoadOptions

GOLDEN = Path(__file__).parent / "golden" / "demo_h100.txt"
GIB = 1 << 30


@pytest.fixture(scope="module")
def demo_h100() -> Prediction:
    return predict("h100", compile=False)


@pytest.fixture(scope="module")
def small() -> Prediction:
    return predict("rtx4090", random_weights="smolvlm-256m", compile=False)


TARGETS = [Target("cuda:89"), Cpu(), Reference()]


def on_target(limit: int | None = None) -> Model:
    """The model of `small` as if it were loaded on such a card."""
    options = LoadOptions(memory_limit=limit)
    return Model(random_checkpoint("smolvlm-256m", "BF16"), options, TARGETS)


def test_the_report_for_people(demo_h100: Prediction) -> None:
    """`mtmd warmup --target h100 --no-compile > tests/mtmd/inspect/golden/demo_h100.txt`"""
    text = str(demo_h100)
    assert text + "\n" == GOLDEN.read_text()


def test_every_report_has_80_columns(small: Prediction, demo_h100: Prediction) -> None:
    tight = predict("l4", random_weights="qwen3-vl-8b", memory="4GiB", compile=False)
    texts = [str(small), str(tight), render_comparison([small, tight, demo_h100])]
    assert [line for text in texts for line in text.splitlines() if len(line) > 80] == []
    assert "DOES NOT FIT" in texts[1] and "* does not fit" in texts[1]
    assert (
        "longest context that fits: none" in texts[1]
        and "concurrent answers of 8,192 tokens: none" in texts[1]
    )


def test_what_does_not_fit_is_told_first_with_a_way_out_and_marks(small: Prediction) -> None:
    tight = replace(
        small, usable_bytes=small.lengths[0].bytes, longest_context=1024, most_answers=0
    )
    lines = str(tight).splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("result:"))
    assert lines[at].startswith("result: DOES NOT FIT (everything would run") and at < 6
    assert lines[at + 1] == "  to do: --context 1024: it fits with 1,024 tokens"
    assert lines[at + 2].startswith("  to do: `mtmd fit` shows")
    assert sum(line.startswith("result:") for line in lines) == 1
    speeds = [line for line in lines if " tok/s" in line]
    first = f"at {small.lengths[0].context:,} "
    assert all((" * " in line) != (first in line) for line in speeds), speeds
    assert "  * does not fit; times as if it did" in lines
    none = replace(tight, longest_context=0, usable_bytes=1)
    assert "--weights Q4_K_M" in " ".join(str(none).split())
    assert "DOES NOT FIT" not in str(small) and "to do" not in str(small)


def test_memory_is_what_the_plans_say(small: Prediction) -> None:
    """Weights, cache and compute of a model on such a device, with the margins it keeps."""
    model = on_target()
    encoder, runner, at = model.encoder, model.runner, small.requested
    assert encoder is not None and at.context == runner.context == 8192
    report = model.warmup_report
    by_graph = {f"{g.graph}, {g.label}": g for g in report.graphs}
    weights = sum(
        by_graph[g].weight_bytes["cuda:89"] for g in ("encoder, warm-up", "decoder, decode")
    )
    assert small.weight_bytes == weights
    assert at.cache_bytes == by_graph["decoder, decode"].cache_bytes["cuda:89"]
    step, prefill = (
        by_graph[f"decoder, {label}"].compute_bytes["cuda:89"] for label in ("decode", "prefill")
    )
    encode = by_graph["encoder, warm-up"].compute_bytes["cuda:89"]
    picture = next(p for p in small.pictures if p.compute_bytes == encode)
    compute = max(prefill + prefill // 8, step + step // 8 + encode + encode // 8)
    reported = at.picture_bytes[small.pictures.index(picture)]
    needed = model.loaded.admission.needed
    beside = TAKEN_BYTES + needed.recordings()["cuda:89"] + needed.workspaces["cuda:89"]
    assert reported == weights + at.cache_bytes + -(-compute * 8 // 7) + beside
    assert runner.plan(BatchShape(1, pages=256)).compute_bytes["cuda:89"] == step


def test_what_pictures_are_resized_in_is_part_of_all_that_is_asked(small: Prediction) -> None:
    """As far as pictures are resized there: not by the host, and not as torchvision does it."""
    at, shape = small.requested, {"random_weights": "smolvlm-256m", "compile": False}
    by_host = predict("rtx4090", preprocess="host", **shape).requested
    assert {a - b for a, b in zip(at.picture_bytes, by_host.picture_bytes, strict=True)} == {
        TAKEN_BYTES
    }
    assert on_target().loaded.admission.needed.resizing == {"cuda:89": TAKEN_BYTES}
    shapes = ("lfm2-vl-1.6b", "qwen3-8b")
    for model in shapes:
        options, backends = LoadOptions(), [Target("cuda:89"), Cpu(), Reference()]
        loaded = Model(random_checkpoint(model, "BF16"), options, backends).loaded
        assert loaded.admission.needed.resizing == {}, model


def test_workspaces_of_libraries_are_part_of_all_that_is_asked() -> None:
    """Of each queue: the decoder's, the encoder's, and those in which runs are recorded."""
    queue = Target("cuda:90").queue_bytes

    def workspaces(model: str, *devices: Target, **chosen: Any) -> dict[str, int]:
        backends = [*devices, Cpu(), Reference()]
        loaded = Model(random_checkpoint(model, "BF16"), LoadOptions(**chosen), backends).loaded
        return dict(loaded.admission.needed.workspaces)

    assert workspaces("qwen3-8b", Target("cuda:90")) == {"cuda:90": 2 * queue}
    assert workspaces("smolvlm-256m", Target("cuda:90")) == {"cuda:90": 4 * queue}
    unrecorded = Target("cuda:90")
    unrecorded.records = False
    assert workspaces("smolvlm-256m", unrecorded) == {"cuda:90": 2 * queue}
    assert (
        Model(
            random_checkpoint("qwen3-8b", "BF16"), LoadOptions(device="cpu")
        ).loaded.admission.needed.workspaces
        == {}
    )


def test_what_is_told_to_fit_is_let_in_by_a_loaded_model_and_less_is_not(small: Prediction) -> None:
    at = small.requested
    largest = max(b for b in at.picture_bytes if b is not None)
    pixels = np.zeros((SIZES[-1][1], SIZES[-1][0], 3), np.uint8)
    whole = on_target(largest).loaded.admission.fit(pixels, Budget())
    assert whole.shrunk_from is None and whole.tokens == small.pictures[-1].tokens
    with pytest.raises(OptionError, match="memory_limit"):
        on_target(small.weight_bytes + at.cache_bytes)


def test_the_longest_context_and_the_most_answers_fit_and_more_do_not() -> None:
    needs = Needs(on_target(), Target("cuda:89"), find_card("rtx4090", 3 * GIB))
    usable, longest, answers = usable_bytes(3 * GIB), needs.longest_context(), needs.most_answers()
    assert usable and longest and answers

    def fits(context: int, answers: int) -> bool:
        stored = (p for p in needs.pictures if p.tokens < context)
        return all(needs.bytes(context, p, answers) <= usable for p in (None, *stored))

    maximum = needs.model.checkpoint.text.context
    assert longest == maximum == 8192 and fits(longest, 4)
    assert fits(8192, answers) and not fits(8192, answers + 1)
    tight = Needs(needs.model, Target("cuda:89"), find_card("rtx4090", GIB + GIB // 2))
    usable, longest = usable_bytes(GIB + GIB // 2), tight.longest_context()
    assert usable and longest and 0 < longest < maximum and longest % 1024 == 0
    assert fits(longest, 4) and not fits(longest + 1024, 4)


def test_a_context_is_reckoned_with_the_pictures_that_it_holds() -> None:
    """Qwen's pictures grow with their size: the largest of them here has thousands of tokens."""
    model = Model(random_checkpoint("qwen3-vl-2b", "BF16"), LoadOptions(), TARGETS)
    needs = Needs(model, Target("cuda:89"), find_card("rtx4090", 24 * GIB))
    smallest, *_, largest = sorted(needs.pictures, key=lambda p: p.tokens)
    assert smallest.tokens < 1024 < largest.tokens
    short = needs._length(1024)
    stored = [p.tokens < 1024 for p in needs.pictures]
    assert [b is not None for b in short.picture_bytes] == stored and not all(stored)
    here = max(b for b in short.picture_bytes if b is not None)
    assert needs._worst(1024) == here < needs.bytes(1024, largest)

    # A card with room for the short one, but not beside a picture that it cannot have.
    memory = next(
        m for m in range(GIB, 64 * GIB, GIB // 64) if (usable_bytes(m) or 0) >= here
    )  # of a card
    tight = Needs(model, Target("cuda:89"), find_card("rtx4090", memory))
    assert tight.bytes(1024, largest) > (usable_bytes(memory) or 0)
    longest = tight.longest_context()
    assert longest is not None and 1024 <= longest < largest.tokens

    none = Needs(model, Target("cuda:89"), find_card("rtx4090", GIB))
    assert none.longest_context() == 0


def test_where_no_picture_fits_the_longest_context_is_one_without() -> None:
    model = Model(random_checkpoint("smolvlm-256m", "BF16"), LoadOptions(), TARGETS)
    needs = Needs(model, Target("cuda:89"), find_card("rtx4090", 24 * GIB))
    minimum = min(p.tokens for p in needs.pictures)
    without, alongside = needs._worst(minimum // 2), needs._worst(minimum + 1)
    assert without < alongside
    memory = next(m for m in range(GIB, 8 * GIB, 1 << 20) if (usable_bytes(m) or 0) >= without)
    assert (usable_bytes(memory) or 0) < alongside
    tight = Needs(model, Target("cuda:89"), find_card("rtx4090", memory))
    longest = tight.longest_context()
    assert longest is not None and minimum // 2 - 32 < longest <= minimum


def test_a_context_without_a_picture_is_told_as_one(small: Prediction) -> None:
    minimum = min(p.tokens for p in small.pictures)
    tight = replace(small, usable_bytes=1, longest_context=minimum, most_answers=0)
    assert f"fits with {minimum:,} tokens, without a picture" in " ".join(str(tight).split())
    alongside = replace(tight, longest_context=minimum + 1)
    assert "without a picture" not in str(alongside)


def test_more_costs_more(small: Prediction) -> None:
    needs = [length.bytes for length in small.lengths]
    assert needs == sorted(needs) and len(set(needs)) == len(needs)
    steps = [length.decode for length in small.lengths]
    assert all(a and b and a.device_ms < b.device_ms for a, b in pairwise(steps))
    for length in small.lengths:
        for e in (length.prefill, length.decode, length.decode_all):
            assert e is not None and e.fast_ms < e.ms < e.slow_ms
            assert e.ms == pytest.approx(max(e.host_ms, e.device_ms))
            assert (e.bound == "launches") or e.device_ms >= e.host_ms
    costs = [p.encode for p in sorted(small.pictures, key=lambda p: p.tiles)]
    assert all(a and b and a.ms <= b.ms for a, b in pairwise(costs))


def test_memory_of_the_card_is_read_as_sizes_are() -> None:
    result = predict("cuda:90", memory="24GiB", compile=False)
    assert result.card is not None and result.card.memory_bytes == 24 * GIB
    assert result.usable_bytes == usable_bytes(24 * GIB) == (24 * GIB - GIB // 2) // 16 * 15
    assert result.fits(result.needed_bytes) and "any GPU of cuda:90" in str(result)
    unknown = predict("cuda:90", compile=False)
    assert (unknown.usable_bytes, unknown.longest_context) == (None, None)
    assert unknown.fits(unknown.needed_bytes) is None and "give --memory" in str(unknown)
    assert all(length.decode is None for length in unknown.lengths)


# Names and kinds of `asdict`: what is renamed or removed here raises SCHEMA.
FIELDS = {
    "schema", "ran_on_a_gpu", "times", "model", "device", "device_name", "dtype", "flash", "refused",
    "graphs", "checks", "dequantized", "speculation", "ranks", "layers", "fit", "programs", "untried", "lacks", "kv", "adapters", "activations", "could_round",
    "weights", "vision_attention", "preprocessing", "machine",
    "fully_accelerated", "card", "sequences",
    "context", "context_most", "usable_bytes", "weight_bytes", "longest_context", "most_answers",
    "lengths", "pictures", "work", "links", "compiled", "not_compiled", "needed_bytes", "fits",
}  # fmt: skip
ESTIMATE = {
    "ms", "fast_ms", "slow_ms", "bound", "host_ms", "device_ms", "launches", "gflop", "gib",
    "exchange_ms",
}  # fmt: skip


def test_the_report_for_programs(mtmd: Any) -> None:
    result = json.loads(mtmd("warmup", "--target", "h100", "--no-compile", "--json").out)
    assert set(result) == FIELDS and result["schema"] == 2 and result["ran_on_a_gpu"] is False
    assert result["times"] == "not confirmed by a run"
    assert set(result["card"]) == {
        "name", "title", "target", "multiprocessors", "memory_bytes", "gb_per_s", "tflops_16",
        "tflops_32", "source",
    }  # fmt: skip
    length, picture, work = result["lengths"][0], result["pictures"][0], result["work"][0]
    assert set(length) == {
        "context", "cache_bytes", "bytes", "picture_bytes", "prefill_tokens", "prefill", "decode",
        "decode_all",
    }  # fmt: skip
    assert set(picture) == {"size", "tokens", "tiles", "compute_bytes", "encode", "refused"}
    assert set(length["decode"]) == set(picture["encode"]) == ESTIMATE
    assert set(work) == {"graph", "launches", "ops"}
    assert set(work["ops"][0]) == {
        "op", "kernel", "nodes", "launches", "gflop", "mib", "ms", "bound",
    }  # fmt: skip
    assert result["compiled"] == [] and result["not_compiled"] == "not asked for"
    assert result["fits"] is True and len(length["picture_bytes"]) == len(result["pictures"])


def test_several_cards_are_one_table(mtmd: Any) -> None:
    text = mtmd("warmup", "--target", "h100,RTX 4090,mi300x,h100").out
    rows = [line.split()[0] for line in text.splitlines() if " of " in line and "launches" in line]
    assert rows == ["h100", "rtx4090", "mi300x"]
    result = json.loads(mtmd("warmup", "--target", "l4,a10", "--no-compile", "--json").out)
    assert [report["card"]["name"] for report in result] == ["l4", "a10"]


def test_cards_and_shapes_are_listed(mtmd: Any) -> None:
    cards = mtmd("warmup", "--target", "list").out
    assert "rtx4090" in cards and "mi300x" in cards and "cuda:100" in cards
    assert "gemma-3-4b" in mtmd("warmup", "--random-weights", "list").out


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (("--target", "rtx9090"), "near it: rtx"),
        (("--target", ","), "expected a card"),
        (("--target", "l4," * 40 + ",".join(f"c{i}" for i in range(40))), "at most 32"),
        (("--target", "h100", "--memory", "lots"), "memory: found 'lots'"),
        (("--target", "h100", "--memory", "-1"), "memory"),
        (("--target", "h100", "--memory-limit", "8GiB"), "give memory"),
        (("--target", "h100", "--random-weights", "gemma"), "random-weights 'gemma'"),
        (("--target", "h100", "--weights", "Q9"), "weights: found 'Q9'"),
        (("--target", "h100", "-m", "x", "--random-weights", "gemma-3-4b"), "expected one of them"),
        (("--target", "h100", "--parallel", "0"), "parallel"),
        (("--target", "h100", "--context", "999999"), "context"),
        (("--target", "h100", "--split", "layer"), "`mtmd fit` predicts several"),
        (("--target", "h100,l4", "--tp", "2"), "found 2 targets, expected one"),
        (("--target", "h100", "--tp", "0"), "tp"),
        (("--target", "h100", "--tp", "2", "--tensor-split", "1,2,3"), "one for each of tp's"),
        (("--target", "h100", "--tp", "2", "--save", "x"), "none of --memory"),
        (("--memory", "24GiB"), "--memory is for a GPU that you do not have"),
        (("--random-weights", "gemma-3-4b", "-m", "x"), "expected one of them"),
        (("--weights", "Q9"), "weights: found 'Q9'"),
        (("--parallel", "2"), "--parallel is for a GPU"),
        (("--no-compile",), "--no-compile is for a GPU"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_refusals(arguments: tuple[str, ...], reported: str, mtmd: Any) -> None:
    line = mtmd("warmup", *arguments).refused()
    assert reported in line and len(line.strip().splitlines()) == 1


def test_strict_counts_memory(mtmd: Any) -> None:
    requested = ("warmup", "--no-compile", "--strict", "--target")
    assert mtmd(*requested, "h100").code == 0
    assert mtmd(*requested, "h100", "--memory", "520MiB").code == 3


def test_without_triton_all_but_the_kernels_is_told() -> None:
    """In a process of its own, where Triton cannot be found; memory and times are the same."""
    code = (
        "import sys, importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *a: None if name == 'triton' else find(name, *a)\n"
        "sys.modules['triton'] = None\n"
        "from mtmd.cli import main\n"
        "sys.exit(main(['warmup', '--target', 'h100']))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    reported = f"kernels not compiled: Triton, which compiles them, is not installed; {install_command('gpu')}"
    assert reported in " ".join(done.stdout.split())
    head = GOLDEN.read_text().split("kernels not compiled")[0]
    assert done.stdout.startswith(head)
