"""The pictures of docs/scale.md, drawn from runs of the simulator (needs matplotlib).

python benchmarks/scale/plots.py docs/images
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import cache
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from scale_sim import COSTS, saturated
from scenario import Costs, Fleet, Scenario, Traffic
from simulation import simulate

LOOKS = {
    "svg.hashsalt": "mtmd",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "savefig.transparent": True,
}
BLUE, RED, GREY = "#3b82d0", "#d0553f", "#808080"  # seen on both themes
INK = {"light": "#24292f", "dark": "#e6edf3"}
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
LOADS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
GPU_NODE = Fleet(1, cores=96, workers=8, slots=16, ahead=32)
CPU_NODES = Fleet(4, cores=2)
PERIOD_S = 300.0
simulated, maximum_of = cache(simulate), cache(saturated)  # both themes show the same runs


def load_and_latency(axes: plt.Axes) -> None:
    """How long answers take, by how much comes of what could be done."""
    costs = Costs.read(COSTS / "cpu-demo.json")
    maximum = maximum_of(costs, replace(CPU_NODES, nodes=1), Traffic())[0] * CPU_NODES.nodes
    costs = replace(costs, load_cpu_s=0, load_wait_s=0)
    runs = []
    for load in LOADS:
        rate = maximum * load
        traffic = Traffic("steady", round(rate * 30), rate=rate, size_cv=0.5, length_cv=0.5)
        runs.append(simulated(Scenario(costs, CPU_NODES, traffic)).latencies)
    for quantile, color in ((50, GREY), (99, BLUE)):
        result = [np.percentile(latencies, quantile) * 1e3 for latencies in runs]
        axes.plot(LOADS, result, "o-", color=color, label=f"{quantile} %")
    axes.set(xlabel="pictures that come, of what can be done", ylabel="ms until the answer", ylim=0)
    axes.set_title("4 machines of 2 cores, demo model")
    axes.legend()


def wave(axes: plt.Axes) -> None:
    """What comes and what is answered, where machines are too few for the peak."""
    costs = replace(Costs.read(COSTS / "cpu-demo.json"), load_cpu_s=0, load_wait_s=0)
    maximum = maximum_of(costs, replace(CPU_NODES, nodes=1), Traffic())[0] * CPU_NODES.nodes
    rate = maximum * 0.75
    traffic = Traffic("wave", round(rate * PERIOD_S), rate=rate, peak=1.6, period_s=PERIOD_S)
    result = simulated(Scenario(costs, replace(CPU_NODES, queue=250), traffic), PERIOD_S / 60)
    rows = np.array(result.series, float)
    middle = (rows[1:, 0] + rows[:-1, 0]) / 2 / PERIOD_S * 24
    for column, color, label in ((1, GREY, "come"), (2, BLUE, "answered"), (3, RED, "sent away")):
        axes.plot(middle, np.diff(rows[:, column]) / np.diff(rows[:, 0]), color=color, label=label)
    axes.set(xlabel="hour of the day", ylabel="pictures a second", xlim=(0, 24))
    axes.set_title("a wave of 1.6 times the mean at a load of 0.75")
    axes.legend()


def cores_alongside_cards(axes: plt.Axes) -> None:
    """What a machine with eight cards does, by its cores."""
    names = ("l4", "h100")
    cores = (16, 24, 32, 48, 64, 96, 128, 192)
    for name, color in zip(names, (GREY, BLUE), strict=True):
        costs = Costs.read(COSTS / f"{name}-smolvlm-256m.json")
        result = [maximum_of(costs, replace(GPU_NODE, cores=n), Traffic())[0] for n in cores]
        axes.plot(cores, result, "o-", color=color, label=f"8 x {name.upper()}")
    axes.set(xlabel="cores of the machine", ylabel="pictures a second", ylim=0)
    axes.set_title("SmolVLM-256M's shape, 8 cards (estimated, not run)")
    axes.legend()


PLOTS = {"scale-load": load_and_latency, "scale-wave": wave, "scale-cores": cores_alongside_cards}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    for theme, ink in INK.items():
        matplotlib.rcParams.update(LOOKS | dict.fromkeys(INKED, ink))
        for name, draw in PLOTS.items():
            figure, axes = plt.subplots(figsize=(5.2, 3.2), layout="constrained")
            draw(axes)
            path = folder / f"{name}-{theme}.svg"
            figure.savefig(path, metadata={"Date": None})
            plt.close(figure)
            print(path)


if __name__ == "__main__":
    main()
