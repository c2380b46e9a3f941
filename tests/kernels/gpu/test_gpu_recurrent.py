"""The Triton kernels of the recurrent ops beyond their cases, which test_table.py runs: any lengths,
hard numbers, refusals.
"""

from __future__ import annotations

import random

import pytest
import torch

from mtmd.base.errors import PlacementError
from mtmd.kernels.gpu import linear_attention, short_conv
from mtmd.kernels.gpu.triton_kernel import relative_error
from mtmd.kernels.graph import Type
from mtmd.kernels.ops import OPS

pytestmark = pytest.mark.usefixtures("exact_bf16", "poisoned")
KERNELS = {"linear_attention": linear_attention, "short_conv": short_conv}


def check(op, case, seed=0):
    """The kernel's result against the reference on the same values in fp32."""
    given = case.inputs(seed=seed)
    assert (
        KERNELS[op].KERNEL.rejects(
            *(None if t is None else Type.of(t) for t in given), **case.options
        )
        is None
    )
    result = KERNELS[op].KERNEL.run(*given, **case.options)
    error = relative_error(op, result, given, case.options)
    assert error <= KERNELS[op].NMSE[case.dtype], f"{case}: NMSE {error:.1e}"


@pytest.mark.parametrize("seed", range(8))
def test_fuzz(seed):
    """Any sizes and any lengths, some of them zero, are taken and right."""
    rng = random.Random(seed)
    lengths = (1, *(rng.choice((0, 1, 1, 2, 3, 15, 16, 17)) for _ in range(rng.randint(1, 4))))
    groups, dtype = (
        rng.choice((1, 2, 3)),
        rng.choice((torch.float32, torch.bfloat16, torch.bfloat16, torch.float16)),
    )
    check(
        "linear_attention",
        linear_attention.problem(
            lengths,
            rng.randint(1, 60),
            rng.randint(1, 60),
            groups * rng.choice((1, 2, 3)),
            groups,
            dtype,
            rng.random() < 0.5,
            delta=bool(seed % 2),
        ),
        seed,
    )
    check(
        "short_conv",
        short_conv.problem(
            lengths,
            rng.randint(1, 300),
            rng.randint(2, 8),
            dtype,
            rng.choice(("none", "silu")),
            rng.random() < 0.5,
            rng.random() < 0.5,
        ),
        seed,
    )


def test_equal_keys_at_full_strength_do_not_lose_digits():
    """Sixteen tokens with the same key, full strength and no decay: powers of the system's matrix
    would grow to 6,435.
    """
    given = list(linear_attention.problem((48,), 16, 16, 2, 1, torch.bfloat16).inputs())
    given[1] = given[1][:1].expand(48, -1, -1)
    given[3], given[4] = torch.zeros_like(given[3]), torch.ones_like(given[4])
    expected = OPS["linear_attention"].reference(*given, scale=0.25)
    actual = linear_attention.KERNEL.run(*given, scale=0.25)
    assert float((actual - expected).square().sum() / expected.square().sum()) < 1e-9


def test_strong_decay_leaves_numbers():
    given = list(linear_attention.problem((40,), 16, 16, 2, 1, torch.bfloat16).inputs())
    given[3] = given[3] - 200
    assert torch.isfinite(linear_attention.KERNEL.run(*given, scale=0.25)).all()


def types(op, **changes):
    case = {
        "linear_attention": linear_attention.problem((5, 2)),
        "short_conv": short_conv.problem((5, 2), 24, 4),
    }[op]
    names = {
        "linear_attention": ("q", "k", "v", "decay", "beta", "state", "starts", "slots"),
        "short_conv": ("x", "w", "state", "starts", "slots", "bias"),
    }[op]
    return (
        {n: t if t is None else Type.of(t) for n, t in zip(names, case.inputs(), strict=True)}
        | case.options
        | changes
    )


f32 = torch.float32


@pytest.mark.parametrize(
    ("op", "changes", "words"),
    [
        ("linear_attention", {"k": Type.contiguous((7, 1, 16), torch.bfloat16)}, "k is bf16"),
        ("linear_attention", {"q": Type.contiguous((7, 1, 16), torch.float64)}, "q is fp64"),
        ("linear_attention", {"v": Type((7, 2, 16), f32, (32, 1, 2))}, "v has strides [32, 1, 2]"),
        ("linear_attention", {"q": Type.contiguous((7, 1, 300), f32)}, "size 300"),
        (
            "linear_attention",
            {"state": Type((4, 16, 2, 16), f32, (512, 1, 256, 16))},
            "states have strides",
        ),
        ("linear_attention", {"scale": float("inf")}, "scale inf"),
        ("linear_attention", {"slots": Type.contiguous((2**27,), torch.int64)}, "2^31"),
        ("linear_attention", {"q": Type((7, 1, 16), f32, (2**28, 16, 1))}, "in a chunk"),
        ("short_conv", {"x": Type.contiguous((7, 24), torch.float64)}, "x is fp64"),
        ("short_conv", {"state": Type((4, 3, 24), f32, (72, 1, 3))}, "the state has strides"),
        ("short_conv", {"bias": Type((24,), f32, (2,))}, "bias has strides"),
        ("short_conv", {"w": Type.contiguous((24, 9), f32)}, "9 tokens"),
        ("short_conv", {"x": Type.contiguous((2**30, 24), f32)}, "2^30"),
    ],
)
def test_rejects_says_why(op, changes, words):
    reason = KERNELS[op].KERNEL.rejects(**types(op, **changes))
    assert reason is not None and words in reason, reason


def test_launchers_refuse_what_rejects_names():
    q, k, v, *rest = linear_attention.problem((5,)).inputs()
    with pytest.raises(PlacementError, match="last dimension"):
        linear_attention.KERNEL.run(
            q, k, v.transpose(1, 2).contiguous().transpose(1, 2), *rest, scale=0.1
        )
    x, w, state, starts, slots, _ = short_conv.problem((5,)).inputs()
    with pytest.raises(PlacementError, match="contiguous"):
        short_conv.KERNEL.run(
            x,
            w,
            state.transpose(0, 1).contiguous().transpose(0, 1),
            starts,
            slots,
            activation="none",
        )


INSTRUCTIONS = """
from mtmd.kernels.gpu import linear_attention
from mtmd.kernels.gpu.compile import SHARED_LIMIT, compile_program
from mtmd.kernels.graph import Type
out = {}
for title, case in linear_attention.USES.items():
    if "K = V = 128" in title:
        program = linear_attention.KERNEL.main(*map(Type.of, case.inputs()), **case.options)
        out[title] = [compile_program(t, program).instruction for t in SHARED_LIMIT]
"""


def test_only_chunks_of_bf16_take_matrix_instructions(compiler):
    for title, instructions in compiler(INSTRUCTIONS).items():
        chunks = "prefill" in title and "bf16" in title
        assert instructions == (["mma.sync"] * 2 + ["mfma"] if chunks else ["fma"] * 3), title
