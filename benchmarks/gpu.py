"""Check and time the flash-attention kernel on this machine's GPU: `python benchmarks/gpu.py [--out] [--tune]`.

1. Every case of `mtmd.kernels.gpu.cases` and every timed shape is compared with the reference on the GPU. If one differs, nothing is timed.
2. The kernel is timed against torch's scaled_dot_product_attention, and against itself with the head padded to a power of two.

Times are medians with the L2 cache flushed before each run (triton.testing.do_bench). Exit code 1: a check failed; 2: no GPU.
"""
from __future__ import annotations

import argparse
import datetime
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"


class Shape(NamedTuple):
    label: str
    rows: int
    keys: int
    heads: int
    groups: int
    width: int
    batch: int = 1
    causal: bool = False


SHAPES = (
    Shape("SigLIP, Gemma 3: 4096 patches", 4096, 4096, 16, 16, 72),
    Shape("SigLIP, Gemma 3: 4 pictures", 4096, 4096, 16, 16, 72, batch=4),
    Shape("SigLIP, 729 patches, 8 pictures", 729, 729, 16, 16, 72, batch=8),
    Shape("ViT-L/14 at 336: 577 patches, 8 pictures", 577, 577, 16, 16, 64, batch=8),
    Shape("ViT with head 80: 4096 patches", 4096, 4096, 16, 16, 80),
    Shape("prefill 2048, GQA 32 over 8", 2048, 2048, 32, 8, 128, causal=True),
    Shape("prefill 2048, Gemma 3 4B: 8 over 4", 2048, 2048, 8, 4, 256, causal=True),
    Shape("decode over 8192 keys, GQA 32 over 8", 1, 8192, 32, 8, 128),
)
TILES = ((128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2), (128, 32, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3),
         (64, 32, 8, 2))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", nargs="?", const="", metavar="FILE", help="also write the report; without FILE, into benchmarks/results/")
    parser.add_argument("--device", default="cuda:0", help="which GPU (default: cuda:0)")
    parser.add_argument("--tune", action="store_true", help="also time each shape with other tiles")
    options = parser.parse_args(arguments)
    import torch
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py: found no CUDA device; run it on a machine with a GPU and a CUDA or ROCm build of torch", file=sys.stderr)
        return 2
    torch.cuda.set_device(options.device)
    failures = [told for told in checks(options.device) if told]
    if failures:
        print("\n".join(["results differ from the reference; nothing was timed:", *failures]), file=sys.stderr)
        return 1
    text = report(options.device, options.tune)
    print(text)
    if options.out is not None:
        name = "-".join(torch.cuda.get_device_name().lower().split())
        path = Path(options.out) if options.out else RESULTS / f"gpu-{name}-{datetime.date.today()}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return 0


def checks(device: str) -> Iterator[str | None]:
    """For every case and shape, None or how it failed."""
    from mtmd.kernels.gpu.cases import CASES
    from mtmd.kernels.gpu.flash_attention import flash_attention
    for case in CASES:
        given = case.inputs(device)
        yield compare(str(case), given, flash_attention(*given, **case.options), case.options)
    for shape in SHAPES:
        given, settings = problem(shape, device)
        yield compare(shape.label, given, flash_attention(*given, **settings), settings)


def compare(label: str, given: tuple[Any, ...], got: Any, options: dict[str, Any]) -> str | None:
    """The reference is fp64 for small problems; for large ones fp32, a batch entry at a time."""
    import torch

    from mtmd.kernels.gpu.cases import TOLERANCE
    from mtmd.kernels.ops.attention import attention
    q, k, v, mask, bounds = given
    exact = torch.float64 if q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1] < 2**24 else torch.float32
    worst = 0.0
    for b in range(q.shape[0]):
        one = [x[b:b + 1] for x in (q, k, v)]
        part = [x if x is None or x.ndim < full or x.shape[0] == 1 else x[b:b + 1] for x, full in ((mask, 4), (bounds, 3))]
        expected = attention.reference(*(x.to(exact) for x in one), *part, **options)
        error = ((got[b:b + 1] - expected).abs() / expected.abs().clamp(min=1)).max().item()
        worst = error if error != error else max(worst, error)
        if not worst <= TOLERANCE[q.dtype]:
            return f"{label}: error {worst:.3g}, expected at most {TOLERANCE[q.dtype]:.3g}"
    return None


