"""How many kernels a step of decoding, a prefill and an encode launch on a GPU, counted in their
plans; no GPU is needed, and nothing is run.

    python benchmarks/gpu_kernels/launches.py [--target cuda:90]
    python benchmarks/gpu_kernels/launches.py --ops gemma-3-4b [--weights Q4_0]

Prints two tables, of decoders and of encoders by the models' published shapes: launches of a
layer (the fewest and the most of all layers but the first and the last) and of all, where each node
of a graph is launched by itself and where graphs are rewritten (`kernels/plan/fusion`). With --ops,
those of a model's graphs by op. What torch computes is called on meta tensors, and what reaches its
dispatcher and is no view is a launch; a Triton kernel says how many it is.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from mtmd.bench.shapes import random_checkpoint, shape_names
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.backends.target import Target
from mtmd.kernels.estimate.launches import cost
from mtmd.kernels.plan.scheduler import Plan
from mtmd.llm.batch import BatchShape
from mtmd.model import Model
from mtmd.options.load import LoadOptions

DECODERS = (
    ("gemma-3-4b", "BF16"),
    ("gemma-3-4b", "Q4_0"),
    ("llama-3.2-1b", "BF16"),
    ("qwen3-8b", "BF16"),
    ("qwen3-8b", "Q4_K_M"),
    ("qwen2.5-vl-7b", "BF16"),
    ("qwen3-30b-a3b", "BF16"),
    ("qwen3-30b-a3b", "Q4_K_M"),
    ("qwen3-next-80b-a3b", "BF16"),
    ("qwen3-next-80b-a3b", "Q4_K_M"),
)
ENCODERS = (
    "gemma-3-4b",
    "smolvlm-256m",
    "qwen2.5-vl-7b",
    "qwen3-vl-8b",
    "internvl3-2b",
    "llava-1.5-7b",
    "lfm2-vl-1.6b",
    "pixtral-12b",
)
PREFILL = 512  # tokens
LAYER = re.compile(r"\bblk\.(\d+)\.")


class OneByOne(Target):
    """A GPU for which graphs stay as they are."""

    fuses = False


@dataclass(frozen=True)
class Count:
    """Of a plan: all launches, and those of each layer that is not the first or the last."""

    launches: int
    layers: tuple[int, ...]

    @property
    def of_a_layer(self) -> str:
        result = sorted({min(self.layers), max(self.layers)}) if self.layers else []
        return " to ".join(map(str, result)) or "-"


def counted(plan: Plan, target: Target) -> Count:
    """A node counts to the layer that its name says first."""
    layers: Counter[int] = Counter()
    everything = 0
    for name, _, launches in _nodes(plan, target):
        everything += launches
        if match := LAYER.search(name):
            layers[int(match[1])] += launches
    return Count(everything, tuple(layers[n] for n in sorted(layers)[1:-1]))


def _nodes(plan: Plan, target: Target) -> Iterator[tuple[str, str, int]]:
    """Name, op and launches of each."""
    with torch.no_grad():
        for step in plan.steps:
            result = cost(step, target)
            yield step.node.name, step.node.op, result.torch + result.triton


@cache
def model_on(target: Target, shape: str, weights: str) -> Model:
    options = LoadOptions(context=4096)
    return Model(random_checkpoint(shape, weights), options, [target, Cpu(), Reference()])


def plans(model: Model) -> Mapping[str, Plan]:
    """A step of one sequence, a prefill, and an encode at the size of a warm-up."""
    decode = BatchShape(1, pages=128, requested=1, sequences=1)
    prefill = BatchShape(PREFILL, pages=128, requested=1, sequences=1)
    result = {"decode": model.runner.plan(decode), "prefill": model.runner.plan(prefill)}
    if model.encoder:
        batch, tile = next(iter(model.encoder.sizes().values()))
        result["encode"] = model.encoder.plan(batch, tile.shape)
    return result


def decoder_row(shape: str, weights: str, targets: tuple[Target, Target]) -> str:
    before, after = (plans(model_on(target, shape, weights)) for target in targets)
    cells = [shape, weights, str(len(model_on(targets[0], shape, weights).checkpoint.text.layers))]
    for name in ("decode", "prefill"):
        one, other = (counted(p[name], t) for p, t in zip((before, after), targets, strict=True))
        if name == "decode":
            cells += [one.of_a_layer, other.of_a_layer]
        cells += [f"{one.launches:,}", f"{other.launches:,}"]
    return f"| {' | '.join(cells)} |"


def encoder_row(shape: str, targets: tuple[Target, Target]) -> str:
    both = [plans(model_on(target, shape, "BF16"))["encode"] for target in targets]
    one, other = (counted(plan, target) for plan, target in zip(both, targets, strict=True))
    q = next(s.node for s in both[0].steps if s.node.op == "attention").inputs[0]
    assert q is not None
    cells = [shape, str(len(one.layers) + 2), "x".join(map(str, q.shape[:2]))]
    cells += [one.of_a_layer, other.of_a_layer, f"{one.launches:,}", f"{other.launches:,}"]
    return f"| {' | '.join(cells)} |"


def by_op(shape: str, weights: str, targets: tuple[Target, Target]) -> Iterator[str]:
    yield "| graph | op | one by one | rewritten |"
    yield "|---|---|---|---|"
    both = [plans(model_on(target, shape, weights)) for target in targets]
    for graph in both[0]:
        ops: list[Counter[str]] = []
        for result, target in zip(both, targets, strict=True):
            ops.append(Counter())
            for _, op, launches in _nodes(result[graph], target):
                ops[-1][op] += launches
        seen = ops[0] | ops[1]
        for op in sorted(seen, key=lambda name: (-ops[0][name], name)):
            if seen[op]:
                yield f"| {graph} | {op} | {ops[0][op]:,} | {ops[1][op]:,} |"
        yield f"| {graph} | all | {ops[0].total():,} | {ops[1].total():,} |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--target", default="cuda:90", help="which GPU (%(default)s)")
    parser.add_argument("--ops", metavar="MODEL", help="those of one model, by op")
    parser.add_argument("--weights", default="BF16", help="of a decoder, with --ops (%(default)s)")
    options = parser.parse_args(arguments)
    targets = OneByOne(options.target), Target(options.target)
    known = shape_names()
    if options.ops and options.ops not in known:
        print(f"{options.ops}: expected one of {', '.join(known)}", file=sys.stderr)
        return 2
    if options.ops:
        for line in by_op(options.ops, options.weights, targets):
            print(line, flush=True)
        return 0
    heads = "a layer: before", "after", "decode: before", "after"
    prefill = f"prefill of {PREFILL}: before", "after"
    print(f"| decoder | weights | layers | {' | '.join((*heads, *prefill))} |")
    print(f"|{'---|' * 9}")
    for shape, weights in DECODERS:
        print(decoder_row(shape, weights, targets), flush=True)
    heads = "encoder", "layers", "pictures x patches"
    print(f"\n| {' | '.join(heads)} | a layer: before | after | all: before | after |")
    print(f"|{'---|' * 7}")
    for shape in ENCODERS:
        print(encoder_row(shape, targets), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
