"""The simulator against closed forms of queueing theory, and against what has to hold whatever
chance does: every picture answered once, the schedule's units, the same for the same seed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, stdev

import pytest
import simpy
from scenario import MEASURED, Costs, Failures, Fleet, Kill, Scenario, Traffic
from shared_cores import Shared
from simulation import Arrivals, Result, Simulation, simulate

from mtmd.base.errors import OptionError

FREE = Costs(
    name="nothing costs anything", kind=MEASURED, how="", machine="", device="cpu",
    engine_cores=1.0, picture_bytes=0, fetch_s=0, decode_s=0, preprocess_s=0, request_s=0,
    locked=0, tiles=0, tiles_at_once=4, encode_batch_s=0, encode_tile_s=0, prompt_tokens=0,
    output_tokens=1, step_s=0, prompt_token_s=0, output_token_s=0, step_tokens=512,
    concurrent_tokens=128, answer_s=0, write_s=0, assign_s=0, load_cpu_s=0, load_wait_s=0,
    background_cores=0,
)  # fmt: skip
DEMO = replace(
    FREE, engine_cores=0.9, picture_bytes=2000, decode_s=1e-3, preprocess_s=2e-3, request_s=1e-3,
    locked=0.5, tiles=1, encode_batch_s=1e-3, encode_tile_s=3e-3, prompt_tokens=31,
    output_tokens=3.2, step_s=2e-3, prompt_token_s=2e-4, output_token_s=2e-4, answer_s=5e-4,
    write_s=2e-3, assign_s=2e-3, load_cpu_s=1, load_wait_s=0.5, background_cores=0.02,
)  # fmt: skip
ONE = Fleet(1, cores=1, slots=1, ahead=0, queue=None)
RATE, COUNT = 0.6, 8000
BATCHES = 20  # means of runs one after another, which hardly depend on each other
SURE = 3.883  # Student's t, 19 degrees of freedom, 99.9 %, both sides


def mean_of(values: list[float]) -> tuple[float, float]:
    """And how far from it the true mean may be: the method of batch means."""
    size = len(values) // BATCHES
    means = [fmean(values[at : at + size]) for at in range(0, size * BATCHES, size)]
    return fmean(means), SURE * stdev(means) / math.sqrt(BATCHES)


def by_themselves(costs: Costs, fleet: Fleet, seed: int = 1, **traffic: float) -> Result:
    return simulate(
        Scenario(costs, fleet, Traffic("steady", COUNT, rate=RATE, **traffic), seed=seed)
    )


@pytest.mark.parametrize("work", ["decode_s", "step_s"])
def test_one_server_with_fixed_work(work: str) -> None:
    """M/D/1: waits are rho / (2 (1 - rho)) times the work, whether cores or the engine does it."""
    result = by_themselves(replace(FREE, **{work: 1.0}), ONE)
    mean, sure = mean_of(result.waits)
    assert abs(mean - RATE / (2 * (1 - RATE))) < sure < 0.3
    assert result.utilization["cores"] == pytest.approx(COUNT / result.seconds)


def test_one_server_with_exponential_work() -> None:
    """M/M/1: waits are rho / (1 - rho) times the mean work, and p of all are answered within
    -ln(1 - p) / (1 - rho).
    """
    result = by_themselves(replace(FREE, decode_s=1.0), ONE, size_cv=1.0)
    mean, sure = mean_of(result.waits)
    assert abs(mean - RATE / (1 - RATE)) < sure < 0.8
    for part in (0.5, 0.9):
        within = [latency < -math.log(1 - part) / (1 - RATE) for latency in result.latencies]
        mean, sure = mean_of(within)
        assert abs(mean - part) < sure < 0.1


def test_several_servers() -> None:
    """M/M/3, by Erlang's C."""
    servers, load = 3, 2.1
    empty = sum(load**n / math.factorial(n) for n in range(servers))
    last = load**servers / math.factorial(servers) / (1 - load / servers)
    wait = last / (empty + last) / (servers - load)
    fleet = replace(ONE, nodes=servers)
    traffic = Traffic("steady", COUNT, rate=load, size_cv=1.0)
    result = simulate(Scenario(replace(FREE, decode_s=1.0), fleet, traffic))
    mean, sure = mean_of(result.waits)
    assert abs(mean - wait) < sure < 0.4