def problem(shape: Shape, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs (bf16, q, k and v side by side in one buffer, as a fused projection leaves them) and the attributes of a shape."""
    import torch
    rng = torch.Generator(device).manual_seed(0)

    def draw(count: int, size: int) -> Any:
        held = torch.randn(shape.batch, count, size * shape.width, generator=rng, device=device).to(torch.bfloat16)
        return held.unflatten(-1, (size, shape.width))

    if shape.rows == shape.keys:
        q, k, v = draw(shape.rows, shape.heads + 2 * shape.groups).split([shape.heads, shape.groups, shape.groups], 2)
    else:
        q, k, v = draw(shape.rows, shape.heads), draw(shape.keys, shape.groups), draw(shape.keys, shape.groups)
    return (q, k, v, None, None), {"scale": shape.width**-0.5, "causal": shape.causal}


def milliseconds(run: Callable[[], Any]) -> float:
    import triton.testing
    return float(triton.testing.do_bench(run, warmup=50, rep=200, return_mode="median"))


def report(device: str, tune: bool) -> str:
    import torch
    import triton
    lines = [f"# Attention on {torch.cuda.get_device_name()}", "",
             f"{datetime.date.today()}, torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}; bf16, "
             "medians of `python benchmarks/gpu.py`. A ratio above 1 means that the kernel is faster.", "",
             "| shape | tile | kernel ms | TFLOP/s | torch SDPA ms | ratio | padded head ms | ratio |", "|---|---|---|---|---|---|---|---|"]
    lines += [measured(shape, device) for shape in SHAPES]
    if tune:
        lines += ["", "| shape | " + " | ".join(str(t) for t in TILES) + " |", "|---" * (len(TILES) + 1) + "|"]
        lines += [tuned(shape, device) for shape in SHAPES]
    return "\n".join(lines)


def measured(shape: Shape, device: str) -> str:
    import torch.nn.functional as F

    from mtmd.kernels.gpu.flash_attention import flash_attention, run_launch
    from mtmd.kernels.gpu.launch import parts, plan_launch
    from mtmd.kernels.graph import Type
    given, options = problem(shape, device)
    q, k, v = (x.transpose(1, 2) for x in given[:3])
    ours = milliseconds(lambda: flash_attention(*given, **options))
    torchs = milliseconds(lambda: F.scaled_dot_product_attention(
        q, k, v, is_causal=shape.causal, scale=options["scale"], enable_gqa=shape.heads != shape.groups))
    types = [Type.of(x) for x in given[:3]]
    launch, padded = plan_launch(*types, **options), "| - | - |"
    if parts(shape.width)[1]:
        whole = plan_launch(*types, **options, split=False)
        took = milliseconds(lambda: run_launch(whole, *given))
        padded = f"| {took:.3f} | {took / ours:.2f} |"
    flops = 4 * shape.batch * shape.heads * shape.rows * shape.keys * shape.width / (2 if shape.causal else 1)
    tile = f"{launch.tile.rows} x {launch.tile.keys}, {launch.tile.warps}, {launch.tile.stages}"
    return (f"| {shape.label}, head {shape.width} | {tile} | {ours:.3f} | {flops / ours / 1e9:.0f} "
            f"| {torchs:.3f} | {torchs / ours:.2f} {padded}")


def tuned(shape: Shape, device: str) -> str:
    from mtmd.kernels.gpu.flash_attention import run_launch
    from mtmd.kernels.gpu.launch import Tile, plan_launch
    from mtmd.kernels.graph import Type
    given, options = problem(shape, device)
    cells = []
    for sizes in TILES:
        launch = plan_launch(*(Type.of(x) for x in given[:3]), **options, tile=Tile(*sizes))
        try:
            cells.append(f"{milliseconds(lambda launch=launch: run_launch(launch, *given)):.3f}")  # type: ignore[misc]
        except Exception as error:  # a tile may not fit the card; the table says so
            cells.append(type(error).__name__)
    return f"| {shape.label}, head {shape.width} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
