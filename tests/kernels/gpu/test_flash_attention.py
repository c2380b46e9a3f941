"""The flash-attention kernel beyond its cases, which test_table.py runs: any shapes, limits, who
reads what, against the op's reference in fp64.
"""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mtmd.base.errors import PlacementError
from mtmd.kernels.gpu.flash_attention.cases import TOLERANCE, problem
from mtmd.kernels.gpu.flash_attention.kernel import KERNEL, kernel
from mtmd.kernels.gpu.flash_attention.tiles import choose_splits, parts
from mtmd.kernels.gpu.launch import power_of_two
from mtmd.kernels.graph import Type
from mtmd.kernels.ops.attention import attention

pytestmark = pytest.mark.usefixtures("exact_bf16")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What the kernel does not write is NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))


def attend(q, k, v, mask=None, bounds=None, **options):
    return KERNEL.run(q, k, v, mask, bounds, **options)


def error_of(got, q, k, v, mask, bounds, **options):
    """Largest error relative to max(1, |expected|), in units of the type's tolerance."""
    expected = attention.reference(q.double(), k.double(), v.double(), mask, bounds, **options)
    assert got.dtype == v.dtype and got.shape == expected.shape and got.is_contiguous()
    error = (got.double() - expected).abs() / expected.abs().clamp(min=1)
    assert not error.isnan().any()
    return error.max().item() / TOLERANCE[v.dtype]


def random_case(rng):
    groups = rng.choice((1, 2, 3))
    return problem(
        rng.choice((rng.randint(16, 256), rng.randint(16, 256), rng.randint(257, 512))),
        rows=rng.choice((1, 2, 17, rng.randint(1, 80))),
        keys=rng.choice((1, 31, 64, rng.randint(1, 150))),
        heads=groups * rng.choice((1, 2, 5)),
        groups=groups,
        batch=rng.randint(1, 5),
        value=rng.choice((None, rng.randint(16, 256))),
        dtype=rng.choice(tuple(TOLERANCE)),
        causal=rng.random() < 0.4,
        window=rng.choice((None, None, rng.randint(-2, 90))),
        softcap=rng.choice((None, None, 3.0)),
        mask=rng.choice(("", "", "TS", "HTS", "1HTS", "B1TS", "BHTS")),
        bounds=rng.choice(("", "", "T", "BT")),
        layout=rng.choice(("plain", "fused", "heads first")),
    )


@pytest.mark.parametrize("seed", range(30))
def test_fuzz(seed):
    """Any head size, layout and mixture of limits is taken, at every batch size, and is right."""
    case = random_case(random.Random(seed))
    given = case.inputs(seed=seed)
    for batch in range(1, 6):
        types = [None if t is None else Type.of(t) for t in case.but(batch=batch).inputs()]
        assert KERNEL.rejects(*types, **case.options) is None
    assert error_of(attend(*given, **case.options), *given, **case.options) <= 1, case


@pytest.mark.parametrize(
    ("causal", "groups", "masked"), [(False, 4, False), (True, 2, False), (False, 1, True)]
)
def test_matches_torch(causal, groups, masked):
    case = problem(72, rows=67, keys=67, heads=4, groups=groups, batch=2, causal=causal)
    q, k, v, _, _ = case.inputs()
    mask = torch.randn(2, 1, 67, 67) if masked else None
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, is_causal=causal, enable_gqa=True
    )
    got = attend(q, k, v, mask, scale=72**-0.5, causal=causal)
    torch.testing.assert_close(got, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_image_block_sees_itself_in_both_directions():
    """Text is causal, slots 20..49 are an image whose rows all see 20..49 and what lies before."""
    case = problem(72, rows=80, keys=80, heads=2, groups=1)
    q, k, v, _, _ = case.inputs()
    rows = torch.arange(80)
    image = (rows >= 20) & (rows < 50)
    bounds = torch.stack([torch.zeros(80, dtype=torch.long), torch.where(image, 49, rows)], 1).int()
    allowed = rows[None, :] <= bounds[:, 1:]
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=allowed, enable_gqa=True
    ).transpose(1, 2)
    got = attend(q, k, v, bounds=bounds, scale=72**-0.5)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    everything = attend(q, k, v, scale=72**-0.5)
    assert (got - everything).abs().max() > 0.1


