"""Products in bfloat16 by AMX: the reference's, at every edge of a panel, a run and a step. Where
there is no AMX, only that nothing is taken.
"""

from __future__ import annotations

import pytest
import torch
from op_cases import node_of
from torch import Tensor

from mtmd.kernels.backends import Cpu as Backend
from mtmd.kernels.cpu import tiled_matmul
from mtmd.kernels.cpu.native.compile import Cpu
from mtmd.kernels.cpu.table import choose
from mtmd.kernels.cpu.tiled import cpu, product
from mtmd.kernels.graph import Type

pytestmark = pytest.mark.usefixtures("poisoned")
AMX = cpu.tiles_allowed()


def operands(rows: int, width: int, columns: int, bias: bool = True) -> list[Tensor | None]:
    draw = torch.Generator().manual_seed(rows + width)
    x, w, b = (
        torch.randn(s, generator=draw).bfloat16()
        for s in ((rows, width), (columns, width), (columns,))
    )
    return [x, w, b if bias else None]


def error(result: Tensor, inputs: list[Tensor | None]) -> float:
    x, w, b = inputs
    assert x is not None and w is not None
    expected = x.double() @ w.double().T + (0 if b is None else b.double())
    return float((result.double() - expected).square().sum() / expected.square().sum())


SIZES = [
    (64, 64, 64),
    (65, 96, 97),  # a row, a column too many
    (97, 80, 300),  # half a step of numbers, panels of which the last is short
    (1030, 264, 129),  # a whole block and a quarter of a step
    (100, 1031, 70),
    (700, 4304, 130),
]


@pytest.mark.skipif(not AMX, reason="the CPU has no AMX")
@pytest.mark.parametrize("rows, width, columns", SIZES, ids=str)
def test_every_edge(rows, width, columns):
    for bias in (True, False):
        inputs = operands(rows, width, columns, bias)
        assert choose(node_of("matmul", inputs, {})) is tiled_matmul.KERNEL
        for threads in (1, 2):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                result = tiled_matmul.tiled_matmul(*inputs)
            finally:
                torch.set_num_threads(before)
            assert error(result, inputs) < 4e-6  # of rounding the result


@pytest.mark.skipif(not AMX, reason="the CPU has no AMX")
def test_batches_are_rows_and_what_it_takes_was_told(peak_bytes):
    x, w, b = operands(6 * 100, 256, 640)
    assert x is not None
    inputs = [x.view(2, 3, 100, 256), w, b]
    node = node_of("matmul", inputs, {})
    run = Backend().lower(node)
    measured = peak_bytes(lambda: run(*inputs))
    result = run(*inputs)
    assert result.shape == (2, 3, 100, 640) and error(result.view(600, 640), [x, w, b]) < 4e-6
    reported = node.type.bytes + Backend().workspace(node)
    assert reported * 0.95 <= measured <= reported * 1.05


@pytest.mark.skipif(not AMX, reason="the CPU has no AMX")
def test_nan_stays_in_its_row():
    x, w, b = operands(70, 100, 80)
    assert x is not None
    x[7, 99] = torch.nan
    result = tiled_matmul.tiled_matmul(x, w, b)
    assert result[7].isnan().all() and result[:7].isfinite().all() and result[8:].isfinite().all()


def test_what_is_rejected_and_why(monkeypatch):
    monkeypatch.setattr(cpu, "host_form", lambda _: ("tiles", 16, 8, 2))
    types = [None if i is None else Type.of(i) for i in operands(64, 64, 64)]
    assert tiled_matmul.rejects(*types) is None
    assert "weights are Q8_0" in str(tiled_matmul.rejects(*types, quant="Q8_0"))
    few = [Type.of(i) for i in operands(63, 64, 64) if i is not None]
    assert "63 x 64 by 64" in str(tiled_matmul.rejects(*few))
    narrow = [Type.of(i) for i in operands(200, 64, 63) if i is not None]
    assert "200 x 64 by 63" in str(tiled_matmul.rejects(*narrow))
    floats = [Type.of(i.float()) for i in operands(64, 64, 64) if i is not None]
    assert "not all bf16" in str(tiled_matmul.rejects(*floats))
    turned = torch.randn(64, 64).bfloat16().T
    assert "contiguous" in str(tiled_matmul.rejects(types[0], Type.of(turned)))
    monkeypatch.setattr(
        cpu, "host_form", lambda _: cpu.form_of(Cpu("x86-64-v4", "+avx512f"), "bf16", True)
    )
    assert "no AMX" in str(tiled_matmul.rejects(*types))


@pytest.mark.parametrize("columns", [64, 768, 1152, 3072, 4304, 100_000])
@pytest.mark.parametrize("width", [64, 768, 4304, 20_000])
@pytest.mark.parametrize("threads", [1, 2, 16])
def test_panels_stay_in_the_cache_and_are_shared_evenly(columns, width, threads):
    for item, cache in ((2, 3 << 18), (4, 3 << 17)):
        panel = product.panel_of(columns, width, threads, 512 * item, cache)
        assert panel % product.STEP == 0 and 64 <= panel <= product.MAX_COLUMNS
        assert panel == 64 or panel * width * item <= cache
        assert -(-columns // panel) >= min(threads, columns // 96)
