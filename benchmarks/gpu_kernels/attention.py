"""Attention: against torch's scaled_dot_product_attention, and against itself with the head padded
or the keys not shared out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gpu_kernels.measure import judged, milliseconds, table


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
    Shape("prefill 2048, GQA 16 over 2", 2048, 2048, 16, 2, 512, causal=True),
    Shape("decode over 8192 keys, GQA 32 over 8", 1, 8192, 32, 8, 128),
    Shape("decode over 1024 keys, GQA 32 over 8", 1, 1024, 32, 8, 128),
    Shape("decode over 8192 keys, GQA 16 over 2", 1, 8192, 16, 2, 512),
    Shape("decode over 8192 keys, 16 heads", 1, 8192, 16, 16, 128),
)
TILES = (
    (128, 128, 8, 2),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
    (128, 64, 4, 2),
    (128, 32, 8, 3),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (64, 32, 8, 2),
    (32, 16, 8, 2),
    (16, 64, 4, 2),
    (16, 64, 4, 3),
    (16, 128, 4, 2),
    (16, 32, 4, 2),
)


def checks(device: str) -> Iterator[str | None]:
    """For every shape, None or how it failed."""
    from mtmd.kernels.gpu.flash_attention.kernel import flash_attention

    for shape in SHAPES:
        given, settings = problem(shape, device)
        yield compare(shape.label, given, flash_attention(*given, **settings), settings)


def compare(label: str, given: tuple[Any, ...], got: Any, options: dict[str, Any]) -> str | None:
    """None, or how far a result is from the reference."""
    from mtmd.kernels.gpu.flash_attention.cases import TOLERANCE, largest_error

    error = largest_error("attention", got, given, options)
    return judged(label, error, TOLERANCE[given[0].dtype])


def problem(shape: Shape, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs (bf16, q, k and v side by side in one buffer, as a fused projection leaves them)
    and the attributes of a shape.
    """
    import torch

    rng = torch.Generator(device).manual_seed(0)

    def draw(count: int, size: int) -> Any:
        held = torch.randn(shape.batch, count, size * shape.width, generator=rng, device=device).to(
            torch.bfloat16
        )
        return held.unflatten(-1, (size, shape.width))

    if shape.rows == shape.keys:
        q, k, v = draw(shape.rows, shape.heads + 2 * shape.groups).split(
            [shape.heads, shape.groups, shape.groups], 2
        )
    else:
        q, k, v = (
            draw(shape.rows, shape.heads),
            draw(shape.keys, shape.groups),
            draw(shape.keys, shape.groups),
        )
    return (q, k, v, None, None), {"scale": shape.width**-0.5, "causal": shape.causal}


def report(device: str, tune: bool) -> list[str]:
    heads = (
        "shape",
        "tile",
        "kernel ms",
        "keys and values (1 row) or arithmetic",
        "torch SDPA ms",
        "ratio",
        "without the split ms",
        "ratio",
        *own(),
    )
    lines = table(
        "Attention, against torch's scaled_dot_product_attention",
        heads,
        (measured(shape, device) for shape in SHAPES),
    )
    if tune:
        lines += table(
            "Attention with other tiles, ms",
            ("shape", *map(str, TILES)),
            (tuned(shape, device) for shape in SHAPES),
        )
    return lines


def measured(shape: Shape, device: str) -> list[str]:
    import torch.nn.functional as F

    from mtmd.kernels.gpu.flash_attention.kernel import flash_attention, run_launch
    from mtmd.kernels.gpu.flash_attention.tiles import parts, plan_launch
    from mtmd.kernels.gpu.launch import power_of_two
    from mtmd.kernels.graph import Type

    given, options = problem(shape, device)
    q, k, v = (x.transpose(1, 2) for x in given[:3])
    ours = milliseconds(lambda: flash_attention(*given, **options))
    torchs = milliseconds(
        lambda: F.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=shape.causal,
            scale=options["scale"],
            enable_gqa=shape.heads != shape.groups,
        )
    )
    types = [Type.of(x) for x in given[:3]]
    launch, without = plan_launch(*types, **options), ["-", "-"]
    padded = sum(parts(shape.width)) < power_of_two(shape.width)
    if padded or launch.splits > 1:
        plain = plan_launch(*types, **options, split=not padded, splits=1)
        took = milliseconds(lambda: run_launch(plain, *given))
        without = [
            f"{took:.4f} ({'head padded' if padded else 'keys not shared out'})",
            f"{took / ours:.2f}",
        ]
    read = 2 * 2 * shape.batch * shape.groups * shape.keys * shape.width
    flops = (
        4
        * shape.batch
        * shape.heads
        * shape.rows
        * shape.keys
        * shape.width
        / (2 if shape.causal else 1)
    )
    rate = (
        f"{read / ours / 1e6:.0f} GB/s" if shape.rows == 1 else f"{flops / ours / 1e9:.0f} TFLOP/s"
    )
    tile = f"{launch.tile.rows} x {launch.tile.keys}, {launch.tile.warps}, {launch.tile.stages}"
    shared = f", keys shared by {launch.splits}" if launch.splits > 1 else ""
    return [
        f"{shape.label}, head {shape.width}",
        tile + shared,
        f"{ours:.4f}",
        rate,
        f"{torchs:.4f}",
        f"{torchs / ours:.2f}",
        *without,
        *(apart(name, types, given, options) for name in own()),
    ]


def own() -> list[str]:
    """What the warm-up measures beside our kernel: torch's, and ours with other tiles."""
    from mtmd.kernels.backends.vision_attention.candidates import CANDIDATES

    return list(CANDIDATES)


def apart(name: str, types: Sequence[Any], given: tuple[Any, ...], options: dict[str, Any]) -> str:
    """Milliseconds of one of them and its error, or why it is not timed."""
    from mtmd.kernels.backends.vision_attention.candidates import CANDIDATES
    from mtmd.kernels.gpu.flash_attention.cases import largest_error

    kernel = CANDIDATES[name]
    if kernel.rejects(*types, **options) is not None:
        return "-"
    try:
        error = largest_error("attention", kernel.run(*given, **options), given, options)
        return f"{milliseconds(lambda: kernel.run(*given, **options)):.4f} (error {error:.1e})"
    except Exception as refusal:  # what a card or a build of torch does not have; the table says so
        return type(refusal).__name__


def tuned(shape: Shape, device: str) -> list[str]:
    from mtmd.kernels.gpu.flash_attention.kernel import run_launch
    from mtmd.kernels.gpu.flash_attention.tiles import Tile, plan_launch
    from mtmd.kernels.graph import Type

    given, options = problem(shape, device)
    cells = []
    for sizes in TILES:
        launch = plan_launch(*(Type.of(x) for x in given[:3]), **options, tile=Tile(*sizes))
        try:
            cells.append(f"{milliseconds(lambda launch=launch: run_launch(launch, *given)):.4f}")  # type: ignore[misc]
        except Exception as error:  # a tile may not fit the card; the table says so
            cells.append(type(error).__name__)
    return [f"{shape.label}, head {shape.width}", *cells]
