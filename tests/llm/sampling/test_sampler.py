"""The sampler against transformers' logits processors."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mtmd.base.errors import MtmdError, OptionError
from mtmd.llm.sampling.host_filters import HEADS, ROWS, candidates, pick
from mtmd.llm.sampling.sampler import POINTS, Sampler, Sampling, adjust, penalize


def reference(logits: torch.Tensor, seen: list[int], sampling: Sampling) -> torch.Tensor:
    """Probabilities [V] after transformers' processors, in the order of its generate()."""
    steps = (
        [RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)]
        if sampling.repetition_penalty != 1
        else []
    )
    steps += [TemperatureLogitsWarper(float(sampling.temperature))]
    steps += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    steps += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    scores = logits.float()[None]
    for step in steps:
        scores = step(torch.tensor([seen]), scores)
    return scores[0].softmax(0)


def chances(logits: torch.Tensor, seen: list[int], sampling: Sampling) -> torch.Tensor:
    """Probabilities [V] as ours are."""
    values = logits.float().numpy().copy()
    penalize(values, seen, sampling.repetition_penalty)
    tokens, weights = candidates(values, sampling)
    probabilities = torch.from_numpy(weights / weights.sum())
    if tokens is None:
        return probabilities
    assert (np.diff(tokens) > 0).all()
    return torch.zeros(len(logits)).index_put((torch.from_numpy(tokens),), probabilities)


GRID = list(
    itertools.product(
        [0.3, 1.0, 2.5], [0, 1, 7, 500], [1.0, 0.9, 0.3], [0.0, 0.05, 1.0], [1.0, 1.3, 0.8]
    )
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 37, 257])
def test_same_tokens_and_probabilities_as_transformers(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    seen = [0, size // 2, size - 1, 0]
    for temperature, top_k, top_p, min_p, penalty in GRID:
        logits = (torch.randn(size, generator=generator) * 4).to(dtype)
        sampling = Sampling(temperature, top_k, top_p, min_p, penalty)
        ours = chances(logits, seen, sampling)
        expected = reference(logits, seen, sampling)
        if dtype == torch.float32:
            assert torch.equal(ours > 0, expected > 0), sampling
        # equal logits are common here, and transformers leaves open which of them top-p drops:
        # compare without their places
        else:
            assert int((ours > 0).sum()) == int((expected > 0).sum()), sampling
            ours, expected = ours.sort().values, expected.sort().values
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("spread", [0.01, 1.5, 6.0], ids=["flat", "usual", "sharp"])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [
    (0, 1.0, 0.0), (40, 1.0, 0.0), (3000, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.99999, 0.0), (0, 0.1, 0.0), (0, 1.0, 0.05), (64, 0.95, 0.02),
])  # fmt: skip
def test_of_a_large_vocabulary_too(spread: float, top_k: int, top_p: float, min_p: float) -> None:
    """Where only those are looked at that may be among the most probable ones."""
    size = 2 * HEADS[-1] * ROWS + 77
    logits = torch.randn(size, generator=torch.Generator().manual_seed(top_k)) * spread
    logits[::5] = -math.inf  # as a constraint has it
    sampling = Sampling(1.3, top_k, top_p, min_p)
    ours, expected = chances(logits, [], sampling), reference(logits, [], sampling)
    different = (ours > 0) != (expected > 0)
    # Of some thousand tokens as likely as each other the last sum may be rounded either way.
    assert int(different.sum()) <= (2 if top_p < 1 else 0)
    torch.testing.assert_close(ours[~different], expected[~different], rtol=2e-5, atol=1e-9)


def test_a_random_number_stands_for_a_place_in_the_cumulated_sum() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 255, 256, 1279, 1280, 1281, 5003):
        weights = rng.random(size, np.float32) ** 4
        weights[rng.random(size) < 0.5] = 0
        weights[size // 2] = 1
        edges = np.cumsum(weights, dtype=np.float64)
        points = [0.0, *rng.random(300), math.nextafter(1.0, 0)]
        result = np.array([pick(weights, point) for point in points])
        assert (weights[result] > 0).all(), "what has no chance never comes"
        goals = np.array(points) * edges[-1]
        slack = 1e-6 * edges[-1]
        assert (edges[result] > goals - slack).all()
        assert (edges[result] - weights[result] <= goals + slack).all()
    assert pick(np.array([1, 0], np.float32), math.nextafter(1.0, 0)) == 0


def test_a_token_takes_no_calls_of_torch_but_for_the_random_number() -> None:
    """Each gives the interpreter away, and it took some thirty."""
    calls: Counter[str] = Counter()

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            calls[func._schema.name] += 1
            return func(*args, **(kwargs or {}))

    sampler = Sampler(Sampling(0.7, 40, 0.9, 0.05, 1.1, 0.1, 0.1, {3: 1.0}, seed=1))
    with Calls():
        for dtype in (torch.float32, torch.bfloat16):
            logits = torch.zeros(5000, dtype=dtype)
            calls.clear()
            for _ in range(POINTS):
                sampler(logits, [1, 2], [2])
            assert calls.pop("aten::rand") == 1, "for several tokens"
            assert calls.keys() <= {"aten::view", "aten::detach"}, calls  # which compute nothing


def test_random_numbers_are_those_of_the_seed_one_after_the_other() -> None:
    generator = torch.Generator().manual_seed(9)
    expected = [float(torch.rand((), dtype=torch.float64, generator=generator)) for _ in range(50)]
    sampler, actual = Sampler(Sampling(temperature=1.0, seed=9)), list[float]()
    while len(actual) < 50:
        actual += sampler.points(7)
        assert sampler.points(3) == actual[-7:-4], "they stay the next"
        sampler.use(7)
    assert actual[:50] == expected


def test_of_equal_tokens_top_p_keeps_the_first() -> None:
    tokens, weights = candidates(
        np.array([0, 1, 1, 1, 1], np.float32), Sampling(temperature=1.0, top_p=0.4)
    )
    assert tokens is not None and tokens.tolist() == [1, 2] and weights.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_come_only_where_there_is_no_other(
    dtype: torch.dtype, temperature: float
) -> None:
    logits = torch.tensor([0.0, 9.0, 8.0, -math.inf, 1.0], dtype=dtype)
    before, sampler = logits.clone(), Sampler(Sampling(temperature, seed=5))
    result = {sampler(logits, [], forbidden={1, 2, 77}) for _ in range(40)}
    assert result == ({4} if temperature == 0 else {0, 4})
    assert sampler(logits, [], forbidden=range(5)) in {1, 2}, "there is no other"
    assert torch.equal(logits, before), "the row is as it was"
    if dtype == torch.float32:
        row = logits.numpy().copy()
        row.flags.writeable = False
        assert sampler(row, [], forbidden={1, 2, 0}) == 4


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.1, 2.0, -1.0, 1.5, -math.inf])
    sampler = Sampler(Sampling(temperature=1.0, seed=3))
    counts = Counter(sampler(logits, []) for _ in range(20_000))
    expected = logits.softmax(0)
    assert counts[4] == 0
    for token in range(4):
        assert (
            abs(counts[token] / 20_000 - float(expected[token])) < 0.015
        )  # about four standard deviations


