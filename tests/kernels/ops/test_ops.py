"""What ops mean, against torch's and transformers' own words for it, and against formulas written
out.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_cases import MAKERS, copies, draw, node_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mtmd.kernels import ops
from mtmd.kernels.graph import Type
from mtmd.kernels.ops import OPS
from mtmd.kernels.ops.op import _infer

pytestmark = pytest.mark.usefixtures("poisoned")
TYPES = [torch.float32, torch.bfloat16]
ONE_ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(result: Tensor, expected: Tensor, ulps: float) -> None:
    """Within `ulps` units in the last place of found's type, of each value or of 1/8 for smaller
    ones.
    """
    error = (result.double() - expected.double()).abs()
    allowed = ulps * ONE_ULP[result.dtype] * expected.double().abs().clamp(min=0.125)
    assert bool((error <= allowed).all()), (
        f"off by {float((error / allowed).max()) * ulps:.2f} ulps"
    )


def test_every_op_has_cases():
    assert sorted(MAKERS) == sorted(OPS), (
        "an op without a maker in op_cases.py is an op without tests of shapes, overwriting and "
        "backends"
    )


@pytest.mark.parametrize("strided", [False, True], ids=["plain", "strided"])
@pytest.mark.parametrize("op", sorted(OPS))
def test_the_shape_rule_is_what_the_reference_returns(op, strided):
    for dtype in TYPES:
        for seed in range(12):
            inputs, attrs = draw(op, seed, dtype, strided)
            node = node_of(op, inputs, attrs)
            result = OPS[op].reference(*inputs, **attrs)
            assert Type.of(result) == node.type, f"seed {seed} {dtype}"
            shares = [
                t is not None and t.untyped_storage()._cdata == result.untyped_storage()._cdata
                for t in inputs
            ]
            assert shares[0] == node.alias and not any(shares[1:]), f"seed {seed} {dtype}"


@pytest.mark.parametrize("op", ["add", "mul", "scale", "silu", "sigmoid", "relu", "rms_norm"])
def test_columns_of_a_wider_value_have_a_shape_rule(op):
    """Else a short convolution, or a norm of queries, has torch load its compiler at the start."""
    columns = Type((3, 8), torch.float32, (24, 1))
    weight = {"rms_norm": (Type.contiguous((8,), torch.float32),), "add": (columns,)}
    operands = (columns, *(weight | {"mul": weight["add"]}).get(op, ()))
    attrs = {"scale": {"factor": 2.0}, "rms_norm": {"eps": 1e-5}}.get(op, {})
    assert OPS[op].shape(*operands, **attrs) == Type.contiguous((3, 8), torch.float32)


def mutations(op: str, seed: int) -> list[tuple[tuple[Type | None, ...], dict[str, Any]]]:
    """Types of a right case with one operand made another: a size off by one, a dimension more or
    less, another dtype, or missing.
    """
    inputs, attrs = draw(op, seed)
    types = [None if t is None else Type.of(t) for t in inputs]
    result = []
    for i, kind in enumerate(types):
        if kind is None:
            continue
        shapes = [
            (*kind.shape[:d], n + 1, *kind.shape[d + 1 :]) for d, n in enumerate(kind.shape)
        ] + [(1, *kind.shape), kind.shape[1:]]
        others = [Type.contiguous(shape, kind.dtype) for shape in shapes]
        others += [
            Type.contiguous(kind.shape, dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int32)
        ]
        result += [((*types[:i], other, *types[i + 1 :]), attrs) for other in [*others, None]]
    return result


@pytest.mark.parametrize("op", sorted(OPS))
def test_a_shape_rule_takes_nothing_that_its_reference_does_not(op):
    """A rule may refuse more than torch does; what it takes has to run, and to give what it
    says.
    """
    refused = 0
    for seed in range(4):
        for types, attrs in mutations(op, seed):
            try:
                reported = _infer(op, types, tuple(attrs.items()))
            except (RuntimeError, ValueError, IndexError, TypeError):
                refused += 1
                continue
            values = [None if t is None else torch.zeros(t.shape, dtype=t.dtype) for t in types]
            result = OPS[op].reference(*values, **attrs)
            assert reported[0] == Type.of(result), f"{[str(t) for t in types]} {attrs}"
    assert refused or op in (
        "gelu",
        "silu",
        "relu",
        "sigmoid",
        "softplus",
        "scale",
        "cast",
        "softcap",
        "reshape",
    )


@pytest.mark.parametrize("op", sorted(OPS))
def test_the_reference_leaves_its_inputs_alone(op):
    for seed in range(6):
        inputs, attrs = draw(op, seed, torch.float32, strided=bool(seed % 2))
        before = copies(inputs)
        OPS[op].reference(*inputs, **attrs)
        written = [
            i
            for i, (a, b) in enumerate(zip(inputs, before, strict=True))
            if a is not None and not torch.equal(a, b)
        ]
        assert written in (([0], []) if OPS[op].writes_first else ([],)), f"seed {seed}"


@pytest.mark.parametrize("op", sorted(name for name, op in OPS.items() if op.in_place))
def test_overwriting_gives_the_same_bits_in_the_first_input(op):
    compared = 0
    for dtype in (torch.float32, torch.bfloat16):
        for seed in range(12):
            inputs, attrs = draw(op, seed, dtype)
            node = node_of(op, inputs, attrs)
            if node.type != node.inputs[0].type:
                continue  # never overwritten: the planner asks for equal types
            expected, again = OPS[op].reference(*inputs, **attrs), copies(inputs)
            actual = OPS[op].in_place(*again, **attrs)
            assert actual.data_ptr() == again[0].data_ptr() and Type.of(actual) == node.type
            assert torch.equal(actual, expected), f"seed {seed} {dtype}"
            compared += 1
    assert compared >= 12


@pytest.mark.parametrize("dtype", TYPES)
def test_gelu_in_both_forms(dtype):
    x = torch.cat((random(500, dtype=dtype) * 3, torch.tensor([0.0, -30.0, 30.0], dtype=dtype)))
    wide = x.double()
    exact = 0.5 * wide * (1 + torch.erf(wide / math.sqrt(2)))
    tanh = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    for approximate, expected in ("none", exact), ("tanh", tanh):
        actual = ops.gelu.reference(x, approximate=approximate)
        torch.testing.assert_close(
            actual.double(), expected, rtol=ONE_ULP[dtype], atol=8 * ONE_ULP[dtype]
        )
    assert float((exact - tanh).abs().max()) > 1e-4  # the two are told apart by the lines above


def test_gated_gelu_and_soft_cap():
    gate, up = random(5, 7), random(5, 7, seed=1)
    assert torch.equal(
        ops.gelu_mul.reference(gate, up, approximate="tanh"), F.gelu(gate, approximate="tanh") * up
    )
    x = random(400) * 100
    close(ops.softcap.reference(x, cap=30.0), 30 * torch.tanh(x.double() / 30), 4)


def test_rms_norm_has_its_statistics_in_fp32():
    x = random(3, 4097, dtype=torch.bfloat16) + 3
    w = random(4097, seed=1)
    expected = (
        x.double() / torch.sqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * w.double()
    )
    close(ops.rms_norm.reference(x, w, eps=1e-6), expected, 1)
    close(ops.rms_norm.reference(x.float(), w, eps=1e-6), expected, 16)
    w16 = w.bfloat16()  # weights rounded to bf16, as a lazier norm would: not within an ulp
    with pytest.raises(AssertionError, match="off by"):
        close((x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)) * w16, expected, 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_layer_norm(dtype, bias):
    x, w, b = (
        random(2, 5, 333, dtype=dtype) * 4 + 7,
        random(333, dtype=dtype, seed=1),
        random(333, dtype=dtype, seed=2),
    )
    wide = x.double()
    mean, variance = wide.mean(-1, keepdim=True), wide.var(-1, unbiased=False, keepdim=True)
    expected = (wide - mean) / torch.sqrt(variance + 1e-5) * w.double()
    if bias:
        expected = expected + b.double()
    actual = ops.layer_norm.reference(x, w, b if bias else None, eps=1e-5)
    torch.testing.assert_close(
        actual.double(), expected, rtol=2 * ONE_ULP[dtype], atol=8 * ONE_ULP[dtype]
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "batch, height, width, size", [(1, 56, 56, 14), (3, 28, 70, 14), (2, 6, 10, 2), (1, 5, 5, 5)]
)
def test_patch_embed_is_a_convolution_with_its_stride(batch, height, width, size, bias):
    pixels, w, b = (
        random(batch, 3, height, width),
        random(11, 3, size, size, seed=1),
        random(11, seed=2) if bias else None,
    )
    expected = F.conv2d(pixels, w, b, stride=size).flatten(2).transpose(1, 2)
    torch.testing.assert_close(
        ops.patch_embed.reference(pixels, w, b), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "grid, channels, outputs, kernel, stride, padding, groups",
    [
        ((8, 6), 5, 7, (3, 3), (1, 1), (1, 1), 1),
        ((9, 7), 4, 6, (3, 2), (2, 1), (0, 1), 2),
        ((5, 5), 6, 6, (3, 3), (2, 2), (1, 1), 6),
        ((1, 11), 3, 4, (1, 3), (1, 2), (0, 1), 1),
    ],
)
def test_conv2d_is_torchs(grid, channels, outputs, kernel, stride, padding, groups, bias):
    x, w = random(2, grid[0] * grid[1], channels), random(outputs, channels // groups, *kernel)
    b = random(outputs, seed=2) if bias else None
    cells = x.unflatten(1, grid).permute(0, 3, 1, 2)
    expected = F.conv2d(cells, w, b, stride, padding, groups=groups).flatten(2).transpose(1, 2)
    both = padding[0], padding[0], padding[1], padding[1]
    attrs = {"grid": grid, "stride": stride, "padding": both, "groups": groups}
    torch.testing.assert_close(ops.conv2d.reference(x, w, b, **attrs), expected)
    if grid[0] == 1:
        row = F.conv1d(x.transpose(1, 2), w.squeeze(2), b, stride[1], padding[1], groups=groups)
        torch.testing.assert_close(expected, row.transpose(1, 2))


@pytest.mark.parametrize(
    "batch, rows, columns, kernel", [(1, 4, 4, 2), (2, 6, 9, 3), (3, 5, 7, 1), (1, 8, 4, 4)]
)
def test_pool2d_is_average_pooling(batch, rows, columns, kernel):
    x = random(batch, rows * columns, 13)
    picture = x.transpose(1, 2).unflatten(2, (rows, columns))
    expected = F.avg_pool2d(picture, kernel, stride=kernel).flatten(2).transpose(1, 2)
    attrs = {"grid": (rows, columns), "size": (rows // kernel, columns // kernel)}
    torch.testing.assert_close(ops.pool2d.reference(x, **attrs), expected)
    half = x.bfloat16()  # summed in fp32, rounded once
    exact = ops.pool2d.reference(half.float(), **attrs).bfloat16()
    assert torch.equal(ops.pool2d.reference(half, **attrs), exact)


@pytest.mark.parametrize(("grid", "size"), [((7, 5), (3, 2)), ((4, 9), (4, 4)), ((5, 5), (1, 3))])
def test_pool2d_of_parts_that_overlap(grid, size):
    x = random(2, grid[0] * grid[1], 13)
    picture = x.transpose(1, 2).unflatten(2, grid)
    expected = F.adaptive_avg_pool2d(picture, size).flatten(2).transpose(1, 2)
    torch.testing.assert_close(ops.pool2d.reference(x, grid=grid, size=size), expected)


def test_embed_rounds_its_scale_to_the_tables_type():
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    tokens, scale = torch.tensor([3, 0, 3, 6]), 2304**0.5 / 1.37
    for dtype in (torch.float32, torch.bfloat16):
        table = Gemma3TextScaledWordEmbedding(7, 5, padding_idx=0, embed_scale=scale).to(dtype)
        torch.nn.init.normal_(table.weight)
        assert torch.equal(ops.embed.reference(tokens, table.weight, scale=scale), table(tokens))
    assert torch.equal(ops.embed.reference(tokens, table.weight), table.weight[tokens])
    rounded = torch.tensor(scale).bfloat16().item()
    assert rounded != scale and torch.equal(
        ops.embed.reference(tokens, table.weight, scale=scale), table.weight[tokens] * rounded
    )


def test_rows_are_placed_and_taken():
    x, rows, at = random(6, 4), random(3, 4, seed=1), torch.tensor([4, 0, 5])
    located = ops.place_rows.reference(x, rows, at)
    assert torch.equal(located[at], rows) and torch.equal(located[1:4], x[1:4])
    assert torch.equal(ops.take_rows.reference(x, at), x[at])
    assert ops.take_rows.reference(x, torch.tensor([], dtype=torch.int64)).shape == (0, 4)
    mixed = ops.place_rows.reference(x.bfloat16(), rows, at)
    assert mixed.dtype == torch.bfloat16 and torch.equal(mixed[4], rows[0].bfloat16())


def test_a_cache_is_written_in_place_at_its_slots_alone():
    cache, k, v = random(2, 9, 2, 4), random(3, 2, 4, seed=1), random(3, 2, 4, seed=2)
    before, slots = cache.clone(), torch.tensor([7, 0, 3])
    kv = ops.kv_store.reference(cache, k, v, slots)
    assert kv.data_ptr() == cache.data_ptr()
    assert torch.equal(cache[0, slots], k) and torch.equal(cache[1, slots], v)
    others = [s for s in range(9) if s not in slots.tolist()]
    assert torch.equal(cache[:, others], before[:, others])
    keys, values = ops.kv_half.reference(kv, which=0), ops.kv_half.reference(kv, which=1)
    assert (
        keys.shape == (1, 9, 2, 4)
        and torch.equal(keys[0, slots], k)
        and torch.equal(values[0, slots], v)
    )


@pytest.mark.parametrize(
    "op", ["matmul", "patch_embed", "conv2d", "attn_scores", "attn_mix", "attention"]
)
def test_flops_are_those_that_torch_counts(op):
    for seed in range(8):
        inputs, attrs = draw(op, seed)
        with FlopCounterMode(display=False) as counter:
            OPS[op].reference(*inputs, **attrs)
        assert OPS[op].flops(node_of(op, inputs, attrs)) == counter.get_total_flops(), (
            f"seed {seed}"
        )


def test_bytes_are_what_has_to_be_read_and_written():
    x, w = torch.zeros(8, 64), torch.zeros(32, 64)
    assert OPS["matmul"].bytes(node_of("matmul", [x, w, None], {})) == 4 * (
        8 * 64 + 32 * 64 + 8 * 32
    )
    tokens, table = torch.zeros(8, dtype=torch.int64), torch.zeros(1000, 64)
    assert (
        OPS["embed"].bytes(node_of("embed", [tokens, table], {})) == 2 * 4 * 8 * 64 + 8 * 8
    )  # not the whole table
    assert (
        OPS["take_rows"].bytes(node_of("take_rows", [table, tokens], {})) == 2 * 4 * 8 * 64 + 8 * 8
    )
    stored = node_of(
        "kv_store",
        [torch.zeros(2, 100, 2, 16), torch.zeros(8, 2, 16), torch.zeros(8, 2, 16), tokens],
        {},
    )
    assert OPS["kv_store"].bytes(stored) == 4 * 2 * 4 * 8 * 32 // 2 + 8 * 8
    assert OPS["reshape"].bytes(node_of("reshape", [x], {"shape": (64, 8)})) == 0
