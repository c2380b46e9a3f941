"""Proposals change how fast an answer comes and nothing else: over random schedules, sampling
options and families, forced ones against none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
import test_engine_schedules as schedules
import test_runner as small
import torch
from stand_in import StandIn

from mtmd.base.errors import DeviceMemoryError, MtmdError
from mtmd.kernels.backends import Backend, Cpu, Reference
from mtmd.llm.engine.engine import Engine
from mtmd.llm.engine.prompt import Prompt
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.sequence import Sequence, State, Token
from mtmd.llm.engine.spans import Span
from mtmd.llm.engine.speculation import Mode, Pace, Speculation, speculation
from mtmd.llm.sampling.sampler import Sampler, Sampling
from mtmd.llm.state import PAGE, Cache
from mtmd.llm.warmup import check_decoder, measure_rows

SAMPLINGS: tuple[Mapping[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.1},
    {"temperature": 0.3, "seed": 7},
    {"temperature": 0.5, "top_k": 5, "seed": 8},
    {"temperature": 0.6, "top_p": 0.7, "min_p": 0.05, "repetition_penalty": 1.05, "seed": 9},
)


class Ready:
    """A constraint that waits for nothing."""

    def begin(self) -> None:
        pass

    def ready(self, wait_s: float = 0) -> bool:  # noqa: ARG002
        return True

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def allowed(self, size: int) -> np.ndarray:
        finite = self.mask(torch.zeros(size)).isfinite()
        return np.packbits(finite.numpy(), bitorder="little")

    def close(self) -> None:
        pass


class Alternating(Ready):
    """Odd tokens and even ones in turn, or the one after the last: a grammar with a state. `slow`:
    now and then it is not ready, and the batch goes on without it.
    """

    def __init__(self, slow: Random | None = None) -> None:
        self.taken: list[int] = []
        self.slow = slow

    def ready(self, wait_s: float = 0) -> bool:  # noqa: ARG002
        return self.slow is None or self.slow.random() < 0.6

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        if len(self.taken) == 30:
            raise MtmdError("no token can come next")
        return logits.masked_fill(torch.arange(len(logits)) % 2 == len(self.taken) % 2, -torch.inf)

    def accept(self, token: int) -> None:
        self.taken.append(token)


# Machine code, node by node, and runs that are recorded and replayed
DEVICES: Mapping[str, Callable[[], list[Backend]]] = {
    "native": lambda: [Cpu()],
    "by node": lambda: [Cpu(native=False)],
    "stand-in": lambda: [StandIn(), Cpu(), Reference()],
}


def engine(
    name: str, speculate: Mode, *, pages: int | None = None, device: str = "native", slots: int = 3
) -> Engine:
    family = (schedules.FAMILIES | schedules.WIDER)[name]
    runner = Runner(
        family,
        schedules.Noise(family),
        DEVICES[device](),
        dtype=torch.float32,
        context=256,
        sequences=slots,
    )
    if pages is not None:
        runner.pages = pages
    return Engine(runner, speculate=speculate)


def request(name: str, seed: int) -> Prompt:
    """As the schedules' requests, with options of sampling, a grammar, stop tokens, and a text that
    repeats itself.
    """
    rng, plain = Random(seed), schedules.request(name, seed)
    spans = [*plain.spans, Span(tuple(rng.randrange(1, 9) for _ in range(rng.choice((0, 6, 30)))))]
    return Prompt(
        [span for span in spans if len(span)],
        Sampler(Sampling(**SAMPLINGS[seed % len(SAMPLINGS)])),
        frozenset({rng.randrange(64)}) if seed % 4 == 3 else frozenset(),
        rng.choice((1, 2, 9, 60)),
        rng.choice((None, 0, 2)),
        Alternating(Random(seed)) if seed % 3 == 2 else None,
    )


def finish(subject: Engine) -> None:
    for _ in range(5000):
        if not subject.busy:
            return
        subject.step()
    raise AssertionError("the engine does not come to an end")


@cache
def alone(name: str, seed: int) -> tuple[list[Token], str]:
    """Without proposals, without others."""
    subject = engine(name, "off")
    sequence = subject.submit(request(name, seed))
    finish(subject)
    assert sequence.finish
    return sequence.take(), sequence.finish


def assert_same(result: list[Token], expected: list[Token]) -> None:
    assert [t.id for t in result] == [t.id for t in expected]
    for a, b in zip(result, expected, strict=True):
        assert (a.logprob is None) == (b.logprob is None)
        if a.logprob is not None:
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [p for _, p in a.top] == pytest.approx([p for _, p in b.top], abs=1e-4)


@pytest.mark.parametrize(
    ("device", "name", "seed"),
    [
        *(
            (d, name, s)
            for d in ("native", "by node")
            for name in schedules.FAMILIES
            for s in (0, 1, 2)
        ),
        *(("stand-in", name, seed) for name in schedules.WIDER for seed in (0, 1)),
    ],
)
def test_forced_proposals_change_no_answer(device: str, name: str, seed: int) -> None:
    rng = Random(seed)
    subject = engine(name, rng.choice((1, 3, 7)), pages=rng.choice((9, 14, None)), device=device)
    subject.scheduler.tokens = rng.choice((20, 64, 512))
    requested: list[tuple[int, Sequence]] = []
    for _ in range(8):
        number = rng.randint(0, 14)
        requested.append((number, subject.submit(request(name, number))))
        for _ in range(rng.choice((0, 1, 4, 20))):
            subject.step()
            assert_pages_fit(subject)
        if rng.random() < 0.2:
            subject.cancel(rng.choice(requested)[1])
    finish(subject)
    for number, sequence in requested:
        expected, end = alone(name, number)
        actual = sequence.take()
        if sequence.finish == "cancelled":
            expected = expected[: len(actual)]
        else:
            assert sequence.finish == end
        assert_same(actual, expected)
    assert (
        subject.scheduler.pages.stored == 0
        and not subject.drafts._states
        and not subject.constraints
    )
    assert sum(s.proposed for _, s in requested) >= sum(s.accepted for _, s in requested) > 0
    assert not subject.speculation._texts
    recorder = subject.runner.backends[0].recorder
    assert device != "stand-in" or recorder.replays > recorder.recordings > 1  # type: ignore[union-attr]


def assert_pages_fit(subject: Engine) -> None:
    """Between steps nobody holds a page for a rejected token."""
    for sequence in subject.scheduler.running:
        if sequence.tokens and sequence.decoding:
            assert len(sequence.pages) <= -(-max(sequence.total - 1, 1) // PAGE)
        stored = sequence in subject.constraints._waiting  # all its tokens read
        assert stored == (sequence.done == sequence.total) or not sequence.tokens
        assert sequence.proposal == ()


def repeating(count: int = 40, **chosen: Any) -> Prompt:
    """Greedy answers of this random model soon go round in a loop."""
    spans = chosen.pop("spans", None) or [Span((5, 6, 7, 8) * 8)]
    return Prompt(spans, Sampler(Sampling()), max_tokens=count, **chosen)


class Recital(Ready):
    """A text by heart, with a word now and then that is another one."""

    def __init__(self, changed: tuple[int, ...] = ()):
        self.at, self.changed = 0, changed

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        token = 20 + self.at % 9 if self.at not in self.changed else 1
        return logits.masked_fill(torch.arange(len(logits)) != token, -torch.inf)

    def accept(self, token: int) -> None:  # noqa: ARG002
        self.at += 1


@pytest.mark.parametrize(("changed", "steps"), [((), 25), ((40, 41, 77), 31)])
@pytest.mark.parametrize("name", schedules.FAMILIES)
def test_a_text_by_heart_takes_fewer_batches(
    name: str, changed: tuple[int, ...], steps: int
) -> None:
    result: list[list[Token]] = []
    for mode in ("off", 7):
        subject = engine(name, mode)
        sequence = subject.submit(repeating(120, constraint=Recital(changed), alternatives=1))
        finish(subject)
        result.append(sequence.take())
    assert_same(result[1], result[0])
    batches = subject.steps - 1  # but the first 16 tokens of the prompt
    assert len(result[0]) == 120 and batches <= steps
    assert sequence.accepted == 120 - batches


def test_the_next_turn_reads_on_from_what_was_accepted() -> None:
    subject, plain = engine("windows, blocks", 7), engine("windows, blocks", "off")
    first = subject.submit(repeating(70))
    finish(subject)
    assert first.accepted and first.proposed > first.accepted
    turn = [Span((5, 6, 7, 8) * 8), Span(tuple(first.tokens)), Span((1, 2, 3))]
    second, expected = (e.submit(repeating(20, spans=turn)) for e in (subject, plain))
    finish(subject)
    finish(plain)
    assert second.reused == (32 + 70 - 1) // PAGE * PAGE
    assert second.tokens == expected.tokens


@pytest.mark.parametrize("left", [1, 2, 3, 5])
def test_no_proposal_goes_beyond_the_answer_or_the_context(left: int) -> None:
    runner = small.runner(64)
    subject = Engine(runner, speculate=7)
    short = subject.submit(repeating(left))
    finish(subject)
    assert len(short.tokens) == left and short.proposed <= max(left - 2, 0) * left
    whole = subject.submit(repeating(500))
    finish(subject)
    assert whole.finish == "length" and len(whole.tokens) == 64 - 32
    assert Engine(small.runner(64)).submit(repeating()).proposed == 0


def test_proposals_are_dropped_first_where_memory_is_short() -> None:
    subject = engine("delta nets, grids", 7)
    requested: list[int] = []

    def may_run(plan: Any) -> bool:
        rows = plan.outputs[-1].shape[0]
        requested.append(rows)
        return rows <= 1

    subject._may_run = may_run
    sequence = subject.submit(repeating(30))
    finish(subject)
    plain = engine("delta nets, grids", "off")
    expected = plain.submit(repeating(30))
    finish(plain)
    assert sequence.tokens == expected.tokens and max(requested) > 1
    assert sequence.proposed == 0


@pytest.mark.parametrize("name", schedules.FAMILIES)
def test_a_batch_with_proposals_that_fails_is_done_again(name: str) -> None:
    subject = engine(name, 7)
    requested = [subject.submit(repeating(40)) for _ in range(2)]
    forward, failures = subject.runner.forward, []

    def failing(batch: Any, *rest: Any) -> Any:
        if batch.answers > len(batch.sequence_slots) and len(failures) < 3:
            failures.append(batch.answers)
            raise DeviceMemoryError("too little memory")
        return forward(batch, *rest)

    subject.runner.forward = failing  # type: ignore[method-assign]
    finish(subject)
    plain = engine(name, "off")
    expected = plain.submit(repeating(40))
    finish(plain)
    assert len(failures) == 3
    assert all(s.tokens == expected.tokens and s.finish == "length" for s in requested)


# What is worth it: with times that are given, nothing is measured.


def policy(costs: Mapping[int, float], text: list[int]) -> tuple[Speculation, Sequence]:
    """For one sequence that has written `text`; a batch of so many rows costs so many steps."""
    pace = Pace(0.15)
    subject = speculation("auto", 10_000, 16, 0, pace)
    for _ in range(20):
        pace.record(1, 1, 1.0)
    for rows, cost in costs.items():
        subject.ran(1, rows, cost, rows, planned=False)
    sequence = Sequence(len(text) + 1, done=len(text), tokens=[0], state=State.DECODING)
    subject.begin(sequence, text, 1000)
    return subject, sequence


COPY = [*range(60), *range(40)]


def test_a_sure_copy_takes_the_rows_that_pay_most() -> None:
    for costs, count in (
        ({2: 1.1, 4: 1.2, 8: 1.4}, 7),
        ({2: 1.1, 4: 1.3, 8: 4.0}, 3),
        ({2: 1.1, 4: 3.0, 8: 9.0}, 1),
        ({2: 2.1, 4: 4.2, 8: 8.5}, 0),
    ):
        subject, sequence = policy(costs, COPY)
        subject.propose([sequence])
        assert len(sequence.proposal) == count, costs
        assert sequence.proposal == tuple(range(40, 40 + count))


def test_what_does_not_repeat_costs_next_to_nothing() -> None:
    """Every token is new, or follows two known ones and is new: each expectation is wrong."""
    rng = Random(0)
    subject, sequence = policy({2: 1.3, 4: 1.6, 8: 2.2}, list(range(200)))
    steps = spent = 0.0
    for index in range(3000):
        subject.propose([sequence])
        rows = 1 + len(sequence.proposal)
        cost = {1: 1.0, 2: 1.3, 4: 1.6, 8: 2.2}[rows]
        steps, spent = steps + 1, spent + cost
        subject.ran(1, rows, cost, 1, planned=False)
        token = 1000 + index if index % 3 == 0 else rng.randrange(200)
        subject.push(sequence, token)
    assert spent < 1.03 * steps


def test_a_size_is_planned_only_once_it_would_have_paid() -> None:
    subject, sequence = policy({}, COPY)
    plain = 0
    for token in range(40, 60):
        subject.propose([sequence])
        if sequence.proposal:
            break
        plain += 1
        subject.ran(1, 1, 1.0, 1, planned=False)
        subject.push(sequence, token)
    assert 3 < plain < 20


def test_nothing_is_proposed_while_somebody_reads() -> None:
    subject, sequence = policy({2: 1.0, 4: 1.0, 8: 1.0}, COPY)
    subject.propose([sequence, Sequence(50)])
    assert sequence.proposal == ()
    subject.propose([sequence])
    assert len(sequence.proposal) == 7


def test_the_likeliest_tokens_of_all_come_first() -> None:
    subject, sure = policy({}, COPY)
    unsure = Sequence(101, done=100, tokens=[0], state=State.DECODING)
    subject.begin(unsure, [*range(60), 90, 91, *range(36), 12, 13], 1000)
    for _ in range(20):
        subject.pace.record(2, 2, 1.0)
    for rows in (4, 8, 16):
        subject.ran(2, rows, 1.0 if rows < 16 else 9.0, rows, planned=False)
    subject.propose([sure, unsure])
    assert len(sure.proposal) + len(unsure.proposal) == 6
    assert len(sure.proposal) > len(unsure.proposal)


def test_a_cost_is_that_of_the_middle_run_and_is_forgotten() -> None:
    pace = Pace(0.15)
    pace.record(1, 4, 1.0)  # there is nothing to compare it with
    assert pace.measured() == ()
    for seconds in (1.0, 1.0, 50.0, 1.0, 1.0):
        pace.record(1, 1, seconds)
    for seconds in (1.5, 99.0, 1.6):
        pace.record(1, 4, seconds)
    assert pace.cost(1, 4) == 1.6 and pace.measured() == ((4, 1.6),)
    assert pace.cost(1, 8) == pytest.approx((1 + 0.15 * 8) / 1.15)
    for _ in range(300):
        pace.record(1, 1, 1.0)
    assert pace.cost(1, 4) == pytest.approx((1 + 0.15 * 4) / 1.15)


def test_the_warm_up_measures_rows_and_leaves_their_plans() -> None:
    runner = small.runner(64)
    measure_rows(runner)
    assert [rows for rows, _ in runner.pace.measured()] == [2, 4, 8]
    assert all(cost > 0 for _, cost in runner.pace.measured())
    made = runner.plans_made
    subject = Engine(runner, speculate=7)
    subject.submit(repeating(16, constraint=Recital(), spans=[Span((3, 4, 5))]))
    finish(subject)
    assert runner.plans_made <= made + 2  # of the prompt, and of what was left at the end
    measure_rows(small.runner(8))  # no room for so many rows: nothing to measure


@pytest.mark.parametrize("name", schedules.WIDER)
def test_trials_take_a_small_cache_where_it_is_taken_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a service may be there already. The plans that answers need are left all the same."""
    taken: list[int] = []
    new_cache = Runner.new_cache

    def noted(runner: Runner) -> Cache:
        cache = new_cache(runner)
        taken.append(sum(state.nbytes for state in cache.tensors.values()))
        return cache

    subject = engine(name, 7, device="stand-in")
    runner = subject.runner
    monkeypatch.setattr(Runner, "new_cache", noted)
    check = check_decoder(runner)
    assert check.first_nan is None and not check.failed
    measure_rows(runner)
    whole = sum(runner.cache_bytes().values())
    assert len(taken) == 2 and max(taken) <= sum(runner.cache_bytes(25, 1).values()) < whole / 2
    assert [rows for rows, _ in runner.pace.measured()] == [2, 4, 8]
    made = runner.plans_made
    assert made == 4
    subject.submit(repeating(16, constraint=Recital(), spans=[Span((3, 4, 5))]))
    finish(subject)
    assert runner.plans_made <= made + 2  # of the prompt, and of what was left at the end
    taken.clear()
    on_cpu = small.runner(64)
    measure_rows(on_cpu)
    assert taken == [sum(on_cpu.cache_bytes().values())], "which is taken as it is written"


def test_states_too_large_to_keep_are_told() -> None:
    subject = speculation("auto", 100, 16, 600 << 20, Pace(0.1))
    assert subject.mode == "off" and "600 MiB" in str(subject.refused)
    assert speculation("off", 100, 16, 600 << 20, Pace(0.1)).refused is None
