"""Many pictures a day, simulated: how many machines they take, what breaks first, how long answers
take, what a million costs. Costs of a picture are measured or estimated (`measure_costs.py`);
nothing here runs a model.

    python benchmarks/scale/scale_sim.py --costs cpu-demo --pictures 2000 --nodes 2 --share 2
    python benchmarks/scale/scale_sim.py --costs h100-smolvlm-256m --workers 8 --cores 96 \\
        --pattern wave --peak 1.6 --per-day 1e8 --period 600 --seconds 600
    python benchmarks/scale/scale_sim.py --costs cpu-demo --pattern bursts --peak 5 --rate 40 --json

Without --nodes there are as many as keep the rate at --load of what they could do, the peak of a
wave included. --part simulates a part of pictures and nodes: chance then evens out less than among
all, so that waits are told rather too long. A wave may have a shorter --period than a day, for
a run that takes less long: what lasts seconds sees the rate stand still in either.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from scenario import DAY_S, PATTERNS, Costs, Failures, Fleet, Kill, Scenario, Traffic
from simulation import Result, simulate

from mtmd.base.errors import MtmdError, OptionError

COSTS = Path(__file__).parent / "costs"
HOUR_S = 3600.0
QUANTILES = (50, 90, 99, 99.9)
FULL = 0.85
PROBE, FLOOD = 3000, 1e6  # pictures, and a second, by which it is found what one node can do
WHAT = {
    "cores": "the machines' cores",
    "engine": "the engines: encoding, prompts and tokens",
    "places": "places for pictures under way",
    "link": "the machines' links",
    "assigning": "the process that shares out units",
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def parser() -> argparse.ArgumentParser:
    doc = (__doc__ or "").partition("\n\n")
    result = Parser(
        "scale_sim.py",
        description=doc[0],
        epilog=doc[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(sorted(path.stem for path in COSTS.glob("*.json")))
    result.add_argument(
        "--costs", required=True, help=f"a file, or one of benchmarks/scale/costs: {names}"
    )
    result.add_argument("--seed", type=int, default=1)
    result.add_argument("--json", action="store_true", help="everything, for programs")

    traffic = result.add_argument_group("pictures")
    traffic.add_argument("--pattern", choices=PATTERNS, default="backlog")
    traffic.add_argument("--pictures", type=int, help="so many (default: 10,000, or --seconds)")
    traffic.add_argument("--seconds", type=float, help="as many as come in so long")
    rate = traffic.add_mutually_exclusive_group()
    rate.add_argument("--rate", type=float, help="a second, in the mean")
    rate.add_argument("--per-day", type=float, help="a day, in the mean")
    traffic.add_argument(
        "--peak", type=float, help="of a wave or a burst, times the mean or the rest"
    )
    traffic.add_argument(
        "--period",
        type=float,
        metavar="S",
        help="of a wave (default: a day), or from burst to burst",
    )
    traffic.add_argument("--burst", type=float, metavar="S", help="how long one is (default: 60)")
    traffic.add_argument("--unit", type=int, help="rows of a file (default: 256)")
    traffic.add_argument(
        "--cache-hits", type=float, metavar="PART", help="of pictures that were encoded lately"
    )
    traffic.add_argument(
        "--size-cv", type=float, help="variation of pictures' sizes: deviation by mean"
    )
    traffic.add_argument("--length-cv", type=float, help="of answers' lengths")

    fleet = result.add_argument_group("machines")
    nodes = fleet.add_mutually_exclusive_group()
    nodes.add_argument("--nodes", type=int)
    nodes.add_argument(
        "--load", type=float, default=0.7, help="of what nodes can do, at the peak (default: 0.7)"
    )
    fleet.add_argument("--part", type=float, default=1.0, help="of pictures and nodes, simulated")
    fleet.add_argument("--cores", type=float, help="of a machine (default: 2)")
    fleet.add_argument("--workers", type=int, help="of a node: GPUs, or processes (default: 1)")
    fleet.add_argument("--share", type=int, help="nodes on one machine (default: 1)")
    fleet.add_argument("--slots", type=int, help="answers at once, of a worker (default: 4)")
    fleet.add_argument(
        "--ahead", type=int, help="pictures that a worker prepares beside those (default: 2)"
    )
    fleet.add_argument("--link-gbit", type=float, help="of a machine (default: 10)")
    fleet.add_argument(
        "--fetch-wait",
        type=float,
        metavar="S",
        help="until a picture's first byte comes (default: 0)",
    )
    fleet.add_argument(
        "--queue", type=int, help="pictures that may wait, for each worker (default: 1,024)"
    )

    failures = result.add_argument_group("failures")
    failures.add_argument(
        "--mtbf-hours", type=float, help="until a node is lost, in the mean (default: never)"
    )
    failures.add_argument(
        "--restart", type=float, metavar="S", help="until another is there (default: 120)"
    )
    failures.add_argument(
        "--notice", type=float, metavar="S", help="until a loss is known (default: 1)"
    )
    failures.add_argument(
        "--kill",
        action="append",
        default=[],
        metavar="NODE@PERCENT",
        help="a node is lost for good when so many rows are there; of a backlog",
    )

    result.add_argument(
        "--price",
        type=float,
        metavar="PER_HOUR",
        help="of a node; an assumption of yours, for the cost of a million pictures",
    )
    return result


def scenario_of(args: argparse.Namespace) -> tuple[Scenario, float]:
    """And how many times larger what is meant is. Raises OptionError."""
    path = Path(args.costs)
    known = COSTS / f"{args.costs}.json"
    costs = Costs.read(known if known.exists() and not path.exists() else path)
    if not 0 < args.part <= 1:
        raise OptionError(f"part: found {args.part:g}, expected more than 0, up to 1")
    if not 0 < args.load < 1:
        raise OptionError(f"load: found {args.load:g}, expected more than 0, below 1")
    if args.price is not None and not 0 < args.price < 1e6:
        raise OptionError(f"price: found {args.price:g}, expected more than 0")
    fleet = Fleet(
        nodes=1 if args.share is None else args.share,
        **_given(
            args,
            "ahead",
            "cores",
            "workers",
            "share",
            "slots",
            "link_gbit",
            "queue",
            fetch_wait="fetch_wait_s",
        ),
    )
    traffic = _traffic(args)
    kills = tuple(Kill.parse(text) for text in args.kill)
    mtbf = None if args.mtbf_hours is None else args.mtbf_hours * HOUR_S
    failures = Failures(mtbf, kills=kills, **_given(args, restart="restart_s", notice="notice_s"))
    if args.nodes is not None:
        nodes = replace(fleet, nodes=args.nodes).nodes
    elif traffic.pattern == "backlog":
        nodes = fleet.share
    else:
        peak = traffic.rate * (traffic.peak if traffic.pattern == "wave" else 1.0)
        nodes = math.ceil(peak / (args.load * saturated(costs, fleet, traffic)[0]))
    simulated = max(fleet.share, round(nodes * args.part / fleet.share) * fleet.share)
    part = simulated / nodes
    if traffic.pattern != "backlog":
        traffic = replace(traffic, rate=traffic.rate * part)
        if args.seconds is not None:
            if not 0 < args.seconds < 1e8:
                raise OptionError(f"seconds: found {args.seconds:g}, expected more than 0")
            traffic = replace(traffic, pictures=max(1, round(traffic.rate * args.seconds)))
    scenario = Scenario(costs, replace(fleet, nodes=simulated), traffic, failures, args.seed)
    return scenario, 1 / part


def _given(args: argparse.Namespace, *same: str, **renamed: str) -> dict[str, Any]:
    """Options that were given, by the names of fields."""
    names = dict(zip(same, same, strict=True)) | renamed
    return {f: value for n, f in names.items() if (value := getattr(args, n)) is not None}


def _traffic(args: argparse.Namespace) -> Traffic:
    if args.pattern == "backlog":
        for name in ("rate", "per_day", "peak", "period", "burst", "seconds"):
            if getattr(args, name) is not None:
                raise OptionError(
                    f"{name.replace('_', '-')}: found with a backlog, expected pictures that "
                    "come: --pattern steady, wave or bursts"
                )
    elif args.rate is None and args.per_day is None:
        raise OptionError(f"rate: found none for {args.pattern}, expected --rate or --per-day")
    if args.pattern == "steady" and (args.peak, args.period, args.burst) != (None,) * 3:
        raise OptionError("peak: found with steady, expected --pattern wave or bursts")
    rate = {}
    if args.rate is not None or args.per_day is not None:
        rate = {"rate": args.rate if args.rate is not None else args.per_day / DAY_S}
    if args.pattern == "bursts" and args.period is None:
        rate["period_s"] = 600.0
    return Traffic(
        args.pattern,
        **rate,
        **_given(
            args,
            "pictures",
            "peak",
            "unit",
            "cache_hits",
            "size_cv",
            "length_cv",
            period="period_s",
            burst="burst_s",
        ),
    )


def saturated(costs: Costs, fleet: Fleet, traffic: Traffic) -> tuple[float, str]:
    """Pictures a second that one node can do, and what keeps it from doing more: by simulating one
    machine for which many pictures wait.
    """
    count = max(PROBE, 100 * fleet.slots * fleet.workers * fleet.share)
    flood = replace(traffic, pattern="steady", pictures=count, rate=FLOOD)
    result = simulate(Scenario(costs, replace(fleet, nodes=fleet.share, queue=None), flood))
    return result.rate / fleet.share, fullest(result)


def fullest(result: Result) -> str:
    """What is used most; places, where nothing else is why they are full."""
    rest = {name: part for name, part in result.utilization.items() if name != "places"}
    first = max(rest, key=lambda name: rest[name])
    return "places" if rest[first] < FULL < result.utilization["places"] else first


def facts(scenario: Scenario, result: Result, times: float, price: float | None) -> dict[str, Any]:
    """What is told of a run: rates and nodes of all that is meant, `times` what was simulated."""
    nodes = scenario.fleet.nodes * times
    node_hours = nodes * result.seconds / HOUR_S / max(result.finished * times, 1) * 1e6
    if scenario.traffic.pattern == "backlog":
        maximum, first = result.rate / scenario.fleet.nodes, fullest(result)
    else:
        maximum, first = saturated(scenario.costs, scenario.fleet, scenario.traffic)
    reported: dict[str, Any] = {
        "costs": scenario.costs.name,
        "kind": scenario.costs.kind,
        "nodes": round(nodes),
        "simulated_nodes": scenario.fleet.nodes,
        "seconds": result.seconds,
        "came": result.came,
        "finished": result.finished,
        "rejected": result.rejected,
        "again": result.again,
        "lost_nodes": result.lost_nodes,
        "pictures_s": result.rate * times,
        "pictures_day": result.rate * times * DAY_S,
        "utilization": result.utilization,
        "breaks_first": first,
        "breaks_at_pictures_s": maximum * nodes,
        "max_waiting": result.max_waiting,
        "present": result.present,
        "node_hours_a_million": node_hours,
        "cost_a_million": None if price is None else price * node_hours,
        "host_s": result.stages,
    }
    if result.latencies:
        for name, values in (("latency_s", result.latencies), ("wait_s", result.waits)):
            match = np.percentile(values, QUANTILES)
            reported[name] = {f"p{q:g}": float(v) for q, v in zip(QUANTILES, match, strict=True)}
            reported[name]["mean"] = float(np.mean(values))
    return reported


def text(reported: dict[str, Any]) -> str:
    lines = [
        f"{reported['costs']} ({reported['kind']}); simulated",
        f"{reported['nodes']:,} nodes, {reported['simulated_nodes']:,} simulated for "
        f"{reported['seconds']:,.1f} s: "
        f"{reported['finished']:,} pictures answered, {reported['rejected']:,} told to come later, "
        f"{reported['lost_nodes']:,} nodes lost, {reported['again']:,} pictures begun again",
        f"{reported['pictures_s']:,.1f} pictures/s, {reported['pictures_day']:,.0f} a day",
    ]
    for name, what in (
        ("latency_s", "until the answer"),
        ("wait_s", "of that, waiting for a place"),
    ):
        if name in reported:
            shown = ", ".join(f"{q} {value:.3g}" for q, value in reported[name].items())
            lines.append(f"seconds {what}: {shown}")
    lines += [f"{part:5.0%} of {WHAT[name]}" for name, part in reported["utilization"].items()]
    lines.append(
        f"breaks first: {WHAT[reported['breaks_first']]}, at "
        f"{reported['breaks_at_pictures_s']:,.1f} pictures/s"
    )
    lines.append(f"a million pictures: {reported['node_hours_a_million']:,.2f} node hours")
    if reported["cost_a_million"] is not None:
        lines[-1] += f", {reported['cost_a_million']:,.2f} at the price that was assumed"
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    arguments = parser()
    args = arguments.parse_args(words)
    try:
        scenario, times = scenario_of(args)
        result = simulate(scenario)
        reported = facts(scenario, result, times, args.price)
    except MtmdError as error:
        arguments.error(str(error))
    print(
        json.dumps(reported | {"scenario": asdict(scenario)}, indent=1)
        if args.json
        else text(reported)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
