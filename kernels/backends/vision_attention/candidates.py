"""Kernels that may run attention nodes of encoders in place of our kernel as it comes: torch's own
kernels for CUDA and ROCm, each called by itself, and ours with other tiles; what each takes of the
`attention` op, and why not the rest.

torch's are called as its dispatcher has them and not through scaled_dot_product_attention: which of
them that picks is a setting of the whole process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.flash_attention.tiles import Tile
from mtmd.kernels.gpu.triton_kernel import Program, TritonKernel
from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import Kernel

SHORT = (torch.bfloat16, torch.float16)
LOADED = 8  # values of 16 bits that are loaded at once: heads, and what lies between them
SLACK = 1 << 20  # bytes of a library's own, such as lengths and states of random numbers
MIN_ROWS, MAX_TILED = 128, 80  # rows, and the head size, of our kernel with other tiles
LOG_ROWS = 128  # rows to which logarithms of sums may be rounded up


@dataclass(frozen=True)
class Tiled(Kernel):
    """Ours with another tile. programs: all that a run on these types launches."""

    programs: Callable[..., Sequence[Program]] = field(kw_only=True)


def _rejects(
    q: Type,
    k: Type,
    v: Type,
    mask: Type | None = None,
    bounds: Type | None = None,
    *,
    scale: float,  # noqa: ARG001 - any
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    mask_capped: bool = False,  # noqa: ARG001 - it takes no mask
    dtypes: tuple[torch.dtype, ...],
    maximum: int,
) -> str | None:
    limits = {"a mask": mask, "bounds of its own for each row": bounds, "a window": window}
    for words, given in (limits | {"a soft cap": softcap}).items():
        if given is not None:
            return f"the node has {words}, which it does not support"
    if causal and q.shape[1] != k.shape[1]:
        return (
            f"{q.shape[1]} causal rows over {k.shape[1]} keys; it takes the first row for the "
            "first key's"
        )
    if q.dtype not in dtypes:
        names = ", ".join(map(name_of, dtypes))
        return f"the node is in {name_of(q.dtype)}; it supports {names}"
    if len({t.dtype for t in (q, k, v)}) > 1 or len({t.shape[3] for t in (q, k, v)}) > 1:
        return "queries, keys and values differ in type or head size"
    if q.shape[2] != k.shape[2]:
        return f"{q.shape[2]} heads share keys of {k.shape[2]}"
    head, step = q.shape[3], LOADED * 2 // q.dtype.itemsize
    if head % step or head > maximum:
        return f"head size {head}; it supports multiples of {step} up to {maximum}"
    for name, kind in (("q", q), ("k", k), ("v", v)):
        if kind.strides[3] != 1 or any(s % step or s < 0 for s in kind.strides[:3]):
            return f"{name} has strides {list(kind.strides)}; it supports multiples of {step}"
    if not q.count or not k.count:
        return "there is nothing to attend to"
    return None


def _workspace(q: Type, *types: Type | None, **attrs: Any) -> int:  # noqa: ARG001
    """The logarithm of each row's sum in fp32, kept for a backward pass that never comes, and a
    library's own. One that takes more when it is tried is refused.
    """
    batch, rows, heads, _ = q.shape
    return 4 * batch * heads * -(-rows // LOG_ROWS) * LOG_ROWS + SLACK


def _heads_first(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that is called as the op is, made of a function of q, k, v [B, H, T, K]."""

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: None = None,
        bounds: None = None,
        *,
        scale: float,
        causal: bool = False,
        **limits: None,
    ) -> Tensor:
        assert mask is None and bounds is None and not any(limits.values())  # it was asked
        result = call(*(x.transpose(1, 2) for x in (q, k, v)), causal, scale)
        return result.transpose(1, 2).contiguous()

    return run


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    match = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, False, 0.0, causal, False, scale=scale
    )
    result: Tensor = match[0]
    return result


def _rejects_without_cudnn(*types: Any, **options: Any) -> str | None:
    if torch.version.hip is not None:
        return "there is no cuDNN for AMD's cards"
    return _rejects(*types, **options, dtypes=SHORT, maximum=256)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    match = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    result: Tensor = match[0]
    return result


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    match = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, None, False, 0.0, causal, scale=scale
    )
    result: Tensor = match[0]
    return result


def _kernel(call: Callable[..., Tensor], dtypes: tuple[torch.dtype, ...], maximum: int) -> Kernel:
    return Kernel(
        run=_heads_first(call),
        rejects=functools.partial(_rejects, dtypes=dtypes, maximum=maximum),
        workspace=_workspace,
    )


