"""Small pictures on a GPU that is not here: one after another, and in packs, by the roofline of
`mtmd warmup --target`.

    python benchmarks/packing/estimated.py h100 rtx4090 --models lfm2-vl-450m qwen3-vl-4b

Attention of a pack is counted as that of its pictures, each alone. Beside the device's time stands
what a size that is new takes of the host: its plan, made on this machine, and launching it node by
node, as its runs are recorded from the third on.
"""

from __future__ import annotations

import argparse
import time

import torch

from mtmd.inspect.predict_target import subject_of
from mtmd.kernels.backends.target import Target
from mtmd.kernels.estimate.cards import Card, find_card
from mtmd.kernels.estimate.launches import cost
from mtmd.kernels.estimate.roofline import MIDDLE, UNCONFIRMED, factors_of, node_time
from mtmd.kernels.plan.scheduler import Plan

SIDES = (224, 336, 448)  # pixels


def device_ms(plan: Plan, target: Target, card: Card) -> tuple[float, float]:
    """Of attention, and of all other nodes."""
    factors, result = factors_of(card)[MIDDLE], [0.0, 0.0]
    for step in plan.steps:
        with torch.no_grad():
            used = cost(step, target)
        spent, _ = node_time(step.node, used, card, factors)
        result[step.node.op != "attention"] += spent * 1e3
    return result[0], result[1]


def launch_ms(plan: Plan, target: Target, card: Card) -> float:
    factors = factors_of(card)[MIDDLE]
    with torch.no_grad():
        costs = [cost(step, target) for step in plan.steps]
    return 1e3 * sum(
        c.torch * factors.torch_launch + c.triton * factors.triton_launch + factors.step
        for c in costs
    )


def compare(name: str, card_name: str) -> None:
    card = find_card(card_name)
    model = subject_of(card_name, None, name)
    encoder, target = model.encoder, model.backends[0]
    assert encoder is not None and encoder.strip is not None and isinstance(target, Target)
    strip = encoder.strip
    encoder.new_plan(1, strip.tile(1))  # what the first plan loads is not counted
    for side in SIDES:
        tokens = side // strip.cells.side
        shape = 3, tokens * strip.cells.side, tokens * strip.cells.side
        patches = tokens**2 * strip.cells.patches
        start = time.perf_counter()
        plan = encoder.new_plan(1, shape)
        planned = (time.perf_counter() - start) * 1e3
        attention, rest = device_ms(plan, target, card)
        reported = []
        for count in (1, strip.sizes[-1] // tokens**2):
            length = strip.length([shape] * count)
            assert length is not None
            _, others = device_ms(encoder.pack_plan(length), target, card)
            each = attention + others / count
            padded = length * strip.cells.patches
            reported.append(f"{count} in a pack of {padded}: {each:.2f} ms each")
        print(
            f"{name}, {card.title}, {side} px ({patches} patches): alone {attention + rest:.2f} ms "
            f"of the device, {launch_ms(plan, target, card):.2f} to launch, {planned:.0f} to plan; "
            + "; ".join(reported)
            + f" ({UNCONFIRMED})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cards", nargs="+", help="as of `mtmd warmup --target`")
    parser.add_argument("--models", nargs="+", default=["lfm2-vl-450m", "qwen3-vl-4b"])
    requested = parser.parse_args()
    for name in requested.models:
        for card in requested.cards:
            compare(name, card)


if __name__ == "__main__":
    main()
