"""The chart of README.md: bars of measured speeds, for light and dark pages (needs matplotlib).

python benchmarks/peers_chart.py docs/images

The figures are those of benchmarks/results/2026-11-28-cpu-peers.md; RESULTS repeats them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

# panel: (unit, {program: best rate}), of SmolLM2-1.7B's shape in Q4_0 and SmolVLM-256M's tower
RESULTS = {
    "write an answer": ("tokens/s", {"mtmd": 22.2, "llama.cpp": 8.4, "OpenVINO": 8.0}),
    "read a prompt": ("tokens/s", {"mtmd": 451, "OpenVINO": 342, "llama.cpp": 73}),
    "encode a picture": ("tiles/s", {"mtmd": 5.4, "transformers": 2.7, "llama.cpp": 0.65}),
}
BLUE, GREY = "#3b82d0", "#8b949e"
INK = {"light": "#24292f", "dark": "#e6edf3"}


def draw(path: Path, ink: str) -> None:
    """Write the chart as SVG, with text in the colour `ink`."""
    style = {"svg.hashsalt": "mtmd", "svg.fonttype": "none", "font.size": 10}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "ytick.color"), ink)
    with plt.rc_context(style | {"savefig.transparent": True}):
        figure, panels = plt.subplots(1, len(RESULTS), figsize=(9.2, 1.75), layout="constrained")
        for axes, (title, (unit, rates)) in zip(panels, RESULTS.items(), strict=True):
            colors = [BLUE if name == "mtmd" else GREY for name in rates]
            bars = axes.barh(list(rates), list(rates.values()), color=colors, height=0.68)
            axes.bar_label(bars, [f"{rate:g}" for rate in rates.values()], padding=4)
            axes.invert_yaxis()
            axes.set_title(f"{title}, {unit}", loc="left", fontsize=10)
            axes.set(xlim=(0, max(rates.values()) * 1.22), xticks=[])
            axes.tick_params(axis="y", length=0)
            axes.spines[:].set_visible(False)
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    for theme, ink in INK.items():
        draw(args.folder / f"peers-{theme}.svg", ink)


if __name__ == "__main__":
    main()
