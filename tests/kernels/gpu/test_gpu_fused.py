"""The kernels that do the work of several nodes, beyond their cases, which test_table.py runs: how
keys are shared out, what is refused, and the memory of a run.
"""

from __future__ import annotations

import pytest
import torch

from mtmd.base.errors import PlacementError
from mtmd.kernels.backends.gpu import Gpu
from mtmd.kernels.gpu import altup, delta_gates, embed, gated, sigmoid_gate
from mtmd.kernels.gpu.moe import kernel as moe
from mtmd.kernels.gpu.moe.cases import problem as experts
from mtmd.kernels.gpu.norms import (
    add_layer_norm,
    add_norm,
    gated_norm,
    largest,
    laurel,
    match_magnitude,
)
from mtmd.kernels.gpu.paged_attention import kernel as paged
from mtmd.kernels.gpu.paged_attention.cases import problem as pages
from mtmd.kernels.gpu.rotary import kv_store, rope
from mtmd.kernels.gpu.triton_kernel import node_of, relative_error
from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import types_of
from mtmd.kernels.ops.moe import Routing

pytestmark = pytest.mark.usefixtures("exact_bf16", "poisoned")
f32, bf16 = torch.float32, torch.bfloat16
MIXED = pages(32, ((70, 1), (0, 5), (129, 1), (31, 2), (40, 0), (200, 1)), 4, 2, window=None)


def of(*shape: int, dtype: torch.dtype = f32) -> Type:
    return Type.contiguous(shape, dtype)


def call_of(case):
    types = types_of(node_of("paged_attention", case))
    return paged.plan_call(paged.Operands(*types, **case.options))


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("requested", "minimum"), [(1, 2), (90, 1), (300, 3), (250, 1)])
def test_however_keys_are_shared_out(monkeypatch, requested, minimum, window):
    """Sequences of all lengths in one batch, more programs than some of them have keys for."""
    monkeypatch.setattr(paged, "REQUESTED", requested)
    monkeypatch.setattr(paged, "MINIMUM", minimum)
    case = MIXED.but(window=window)
    inputs = case.inputs(seed=requested)
    result = paged.KERNEL.run(*inputs, **case.options)
    assert relative_error("paged_attention", result, inputs, case.options) <= paged.NMSE[f32]


def test_shares_are_a_number_of_the_launch_and_no_program_of_its_own():
    """Neither are sequences, tokens, or pages of the table."""
    calls = []
    for count, keys in ((1, 900), (2, 8000), (16, 500), (17, 500)):
        case = pages(128, ((keys, 1),) * count, 8, 2, bf16, spare=count)
        calls.append(call_of(case))
    assert len({call.scalars["splits"] for call in calls}) > 2
    searches = {call.constants.pop("SEARCH") for call in calls}
    assert searches == {0, 4, 8} and len({str(call.constants) for call in calls}) == 1


def test_seventeen_sequences_take_as_many_programs_as_sixteen():
    """Or one in seventeen more: a few programs for each, and none walks another's keys."""
    programs = []
    for count in (16, 17):
        case = pages(256, ((2047, 1),) * count, 8, 4, bf16)
        call = call_of(case)
        programs.append(call.programs)
        assert call.constants["SPLIT"]
    assert programs[0] <= programs[1] * 17 / 16 and programs[1] >= 204


