"""Products of experts with the rows that chose them: the kernel for each number of rows."""

from __future__ import annotations

from dataclasses import dataclass

from mtmd.kernels.cpu.native import products
from mtmd.kernels.cpu.native.compile import compile_kernel
from mtmd.kernels.cpu.native.experts import BLOCK
from mtmd.kernels.cpu.native.program import Pointer
from mtmd.kernels.cpu.tiled import few_rows, product
from mtmd.kernels.cpu.tiled.cpu import GENERIC, host_form, second_cache

SIZES = {"f32": 4, "bf16": 2}
Location = int | Pointer
MAX_ROWS = 16  # of a product by rows, where the CPU has no tiles


@dataclass(frozen=True)
class Forms:
    """Products of one weight [`outer`, `width`] an expert: up to `few` rows by rows, up to `medium`
    by tiles, of more by panels.
    """

    kind: str
    x: str
    width: int
    outer: int
    few: int
    medium: int
    by_rows: tuple[products.Kernel, ...]
    by_tiles: few_rows.Kernel | None
    by_panels: int
    panel: int  # rows of a weight
    sizes: tuple[int, ...]
    scratch: int

    @property
    def layout(self) -> tuple[object, ...]:
        """Return what two weights have alike that read the same rows laid out."""
        prepare, tiles = self.by_rows[0].prepare, self.by_tiles
        return self.few, self.medium, prepare and prepare.name, tiles and tiles.name

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row as it is stored."""
        return self.width * SIZES[self.x]

    @property
    def block_bytes(self) -> int:
        """Return the bytes of 16 rows laid out, in any form."""
        prepare, tiles = self.by_rows[0].prepare, self.by_tiles
        sizes = [BLOCK * self.row_bytes]
        sizes += [BLOCK * prepare.bytes(self.width)] if prepare is not None else []
        sizes += [tiles.bytes(BLOCK, self.width)] if tiles is not None else []
        return -(-max(sizes) // 64) * 64

    @property
    def prepared(self) -> bool:
        return self.by_rows[0].prepare is not None

    def laying(self) -> list[int]:
        """Return the arguments of `emit_lay_rows` from BLOCK_BYTES on."""
        prepare, tiles = self.by_rows[0].prepare, self.by_tiles
        args = [self.block_bytes, self.width, self.few, self.medium]
        args += [prepare.address, prepare.bytes(self.width)] if prepare else [0, 0]
        if tiles is None:
            return [*args, 0, 0, 0]
        return [*args, tiles.prepare, tiles.units(1, self.width), tiles.bytes(1, self.width)]

    @property
    def units(self) -> int:
        """Return the units of `emit_grouped` for each expert."""
        return -(-self.outer // self.panel)

    def multiplying(
        self, weight: Location, out: Location, laid: Location, plain: Location, plain_bytes: int
    ) -> list[Location]:
        """Return the arguments of `emit_grouped` from FEW on: rows laid out at `laid`, as they are
        stored at `plain`, 16 in `plain_bytes`.
        """
        row, prepare = products.row_bytes(self.kind, self.width), self.by_rows[0].prepare
        stride = self.width if prepare is None else prepare.bytes(self.width)
        args: list[Location] = [self.few, self.medium, self.units, self.panel, self.outer]
        args += [weight, self.outer * row, row, out, self.outer * SIZES[self.x], self.width]
        args += [laid, self.block_bytes, stride, plain, plain_bytes]
        args += [kernel.address for kernel in self.by_rows]
        return [*args, self.by_tiles.address if self.by_tiles else 0, self.by_panels, *self.sizes]


def forms(kind: str, width: int, outer: int, x: str, rows: int) -> Forms:
    """The products of up to `rows` rows of x an expert."""
    by_rows = tuple(products.product(kind, count, x, x, alike=True) for count in products.ROWS)
    few, medium, tiles = MAX_ROWS, MAX_ROWS, None
    if few_rows.takes(kind, few_rows.FEWEST, outer, width, x):
        few, medium = few_rows.FEWEST - 1, few_rows.limit(kind)
        tiles = few_rows.product(kind, x)
    form = host_form(x) or GENERIC
    step, block = product.step_of(kind, form), product.block_of(width, product.item_of(form))
    panel = product.panel_of(outer, width, 1, step, 3 * second_cache() // 8)
    results, rest, scratch = product.locations(kind, form, width, panel)
    run = -(-rows // product.STEP) * product.STEP
    sizes = run, results, rest, block
    address = compile_kernel(product.emit_product, kind, form, x, x)
    scratch = max(
        scratch,
        BLOCK * width * SIZES[x],  # of `emit_lay_rows`
        few_rows.scratch_bytes(medium),
        *(kernel.scratch(width) for kernel in by_rows),
    )
    return Forms(kind, x, width, outer, few, medium, by_rows, tiles, address, panel, sizes, scratch)