def test_equal_seeds_give_equal_tokens_whatever_others_draw() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=1.5, seed=11)
    first = Sampler(sampling)
    alone = [first(logits, []) for _ in range(30)]
    second, other = Sampler(sampling), Sampler(Sampling(temperature=1.0, seed=12))
    mixed = []
    for _ in range(30):
        other(logits, [])
        torch.rand(5)
        mixed.append(second(logits, []))
    assert mixed == alone and len(set(alone)) > 5
    assert [Sampler(Sampling(temperature=1.5, seed=12))(logits, []) for _ in range(3)] != alone[:3]


def test_a_seed_is_drawn_and_can_be_used_again() -> None:
    logits = torch.zeros(1000)
    first, other = Sampler(Sampling(temperature=1.0)), Sampler(Sampling(temperature=1.0))
    assert first.seed != other.seed
    again = Sampler(Sampling(temperature=1.0, seed=first.seed))
    assert [first(logits, []) for _ in range(10)] == [again(logits, []) for _ in range(10)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_greedy_takes_the_first_of_equals(dtype: torch.dtype) -> None:
    logits = torch.tensor([1, 5, 5, -2, 5], dtype=dtype)
    sampler = Sampler(Sampling(top_k=1, top_p=0.1, min_p=1.0))
    assert sampler(logits, []) == 1
    assert Sampler(Sampling(repetition_penalty=2.0))(logits, [1, 1, 2]) == 4
    assert (
        Sampler(Sampling(repetition_penalty=2.0))(torch.tensor([-1.0, -1.5], dtype=dtype), [0]) == 1
    )
    assert logits.tolist() == [1, 5, 5, -2, 5]


def test_small_temperatures_do_not_overflow() -> None:
    logits = torch.tensor([3e38, 2e38, -3e38])
    assert {Sampler(Sampling(temperature=1e-5, seed=s))(logits, []) for s in range(20)} == {0}
    extreme = Sampling(temperature=100, min_p=1e-9, repetition_penalty=1.5)
    assert Sampler(extreme)(torch.tensor([-3.3e38, -math.inf]), [1]) == 0


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broken_logits_are_not_sampled(temperature: float, bad: float, dtype: torch.dtype) -> None:
    logits = torch.zeros(9, dtype=dtype)
    logits[4] = bad
    for penalty in (1.0, 1.5):
        with pytest.raises(MtmdError, match=f"{bad:g} in 1 of 9 logits"):
            Sampler(Sampling(temperature=temperature, repetition_penalty=penalty, seed=0))(
                logits, [2]
            )


def test_masked_tokens_are_allowed_but_not_all() -> None:
    assert Sampler(Sampling())(torch.tensor([-math.inf, 1.0]), []) == 1
    with pytest.raises(MtmdError, match="-inf in 3 of 3 logits"):
        Sampler(Sampling(temperature=1.0))(torch.full((3,), -math.inf), [])


@pytest.mark.parametrize("seen", [[5], [-1], [0, 9]])
def test_tokens_outside_the_vocabulary(seen: list[int]) -> None:
    with pytest.raises(MtmdError, match="expected 0 to 4"):
        Sampler(Sampling(repetition_penalty=1.1))(torch.zeros(5), seen)


@pytest.mark.parametrize("shape", [(1, 5), (0,), ()])
def test_logits_are_one_row(shape: tuple[int, ...]) -> None:
    with pytest.raises(MtmdError, match=r"expected \[V\]"):
        Sampler(Sampling())(torch.zeros(shape), [])


WRONG = {
    "temperature": [-0.1, math.nan, math.inf, -1e-9, 101, "1", None, True],
    "top_k": [-1, 1.5, True, math.nan, None],
    "top_p": [1.01, math.nan, -1, "x"],
    "min_p": [-0.1, 1.1, math.nan, None],
    "repetition_penalty": [0, -1, math.nan, math.inf, 1000],
    "seed": [-1, 1 << 63, 1.0, True, "7"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_options_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"^{name}: found .*, expected ") as caught:
        Sampling(**{name: value})
    assert repr(value) in str(caught.value)


def test_options_are_checked_without_torch() -> None:
    code = (
        "import sys; from mtmd.llm.sampling.options import Sampling; from "
        "mtmd.options.answer import AnswerOptions; AnswerOptions(); Sampling(); "
        "sys.exit(' '.join({'torch', 'numpy', 'tokenizers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_edges_of_the_ranges_are_allowed() -> None:
    Sampling(
        temperature=1e-5, top_k=10**9, top_p=1, min_p=1, repetition_penalty=100, seed=(1 << 63) - 1
    )
    sampler = Sampler(Sampling(temperature=2, top_k=10**9, top_p=1e-9, min_p=1, seed=0))
    assert sampler(torch.tensor([0.0, 1.0, 0.5]), []) == 1


def test_biases_and_penalties_of_the_answer() -> None:
    """OpenAI's formula: as often as a token came, and once; the prompt does not count."""
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0])
    sampling = Sampling(frequency_penalty=0.5, presence_penalty=0.25, logit_bias={0: 5, "1": -100})
    result = logits.numpy().copy()
    adjust(result, [3, 3, 2], sampling)
    assert result.tolist() == [6.0, -98.0, 3 - 0.75, 4 - 1.25]
    adjust(result, [], Sampling(presence_penalty=2))
    assert result[0] == 6
    assert Sampler(sampling)(logits, [], [3, 3]) == 0
    assert logits.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert Sampler(Sampling(frequency_penalty=2))(logits, [3] * 9, [3]) == 2
    with pytest.raises(MtmdError, match="logit_bias: found token 4"):
        adjust(result, [], Sampling(logit_bias={4: 1}))


def test_top_p_of_nothing_keeps_the_best_token() -> None:
    sampler = Sampler(Sampling(temperature=2.0, top_p=0, seed=1))
    assert {sampler(torch.tensor([1.0, 1.1, 0.9]), []) for _ in range(20)} == {1}