PAGED = (of(1, 2, 4, 64), of(2, 64, 2, 64), of(2, dtype=torch.int64), of(2, 2, dtype=torch.int32))
STARTS, OPTIONS = of(2, dtype=torch.int64), {"size": 32, "scale": 0.1}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({0: of(1, 2, 4, 64, dtype=torch.float64)}, "q is fp64"),
        ({1: of(2, 64, 2, 64, dtype=torch.float64)}, "the cache is fp64"),
        ({0: of(1, 2, 4, 8), 1: of(2, 64, 2, 8)}, "head size 8; the kernel supports 16 to 576"),
        ({0: Type((1, 2, 4, 64), f32, (512, 256, 1, 4))}, "stride 1 in the last"),
        ({1: Type((2, 64, 2, 64), f32, (1, 2, 128, 256))}, "the cache has strides"),
        ({0: of(1, 2, 74, 64)}, "37 query heads of a key head"),
        ({1: of(2, 2**30, 2, 64)}, "1073741824 rows in the cache"),
        ({0: of(1, 2**24, 4, 64)}, "16777216 tokens of 1 sequences"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_pages_that_are_refused(changed, words):
    types = [changed.get(i, t) for i, t in enumerate((*PAGED, STARTS))]
    assert words in str(paged.KERNEL.rejects(*types, **OPTIONS))


def test_options_that_are_refused():
    assert "scale 0.0" in str(paged.KERNEL.rejects(*PAGED, STARTS, size=32, scale=0.0))
    assert "softcap -1" in str(paged.KERNEL.rejects(*PAGED, STARTS, **OPTIONS, softcap=-1.0))
    many = of(1, 200, 4, 64), *PAGED[1:3], of(200, 2, dtype=torch.int32), STARTS
    assert "queries to be turned in blocks of 64 rows" in str(
        paged.KERNEL.rejects(*many, None, None, **OPTIONS, eps=1e-6)
    )
    assert paged.KERNEL.rejects(*many, **OPTIONS) is None
    with pytest.raises(PlacementError, match="paged attention on the GPU: head size 600"):
        x = torch.zeros(1, 1, 1, 600), torch.zeros(2, 32, 1, 600), torch.zeros(1).long()
        bounds, starts = torch.zeros(1, 2).int(), torch.tensor([0, 1])
        paged.KERNEL.run(*x, bounds, starts, size=32, scale=1.0)


@pytest.mark.parametrize(
    ("kernel", "op", "case"),
    [
        (paged.KERNEL, "paged_attention", MIXED),
        (paged.KERNEL, "paged_attention", pages(64, ((0, 70),), 4, 1)),
        (moe.KERNEL, "moe", experts(9, 4, 2, 64, 40)),
        (moe.KERNEL, "moe", experts(1, 16, 2, 64, 40)),
    ],
    ids=lambda value: str(value) if not hasattr(value, "run") else "kernel",
)
def test_memory_of_a_run(kernel, op, case, peak_bytes):
    node, inputs = node_of(op, case), case.inputs()
    taken = peak_bytes(lambda: kernel.run(*inputs, **case.options))
    assert taken == kernel.workspace(*types_of(node), **node.attrs) + node.type.bytes


@pytest.mark.parametrize(
    "kernel",
    [gated.SILU_MUL, gated.GELU_MUL, gated.GELU_KERNEL, sigmoid_gate.KERNEL, rope.ROPE_COLUMNS],
    ids=["silu_mul", "gelu_mul", "gelu", "sigmoid_gate", "rope_columns"],
)
def test_a_result_that_lies_where_the_first_input_did(kernel):
    case = kernel.cases[0]
    inputs = case.inputs()
    expected = kernel.run(*inputs, **case.options)
    result = kernel.in_place(*inputs, **case.options)
    assert result is inputs[0] and torch.equal(result, expected)


def test_a_gpu_overwrites_where_the_plan_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    node = node_of("gelu", gated.GELU_KERNEL.cases[0])
    assert Gpu().lower(node).func is gated.GELU_KERNEL.run
    assert Gpu().lower(node, in_place=True).func is gated.GELU_KERNEL.in_place


EXPERTS = [of(3, 64), of(3, 8), of(8, 32, 64), of(8, 32, 64), of(8, 64, 32)]


@pytest.mark.parametrize(
    ("changed", "options", "words"),
    [
        ({0: of(3, 64, dtype=torch.float64)}, {}, "x is fp64"),
        ({2: Type((8, 32, 64), f32, (1, 8, 256))}, {}, "gate has strides"),
        ({1: Type((3, 8), f32, (1, 3))}, {}, "the router has strides"),
        ({1: of(3, 2000)}, {}, "2 of 2000 experts"),
        ({2: of(8, 32, 34, dtype=torch.uint8)}, {"gate_quant": "IQ9_X"}, "gate is IQ9_X"),
        ({0: of(2**23, 64), 1: of(2**23, 8)}, {}, "below 2^24 choices"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_experts_that_are_refused(changed, options, words):
    types = [changed.get(i, t) for i, t in enumerate(EXPERTS)]
    assert words in str(moe.KERNEL.rejects(*types, routing=Routing(2, normalize=True), **options))


def test_others_that_are_refused():
    table, wide = of(3, 2, 8), of(3, 2, 2000)
    assert "x is fp64" in str(rope.KERNEL.rejects(of(3, 2, 16, dtype=torch.float64), table))
    whole = {"start": 0, "stop": 16, "head": 16}
    assert "x has strides" in str(
        rope.ROPE_COLUMNS.rejects(Type((3, 48), f32, (1, 3)), table, **whole)
    )
    with pytest.raises(PlacementError, match="rope of columns on the GPU: x is i64"):
        rope.ROPE_COLUMNS.run(torch.zeros(3, 48).long(), torch.zeros(3, 2, 8), **whole)
    assert "table is" in str(rope.KERNEL.rejects(of(3, 2, 16), Type((3, 2, 8), f32, (1, 3, 6))))
    assert "stride 1 in the last" in str(
        rope.KERNEL.rejects(Type((3, 2, 16), f32, (1, 3, 6)), table)
    )
    assert "of 2000 values" in str(rope.KERNEL.rejects(wide, table))
    slots = of(3, dtype=torch.int64)
    cache, k = of(2, 9, 2, 16), of(3, 2, 16)
    separate = Type((3, 2, 16), f32, (32, 1, 2))
    assert "k has strides" in str(kv_store.KV_STORE.rejects(cache, separate, k, slots))
    assert "the cache has strides" in str(
        kv_store.KV_STORE.rejects(Type((2, 9, 2, 16), f32, (1, 2, 18, 36)), k, k, slots)
    )
    assert "v is fp64" in str(
        kv_store.KV_STORE.rejects(cache, k, of(3, 2, 16, dtype=torch.float64), slots)
    )
    assert "of 2000 values" in str(kv_store.KV_STORE.rejects(of(2, 9, 2, 2000), wide, wide, slots))
    assert "w is i64" in str(
        add_norm.KERNEL.rejects(of(3, 9), of(3, 9), of(9, dtype=torch.int64), eps=1e-6)
    )
    assert "y has strides" in str(
        add_norm.KERNEL.rejects(of(3, 9), Type((3, 9), f32, (1, 3)), of(9), eps=1e-6)
    )
    assert "of 20000 values" in str(
        add_norm.KERNEL.rejects(of(1, 20000), of(1, 20000), of(20000), eps=1e-6)
    )
    assert "b is i64" in str(
        add_layer_norm.KERNEL.rejects(of(3, 9), of(3, 9), of(9), of(9, dtype=torch.int64), eps=1e-6)
    )
    assert "x has strides" in str(
        add_layer_norm.KERNEL.rejects(Type((3, 9), f32, (1, 3)), of(3, 9), of(9), eps=1e-6)
    )
    assert "of 20000 values" in str(
        add_layer_norm.KERNEL.rejects(of(1, 20000), of(1, 20000), of(20000), eps=1e-6)
    )
    with pytest.raises(PlacementError, match="residual and layer norm on the GPU: x has strides"):
        x = torch.zeros(9, 3).T
        add_layer_norm.KERNEL.run(x, x, torch.ones(9), eps=1e-6)
    assert "up is bf16" in str(gated.SILU_MUL.rejects(of(3, 9), of(3, 9, dtype=bf16)))
    tokens, table = of(3, dtype=torch.int64), of(9, 34, dtype=torch.uint8)
    assert "the table is IQ9_X" in str(
        embed.KERNEL.rejects(tokens, table, quant="IQ9_X", dtype="bf16")
    )
    assert "tokens has strides" in str(
        embed.KERNEL.rejects(Type((3,), torch.int64, (2,)), table, quant="Q8_0", dtype="bf16")
    )
    many = of(2**31, dtype=torch.int64)
    assert "2147483648 tokens" in str(embed.KERNEL.rejects(many, table, quant="Q8_0", dtype="bf16"))
    with pytest.raises(PlacementError, match="quantized rows on the GPU: table begins at"):
        shifted = torch.zeros(35, dtype=torch.uint8)[1:].view(1, 34)
        embed.KERNEL.run(torch.zeros(1).long(), shifted, quant="Q8_0", dtype="bf16")
    assert "x is i64" in str(
        gated.GELU_KERNEL.rejects(of(3, dtype=torch.int64), approximate="quick")
    )
    assert "fewer than 2^40" in str(gated.GELU_KERNEL.rejects(of(2**40), approximate="quick"))
    with pytest.raises(PlacementError, match="GELU on the GPU: x has strides"):
        gated.GELU_KERNEL.run(torch.zeros(9, 3).T, approximate="quick")
    assert "rows one after another" in str(
        gated.SILU_MUL.rejects(of(3, 9), Type((3, 9), f32, (1, 3)))
    )


def test_a_sigmoid_gate_that_is_refused():
    x = of(3, 9)
    assert "gate is i64" in str(sigmoid_gate.KERNEL.rejects(x, of(3, 1, dtype=torch.int64)))
    assert "y has strides" in str(sigmoid_gate.KERNEL.rejects(x, x, Type((3, 9), f32, (1, 3))))
    assert "fewer than 2^31 programs" in str(
        sigmoid_gate.KERNEL.rejects(of(2**31, 9), of(2**31, 1))
    )
    with pytest.raises(PlacementError, match="sigmoid gate on the GPU: x has strides"):
        sigmoid_gate.KERNEL.run(torch.zeros(9, 3).T, torch.zeros(3, 1))


def test_gates_of_heads_that_are_refused():
    heads, one = of(3, 2, 16), of(16)
    assert "gate is i64" in str(
        gated_norm.KERNEL.rejects(heads, one, of(3, 2, 16, dtype=torch.int64), eps=1e-6)
    )
    assert "w has strides" in str(
        gated_norm.KERNEL.rejects(heads, Type((16,), f32, (2,)), heads, eps=1e-6)
    )
    separate = Type((3, 2, 16), f32, (64, 32, 1))
    assert "gate has strides" in str(gated_norm.KERNEL.rejects(heads, one, separate, eps=1e-6))
    assert "of 2000 values" in str(
        gated_norm.KERNEL.rejects(of(3, 2, 2000), of(2000), of(3, 2, 2000), eps=1e-6)
    )
    with pytest.raises(PlacementError, match="gated norm on the GPU: x has strides"):
        x = torch.zeros(16, 2, 3).permute(2, 1, 0)
        gated_norm.KERNEL.run(x, torch.ones(16), x.contiguous(), eps=1e-6)
    of_head = of(2)
    assert "beta is i64" in str(
        delta_gates.KERNEL.rejects(of(3, 2), of_head, of_head, of(3, 2, dtype=torch.int64))
    )
    assert "alpha has strides" in str(
        delta_gates.KERNEL.rejects(Type((3, 2), f32, (1, 3)), of_head, of_head)
    )
    assert "a has strides" in str(
        delta_gates.KERNEL.rejects(of(3, 2), of_head, Type((2,), f32, (2,)), of(3, 2))
    )
    assert "supports fewer" in str(
        delta_gates.KERNEL.rejects(of(2**37, 2), of_head, of_head, of(2**37, 2))
    )
    with pytest.raises(PlacementError, match="gates of heads on the GPU: dt has strides"):
        x = torch.zeros(3, 2)
        delta_gates.KERNEL.run(x, torch.zeros(4)[::2], torch.zeros(2), x)


STREAMS = (of(3, 4, 24), of(24), of(4, 24), of(16, 4))
UPDATE = {"active": 0, "eps": 1e-6, "scale": 1.0}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({0: of(3, 4, 24, dtype=torch.float64)}, "streams is fp64"),
        ({2: Type((4, 24), f32, (1, 4))}, "router has strides"),
        ({3: of(4, 4), 4: Type((3, 24), f32, (1, 3))}, "y has strides [1, 3]"),
        ({0: of(3, 17, 24), 3: of(289, 4)}, "17 streams, 4 rows of a router"),
        ({2: of(17, 24), 3: of(16, 17)}, "4 streams, 17 rows of a router"),
        ({0: of(2**27, 4, 24)}, "fewer than 2^31 programs"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_streams_that_are_refused(changed, words):
    types = [changed.get(i, t) for i, t in enumerate((*STREAMS, None))]
    assert words in str(altup.KERNEL.rejects(*types, **UPDATE))


def test_rows_whose_largest_values_torch_finds():
    def refusal(x):
        return str(largest.KERNEL.rejects(x, deviations=0.5))

    assert "x is fp64" in refusal(of(3, 4, dtype=torch.float64))
    assert "rows one after another" in refusal(Type((3, 4), f32, (1, 3)))
    assert "rows one after another" in refusal(Type((3, 4), f32, (2, 1)))
    assert "up to 16384 values" in refusal(of(3, 16385))


def test_residuals_of_low_rank_that_are_refused():
    one = of(8)

    def refusal(x, y=None):
        y = y or of(3, 8)
        return str(laurel.KERNEL.rejects(x, y, one, y, y, one, one, eps=1e-6, factor=1.0))

    assert "rows one after another" in refusal(Type((3, 8), f32, (1, 3)))
    assert "rows one after another" in refusal(Type((3, 8), f32, (4, 1)))
    assert "y has strides" in refusal(of(3, 8), Type((3, 8), f32, (24, 1)))
    assert "x is bf16, y fp32" in refusal(of(3, 8, dtype=bf16))


def test_rows_that_torch_makes_as_large_as_others():
    def refusal(y, x, floor=1e-5):
        return str(match_magnitude.KERNEL.rejects(y, x, floor=floor))

    one = of(3, 1, 8)
    assert "x is fp64" in refusal(of(3, 2, 8), of(3, 1, 8, dtype=torch.float64))
    assert "rows of tokens" in refusal(of(3, 8), of(3, 8))
    assert "stride 1 in the last" in refusal(of(3, 2, 8), Type((3, 1, 8), f32, (1, 3, 3)))
    assert "one after another" in refusal(Type((3, 2, 8), f32, (8, 24, 1)), one)
    assert "as many tokens" in refusal(of(3, 2, 8), of(1, 1, 8))
    assert "floor 0.0" in refusal(of(3, 2, 8), one, 0.0)
    assert "up to 16384 values" in refusal(of(3, 2, 16385), of(3, 1, 16385))


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of what a GPU computes in silence
def test_a_token_whose_numbers_overflowed_spoils_no_other():
    """Compiled, a comparison with NaN is lost, also by the lanes that hold no expert."""
    for case in (experts(1, 6, 2, 32, 32), experts(5, 6, 2, 32, 32)):
        x, router, *rest = case.inputs()
        whole = moe.KERNEL.run(x, router, *rest, **case.options)
        router = router.clone()
        router[0] = float("nan")
        result = moe.KERNEL.run(x, router, *rest, **case.options)
        assert result[0].isnan().all() and torch.equal(result[1:], whole[1:])


def test_what_is_no_number_in_a_token_stays_there():
    """Also in a row that is cut at zero, and of a size that is no less than a floor."""
    nan = float("nan")
    for case in (altup.problem(3, 40), altup.problem(3, 40, correct=True)):
        streams, *others, y = case.inputs()
        whole = altup.KERNEL.run(streams, *others, y, **case.options)
        read = streams[:, 0] if y is None else y
        read[1, 7] = nan
        result = altup.KERNEL.run(streams, *others, y, **case.options)
        assert result[1].isnan().all() and torch.equal(result[::2], whole[::2])
    x = torch.randn(3, 40)
    x[1, 7] = nan
    assert largest.KERNEL.run(x, deviations=0.5).isnan().any(1).tolist() == [False, True, False]
    y = x[:, None]
    for pair in ((y, torch.ones(3, 1, 40)), (torch.ones(3, 1, 40), y)):
        result = match_magnitude.KERNEL.run(*pair, floor=1e-5)
        assert result.isnan().all(2).flatten().tolist() == [False, True, False]


def test_a_gate_that_is_no_number_is_none_afterwards():
    nan = torch.tensor([[float("nan"), 0.5]])
    assert sigmoid_gate.KERNEL.run(torch.ones(1, 2), nan).isnan().tolist() == [[True, False]]
    for beta in (nan, None):
        result = delta_gates.KERNEL.run(nan, torch.zeros(2), -torch.ones(2), beta)
        assert result.flatten().isnan().tolist() == [True, False] * 2
