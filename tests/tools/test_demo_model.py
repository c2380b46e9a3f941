"""The demo model: its world, its answers, and transformers reading the same files."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import checkpoints as make
import evaluate
import numpy as np
import pytest
import torch
from world import (
    COLORS,
    COUNTS,
    KINDS,
    LOCATIONS,
    SHAPES,
    WORDS,
    Facts,
    Question,
    ask,
    describe,
    draw,
)

from mtmd import Model, load

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "mtmd" / "demo_model"
AT_ONCE = 8


@pytest.fixture(scope="module")
def model() -> Model:
    return load(parallel=AT_ONCE)


def all_answers(answer: Callable[[Any], str], cases: Iterable[Any]) -> list[str]:
    """The answer to each case, of several at once: in batches they take a part of the time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(answer, cases))


def questions(seed: int, count: int) -> list[tuple[Any, Facts, Question]]:
    rng = random.Random(seed)
    result = []
    for _ in range(count):
        image, facts = draw(rng)
        result.append((image, facts, rng.choice(ask(facts, rng))))
    return result


def test_the_world_is_large_enough() -> None:
    assert (
        len(COLORS) >= 8
        and len(SHAPES) >= 6
        and len(LOCATIONS) == 9
        and len(COUNTS) == 5
        and len(WORDS) >= 20
    )
    seen = {q.kind for _, facts, _ in questions(123, 300) for q in ask(facts, random.Random(1))}
    assert seen == set(KINDS)


def test_a_seed_is_a_data_set() -> None:
    first, second = questions(5, 20), questions(5, 20)
    assert [(f, q) for _, f, q in first] == [(f, q) for _, f, q in second]
    assert all(
        a.tobytes() == b.tobytes() for (a, _, _), (b, _, _) in zip(first, second, strict=True)
    )


def test_answers_are_true_of_the_picture() -> None:
    """Checked by other means than the generator's: counting what was drawn."""
    for _, facts, question in questions(9, 400):
        if question.kind == "count":
            assert question.answer == f"{COUNTS[len(facts.things)].capitalize()}."
        elif question.kind == "left right":
            a, b = (
                next(t for t in facts.things if f"the {t.name} " in f"{part} ")
                for part in question.text.rstrip("?")
                .replace("Is ", "")
                .replace(" to the ", " ")
                .replace(" of the ", "|the ")
                .split("|")
            )
            assert question.answer == (
                "Yes." if ("left" in question.text) == (a.cell % 3 < b.cell % 3) else "No."
            )
        elif question.kind == "describe":
            assert question.answer == describe(facts) and all(
                t.full_name in question.answer for t in facts.things
            )


def test_size() -> None:
    assert sum(f.stat().st_size for f in DEMO.iterdir() if f.is_file()) <= 16 << 20


def test_most_answers_are_right(model: Model) -> None:
    """A small sample for a quick look; tools/demo_model/evaluate.py measures."""
    requested = questions(777_000, 80)
    actual = all_answers(lambda r: model.describe(r[0], r[2].text), requested)
    right = sum(a == q.answer for a, (_, _, q) in zip(actual, requested, strict=True))
    assert right >= 72, f"{right} of {len(requested)}"


@pytest.mark.parametrize(
    "chosen",
    [{"flash_attn": "off"}, {"refuse": [r"attention:/blk\.[13]\./"]}],
    ids=["off", "mixed"],
)
def test_answers_do_not_depend_on_the_form_of_attention(
    model: Model, chosen: dict[str, Any]
) -> None:
    other = load(parallel=AT_ONCE, **chosen)
    assert {f.state for f in other.warmup_report.flash} == (
        {"off"} if "flash_attn" in chosen else {"mixed"}
    )
    requested = questions(778_000, 25)
    actual, expected = (
        all_answers(lambda r, m=m: m.describe(r[0], r[2].text), requested) for m in (other, model)
    )
    assert actual == expected


@pytest.mark.parametrize("group", [g for g in evaluate.GROUPS if g != "picture first"])
def test_most_answers_of_every_group_are_right(model: Model, group: str) -> None:
    """Text before the picture, system prompts, later turns, several pictures, boxes, videos."""
    requested = list(evaluate.cases(group, 781_000, 24))
    actual = all_answers(evaluate.Answerer(model).answer, requested)
    right = sum(
        evaluate.overlap(answer, case.expected) >= evaluate.GOOD_OVERLAP
        if case.expected.startswith("{")
        else answer == case.expected
        for answer, case in zip(actual, requested, strict=True)
    )
    assert right >= 22, f"{right} of {len(requested)}"


def test_transformers_gives_the_same_answers(model: Model) -> None:
    """In every group: pictures before and after the text, several, boxes, frames of a video."""
    from transformers import Gemma3ForConditionalGeneration

    reference = Gemma3ForConditionalGeneration.from_pretrained(DEMO, dtype=torch.float32).eval()
    ask = evaluate.Answerer(model)
    for group in evaluate.GROUPS:
        for case in evaluate.cases(group, 779_000, 2):
            inputs = make.gemma3_inputs(DEMO, case.messages, [np.asarray(i) for i in case.images])
            with torch.no_grad():
                sequence = reference.generate(**inputs, max_new_tokens=96, do_sample=False)[0]
            actual = ask.finished(case, max_tokens=96)
            assert list(actual.prompt_token_ids) == inputs["input_ids"][0].tolist()
            stop = model.checkpoint.stop_tokens
            expected = sequence[inputs["input_ids"].shape[1] :].tolist()
            assert list(actual.output_token_ids) == [t for t in expected if t not in stop]


def test_evaluate_prints_groups_kinds_and_total(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--seed", "4242", "-n", "2", "--threads", "1"])
    evaluate.main()
    lines = capsys.readouterr().out.splitlines()
    assert 0 <= float(lines[-1]) <= 100
    groups = [line for line in lines[1:-1] if not line.startswith(" ")]
    assert [line[:36].strip() for line in groups] == list(evaluate.GROUPS)
    assert all(" of    2 " in line for line in groups)
    assert "mean overlap" in groups[list(evaluate.GROUPS).index("boxes")]


def test_a_box_counts_by_what_it_has_in_common_with_the_real_one() -> None:
    real = '{"box_2d": [0, 0, 100, 200], "label": "red star"}'
    assert evaluate.overlap(real, real) == 1
    assert evaluate.overlap(real.replace("200", "100"), real) == 0.5
    assert evaluate.overlap(real.replace("red", "blue"), real) == 0
    assert evaluate.overlap("There is no star.", real) == 0
    assert evaluate.overlap(f"{real} {real}", real) == 0


def test_examples_are_of_this_world(model: Model) -> None:
    """examples/README.md says what each picture shows; the model says the same."""
    reported = [
        line
        for line in (ROOT / "examples" / "README.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    assert len(reported) >= 6
    for line in reported:
        name, description = (cell.strip().strip("`") for cell in line.strip("|").split("|"))
        assert model.describe(ROOT / "examples" / name) == description
