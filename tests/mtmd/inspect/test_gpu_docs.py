"""docs/gpu.md is what tools/gpu_predictions.py writes: all of it that takes no minute to write."""

from __future__ import annotations

from pathlib import Path

from gpu_predictions import (
    COMPARED,
    card_rows,
    compared,
    cycle_rows,
    factor_rows,
    launch_row,
    link_rows,
)

DOCS = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text()


def test_the_document_is_as_written_by_its_script() -> None:
    assert "\n".join(factor_rows()) in DOCS and "\n".join(card_rows()) in DOCS
    assert "\n".join(link_rows()) in DOCS and "\n".join(cycle_rows()) in DOCS
    assert f"```\n{compared('smolvlm-256m')}\n```" in DOCS and ",".join(COMPARED) in DOCS
    assert launch_row("smolvlm-256m") in DOCS