def _ours(load: Callable[[], TritonKernel], rejects: Callable[..., str | None]) -> Tiled:
    """A kernel of ours, whose file is imported when it is used."""
    load = functools.cache(load)

    def run(*tensors: Tensor | None, **options: Any) -> Tensor:
        return load().run(*tensors, **options)

    def programs(*types: Type | None, **options: Any) -> Sequence[Program]:
        return load().launched(*types, **options)

    return Tiled(run=run, rejects=rejects, programs=programs)


def _other_tile(tile: Tile) -> Tiled:
    def load() -> TritonKernel:
        from mtmd.kernels.gpu.flash_attention.kernel import kernel

        return kernel(tile=tile)

    return _ours(load, _rejects_other_tile)


def _rejects_other_tile(q: Type, *types: Type | None, **options: Any) -> str | None:
    if q.shape[1] < MIN_ROWS:
        return f"{q.shape[1]} rows; it supports {MIN_ROWS} and more"
    return _rejects(q, *types, **options, dtypes=SHORT, maximum=MAX_TILED)  # type: ignore[arg-type]


def _carried(tile: Tile) -> Tiled:
    def load() -> TritonKernel:
        from mtmd.kernels.gpu.flash_attention.carried import kernel

        return kernel(tile)

    def rejects(q: Type, k: Type, *types: Type | None, **options: Any) -> str | None:
        if options.get("causal"):
            return "the node is causal, which it does not support"
        if k.shape[1] < tile.keys:
            return f"{k.shape[1]} keys; it supports {tile.keys} and more"
        return _rejects_other_tile(q, k, *types, **options)

    return _ours(load, rejects)


def _on_hopper(kernel: Tiled) -> Tiled:
    """The same, where the card at hand is one."""

    def rejects(*types: Type | None, **options: Any) -> str | None:
        if torch.version.hip is not None or _capability() not in (None, 9):
            return "matrix instructions run beside others on cards of compute capability 9.0 alone"
        return kernel.rejects(*types, **options)

    return replace(kernel, rejects=rejects)


def _capability() -> int | None:
    """The first number of the current card's; None where there is no card to ask."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None


# By the name that reports have. A candidate that a build of torch does not have says so when it is
# tried.
TORCHS: Mapping[str, Kernel] = {
    "torch cuDNN": replace(_kernel(_cudnn, SHORT, 256), rejects=_rejects_without_cudnn),
    "torch flash": _kernel(_flash, SHORT, 256),
    "torch efficient": _kernel(_efficient, (*SHORT, torch.float32), 512),
}
# The tile that ours has (tiles.py) is the largest without spills, and one program at a time on a
# multiprocessor of cuda:90; of 64 x 64 there are three (160 registers at head 72), and 128 x 128
# has half the steps. Without spills under Triton 3.6 and 3.9 at heads 64 and 72 for cuda:80,
# cuda:90 and gfx942, whose 64 KiB hold one block of 128 keys at heads above 64, and not two.
OTHER: Mapping[str, Tile] = {
    "triton 64 x 64": Tile(64, 64, 4, 2),
    "triton 128 x 128": Tile(128, 128, 8, 2),
}
ON_AMD: Mapping[str, Tile] = {**OTHER, "triton 128 x 128": Tile(128, 128, 8, 1)}
TILES: Mapping[str, Tiled] = {name: _other_tile(tile) for name, tile in OTHER.items()}
AMD_TILES: Mapping[str, Tiled] = {name: _other_tile(tile) for name, tile in ON_AMD.items()}
# The product with the next block's keys runs beside the softmax of this one, in what is compiled
# for cuda:90: 182 to 204 registers at heads 64 and 72, none spilled, eight warps on a
# multiprocessor with either. Elsewhere matrix instructions are waited for one by one.
CARRYING: Mapping[str, Tile] = {
    "triton 64 x 64, carried": Tile(64, 64, 4, 2),
    "triton 128 x 64, carried": Tile(128, 64, 8, 2),
}
CARRIED: Mapping[str, Tiled] = {name: _carried(tile) for name, tile in CARRYING.items()}
CANDIDATES: Mapping[str, Kernel] = {
    **TORCHS,
    **(TILES if torch.version.hip is None else AMD_TILES),
    **{name: _on_hopper(kernel) for name, kernel in CARRIED.items()},
}
PLANNED: Mapping[str, str] = {
    "torch cuDNN": (
        "it plans each shape separately, which takes up to 0.1 s and memory "
        "that it does not release, and tiles of this encoder have many shapes; "
        "use --vision-attention torch to select it nevertheless"
    )
}
"""Candidates that are fast only where few shapes come, and why."""


def tiled(target: str) -> Mapping[str, Tiled]:
    """Return those of the candidates that are compiled, for an architecture that need not be
    here.
    """
    if target.startswith("hip"):
        return AMD_TILES
    return {**TILES, **(CARRIED if target == "cuda:90" else {})}
