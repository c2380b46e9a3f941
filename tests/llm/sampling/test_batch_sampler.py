"""Tokens of several sequences chosen in one go are those that are chosen one by one."""

from __future__ import annotations

from random import Random
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtmd.base.errors import MtmdError
from mtmd.llm.engine.next_token import with_probabilities
from mtmd.llm.sampling.batch_sampler import RowRequest, sample
from mtmd.llm.sampling.host_filters import candidates, pick
from mtmd.llm.sampling.sampler import Sampler, Sampling

VOCABULARY = 211


def packed(row: torch.Tensor) -> np.ndarray:
    """A bit for each token that is left."""
    return np.packbits(row.isfinite().numpy(), bitorder="little")


def sampling(rng: Random, seed: int) -> Sampling:
    return Sampling(
        temperature=rng.choice((0.0, 0.3, 1.0, 4.0)),
        top_k=rng.choice((0, 0, 1, 5, 40, VOCABULARY)),
        top_p=rng.choice((1.0, 1.0, 0.5, 0.9, 0.01)),
        min_p=rng.choice((0.0, 0.0, 0.1)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.7)),
        presence_penalty=rng.choice((0.0, 0.0, -0.4)),
        logit_bias=rng.choice(((), (), ((3, 4.0), (7, -100.0)))),
        seed=seed,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("count", [1, 17])
