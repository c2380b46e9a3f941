"""Kernels as the compiler leaves them for an A100 and an H100, in the emulator of PTX: a small choice
of cases. `make ptx` runs all cases and the tests of single kernels.
"""

from __future__ import annotations

import pytest
import torch
from ptx.memory import Fault

from mtmd.kernels.gpu import gated, sigmoid_gate
from mtmd.kernels.gpu.launch import Call
from mtmd.kernels.gpu.moe import kernel as moe
from mtmd.kernels.gpu.rotary import kv_store
from mtmd.kernels.gpu.table import KERNELS
from mtmd.kernels.gpu.triton_kernel import node_of
from mtmd.kernels.graph import Type
from mtmd.kernels.ops import OPS
from mtmd.kernels.quantization.kv_rows import CODED, dequantize_rows

pytestmark = pytest.mark.usefixtures("poisoned")
CHOICE = {  # by op, the numbers of its cases: the cheapest to compile that have a way of their own
    "add_layer_norm": (0,),
    "add_norm": (3,),
    "altup": (0, 4),
    "attention": (1, 66),
    "conv2d": (0,),
    "delta_gates": (0, 5),
    "embed": (0,),
    "gated_norm": (0,),
    "gaussian_topk": (3,),
    "gelu": (0,),
    "gelu_mul": (1,),
    "kv_store": (0,),
    "l2_norm": (4,),
    "laurel": (4,),
    "linear_attention": (3, 8, 16),
    "match_magnitude": (4,),
    "matmul": (4, 15),
    "moe": (10,),
    "paged_attention": (1, 5),
    "rms_norm": (0, 13, 14),
    "rope": (3,),
    "rope_columns": (3,),
    "rope_store": (0,),
    "short_conv": (0,),
    "sigmoid_gate": (0,),
    "silu_mul": (4,),
}
WIDE = {  # those with products of 64 rows, which an H100 has an instruction of its own for
    "attention": (13, 14),
    "conv2d": (2,),
    "matmul": (97,),
    "paged_attention": (13,),
}


def cases(choice):
    return [
        pytest.param(op, number, id=f"{op} {KERNELS[op][0].load().cases[number]}")
        for op, numbers in choice.items()
        for number in numbers
    ]


@pytest.mark.parametrize(("op", "number"), cases(CHOICE))
def test_a_case_is_right_and_touches_only_what_is_its_own(op, number, emulator, monkeypatch):
    kernel, before = KERNELS[op][0].load(), emulator.launches
    emulator.install(monkeypatch)
    assert kernel.failure(op, kernel.cases[number]) is None
    assert emulator.launches > before


@pytest.mark.parametrize(("op", "number"), cases(WIDE))
def test_products_of_four_warps_are_right(op, number, hopper, monkeypatch):
    """From shared memory that others write next, and in registers that are there later."""
    kernel, before = KERNELS[op][0].load(), set(hopper.texts)
    hopper.install(monkeypatch)
    assert kernel.failure(op, kernel.cases[number]) is None
    made = [text for key, (text, *_) in hopper.texts.items() if key not in before]
    assert any(ins.words[0] == "wgmma" for text in made for ins in text.instructions())


NARROW = [  # one row of fewer values than a block has threads, which once read what others wrote
    ("silu_mul", gated.SILU_MUL, gated.problem((3, 40))),
    ("sigmoid_gate", sigmoid_gate.KERNEL, sigmoid_gate.problem((1, 1), added=True)),
]


@pytest.mark.parametrize(("op", "kernel", "case"), NARROW, ids=[op for op, *_ in NARROW])
def test_a_narrow_row_is_overwritten_by_who_read_it(op, kernel, case, emulator, monkeypatch):
    emulator.install(monkeypatch)
    inputs = case.inputs()
    assert Type.of(inputs[0]) == node_of(op, case).type
    expected = kernel.run(*case.inputs(), **case.options)
    assert torch.equal(kernel.in_place(*inputs, **case.options), expected)


@pytest.mark.parametrize("quant", CODED)
def test_a_row_that_is_no_number_is_none_in_the_cache(quant, emulator, monkeypatch):
    """A GPU's maximum forgets a NaN: the scale of a row in fp8 was that of its other values."""
    emulator.install(monkeypatch)
    case = kv_store.problem(3, 1, 64, quant=quant)
    for value in (torch.nan, torch.inf):
        cache, k, v, slots = case.inputs()
        k[1, 0, 3] = v[2, 0, 40] = value
        expected = OPS["kv_store"].reference(cache.clone(), k, v, slots, quant=quant)
        result = kv_store.KV_STORE.run(cache, k, v, slots, quant=quant)
        rows = [dequantize_rows(of[:, slots], quant, 64).isfinite() for of in (result, expected)]
        assert torch.equal(*rows) and not rows[0][0, 1, 0, :32].any()


def test_a_token_without_a_number_for_one_expert_gets_none(emulator, monkeypatch):
    """Of experts that are rated one by one: the others' ratings are numbers, and were chosen."""
    emulator.install(monkeypatch)
    case = next(c for c in moe.KERNEL.cases if c.options["routing"].score == "sigmoid")
    x, router, *rest = case.inputs()
    expected = moe.KERNEL.run(x, router, *rest, **case.options)
    router[0, 1] = torch.nan
    result = moe.KERNEL.run(x, router, *rest, **case.options)
    assert result[0].isnan().all() and torch.equal(result[1:], expected[1:])


def test_a_kernel_that_reaches_too_far_is_stopped(emulator, monkeypatch):
    """The launch says that a row has more values than the operand."""
    emulator.install(monkeypatch)
    x, out = torch.ones(40), torch.empty(40)
    call = Call({"N": 41}, {"ACT": "quick", "COLUMNS": 1024}, 1, 4, 1)
    with pytest.raises(Fault, match=r"gated.py:\d+.*out of bounds: byte 160 of x \(160 bytes\)"):
        emulator.run_call(gated.gelu_kernel, call, {"x": x, "out": out})