def test_keys_out_of_reach_are_not_read():
    """Cache slots behind the last visible key, and whole key blocks before the first, may hold
    anything.
    """
    case = problem(72, rows=3, keys=400, heads=2, groups=1)
    q, k, v, _, _ = case.inputs()
    bounds = torch.tensor([[130, 150], [140, 200], [131, 170]], dtype=torch.int32)
    expected = attention.reference(q, k, v, None, bounds, scale=0.1)
    for x in (k, v):
        x[:, :128] = torch.nan
        x[:, 201:] = torch.nan
    torch.testing.assert_close(
        attend(q, k, v, bounds=bounds, scale=0.1), expected, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_token_reads_the_keys_that_it_sees(dtype):
    """And none beside them, in the same blocks of keys."""
    case = problem(64, rows=1, keys=600, heads=4, dtype=dtype, bounds="T")
    q, k, v, *_ = case.inputs()
    bounds = torch.tensor([[37, 530]], dtype=torch.int32)
    expected = attend(q, k, v, None, bounds, **case.options)
    for x in (k, v):
        x[:, :37] = x[:, 531:] = torch.nan
    assert torch.equal(attend(q, k, v, None, bounds, **case.options), expected)


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")  # of the poisoned rows
@pytest.mark.parametrize(
    "case",
    [
        problem(72, rows=75, keys=75, heads=4, groups=2, dtype=torch.bfloat16, bounds="T"),
        problem(64, rows=75, keys=75, dtype=torch.float16, bounds="T", softcap=5.0),
        problem(32, rows=75, keys=75, bounds="T", causal=True),
        problem(40, rows=75, keys=75, dtype=torch.bfloat16, bounds="BT", mask="TS"),
        problem(64, rows=4, keys=1100, dtype=torch.bfloat16, bounds="T"),  # keys shared out
        problem(300, rows=40, keys=75, value=24, dtype=torch.bfloat16, bounds="T"),
    ],
    ids=str,
)
def test_what_is_no_number_in_one_sequence_stays_there(case):
    """Two sequences, each of which sees its own keys, in the same blocks of rows and of keys: what
    one of them holds changes not a bit of the other, and is not hidden where it is.
    """
    q, k, v, mask, _ = case.inputs()
    rows, keys = q.shape[1], k.shape[1]
    first, own = max(1, rows // 2 - 3), keys // 2 - 5
    bounds = torch.tensor([[0, own - 1]] * first + [[own, keys - 1]] * (rows - first))
    bounds = bounds.expand(q.shape[0], rows, 2).contiguous().to(torch.int32)
    expected = attend(q, k, v, mask, bounds, **case.options)
    halves = (slice(0, first), slice(0, own)), (slice(first, rows), slice(own, keys))
    for (one, _), (other, theirs) in (halves, halves[::-1]):
        poisoned = q.clone(), k.clone(), v.clone()
        poisoned[2][:, theirs, :, ::2], poisoned[2][:, theirs, :, 1::2] = torch.inf, torch.nan
        for values in (None, torch.nan):  # of queries and keys
            if values is not None:
                poisoned[0][:, other] = poisoned[1][:, theirs] = values
            with np.errstate(all="ignore"):
                result = attend(*poisoned, mask, bounds, **case.options)
            assert torch.equal(result[:, one], expected[:, one])
            if mask is None and not case.options["causal"]:
                assert not result[:, other].isfinite().any()


@pytest.mark.parametrize(
    "options",
    [
        {"bounds": torch.tensor([[5, 2], [130, 200], [-9, -1]], dtype=torch.int32)},
        {"window": -200},
        {"mask": torch.full((3, 130), -torch.inf)},
    ],
    ids=["bounds", "window", "mask"],
)
def test_a_row_that_sees_nothing_gives_zeros(options):
    q, k, v, _, _ = problem(72, rows=3).inputs()
    assert torch.equal(attend(q, k, v, scale=0.1, **options), torch.zeros(1, 3, 2, 72))


def test_no_keys_and_no_rows():
    q, k, v, _, _ = problem(72, rows=3).inputs()
    assert torch.equal(attend(q, k[:, :0], v[:, :0], scale=0.1), torch.zeros(1, 3, 2, 72))
    assert attend(q[:, :0], k, v, scale=0.1).shape == (1, 0, 2, 72)


@pytest.mark.parametrize("splits", [2, 8, 32])
@pytest.mark.parametrize(
    "case",
    [
        problem(40, rows=3, keys=530, heads=4, groups=2, bounds="T"),
        problem(16, rows=1, keys=512, dtype=torch.bfloat16),
        problem(16, rows=2, keys=100, causal=True, window=20, mask="TS", softcap=5.0),
    ],
    ids=str,
)
def test_keys_shared_out_by_any_number_of_programs(case, splits):
    """Some of which get no keys, or keys that no row sees."""
    given = case.inputs()
    shared = kernel(splits=splits)
    call = shared.main(*(None if t is None else Type.of(t) for t in given), **case.options).call
    assert call.across == call.constants["SPLITS"] == splits
    assert error_of(shared.run(*given, **case.options), *given, **case.options) <= 1


@pytest.mark.parametrize(
    "options",
    [
        {"bounds": torch.tensor([[5, 2], [600, 900]], dtype=torch.int32)},
        {"window": -2000},
        {"mask": torch.full((2, 600), -torch.inf)},
    ],
    ids=["bounds", "window", "mask"],
)
def test_a_row_that_sees_nothing_of_shared_out_keys_gives_zeros(options):
    q, k, v, _, _ = problem(24, rows=2, keys=600).inputs()
    assert KERNEL.main(*(Type.of(t) for t in (q, k, v)), scale=0.1).call.across > 1
    assert torch.equal(attend(q, k, v, scale=0.1, **options), torch.zeros(1, 2, 2, 24))


def test_keys_are_shared_out_where_few_programs_have_many():
    result = {
        (rows, blocks, programs): choose_splits(rows, blocks, programs)
        for rows, blocks, programs in (
            (1, 128, 8),
            (1, 32, 8),
            (1, 7, 8),
            (1, 128, 100),
            (1, 128, 129),
            (16, 512, 8),
            (17, 512, 8),
            (1, 0, 8),
            (0, 128, 0),
        )
    }
    assert list(result.values()) == [32, 8, 1, 2, 1, 32, 1, 1, 1]


def test_64_bit_window_and_int64_bounds():
    given = problem(72, rows=5, window=2**40, bounds="T").inputs()
    bounds = given[4].long()
    bounds[0, 1] = 2**40
    bounds[1, 0] = -(2**40)
    got = attend(*given[:4], bounds, scale=0.1, window=2**40)
    assert error_of(got, *given[:4], bounds, scale=0.1) <= 1


def types(case=None, **changes):
    given = zip(("q", "k", "v", "mask", "bounds"), (case or problem(72)).inputs(), strict=True)
    return {name: t if t is None else Type.of(t) for name, t in given} | changes


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        (types(problem(12)), {}, "head size 12"),
        (types(problem(577)), {}, "head size 577"),
        (types(problem(72, value=8)), {}, "v has head size 8"),
        (types(problem(72, dtype=torch.float64)), {}, "fp64"),
        (types(v=Type.contiguous((1, 130, 1, 72), torch.bfloat16)), {}, "v is bf16"),
        (
            types(q=Type((1, 65, 2, 72), torch.float32, (9360, 1, 4680, 65))),
            {},
            "[9360, 1, 4680, 65]",
        ),
        (types(mask=Type.contiguous((65, 130), torch.bool)), {}, "mask is bool"),
        (types(bounds=Type.contiguous((65, 2), torch.float32)), {}, "bounds are fp32"),
        (types(), {"scale": -1.0}, "scale -1.0"),
        (types(), {"softcap": 0.0}, "softcap 0.0"),
        (types(q=Type.contiguous((1, 2**30, 2, 72), torch.float32)), {}, "2^30"),
        (
            types(
                q=Type.contiguous((2**22, 512, 1, 72), torch.float32),
                k=Type.contiguous((2**22, 130, 1, 72), torch.float32),
                v=Type.contiguous((2**22, 130, 1, 72), torch.float32),
            ),
            {},
            "2^31",
        ),
    ],
)
def test_rejects_says_why(given, options, words):
    reason = KERNEL.rejects(**given, **({"scale": 0.1} | options))
    assert reason is not None and words in reason