def test_as_one_by_one(count: int, dtype: torch.dtype) -> None:
    for round_ in range(12):
        rng, seed = Random(round_), torch.Generator().manual_seed(round_)
        logits = (torch.randn(count, VOCABULARY, generator=seed) * 3).to(dtype)
        wishes, expected = [], []
        for number, row in enumerate(logits):
            one = sampling(rng, round_ * 100 + number)
            seen = rng.choices(range(VOCABULARY), k=rng.randint(0, 30))
            written = seen[len(seen) // 2 :]
            forbidden = frozenset(rng.sample(range(VOCABULARY), rng.choice((0, 3))))
            allowed = row.clone() if rng.random() < 0.3 else None
            if allowed is not None:
                allowed[::3] = -torch.inf
            alternatives = rng.choice((None, 0, 4))
            sampler, twin = Sampler(one), Sampler(one)
            point = twin.points(3)[0] if one.temperature else 0.0
            bits = None if allowed is None else packed(allowed)
            wishes.append(RowRequest(one, seen, written, forbidden, point, bits, alternatives))
            left = row if allowed is None else allowed
            token = sampler(left, seen, written, forbidden)
            expected.append(with_probabilities(token, row, alternatives))
            if one.temperature:
                twin.use()
            assert sampler.points(2) == twin.points(2), "what is left of chance is the same"
        before = logits.clone()
        chosen, doubled = list(range(count))[::-1], torch.cat([logits, logits])
        some = sample(doubled, wishes[::-1], [count + row for row in chosen])
        together = sample(logits, wishes)
        assert some[::-1] == together, "of some rows, in another order"
        for actual, one in zip(together, expected, strict=True):
            assert actual.error is None and actual.token == one.id
            assert actual.logprob == pytest.approx(one.logprob, abs=1e-5)
            assert [t for t, _ in actual.top] == [t for t, _ in one.top]
            assert [v for _, v in actual.top] == pytest.approx([v for _, v in one.top], abs=1e-5)
        assert torch.equal(logits, before)


def test_what_is_wrong_is_told_to_whom_it_concerns() -> None:
    logits = torch.zeros(4, VOCABULARY)
    logits[1, 5], logits[3] = torch.nan, -torch.inf
    wishes = [
        RowRequest(Sampling(temperature=0, logit_bias=((VOCABULARY, 1.0),))),
        RowRequest(Sampling(temperature=1)),
        RowRequest(Sampling(temperature=1), point=0.999),
        RowRequest(Sampling(temperature=0)),
    ]
    first, second, third, fourth = sample(logits, wishes)
    assert "found token 211" in str(first.error)
    assert "nan in 1 of 211 logits" in str(second.error) and isinstance(second.error, MtmdError)
    assert third.error is None and third.token == 210
    assert "-inf" in str(fourth.error)


def test_forbidden_tokens_come_where_nothing_else_may() -> None:
    logits = torch.full((2, VOCABULARY), -torch.inf)
    logits[:, 9] = 1.0
    logits[1, 3] = 0.0
    wish = RowRequest(Sampling(temperature=0), forbidden=frozenset({9}))
    assert [d.token for d in sample(logits, [wish, wish])] == [9, 3]


def test_what_comes_back_comes_at_once() -> None:
    """Whatever is asked, by however many: a device is waited for once."""

    class Waits(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            name = func._schema.name.removeprefix("aten::")
            Waits.count += name in ("_local_scalar_dense", "nonzero", "item", "is_nonzero")
            return func(*args, **(kwargs or {}))

    rng = Random(0)
    wishes = [
        RowRequest(sampling(rng, i), [1, 2], [2], point=0.5, alternatives=3) for i in range(17)
    ]
    with Waits():
        sample(torch.randn(17, VOCABULARY), wishes)
    assert Waits.count == 0  # and one copy of all that was found


def test_all_that_is_asked_is_uploaded_at_once() -> None:
    """Grammars of several rows included: a device of torch's that computes nothing counts copies to
    it, until what was found is to be read.
    """

    class Copies(TorchDispatchMode):
        result: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            given = [a for a in args if isinstance(a, torch.Tensor) and a.device.type == "cpu"]
            if given and isinstance(result, torch.Tensor) and result.is_meta:
                Copies.result.append(func._schema.name)
            return result

    rng = Random(0)
    bits = packed(torch.zeros(VOCABULARY))
    wishes = [
        RowRequest(sampling(rng, i), [1, 2], [2], frozenset({3}), 0.5, bits if i % 2 else None, 3)
        for i in range(17)
    ]
    with Copies(), pytest.raises(NotImplementedError, match="meta"):
        sample(torch.empty(20, VOCABULARY, device="meta"), wishes, list(range(1, 18)))
    assert Copies.result == ["aten::_to_copy"]


TOP_P = (1.0, 0.9987, 0.8977, 0.5113, 1.1e-3, 1e-9)  # not where one of equals just goes or stays


def ties(size: int, rng: torch.Generator) -> torch.Tensor:
    """Rows that a few of the largest tell little about."""
    noise = torch.randn(size, generator=rng)
    rows = [
        noise * 3,
        torch.zeros(size),
        noise * 1e-7,
        (noise * 2).round(),  # many of each value
        torch.where(noise > 2, 0.0, -torch.inf),
        torch.where(torch.arange(size) == 5, 50.0, noise),
        torch.arange(size) / size,
        -torch.arange(size) / 4.0,
        torch.cat([torch.full((3,), 2.0), torch.ones(size - 3)]),
        torch.cat([torch.ones(size - 3), torch.full((3,), 2.0)]),
        torch.where(torch.arange(size) % 3 == 0, 1.0, -200.0),
        torch.full((size,), -torch.inf).index_fill(0, torch.tensor([size - 1]), 0.0),
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("head", [1, 8, 64])
def test_the_largest_tell_what_all_of_them_in_order_do(head: int) -> None:
    size, rng = 300, Random(head)
    for round_ in range(8):
        logits = ties(size, torch.Generator().manual_seed(round_))
        wishes = [
            RowRequest(
                Sampling(
                    temperature=rng.choice((0.5, 1.0, 2.0)),
                    top_k=rng.choice((0, 0, 3, 8, 9, 100, size)),
                    top_p=rng.choice(TOP_P),
                    min_p=rng.choice((0.0, 0.0, 0.05)),
                    seed=round_,
                ),
                point=rng.random(),
                alternatives=2,
            )
            for _ in logits
        ]
        assert sample(logits, wishes, head=head) == sample(logits, wishes, head=None)
        one_by_one = []
        for row, wish in zip(logits, wishes, strict=True):
            tokens, weights = candidates(row.numpy().copy(), wish.sampling)
            index = pick(weights, wish.point)
            one_by_one.append(index if tokens is None else int(tokens[index]))
        result = [d.token for d in sample(logits, wishes, head=head)]
        # Logits of the third row differ, but not how likely they are in single precision, by which
        # the host puts them in order.
        assert result[:2] + result[3:] == one_by_one[:2] + one_by_one[3:]


def test_a_row_as_models_give_it_is_not_sorted_and_one_that_is_flat_once_more() -> None:
    sorted_rows = []

    class Sorts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func._schema.name == "aten::sort":
                sorted_rows.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)) * 2.5
    logits[:, :30] += 12
    wishes = [RowRequest(Sampling(temperature=0.7, top_p=0.9), point=0.5)] * 2
    wishes.append(RowRequest(Sampling(temperature=0.7, top_k=40), point=0.5))
    with Sorts():
        sample(logits, wishes, head=64)
        assert sorted_rows == []
        logits[1] = 0
        sample(logits, wishes, head=64)
    assert sorted_rows == [(1, 5000)]
