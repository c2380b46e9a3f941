"""Why logits of quantized experts on several ranks are further from one process than those of other
weights: layer by layer, the mixture of experts against fp64.

    python benchmarks/ranks/rounding.py [WORD IN ROW OR VARIANT] [Q4_K] [2]

Products of few rows round what they read to 16 bits, by groups that share a scale. For each layer,
by |found - expected|^2 / |expected|^2: how far what the experts read is apart; what they make of it
against fp64, by one process and by ranks; the same against fp64 of what was rounded, which leaves
nothing but the rounding of fp32; and how far the results are apart, by the kernels, in fp64, and in
fp64 of what was rounded. Last, how many of the integers differ.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tests/support", "tests/families", "tools")]

from checkpoints import nmse  # noqa: E402
from rank_table import quantized  # noqa: E402
from ranks import run_ranks  # noqa: E402
from table import CASES, ROWS  # noqa: E402
from test_ranks import Subject, runner_of  # noqa: E402

from mtmd.kernels.cpu.native.unpack import UNPACK  # noqa: E402
from mtmd.kernels.cpu.quant_matmul import FEW  # noqa: E402
from mtmd.kernels.graph import Node  # noqa: E402
from mtmd.kernels.ops.moe import route  # noqa: E402
from mtmd.kernels.parallel.shard import Sharding  # noqa: E402
from mtmd.kernels.quantization.blocks import dequantize  # noqa: E402
from mtmd.llm.engine.runner import Runner  # noqa: E402
from mtmd.llm.engine.spans import Span  # noqa: E402

Seen = dict[str, tuple[Node, Tensor, list[Tensor]]]


def experts_of(runner: Runner, spans: list[Span]) -> Seen:
    """Of a prompt, every mixture of experts with its result and what it read."""
    seen: Seen = {}

    def look(node: Node, value: Tensor, inputs: list[Tensor | None]) -> None:
        if node.op == "moe":
            seen[node.name] = node, value.clone(), [i.clone() for i in inputs if i is not None]

    cache = runner.new_cache()
    runner.prefill(spans, cache, runner.begin(cache, 0), look)
    return seen


def rounded(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """fp32 x as products read it, in fp64, and its integers (layouts.py)."""
    layout = UNPACK[kind].layout
    groups = x.view(len(x), -1, layout.group)
    maximum = groups.abs().amax(-1, keepdim=True)
    numbers = torch.round(groups * torch.where(maximum > 1e-30, layout.limit / maximum, 0.0))
    scales = maximum * torch.tensor(1 / layout.limit)
    return (numbers.double() * scales.double()).view(x.shape), numbers


def in_fp64(node: Node, inputs: list[Tensor], rounds: bool) -> tuple[Tensor, list[Tensor]]:
    """The op, and the integers of each expert's x where products round."""
    x, router, gate, up, down = inputs[:5]
    attrs, integers = node.attrs, []
    weights, chosen = route(router, attrs["routing"], *inputs[5:])
    total = torch.zeros(x.shape, dtype=torch.float64)
    for e in chosen.unique().tolist():
        tokens, location = (chosen == e).nonzero(as_tuple=True)
        g, u, d = (
            dequantize(table[e], attrs[f"{name}_quant"]).double()
            for name, table in (("gate", gate), ("up", up), ("down", down))
        )
        rows = x[tokens].double()
        few = rounds and len(tokens) <= FEW
        if few:
            rows, numbers = rounded(x[tokens], attrs["gate_quant"])
            integers.append(numbers)
        ratings = rows @ g.T
        silu = attrs.get("act", "silu") == "silu"
        act = F.silu(ratings) if silu else F.gelu(ratings, approximate="tanh")
        gated = act * (rows @ u.T)
        if few:
            gated, _ = rounded(gated.float(), attrs["down_quant"])
        total.index_add_(0, tokens, gated @ d.T * weights[tokens, location, None].double())
    return total, integers


def reported(name: str, one: Seen, ranks: list[Seen]) -> None:
    node, value, inputs = one[name]
    parts = [seen[name] for seen in ranks]
    shared = torch.stack([part[1].double() for part in parts]).sum(0)
    result: dict[bool, tuple[Tensor, Tensor]] = {}
    for rounds in (False, True):
        whole, integers = in_fp64(node, inputs, rounds)
        each = [in_fp64(part[0], part[2], rounds) for part in parts]
        result[rounds] = whole, torch.stack([total for total, _ in each]).sum(0)
    (exact, exact_ranks), (with_rounding, with_rounding_ranks) = result[False], result[True]
    differ = sum(
        int((a != b).sum()) for a, b in zip(integers, each[0][1], strict=True) if a.numel()
    )
    numbers: list[Any] = [
        nmse(inputs[0], parts[0][2][0]),
        nmse(value.double(), exact),
        nmse(shared, exact_ranks),
        nmse(value.double(), with_rounding),
        nmse(shared, with_rounding_ranks),
        nmse(value.double(), shared),
        nmse(exact, exact_ranks),
        nmse(with_rounding, with_rounding_ranks),
        differ / max(1, sum(part.numel() for part in integers)),
    ]
    print(f"{name:<16}" + "".join(f"{number:>10.1e}" for number in numbers), flush=True)


def main(word: str = "gemma4: experts", kind: str = "Q4_K", size: str = "2") -> None:
    torch.set_num_threads(1)
    for row, variant in CASES:
        if word not in f"{row}: {variant}":
            continue
        with tempfile.TemporaryDirectory() as name:
            (folder := Path(name) / "oracle").mkdir()
            oracle = ROWS[row].variants[variant](folder)
            checkpoint = quantized(oracle.folder, Path(name) / kind, kind)
            subject = Subject(checkpoint, ROWS[row].vision)
            tokens, spans = subject.image_tokens, subject.spans
            one = experts_of(runner_of(checkpoint, tokens), spans)
            ranks = run_ranks(
                int(size),
                lambda group, at=(checkpoint, tokens, spans): experts_of(  # type: ignore[misc]
                    runner_of(at[0], at[1], sharding=Sharding(group)), at[2]
                ),
            )
        print(f"{row}: {variant}, {kind}, {size} ranks")
        print(
            f"{'':<36}{'to fp64':^20}{'to fp64, rounded':^20}{'one to ranks':^30}{'integers':>10}"
        )
        heads = ("x", "one", "ranks", "one", "ranks", "kernels", "fp64", "rounded", "apart")
        print(f"{'layer':<16}" + "".join(f"{head:>10}" for head in heads))
        for layer in one:
            reported(layer, one, ranks)


if __name__ == "__main__":
    main(*sys.argv[1:])