def test_launcher_refuses_what_rejects_names():
    q, k, v, _, _ = problem(72, rows=3).inputs()
    with pytest.raises(PlacementError, match=r"last dimension"):
        attend(q.transpose(1, 3).contiguous().transpose(1, 3), k, v, scale=0.1)


def test_parts_cover_every_head_size():
    for size, exact in product(range(16, 577), (False, True)):
        first, second = parts(size, exact)
        assert size <= first + second <= power_of_two(size) or size <= 16
        assert all(n == 0 or (n >= 16 and n == power_of_two(n)) for n in (first, second))
    assert [parts(n) for n in (16, 40, 64, 72, 80, 88, 96, 112, 256, 257, 512)] == [
        (16, 0),
        (32, 16),
        (64, 0),
        (64, 16),
        (64, 16),
        (64, 32),
        (64, 32),
        (128, 0),
        (256, 0),
        (256, 16),
        (256, 256),
    ]
    assert [parts(n, exact=True) for n in (32, 48, 49, 64, 96, 97, 128, 129, 256)] == [
        (32, 0),
        (32, 16),
        (32, 32),
        (32, 32),
        (64, 32),
        (64, 64),
        (64, 64),
        (128, 16),
        (256, 0),
    ]


ORDER = """
import re
import torch
from mtmd.kernels.gpu.compile import compiled_for
from mtmd.kernels.gpu.flash_attention.carried import kernel
from mtmd.kernels.gpu.flash_attention.tiles import Tile
from mtmd.kernels.graph import Type
x = Type.contiguous((1, 256, 2, 72), torch.bfloat16)
made = kernel(Tile(64, 64, 4, 2)).main(x, x, x, scale=0.1)
ptx = compiled_for("cuda:90", made).asm["ptx"]
out = re.findall(r"wgmma.mma_async|wgmma.wait_group|ex2.approx", ptx)
"""


def test_the_next_scores_are_under_way_while_weights_are_made(compiler):
    """Between the start of a product and the wait for it come a block's exponentials: 32 of a
    thread's scores, and two of its rows. Compiles a kernel: seconds.
    """
    short = {"wgmma.mma_async": "m", "wgmma.wait_group": "w", "ex2.approx": "e"}
    assert f"m{'e' * 34}m" in "".join(short[word] for word in compiler(ORDER))