@pytest.mark.parametrize("size_cv", [0.0, 1.5])
def test_cores_that_all_share(size_cv: float) -> None:
    """M/G/1 with processor sharing: 1 / (1 - rho) times the work, whatever its distribution."""
    result = by_themselves(replace(FREE, decode_s=1.0), replace(ONE, slots=1000), size_cv=size_cv)
    mean, sure = mean_of(result.latencies)
    assert abs(mean - 1 / (1 - RATE)) < sure < 0.7
    assert max(result.waits) == 0


def test_number_present_and_work_done() -> None:
    """Little's law and the utilization law, which hold in every run exactly."""
    traffic = Traffic("steady", 2000, rate=60, size_cv=1, length_cv=1, cache_hits=0.2)
    result = simulate(Scenario(DEMO, Fleet(2, cores=1.3), traffic))
    assert result.present == pytest.approx(sum(result.latencies) / result.seconds)
    host = sum(result.stages[s] for s in ("fetch", "decode", "preprocess", "request"))
    engine = sum(result.stages[s] for s in ("encode", "prefill", "decoding", "answer"))
    cores = host + DEMO.engine_cores * engine + 2000 * DEMO.write_s / 256
    capacity = 2 * (1.3 - DEMO.background_cores)
    assert result.utilization["cores"] * capacity * result.seconds == pytest.approx(cores, rel=0.01)


def test_what_known_pictures_save() -> None:
    traffic = Traffic("backlog", 1000, cache_hits=1.0, page_tokens=10)
    result = simulate(Scenario(DEMO, traffic=traffic))
    assert result.stages["encode"] == 0
    assert result.stages["prefill"] == pytest.approx(1000 * 10 * DEMO.prompt_token_s)


def test_answers_as_long_and_pictures_as_large_as_they_are_in_the_mean() -> None:
    traffic = Traffic("backlog", 2500, size_cv=1.0, length_cv=0.7)
    result = simulate(Scenario(replace(DEMO, output_tokens=40), traffic=traffic))
    assert result.stages["decode"] == pytest.approx(2500 * DEMO.decode_s, rel=0.07)
    run = Simulation(Scenario(replace(DEMO, output_tokens=40), traffic=traffic))
    assert fmean(run.picture(n).output for n in range(2500)) == pytest.approx(40, rel=0.05)


def test_machines_that_nodes_share() -> None:
    """Two actors on two cores get what there is of them, not twice what one gets."""
    backlog = Traffic("backlog", 1000, unit=25)
    costs = replace(DEMO, load_cpu_s=0, load_wait_s=0)
    alone, together, separate = (
        simulate(Scenario(costs, fleet, backlog)).rate
        for fleet in (Fleet(1), Fleet(2, share=2), Fleet(2))
    )
    maximum = 2 / sum((DEMO.decode_s, DEMO.preprocess_s, DEMO.request_s))
    assert separate == pytest.approx(2 * alone, rel=0.05)
    assert 1.3 * alone < together < 1.9 * alone < maximum


@pytest.mark.parametrize("pattern", ["steady", "bursts", "backlog"])
def test_every_picture_is_answered_once_where_nodes_are_lost(pattern: str) -> None:
    traffic = Traffic(pattern, 1500, rate=60, peak=3, period_s=20, burst_s=5, unit=20)
    failures = Failures(mtbf_s=5.0, notice_s=0.5, restart_s=2.0)
    result = simulate(Scenario(DEMO, Fleet(3, queue=None), traffic, failures))
    assert result.lost_nodes > 3 and result.again > 0
    assert result.times == dict.fromkeys(range(1500), 1)
    assert result.finished == result.came == 1500 and result.rejected == 0


def test_a_node_that_is_killed_leaves_its_units_to_others() -> None:
    traffic = Traffic("backlog", 1000, unit=25)
    fleet, kill = Fleet(2, share=2), Failures(kills=(Kill(1, 0.5),))
    whole, killed = (simulate(Scenario(DEMO, fleet, traffic, f)) for f in (Failures(), kill))
    assert killed.lost_nodes == 1 and set(killed.times.values()) == {1}
    # at most the two units that it had, each half done at least in part
    assert 0 < killed.again <= 50 and whole.again == 0
    assert killed.seconds > whole.seconds


def test_a_full_queue_sends_pictures_away() -> None:
    """M/D/1 of twice what can be done: half are sent away, and those who wait are so many."""
    traffic = Traffic("steady", 4000, rate=2.0)
    result = simulate(Scenario(replace(FREE, decode_s=1.0), replace(ONE, queue=5), traffic))
    assert result.max_waiting == 5
    assert result.finished + result.rejected == result.came == 4000
    assert result.rejected == pytest.approx(2000, rel=0.05)
    assert max(result.latencies) <= 6 + 1e-6


