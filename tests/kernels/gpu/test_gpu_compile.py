"""Ahead-of-time compilation for GPUs that are not here. It runs in a process of its own: this one
interprets kernels.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_table import VISION, resources

from mtmd.base.errors import OptionError, PlacementError
from mtmd.kernels.gpu import compile as aot

ROOT = Path(__file__).parents[3]
SCRIPT = """
from dataclasses import asdict
from kernel_table import DECODE, PREFILL, PRODUCTS, VISION, combine_row, product_row, resources, row
from mtmd.kernels.gpu.compile import SHARED_LIMIT, compile_program
out = {f"{t} {w} {s}": asdict(resources(VISION, w, t, split=s)) for t in SHARED_LIMIT for w in (72, 80) for s in (True, False)}
out |= {f"{t} bounds": asdict(resources(PREFILL, 72, t)) for t in SHARED_LIMIT}
out |= {f"{t} 512": asdict(resources(PREFILL, 512, t)) for t in SHARED_LIMIT}
out |= {f"{t} decoding {w}": asdict(resources(DECODE, w, t)) for t in SHARED_LIMIT for w in (128, 512)}
_, combine = DECODE.programs(512)
out |= {f"{t} combine": asdict(compile_program(t, combine)) for t in SHARED_LIMIT}
product = next(case for case in PRODUCTS.values() if (case["quant"], case["rows"]) == ("Q4_K", 512))
rows = [row(form, width) for form, widths in ((VISION, (72, 80, 128, 256)), (PREFILL, (72, 512)), (DECODE, (128, 512))) for width in widths]
rows += [row(VISION, width, False) for width in (72, 80)]
rows += [f"| {' | '.join(cells)} |" for cells in (product_row(product), combine_row(512))]
out = {"resources": out, "rows": rows}
"""


@pytest.fixture(scope="module")
def compiled(compiler):
    return compiler(SCRIPT)


@pytest.mark.parametrize("target", aot.SHARED_LIMIT)
@pytest.mark.parametrize(
    "form", ["72 True", "80 True", "bounds", "512", "decoding 128", "decoding 512"]
)
def test_chosen_tile_fits(compiled, target, form):
    r = compiled["resources"][f"{target} {form}"]
    assert 0 < r["shared_bytes"] <= aot.SHARED_LIMIT[target]
    assert r["spill_bytes"] == 0
    few = form == "512" or "decoding" in form  # fewer rows than wgmma takes
    assert (
        r["instruction"]
        == {"cuda:80": "mma.sync", "cuda:90": "mma.sync" if few else "wgmma", "hip:gfx942": "mfma"}[
            target
        ]
    )


REGISTERS = """
from dataclasses import replace
import torch
from kernel_table import DECODE, FORMS, PREFILL, resources
EXACT, EXACT_PREFILL = FORMS[-1], replace(PREFILL, title="fp32", dtype=torch.float32)
EXACT_DECODE = replace(DECODE, title="decoding in fp32", dtype=torch.float32)
forms = [("cuda:80", PREFILL, width) for width in (32, 80, 128)]
forms += [("cuda:80", DECODE, 256), ("cuda:80", EXACT, 72), ("cuda:80", EXACT, 512), ("cuda:90", EXACT, 512), ("hip:gfx942", EXACT, 512)]
forms += [("cuda:80", EXACT_PREFILL, 64), ("cuda:90", EXACT_PREFILL, 112)]
forms += [(target, form, 40) for target in ("cuda:80", "cuda:90") for form in (EXACT, EXACT_DECODE)]
out = {f"{target} {form.title} {width}": resources(form, width, target).spill_bytes for target, form, width in forms}
"""


def test_loops_of_attention_leave_registers_for_rows(compiler):
    """All of these spilled, up to 440 bytes, while a thread kept where its results go, or of a wide
    head in fp32 held whole rows, or, of head 40, while the compiler aimed at more programs at once.
    Compiles fourteen kernels: seconds.
    """
    spilled = compiler(REGISTERS)
    assert len(spilled) == 14 and not any(spilled.values()), spilled


def test_every_tile_that_a_warm_up_tries_fits(tried_tiles):
    """Two blocks of 128 keys are more than gfx942 has. Compiles eight kernels: seconds."""
    assert len(tried_tiles) == 3 * 2 + 2
    for name, used in tried_tiles:
        assert used["shared_bytes"] <= aot.SHARED_LIMIT[used["target"]], (name, used)
        assert used["spill_bytes"] == 0 and used["at_once"] > 0, (name, used)


@pytest.mark.parametrize("target", aot.SHARED_LIMIT)
def test_parts_are_added_in_registers(compiled, target):
    r = compiled["resources"][f"{target} combine"]
    assert r["shared_bytes"] <= 4096 and r["spill_bytes"] == 0


@pytest.mark.parametrize("target", aot.SHARED_LIMIT)
@pytest.mark.parametrize("width", [72, 80])
def test_split_head_takes_less_than_padding(compiled, target, width):
    split, padded = (compiled["resources"][f"{target} {width} {form}"] for form in (True, False))
    assert split["shared_bytes"] < padded["shared_bytes"]
    assert (
        split["registers"] + split["spill_bytes"] // 4
        < padded["registers"] + padded["spill_bytes"] // 4
    )


def test_documented_table_is_current(compiled):
    lines = (ROOT / "docs" / "kernels.md").read_text().splitlines()
    assert all(row in lines for row in compiled["rows"]), (
        "docs/kernels.md: run python tools/kernel_table.py > docs/kernels.md"
    )


CONSTANTS = """
from kernel_table import VISION
from mtmd.kernels.gpu.launch import arguments
from triton.language import constexpr
program = VISION.programs(72)[0]
given = arguments(program.function, {}, program.call)["C"]
out = [name for name, value in given._asdict().items() if not isinstance(value, constexpr)]
"""


def test_each_constant_of_a_kernel_is_one_for_the_compiler(compiler):
    """Triton before 3.8 makes none of a plain number in a tuple, once a function is passed it:
    attention, products and experts were not compiled at all.
    """
    assert compiler(CONSTANTS) == []


def test_interpreted_kernel_cannot_be_compiled():
    with pytest.raises(PlacementError, match="TRITON_INTERPRET"):
        resources(VISION, 72, "cuda:90")


@pytest.mark.parametrize("target", ["cuda", "cuda:9", "cuda:x", "hip:90", "tpu:1", ""])
def test_unknown_target(target):
    with pytest.raises(OptionError, match="one of cuda:75"):
        resources(VISION, 72, target)
