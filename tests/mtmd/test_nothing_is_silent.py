"""Whatever the device refuses at the shape of a run is in the answer's receipt, and in the report
from then on.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from mtmd import load

EXAMPLES = Path(__file__).parents[2] / "examples"
ONE, FOUR, WORD = EXAMPLES / "one.png", EXAMPLES / "four.png", EXAMPLES / "word.png"


def test_an_op_that_only_prompts_with_images_need() -> None:
    model = load(refuse=["place_rows"])
    assert not model.warmup_report.fully_accelerated
    assert [r.op for r in model.warmup_report.refused] == ["place_rows"]
    warnings = model.answer(ONE, max_tokens=2).receipt.warnings
    assert len(warnings) == 1 and "place_rows" in warnings[0] and "runs on cpu" in warnings[0]


@pytest.mark.parametrize(
    ("rule", "images", "reported"),
    [
        ("*:batch=2", [FOUR, WORD], "batch 2 is not supported"),
        ("attention:rows=30", [ONE], "rows 30 is not supported"),
    ],
)
def test_a_shape_that_nobody_asked_about(rule: str, images: list[Path], reported: str) -> None:
    model, plain = load(refuse=[rule]), load()
    assert (
        model.answer(
            ONE, "How many shapes are there in this picture, and which?", max_tokens=1
        ).receipt.warnings
        == ()
    )
    answer = model.answer(images)
    assert answer.text == plain.answer(images).text
    assert any(reported in w for w in answer.receipt.warnings)
    assert (
        any(reported in r.reason for r in model.warmup_report.refused)
        and not model.warmup_report.fully_accelerated
    )


def test_a_format_that_no_grammar_is_known_for() -> None:
    """As Pydantic's `Path` and `SecretStr`: the rest of the schema is held to."""
    schema = {
        "type": "object",
        "properties": {
            "file": {"type": "string", "format": "path", "maxLength": 3},
            "key": {"anyOf": [{"type": "string", "format": "password", "maxLength": 3}]},
            "day": {"type": "string", "format": "date"},
        },
        "required": ["file", "key", "day"],
    }
    answer = load().answer(ONE, json_schema=schema, max_tokens=200)
    assert datetime.date.fromisoformat(json.loads(answer.text)["day"])
    assert [w for w in answer.receipt.warnings if w.startswith("json_schema: ")] == [
        "json_schema: any text is taken where the format is 'password', 'path', which no grammar "
        "is known for"
    ]
