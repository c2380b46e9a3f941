"""What `--activations int8` gains on this CPU: processor time of one thread, with and without it by
turns, the best of --rounds.

    python benchmarks/activations.py                          products with random weights
    python benchmarks/activations.py --types Q4_0,Q6_K --rows 64,256
    python benchmarks/activations.py --model FILE.gguf --tokens 256,1024      whole prompts
    python benchmarks/activations.py --tower smolvlm-256m     a tile, with random weights
    python benchmarks/activations.py --without-amx            as if the CPU had no AMX

Ratios above 1 say that int8 is faster. What it costs in quality: `mtmd bench FILE.gguf --quality
--variant activations=int8`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from mtmd.bench.shapes import random_checkpoint
from mtmd.kernels.cpu.tiled import cpu, many_rows
from mtmd.kernels.gpu.quant_matmul.cases import random_blocks
from mtmd.kernels.quantization.blocks import BLOCKS
from mtmd.llm.engine.make_batch import make_batch
from mtmd.llm.engine.spans import Span
from mtmd.loading import load
from mtmd.model import Model
from mtmd.options.load import LoadOptions

TYPES = "Q4_0,Q4_K,Q5_0,Q6_K,Q8_0"
FIRST_TOKEN = 100


def by_turns(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds of the best round of each."""
    best = dict.fromkeys(ways, float("inf"))
    for turn in range(rounds + 1):
        for name, run in ways.items():
            start = time.process_time()
            run()
            if turn:  # the first compiles
                best[name] = min(best[name], (time.process_time() - start) * 1e3)
    return best


def products(kind: str, rows: int, size: str, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    outer, width = map(int, size.split("x"))
    width = -(-width // BLOCKS[kind].values) * BLOCKS[kind].values
    w, x = random_blocks(kind, outer, width), torch.randn(rows, width).to(dtype)
    out = torch.empty(rows, outer, dtype=dtype)

    def run(int8: bool) -> Callable[[], None]:
        return lambda: many_rows.multiply(kind, x, w, None, out, int8)

    return by_turns({"auto": run(False), "int8": run(True)}, rounds)


def prompt(model: Model, tokens: int) -> None:
    runner = model.runner
    cache = runner.new_cache()
    ids = tuple(range(FIRST_TOKEN, FIRST_TOKEN + tokens))
    batch = make_batch([(runner.begin(cache, 0), [Span(ids)])], cache)
    model.exclusively(lambda: runner.forward(batch))


def tower(shape: str, int8: bool, dtype: str) -> Callable[[], object]:
    """Return what encodes a tile with a tower of random weights."""
    chosen = LoadOptions(device="cpu", dtype=dtype, activations="int8" if int8 else "auto")
    model = Model(random_checkpoint(shape, "BF16"), chosen)
    encoder = model.encoder
    assert encoder is not None
    tile = encoder.family.resolution.tile_type().shape
    pixels = torch.randn(1, *tile).to(model.dtype)
    return lambda: encoder.run(pixels)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--rows", default="64,256")
    parser.add_argument("--sizes", default="4864x896,896x4864", help="(default: %(default)s)")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--model", help="measure prompts of a model in place of products")
    parser.add_argument("--tower", metavar="SHAPE", help="measure the encode of a tile instead")
    parser.add_argument("--weights", help="as --weights of mtmd")
    parser.add_argument("--tokens", default="256")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--without-amx", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.without_amx:
        cpu.tiles_allowed = lambda: False
    print("| what | rows | ms | int8 ms | ratio |\n|---|---|---|---|---|")
    if args.tower:
        ways = {name: tower(args.tower, name == "int8", args.dtype) for name in ("auto", "int8")}
        show(args.tower, 1, by_turns(ways, args.rounds))
        return
    if args.model:
        given = {"threads": 1, "weights": args.weights, "dtype": args.dtype}
        with (
            load(args.model, **given) as plain,
            load(args.model, **given, activations="int8") as rounded,
        ):
            models = {"auto": plain, "int8": rounded}
            for tokens in map(int, args.tokens.split(",")):
                ways = {name: (lambda m=m, n=tokens: prompt(m, n)) for name, m in models.items()}
                show(plain.name, tokens, by_turns(ways, args.rounds))
        return
    dtype = torch.float32 if args.dtype == "fp32" else torch.bfloat16
    for kind in args.types.split(","):
        for size in args.sizes.split(","):
            for rows in map(int, args.rows.split(",")):
                best = products(kind, rows, size, dtype, args.rounds)
                show(f"{kind}, {size}", rows, best)


def show(what: str, rows: int, best: dict[str, float]) -> None:
    auto, int8 = best["auto"], best["int8"]
    print(f"| {what} | {rows} | {auto:.1f} | {int8:.1f} | {auto / int8:.2f} |", flush=True)


if __name__ == "__main__":
    main()
