"""Attention: ours, with every tile that a warm-up tries, against torch's own: cuDNN's, flash and
efficient, each by itself, and scaled_dot_product_attention as it chooses.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from gpu_kernels.ceilings import COPY, PRODUCT
from gpu_kernels.predictions import cells_of
from gpu_kernels.rows import Aim, Cells, Row, Setting, Task, first_line, is_gone, judged, must


class Shape(NamedTuple):
    label: str
    rows: int
    keys: int
    heads: int
    groups: int
    width: int
    batch: int = 1
    causal: bool = False

    @property
    def small(self) -> Shape:
        """For Triton's interpreter, with blocks of all kinds."""
        rows, keys = min(self.rows, 20), min(self.keys, 20 if self.rows > 1 else 600)
        group = min(self.heads // self.groups, 2)
        return self._replace(rows=rows, keys=keys, heads=2 * group, groups=2, batch=1)

    @property
    def is_judged(self) -> bool:
        """Whether it is one of those that are to be as fast as torch's."""
        return self.batch == 8 and self.rows == 4096


# The first ones are what an encoder has to be good at: 8 pictures of 4096 patches.
SHAPES = (
    *(Shape("8 x 4096 patches, 16 heads", 4096, 4096, 16, 16, k, batch=8) for k in (72, 64, 80)),
    Shape("8 x 4096 patches, 16 heads", 4096, 4096, 16, 16, 128, batch=8),
    Shape("SigLIP, Gemma 3: 4096 patches", 4096, 4096, 16, 16, 72),
    Shape("SigLIP, Gemma 3: 4 pictures", 4096, 4096, 16, 16, 72, batch=4),
    Shape("prefill 2048, GQA 32 over 8", 2048, 2048, 32, 8, 128, causal=True),
    Shape("prefill 2048, Gemma 3 4B: 8 over 4", 2048, 2048, 8, 4, 256, causal=True),
    Shape("SigLIP, 729 patches, 8 pictures", 729, 729, 16, 16, 72, batch=8),
    Shape("ViT-L/14 at 336: 577 patches, 8 pictures", 577, 577, 16, 16, 64, batch=8),
    Shape("ViT with head 80: 4096 patches", 4096, 4096, 16, 16, 80),
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
FIRST = 72  # a head size
MIN_TFLOPS = {FIRST: 400}  # by head size, of 8 x 4096 patches on a card of compute capability 9.0
TITLE = "Attention, against torch's"


def tasks(setting: Setting, first: bool = False) -> Iterator[Task]:
    """`first`: what an encoder's head of 72 takes, and no more; else the others."""
    shapes = [shape for shape in SHAPES if (shape.width == FIRST) == first]
    for shape in shapes:
        yield Task(named(shape), functools.partial(measured, shape, setting))
    for shape in shapes if setting.tune else ():
        yield Task(f"tiles: {named(shape)}", functools.partial(tuned, shape, setting))


def named(shape: Shape) -> str:
    return f"{shape.label}, head {shape.width}"


def programs(target: str) -> Iterator[Any]:
    """What the timed shapes launch on a target."""
    return (program for shape in SHAPES for program in programs_of(shape, target))


def programs_of(shape: Shape, target: str) -> Iterator[Any]:
    from mtmd.kernels.backends.vision_attention.candidates import tiled
    from mtmd.kernels.gpu.table import KERNELS
    from mtmd.kernels.graph import Type

    given, options = problem(shape, "meta")
    types = [Type.of(x) for x in given[:3]]
    yield from KERNELS["attention"][0].load().launched(*types, **options)
    for kernel in tiled(target).values():
        if kernel.rejects(*types, **options) is None:
            yield from kernel.programs(*types, **options)


def compare(label: str, given: tuple[Any, ...], got: Any, options: dict[str, Any]) -> str | None:
    """None, or how far a result is from the reference."""
    from mtmd.kernels.gpu.flash_attention.cases import TOLERANCE, largest_error

    error = largest_error("attention", got, given, options)
    return judged(label, error, TOLERANCE[given[0].dtype])


def problem(
    shape: Shape, device: str, exact: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs (bf16, or fp32 where it is `exact`; q, k and v side by side in one buffer, as a
    fused projection leaves them) and the attributes of a shape.
    """
    import torch

    dtype = torch.float32 if exact else torch.bfloat16
    rng = None if device == "meta" else torch.Generator(device).manual_seed(0)

    def draw(count: int, size: int) -> Any:
        stored = shape.batch, count, size * shape.width
        values = torch.randn(stored, generator=rng, device=device).to(dtype)
        return values.unflatten(-1, (size, shape.width))

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


def measured(shape: Shape, setting: Setting) -> Row:
    import torch.nn.functional as F

    from mtmd.kernels.backends.vision_attention.candidates import TORCHS
    from mtmd.kernels.gpu.flash_attention.kernel import kernel
    from mtmd.kernels.gpu.flash_attention.tiles import parts
    from mtmd.kernels.gpu.launch import power_of_two
    from mtmd.kernels.gpu.table import KERNELS
    from mtmd.kernels.graph import Type

    label, real = named(shape), shape
    if setting.dry:
        shape = shape.small
    else:
        compile_first(shape, setting)
    given, options = problem(shape, setting.device, exact=setting.dry)
    attend = KERNELS["attention"][0].load().run
    must(compare(label, given, attend(*given, **options), options))
    q, k, v = (x.transpose(1, 2) for x in given[:3])
    plain = setting.milliseconds(lambda: attend(*given, **options))
    chosen = setting.milliseconds(
        lambda: F.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=shape.causal,
            scale=options["scale"],
            enable_gqa=shape.heads != shape.groups,
        )
    )
    tried = {name: candidate(name, given, options, setting) for name in candidates()}
    times = {name: ms for name, (ms, _) in tried.items() if ms is not None}
    ours = {"triton": plain} | {n: ms for n, ms in times.items() if n not in TORCHS}
    torchs = {n: ms for n, ms in times.items() if n in TORCHS} or {"SDPA": chosen}
    best, other = min(ours, key=ours.__getitem__), min(torchs, key=torchs.__getitem__)
    types = [Type.of(x) for x in given[:3]]
    call = kernel().main(*types, **options).call
    unsplit: float | str = "-"
    padded = sum(parts(shape.width)) < power_of_two(shape.width)
    if padded or call.across > 1:
        without = kernel(split=not padded, splits=1).run
        unsplit = setting.milliseconds(lambda: without(*given, **options))
    sizes = call.constants
    tile = f"{sizes['ROWS']} x {sizes['KEYS']}, {call.warps}, {call.stages}"
    ratio = torchs[other] / ours[best]
    rate, unit, share = speed(shape, ours[best], setting)
    cells: Cells = {
        "shape": label,
        "tile": tile + (f", keys shared by {call.across}" if call.across > 1 else ""),
        "triton ms": plain,
        "head padded, or keys not shared out, ms": unsplit,
        **{name: shown for name, (_, shown) in tried.items()},
        "SDPA ms": chosen,
        "best of ours": f"{best}, {rate:.4g} {unit}",
        "of ceiling": "-" if share is None else share,
        **cells_of("attention", given[:3], options, ours[best], setting),
        "best of torch's": other,
        "ratio": ratio,
    }
    aims = []
    if real.is_judged:
        aims.append(Aim(f"{label}: against torch's best", ratio, minimum=1.0))
    if real.is_judged and real.width in MIN_TFLOPS and (setting.dry or is_hopper()):
        minimum = MIN_TFLOPS[real.width]
        aims.append(Aim(f"{label}: TFLOP/s", flops(shape) / ours[best] / 1e9, minimum=minimum))
    return Row(cells, TITLE, tuple(aims))


def compile_first(shape: Shape, setting: Setting) -> None:
    """All forms by all cores, and not one after the other as they are launched."""
    from mtmd.base.errors import PlacementError
    from mtmd.kernels.backends.gpu import Gpu
    from mtmd.kernels.gpu.ahead.compiling import compile_all

    target = Gpu(setting.device).target
    with suppress(PlacementError):  # the form that is refused says so where it is tried
        compile_all(target, list(programs_of(shape, target)))


def flops(shape: Shape) -> float:
    pairs = shape.batch * shape.heads * shape.rows * shape.keys / (2 if shape.causal else 1)
    return 4 * pairs * shape.width


def speed(shape: Shape, ms: float, setting: Setting) -> tuple[float, str, float | None]:
    """Of keys and values that are read, where there is one row; of arithmetic otherwise; and which
    part that is of what the card can do.
    """
    if shape.rows == 1:
        rate = 2 * 2 * shape.batch * shape.groups * shape.keys * shape.width / ms * 1e3
        return rate / 1e9, "GB/s", setting.part_of(rate, COPY)
    rate = flops(shape) / ms * 1e3
    return rate / 1e12, "TFLOP/s", setting.part_of(rate, PRODUCT)


def is_hopper() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def candidates() -> Sequence[str]:
    """What the warm-up measures beside our kernel: torch's, and ours with other tiles."""
    from mtmd.kernels.backends.vision_attention.candidates import CANDIDATES

    return list(CANDIDATES)


def candidate(
    name: str, given: tuple[Any, ...], options: dict[str, Any], setting: Setting
) -> tuple[float | None, float | str]:
    """Milliseconds of one of them, if it is right; and these, or why there are none, for the table.

    Raises the exception of a device that has failed.
    """
    from mtmd.kernels.backends.vision_attention.candidates import CANDIDATES
    from mtmd.kernels.graph import Type

    kernel = CANDIDATES[name]
    if kernel.rejects(*(Type.of(x) for x in given[:3]), **options) is not None:
        return None, "-"
    try:
        wrong = compare(name, given, kernel.run(*given, **options), options)
        if wrong:
            return None, wrong
        ms = setting.milliseconds(lambda: kernel.run(*given, **options))
    except Exception as refusal:  # what a card or a build of torch does not have; the table says so
        if is_gone(refusal, setting.device):
            raise
        return None, first_line(refusal)[:60]
    return ms, ms


def tuned(shape: Shape, setting: Setting) -> Row:
    from mtmd.kernels.gpu.flash_attention.kernel import kernel
    from mtmd.kernels.gpu.flash_attention.tiles import Tile

    cells: Cells = {"shape": named(shape)}
    if setting.dry:
        shape = shape.small
    given, options = problem(shape, setting.device, exact=setting.dry)
    for sizes in TILES:
        attend = kernel(tile=Tile(*sizes)).run
        try:
            cells[str(sizes)] = setting.milliseconds(
                lambda attend=attend: attend(*given, **options)  # type: ignore[misc]
            )
        except Exception as refusal:  # a tile may not fit the card; the table says so
            if is_gone(refusal, setting.device):
                raise
            cells[str(sizes)] = type(refusal).__name__
    return Row(cells, "Attention with other tiles, ms")
