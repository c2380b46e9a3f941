"""Ops on pictures and grids of patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops.op import need, need_floats, op


def _patch_flops(node: Node) -> int:
    w = node.inputs[1]
    assert w is not None
    return 2 * node.type.count * (w.type.count // w.shape[0])


def _patch_shape(pixels: Type, w: Type, b: Type | None = None) -> Type:
    need(
        len(pixels.shape) == len(w.shape) == 4 and w.shape[2] == w.shape[3],
        f"pixels {list(pixels.shape)}, w {list(w.shape)}",
    )
    need_floats(pixels)
    need(
        all(t is None or t.dtype == pixels.dtype for t in (w, b)),
        f"pixels are {pixels}, w {w}, b {b}: of several types",
    )
    batch, _, height, width = pixels.shape
    size = w.shape[-1]
    need(
        height % size == 0 and width % size == 0,
        f"pixels {list(pixels.shape)} are no multiple of patch {size}",
    )
    need(
        pixels.shape[1] == w.shape[1] and (b is None or b.shape == w.shape[:1]),
        f"pixels {list(pixels.shape)}, w {list(w.shape)}",
    )
    return Type.contiguous((batch, (height // size) * (width // size), w.shape[0]), w.dtype)


@op(shape=_patch_shape, flops=_patch_flops)
def patch_embed(pixels: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """One embedding per patch, row by row

    pixels [B, 3, Y, X], w [C, 3, S, S], b [C] -> [B, P, C], P = (Y/S)(X/S)
    """
    size = w.shape[-1]
    batch, channels, height, width = pixels.shape
    patches = pixels.reshape(batch, channels, height // size, size, width // size, size).permute(
        0, 2, 4, 1, 3, 5
    )
    return F.linear(
        patches.reshape(batch, -1, channels * size * size), w.reshape(w.shape[0], -1), b
    )


def _patches_shape(pixels: Type, *, size: int) -> Type:
    need_floats(pixels)
    need(len(pixels.shape) == 4, f"pixels {list(pixels.shape)}")
    batch, channels, height, width = pixels.shape
    need(
        height % size == 0 and width % size == 0,
        f"pixels {list(pixels.shape)} are no multiple of patch {size}",
    )
    count = (height // size) * (width // size)
    return Type.contiguous((batch, count, channels * size**2), pixels.dtype)


@op(shape=_patches_shape, flops=lambda n: n.type.count)
def patches(pixels: Tensor, *, size: int) -> Tensor:
    """The pixels of each patch as a row, channel after channel, line by line

    pixels [B, 3, Y, X] -> [B, P, 3 S S], P = (Y/S)(X/S), S = `size`
    """
    batch, channels, height, width = pixels.shape
    cells = pixels.reshape(batch, channels, height // size, size, width // size, size)
    rows = cells.permute(0, 2, 4, 1, 3, 5).clone(memory_format=torch.contiguous_format)
    return rows.view(batch, (height // size) * (width // size), channels * size * size)


def _pool_shape(x: Type, *, grid: tuple[int, int], size: tuple[int, int]) -> Type:
    need_floats(x)
    need(len(x.shape) == 3, f"x {list(x.shape)}")
    rows, columns = grid
    need(x.shape[1] == rows * columns, f"x {list(x.shape)} is not a grid of {rows} x {columns}")
    need(
        0 < size[0] <= rows and 0 < size[1] <= columns,
        f"grid {rows} x {columns} has no {size[0]} x {size[1]} parts",
    )
    return Type.contiguous((x.shape[0], size[0] * size[1], x.shape[2]), x.dtype)


@op(shape=_pool_shape, flops=lambda n: next(iter(n.operands)).type.count)
def pool2d(x: Tensor, *, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Average over the parts of a grid that are cut into `size` rows and columns of parts; parts of
    a grid that does not divide overlap by a row or a column, as torch's adaptive_avg_pool2d has it

    x [B, P, C], P = rows * columns -> [B, size[0] * size[1], C]
    """
    (rows, columns), (down, across) = grid, size
    if rows % down or columns % across:
        picture = x.float().transpose(1, 2).unflatten(2, grid)
        pooled = F.adaptive_avg_pool2d(picture, size).flatten(2).transpose(1, 2)
        return pooled.to(x.dtype).contiguous()
    cells: Tensor = x.unflatten(1, (down, rows // down, across, columns // across))
    return cells.float().mean((2, 4)).to(x.dtype).flatten(1, 2)


def _unshuffle_shape(
    x: Type,
    *,
    grid: tuple[int, int],
    factor: int,
    channels_first: bool = False,  # noqa: ARG001
) -> Type:
    need_floats(x)
    rows, columns = grid
    need(
        len(x.shape) == 3 and x.shape[1] == rows * columns,
        f"x {list(x.shape)} is not a grid of {rows} x {columns}",
    )
    need(
        rows >= factor and columns >= factor,
        f"grid {rows} x {columns} has no {factor} x {factor} neighbours",
    )
    tokens = (rows // factor) * (columns // factor)
    return Type.contiguous((x.shape[0], tokens, x.shape[2] * factor**2), x.dtype)


@op(shape=_unshuffle_shape)
def unshuffle(
    x: Tensor, *, grid: tuple[int, int], factor: int, channels_first: bool = False
) -> Tensor:
    """factor x factor neighbours of a grid side by side in one row, also called pixel unshuffle or
    patch merging

    x [B, P, C], P = rows * columns -> [B, (rows // factor) * (columns // factor), C * factor^2]; a
    row holds its neighbours line by line, each with its C values, or, with `channels_first`, for
    each of the C channels its neighbours line by line. Rows and columns that remain at the end of
    the grid are dropped, as by torch's unfold.
    """
    rows, columns = grid[0] // factor, grid[1] // factor
    whole = x.unflatten(1, grid).narrow(1, 0, rows * factor).narrow(2, 0, columns * factor)
    cells = whole.unflatten(2, (columns, factor)).unflatten(1, (rows, factor))
    order = (0, 1, 3, 5, 2, 4) if channels_first else (0, 1, 3, 2, 4, 5)
    alongside: Tensor = cells.permute(order).clone(memory_format=torch.contiguous_format)
    return alongside.view(x.shape[0], rows * columns, -1)


Padding = tuple[int, int, int, int]
"""Lines of zeros above and below a grid, columns of zeros left and right of it."""


def conv_grid(
    grid: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], padding: Padding
) -> tuple[int, int]:
    """Return the rows and columns that a convolution makes of a grid; below 1 where the kernel
    does not fit in.
    """
    top, bottom, left, right = padding
    padded = grid[0] + top + bottom, grid[1] + left + right
    rows, columns = ((p - k) // s + 1 for p, k, s in zip(padded, kernel, stride, strict=True))
    return rows, columns


def _conv_flops(node: Node) -> int:
    w = node.inputs[1]
    assert w is not None
    return 2 * node.type.count * (w.type.count // w.shape[0])


def _conv_shape(
    x: Type,
    w: Type,
    b: Type | None = None,
    *,
    grid: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    padding: Padding = (0, 0, 0, 0),
    groups: int = 1,
) -> Type:
    need_floats(x)
    need(all(t is None or t.dtype == x.dtype for t in (w, b)), f"x is {x}, w {w}, b {b}")
    rows, columns = grid
    need(
        len(x.shape) == 3 and x.shape[1] == rows * columns,
        f"x {list(x.shape)} is not a grid of {rows} x {columns}",
    )
    need(
        len(w.shape) == 4
        and groups > 0
        and w.shape[0] % groups == 0
        and w.shape[1] * groups == x.shape[2]
        and (b is None or b.shape == w.shape[:1]),
        f"x {list(x.shape)}, w {list(w.shape)}, b {b and list(b.shape)} in {groups} groups",
    )
    need(min(stride) > 0 and min(padding) >= 0, f"stride {stride}, padding {padding}: too small")
    size = conv_grid(grid, (w.shape[2], w.shape[3]), stride, padding)
    need(min(size) > 0, f"a kernel {list(w.shape[2:])} does not fit into {grid} with {padding}")
    return Type.contiguous((x.shape[0], size[0] * size[1], w.shape[0]), x.dtype)


def _conv_workspace(node: Node) -> int:
    """The padded grid, every window of it, and with groups their products before they are put side
    by side; of a batch the windows and the weights once more.
    """
    x, w = node.inputs[:2]
    assert x is not None and w is not None
    rows, columns = node.attrs["grid"]
    top, bottom, left, right = node.attrs.get("padding", (0, 0, 0, 0))
    batch, _, channels = x.shape
    padded = batch * (rows + top + bottom) * (columns + left + right) * channels
    windows = batch * node.shape[1] * channels * w.shape[2] * w.shape[3]
    if node.attrs.get("groups", 1) == 1:
        strided = node.type.count if w.shape[2] * w.shape[3] == 1 else 0  # summed apart from b
        count = padded + windows + strided
        return int(count) * x.dtype.itemsize
    again = windows + batch * w.type.count if batch > 1 else 0
    return int(padded + windows + again + node.type.count) * x.dtype.itemsize


@op(shape=_conv_shape, flops=_conv_flops, workspace=_conv_workspace)
def conv2d(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    grid: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    padding: Padding = (0, 0, 0, 0),
    groups: int = 1,
) -> Tensor:
    """Convolution of a grid with a kernel of I x J

    x [B, P, C], P = rows * columns, w [N, C / groups, I, J], b [N] -> [B, P', N], P' of
    `conv_grid`. `padding` counts zeros above, below, left and right. A grid of one row is a
    sequence: I = 1, and the stride's and the padding's second halves are those of a `conv1d`.
    With `groups` each of so many equal parts of the N outputs reads its own part of the channels;
    as many groups as channels are a depthwise convolution.
    """
    top, bottom, left, right = padding
    cells = F.pad(x.unflatten(1, grid), (0, 0, left, right, top, bottom))
    windows = cells.unfold(1, w.shape[2], stride[0]).unfold(2, w.shape[3], stride[1])
    batch, rows, columns = windows.shape[:3]
    seen = windows.reshape(batch, rows * columns, groups, -1)
    if groups == 1:
        return F.linear(seen.squeeze(2), w.flatten(1), b)
    weights = w.reshape(groups, w.shape[0] // groups, -1)
    result = seen.transpose(1, 2) @ weights.transpose(1, 2)
    result = result.transpose(1, 2).flatten(2).contiguous()
    return result if b is None else result.add_(b)


def _windows_shape(x: Type, *, grid: tuple[int, int], size: int) -> Type:
    need_floats(x)
    need(
        len(x.shape) == 3 and x.shape[1] == grid[0] * grid[1] and size > 0,
        f"x {list(x.shape)} is not a grid of {grid[0]} x {grid[1]} for windows of {size}",
    )
    count = -(-grid[0] // size) * -(-grid[1] // size)
    return Type.contiguous((x.shape[0] * count, size * size, x.shape[2]), x.dtype)


@op(shape=_windows_shape)
def windows(x: Tensor, *, grid: tuple[int, int], size: int) -> Tensor:
    """A grid cut into squares of size x size, those at its lower and right edge with zeros behind
    its cells, each square a batch entry of its own

    x [B, P, C], P = rows * columns -> [B * N, size * size, C], N squares line by line
    """
    rows, columns = grid
    cells = x.unflatten(1, grid)
    if rows % size or columns % size:
        cells = F.pad(cells, (0, 0, 0, -columns % size, 0, -rows % size))
    squares: Tensor = cells.unflatten(2, (-1, size)).unflatten(1, (-1, size))
    squares = squares.permute(0, 1, 3, 2, 4, 5)
    return squares.clone(memory_format=torch.contiguous_format).view(-1, size * size, x.shape[2])


def _from_windows_shape(x: Type, *, grid: tuple[int, int], size: int) -> Type:
    need_floats(x)
    count = -(-grid[0] // size) * -(-grid[1] // size)
    need(
        len(x.shape) == 3 and x.shape[1] == size * size and x.shape[0] % count == 0,
        f"x {list(x.shape)} is not {count} windows of {size} x {size} a picture",
    )
    return Type.contiguous((x.shape[0] // count, grid[0] * grid[1], x.shape[2]), x.dtype)


@op(shape=_from_windows_shape)
def from_windows(x: Tensor, *, grid: tuple[int, int], size: int) -> Tensor:
    """The grid of which `windows` made squares, without what it has added

    x [B * N, size * size, C] -> [B, P, C], P = rows * columns
    """
    rows, columns = grid
    down, across = -(-rows // size), -(-columns // size)
    squares = x.unflatten(1, (size, size)).unflatten(0, (-1, down, across))
    squares = squares.permute(0, 1, 3, 2, 4, 5)
    cells: Tensor = squares.flatten(3, 4).flatten(1, 2)
    if rows % size or columns % size:  # a slice of all is an alias, which is not recorded
        cells = cells[:, :rows, :columns]
    return cells.clone(memory_format=torch.contiguous_format).view(-1, rows * columns, x.shape[2])


MODES = ("bilinear", "bicubic")


def _resize_shape(
    x: Type,
    *,
    grid: tuple[int, int],
    size: tuple[int, int],
    mode: str,
    align_corners: bool = False,
    antialias: bool = False,
) -> Type:
    need_floats(x)
    need(
        len(x.shape) == 2 and x.shape[0] == grid[0] * grid[1],
        f"x {list(x.shape)} is not a grid of {grid[0]} x {grid[1]}",
    )
    need(
        mode in MODES and min(size) > 0,
        f"mode {mode!r} to {size}, expected one of {', '.join(MODES)} and a size above 0",
    )
    need(not (align_corners and antialias), "align_corners and antialias exclude each other")
    return Type.contiguous((size[0] * size[1], x.shape[1]), x.dtype)


@op(shape=_resize_shape, flops=lambda n: 16 * n.type.count)
def resize2d(
    x: Tensor,
    *,
    grid: tuple[int, int],
    size: tuple[int, int],
    mode: str,
    align_corners: bool = False,
    antialias: bool = False,
) -> Tensor:
    """A grid of vectors interpolated to another size, in fp32 (ggml's UPSCALE)

    x [rows * columns, C] -> [size[0] * size[1], C]
    """
    cells = x.float().unflatten(0, grid).permute(2, 0, 1)[None]
    scaled = F.interpolate(cells, size, mode=mode, align_corners=align_corners, antialias=antialias)
    return scaled[0].permute(1, 2, 0).flatten(0, 1).to(x.dtype).contiguous()
