"""How far number types are from a reference: equal where they are the same, as far as a plain
calculation says where they are not, and what is wrong told before anything is loaded.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import checkpoints as make
import pytest
import torch

from mtmd import load
from mtmd.base.errors import ModelError, OptionError
from mtmd.bench.quality import TEXT, USUAL, log_probabilities, measure_quality, render_quality

SHORT = "Two red squares lie on a blue one, and a third is far away."


def test_rows_are_as_far_as_a_plain_calculation_says() -> None:
    report = measure_quality(
        None, {"32": {"dtype": "fp32"}, "16": {"dtype": "bf16"}}, {}, text=SHORT, positions=24
    )
    same, rounded = report.rows
    for way in (same.read, same.written):
        assert 0 <= way.mean <= way.maximum < 1e-6 and way.same_top == 1
    assert same.picture_nmse == 0 and same.weight_bytes > 1.9 * rounded.weight_bytes
    assert rounded.picture_nmse is not None and 0 < rounded.picture_nmse < 1e-2
    rows = []
    for dtype in ("fp32", "bf16"):
        with load(dtype=dtype) as model:  # type: ignore[arg-type]
            ids = tuple(model.checkpoint.tokenizer.encode(SHORT)[:24])
            runner = model.runner
            rows.append(
                model.exclusively(lambda r=runner, i=ids: log_probabilities(r, i, len(i))).double()
            )
    p, q = rows
    each = (p.exp() * (p - q)).sum(1).clamp(min=0)
    assert rounded.read.mean == pytest.approx(float(each.mean()), rel=0.05)
    assert rounded.read.maximum == pytest.approx(float(each.max()), rel=0.05)
    assert rounded.read.same_top == float((p.argmax(1) == q.argmax(1)).double().mean())
    following = p[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    assert report.perplexity == pytest.approx(math.exp(-float(following.mean())), rel=1e-5)
    text = render_quality(report)
    assert "compared with demo model, fp32" in text and max(map(len, text.splitlines())) < 110


def test_the_usual_rows(tmp_path: Path) -> None:
    """Those that a model cannot have are named; types that were chosen are not varied."""
    make.gemma3(tmp_path / "a")
    report = measure_quality(str(tmp_path / "a"), {}, {}, text=SHORT, positions=8)
    names = [row.name for row in report.rows] + [t.partition(": ")[0] for t in report.left_out]
    usual = [f"{option}={kind}" for option, kinds in USUAL.items() for kind in kinds]
    assert sorted(names) == sorted(["as loaded", *usual]) and names[0] == "as loaded"
    told = render_quality(report)
    assert all(f"left out: {text[:40]}" in told for text in report.left_out)
    base = {"weights": "Q8_0", "kv_type": "fp32", "activations": "auto"}
    report = measure_quality(str(tmp_path / "a"), {}, base, text=SHORT, positions=8)
    assert [row.name for row in report.rows] == ["as loaded"]


def test_the_command_compares_with_another_model(mtmd: Any, tmp_path: Path) -> None:
    """Of the same vocabulary; without encoder there is no picture."""
    make.gemma3(tmp_path / "a")
    make.gemma3(tmp_path / "b", seed=1)
    ran = mtmd(
        *("bench", tmp_path / "a", "--quality", "--variant", "dtype=fp32", "--positions", 16),
        *("--reference", tmp_path / "b", "--json"),
    )
    assert ran.code == 0, ran
    (row,) = json.loads(ran.out)["rows"]
    assert row["read"]["mean"] > 1e-3 and row["read"]["same_top"] < 1
    with pytest.raises(ModelError, match=r"has a vocabulary of .* expected two of the same model"):
        measure_quality(str(tmp_path / "a"), {"x": {}}, {}, reference="demo", positions=16)


WRONG = [
    (["--variant", "dtype=bf16"], "--variant says what --quality compares"),
    (["--quality", "--variant", "dtype=int3"], "dtype: found 'int3'"),
    (["--quality", "--variant", "dtyp=bf16"], "did you mean 'dtype'"),
    (["--quality", "--variant", "bf16"], "expected NAME=VALUE"),
    (["--quality", "--variant", "threads=many"], "'threads=many', expected 1 to 1,024"),
    (["--quality", "--positions", "1"], "positions: found 1, expected 2 to"),
    (["--quality", "nowhere.txt"], "'nowhere.txt' cannot be read (No such file or directory)"),
    (["--quality", "--html", "x.html"], "found --quality and --html; expected one of them"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[case[1][:30] for case in WRONG])
def test_what_is_wrong_is_told_before_anything_is_loaded(
    mtmd: Any, arguments: list[str], words: str
) -> None:
    assert words in mtmd("bench", *arguments).refused()


def test_texts_that_are_none_are_told(mtmd: Any, tmp_path: Path) -> None:
    binary = tmp_path / "text"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "is no UTF-8, expected a text file" in mtmd("bench", "--quality", binary).refused()
    with pytest.raises(OptionError, match="a text of 1 tokens, expected at least 8"):
        measure_quality(None, {"x": {}}, {}, text="a")
    assert len(TEXT.read_text()) > 2000
