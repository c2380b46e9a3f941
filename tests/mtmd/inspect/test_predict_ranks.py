"""What several cards that are not here would do together."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mtmd import predict
from mtmd.inspect.predict_target import PredictionReport

GOLDEN = Path(__file__).parent / "golden" / "demo_h100_tp2.txt"


@pytest.fixture(scope="module")
def shared() -> PredictionReport:
    return predict("h100", compile=False, tp=2)


def test_the_report_for_people(shared: PredictionReport) -> None:
    """The part of `mtmd warmup --target h100 --tp 2 --no-compile` that stands behind one card's."""
    alone, text = str(predict("h100", compile=False)), str(shared)
    start = text.index("2 such cards")
    stop = text.index("memory, GiB")
    assert text[start:stop] == GOLDEN.read_text()
    assert text[:start] + text[stop:] == alone
    assert max(map(len, text.splitlines())) <= 80


def test_a_rank_takes_its_part_and_says_what_it_exchanges(shared: PredictionReport) -> None:
    assert shared.ranks is not None and len(shared.ranks.ranks) == 2
    assert all(r.weight_bytes < 0.55 * shared.weight_bytes for r in shared.ranks.ranks)
    assert [link.link for link in shared.links] == ["nvlink4", "nvlink4-mesh", "pcie5"]
    for fast, slow in pairwise(shared.links):
        assert fast.decode and slow.decode and fast.encode and slow.encode
        assert 0 < fast.decode.exchange_ms < slow.decode.exchange_ms < slow.decode.device_ms
        assert fast.decode.ms == pytest.approx(max(fast.decode.device_ms, fast.decode.host_ms))
        computing = [link.decode.device_ms - link.decode.exchange_ms for link in (fast, slow)]  # type: ignore[union-attr]
        assert computing[0] == pytest.approx(computing[1])


def test_the_report_for_programs(mtmd: Any) -> None:
    words = ("--tp", "3", "--tensor-split", "2,1,1", "--no-compile", "--json")
    result = json.loads(mtmd("warmup", "--target", "rtx3090", *words).out)
    assert [r["share"] for r in result["ranks"]["ranks"]] == [2, 1, 1]
    (link,) = result["links"]  # a bridge ties two cards
    assert link["link"] == "pcie4" and link["gb_per_s"] == pytest.approx(31.5, abs=0.01)
    assert set(link) == {
        "link", "title", "gb_per_s", "source", "prefill_tokens", "prefill", "decode", "encode",
    }  # fmt: skip


def test_an_architecture_is_many_cards() -> None:
    result = predict("cuda:90", memory="24GiB", compile=False, tp=2)
    assert result.links == () and result.ranks is not None
    assert "no times: name a card" in str(result)
