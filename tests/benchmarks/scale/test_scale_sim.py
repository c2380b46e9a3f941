"""The command: what it tells, and what it says of wrong input."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import scale_sim
from scenario import Costs
from test_simulation import DEMO

from mtmd.base.errors import OptionError


@pytest.fixture
def costs(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(asdict(DEMO)))
    return str(path)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_sim, "PROBE", 600)


def facts(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert scale_sim.main([*words, "--json"]) == 0
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


def test_a_job_is_told(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--costs", costs, "--pictures", "400", "--unit", "20", "--nodes", "2", "--share", "2"]
    assert scale_sim.main([*words, "--kill", "1@50", "--price", "2"]) == 0
    reported = capsys.readouterr().out
    assert "(measured); simulated" in reported and "1 nodes lost" in reported
    assert "breaks first: the engines" in reported
    assert "node hours" in reported and "at the price that was assumed" in reported


def test_as_many_nodes_as_it_takes(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At half of what nodes can do there are twice as many; a part of them tells the same rate."""
    words = ["--costs", costs, "--pattern", "steady", "--rate", "1000", "--seconds", "4"]
    full = facts(capsys, *words, "--load", "0.8", "--part", "0.2")
    half = facts(capsys, *words, "--load", "0.4", "--part", "0.2")
    assert half["nodes"] == pytest.approx(2 * full["nodes"], abs=2)
    assert full["simulated_nodes"] == pytest.approx(full["nodes"] / 5, abs=1)
    assert full["breaks_at_pictures_s"] == pytest.approx(1000 / 0.8, rel=0.1)
    assert half["latency_s"]["p50"] < full["latency_s"]["p50"]  # type: ignore[index]


def test_what_is_scarce_breaks_first(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--costs", costs, "--pattern", "steady", "--rate", "1", "--pictures", "9"]
    result = {
        facts(capsys, *words, "--nodes", "1", *more)["breaks_first"]
        for more in (["--link-gbit", "0.0005"], ["--fetch-wait", "2"], ["--cores", "0.5"])
    }
    assert result == {"link", "places", "cores"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--part", "0"], "part: found 0, expected more than 0, up to 1"),
        (["--kill", "one"], "kill: found 'one', expected NODE@PERCENT"),
        (["--nodes", "2", "--kill", "2@50"], "kill: found node 2, expected 0 to 1"),
        (["--nodes", "1", "--kill", "0@50"], "kill: found all 1 nodes, expected one that is left"),
        (["--nodes", "3", "--share", "2"], "share: found 2 nodes on a machine and 3 nodes"),
        (["--nodes", "0"], "nodes: found 0, expected 1"),
        (["--rate", "5"], "rate: found with a backlog, expected pictures that come"),
        (["--pattern", "steady"], "rate: found none for steady, expected --rate or --per-day"),
        (["--pattern", "wave", "--rate", "9", "--peak", "3"], "peak: found 3, expected 1 to 2"),
        (["--pattern", "steady", "--rate", "nan"], "rate: found nan, expected a number"),
        (["--cache-hits", "1.5"], "cache_hits: found 1.5, expected 0 to 1"),
        (["--mtbf-hours", "0"], "mtbf_s: found 0, expected 1e-06 or more"),
        (["--pictures", "0"], "pictures: found 0, expected 1"),
        (["--price", "0"], "price: found 0, expected more than 0"),
        (["--load", "1"], "load: found 1, expected more than 0, below 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words_are_told_in_one_line(
    words: list[str], says: str, costs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        scale_sim.main(["--costs", costs, *words])
    reported = capsys.readouterr().err
    assert ended.value.code == 2
    assert says in reported and reported.count("\n") == 1


def test_costs_are_checked(tmp_path: Path) -> None:
    path, good = tmp_path / "costs.json", asdict(DEMO)
    for wrong, says in (
        ("{", "cannot be read"),
        ("[]", "found no object"),
        (json.dumps(good | {"colour": 1}), "found 'colour'"),
        (json.dumps({k: v for k, v in good.items() if k != "step_s"}), "step_s lacking"),
        (json.dumps(good | {"step_s": -1}), "step_s: found -1, expected 0 or more"),
        (json.dumps(good | {"step_s": "1"}), "step_s: found '1', expected a number"),
        (json.dumps(good | {"kind": "guessed"}), "kind: found 'guessed'"),
        (json.dumps(good | {"device": "abacus"}), "device: found 'abacus', expected cpu or gpu"),
    ):
        path.write_text(wrong)
        with pytest.raises(OptionError, match=says):
            Costs.read(path)


def test_cards_need_threads_beside_those_that_wait_for_them(costs: str) -> None:
    Path(costs).write_text(json.dumps(asdict(replace(DEMO, device="gpu", engine_cores=1.0))))
    args = scale_sim.parser().parse_args(["--costs", costs, "--workers", "4", "--cores", "4"])
    with pytest.raises(OptionError, match="found 4 for 4 threads that wait for GPUs"):
        scale_sim.scenario_of(args)


@pytest.mark.parametrize("path", sorted(scale_sim.COSTS.glob("*.json")), ids=lambda p: p.stem)
def test_costs_that_come_along_can_be_read(path: Path) -> None:
    assert Costs.read(path).how.startswith("measure_costs.py")