@pytest.mark.parametrize(("pattern", "peak"), [("steady", 1.0), ("wave", 1.8), ("bursts", 6.0)])
def test_as_many_come_as_were_asked_for(pattern: str, peak: float) -> None:
    traffic = Traffic(pattern, 30_000, rate=50, peak=peak, period_s=4, burst_s=1)
    arrivals = Simulation(Scenario(FREE, traffic=traffic)).source
    assert isinstance(arrivals, Arrivals)
    times = arrivals.times()
    came = [next(times) for _ in range(30_000)]
    assert 30_000 / came[-1] == pytest.approx(50, rel=0.1)
    assert came == sorted(came)
    if pattern == "wave":  # from the trough: most come in the middle of a period
        middle = sum(1.5 <= at % 4 < 2.5 for at in came)
        assert middle / came[-1] * 4 == pytest.approx(50 * (1 + 0.8 * 0.9), rel=0.05)
    gaps = [after - before for before, after in pairwise(came)]
    varied = stdev(gaps) / fmean(gaps)  # 1 for a Poisson process
    assert varied == pytest.approx(1, abs=0.05) if pattern == "steady" else varied > 1.1


def test_the_same_seed_tells_the_same() -> None:
    traffic = Traffic("bursts", 600, rate=40, peak=4, period_s=10, burst_s=2, size_cv=1)
    scenario = Scenario(DEMO, Fleet(2), traffic, Failures(mtbf_s=10, restart_s=1))
    first, again = simulate(scenario), simulate(scenario)
    other = simulate(replace(scenario, seed=2))
    assert first == again
    assert first.latencies != other.latencies


def test_a_card_works_beside_the_cores() -> None:
    """It takes no share of the cores but for the thread that waits for it."""
    costs = replace(FREE, device="gpu", step_s=1.0, engine_cores=1.0)
    result = by_themselves(costs, replace(ONE, cores=2))
    mean, sure = mean_of(result.waits)
    assert abs(mean - RATE / (2 * (1 - RATE))) < sure
    assert result.utilization["cores"] == 0
    assert result.utilization["engine"] == pytest.approx(COUNT / result.seconds)


def test_sequences_of_a_batch_share_the_steps() -> None:
    """Four answers of ten tokens at once: ten steps of four, and one prompt after another."""
    costs = replace(FREE, prompt_tokens=5, output_tokens=10, step_s=1.0, output_token_s=0.1)
    result = simulate(Scenario(costs, Fleet(1, slots=4), Traffic("backlog", 4)))
    assert result.stages["decoding"] == pytest.approx(10 * 1.0 + 4 * 9 * 0.1)


def test_shares_of_a_resource() -> None:
    """Three threads on two cores: each at two thirds; weights count; who leaves, leaves room."""
    env = simpy.Environment()
    cores, ended = Shared(env, 2.0), dict[str, float]()

    def thread(name: str, seconds: float, weight: float = 1.0):
        yield from cores.hold(seconds, weight)
        ended[name] = env.now

    for name, seconds, weight in (("a", 2.0, 1.0), ("b", 2.0, 1.0), ("c", 4.0, 1.0)):
        env.process(thread(name, seconds, weight))
    env.run()
    assert ended == pytest.approx({"a": 3.0, "b": 3.0, "c": 5.0})
    cores.settle()
    assert cores.used == pytest.approx(8.0)
    start = env.now
    env.process(thread("wide", 3.0, 2.0))
    env.process(thread("narrow", 1.0, 1.0))
    env.run()
    assert ended["narrow"] - start == pytest.approx(1.5)
    assert ended["wide"] - start == pytest.approx(3.5)


def test_who_is_interrupted_leaves_its_share() -> None:
    env = simpy.Environment()
    cores, ended = Shared(env, 1.0), list[float]()

    def work():
        try:
            yield from cores.hold(10.0)
        except simpy.Interrupt:
            return
        ended.append(env.now)

    first, _ = env.process(work()), env.process(work())

    def interrupt():
        yield env.timeout(4.0)
        first.interrupt()

    env.process(interrupt())
    env.run()
    assert ended == pytest.approx([12.0])


def test_nodes_that_never_come_to_anything_end_the_run() -> None:
    """They take longer to load than they live."""
    scenario = Scenario(DEMO, Fleet(3), Traffic("backlog", 10), Failures(mtbf_s=0.01, restart_s=0))
    with pytest.raises(OptionError, match=r"mtbf_s: found 0.01, with which 1000 nodes were lost"):
        simulate(scenario)
