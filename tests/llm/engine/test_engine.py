"""Many requests at once on a small random decoder: each answered as if it were alone, whatever the
others do.
"""

from __future__ import annotations

from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import test_runner as small
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtmd.base.errors import DeviceMemoryError, MtmdError, PromptError
from mtmd.kernels.cpu.sampling.rows import _kernel
from mtmd.kernels.plan.scheduler import Plan
from mtmd.llm.batch import Batch
from mtmd.llm.engine.engine import Engine
from mtmd.llm.engine.prompt import Prompt
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.scheduler import MIN_SHARE, Step
from mtmd.llm.engine.sequence import Sequence
from mtmd.llm.engine.spans import Span, identities
from mtmd.llm.sampling.sampler import Sampler, Sampling
from mtmd.llm.state import PAGE


def engine(sequences: int = 4, context: int = 128, pages: int | None = None) -> Engine:
    runner = small.runner(context, sequences=sequences)
    if pages is not None:
        runner.pages = pages
    return Engine(runner)


def request(length: int = 11, first: int = 5, count: int = 12, **chosen: Any) -> Prompt:
    sampling = {
        name: chosen.pop(name)
        for name in ("temperature", "seed", "repetition_penalty")
        if name in chosen
    }
    spans = chosen.pop("spans", None) or [Span(tuple(first + i % 50 for i in range(length)))]
    return Prompt(spans, Sampler(Sampling(**sampling)), max_tokens=count, **chosen)


def run(subject: Engine) -> None:
    for _ in range(3000):
        if not subject.busy:
            return
        subject.step()
    raise AssertionError("the engine does not come to an end")


def alone(**chosen: Any) -> list[int]:
    subject = engine()
    sequence = subject.submit(request(**chosen))
    run(subject)
    assert sequence.finish == "length"
    return sequence.tokens


def test_one_request_is_what_the_runner_generates() -> None:
    assert alone() == small.answer(small.runner(128))


class Thought:
    """Closed after so many tokens, by two more; then the answer begins."""

    def __init__(self, budget: int = 5, closing: tuple[int, ...] = (7, 9)):
        self.budget, self.closing, self.tokens = budget, list(closing), 0
        self.must_be_closed = False

    @property
    def is_over(self) -> bool:
        return not self.closing

    def forced(self) -> int | None:
        return self.closing[0] if self.tokens >= self.budget else None

    def close(self) -> int:
        self.budget = 0
        return self.closing[0]

    def accept(self, token: int) -> None:
        if self.forced() == token:
            self.closing.pop(0)
        self.tokens += 1


@pytest.mark.parametrize("drawn", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "drawn"])
def test_a_thought_is_closed_by_tokens_as_others_are(drawn: dict[str, Any]) -> None:
    """They are part of what is read afterwards, also by who gave way and comes again."""
    expected = [alone(first=n, count=20, thought=Thought(), **drawn) for n in range(3)]
    plain = alone(first=0, count=20, **drawn)
    assert expected[0][:5] == plain[:5] and expected[0][5:7] == [7, 9]
    assert (
        expected[0][7:]
        == alone(spans=[Span((*(i % 50 for i in range(11)), *expected[0][:7]))], count=13)
        or drawn
    )
    subject = engine(pages=5)  # for two of three
    sequences = [
        subject.submit(request(first=n, count=20, thought=Thought(), **drawn)) for n in range(3)
    ]
    run(subject)
    assert [s.tokens for s in sequences] == expected


def test_what_ends_an_answer_ends_no_thought_that_has_to_be_followed_by_one() -> None:
    plain = alone(count=12)
    stop, thought = frozenset(plain[2:3]), Thought(budget=9)
    subject = engine()
    sequence = subject.submit(request(count=12, stop=stop, thought=thought))
    run(subject)
    assert (sequence.finish, sequence.tokens) == ("stop", plain[:2])
    thought = Thought(budget=9)
    thought.must_be_closed = True
    sequence = subject.submit(request(count=12, stop=stop, thought=thought, alternatives=1))
    run(subject)
    assert sequence.tokens[:4] == [*plain[:2], 7, 9]
    assert all(token.logprob is not None for token in sequence.take())
    sequence = subject.submit(request(count=12, stop=stop, thought=Thought(budget=2), min_tokens=4))
    run(subject)
    assert len(sequence.tokens) - 4 >= 4


@pytest.mark.parametrize(("rows", "expected"), [(16, [(16, 3)]), (40, [(40, 0), (2, 2)])])
def test_prompts_of_many_rows_run_by_themselves_beside_answers(
    rows: int, expected: list[tuple[int, int]]
) -> None:
    """Answers read the cache in place, whatever is read beside them."""
    subject, shapes = engine(), list[tuple[int, int]]()
    assert subject.cache.in_place
    first = [subject.submit(request(7, n, 40)) for n in range(2)]
    while any(not sequence.tokens for sequence in first):
        subject.step()
    subject.scheduler.mixed_rows = rows
    late, forward = subject.submit(request(70, 3, 6)), subject.runner.forward

    def noted(batch: Batch) -> torch.Tensor:
        shapes.append((len(batch.tokens), batch.answers))
        return forward(batch)

    with patch.object(subject.runner, "forward", noted):
        while not shapes:
            subject.step()
    assert shapes == expected, "rows and logits of the first step of it"
    run(subject)
    assert late.tokens == alone(length=70, first=3, count=6)
    assert [s.tokens for s in first] == [alone(length=7, first=n, count=40) for n in range(2)]


def test_short_prompts_are_read_a_few_rows_at_a_time() -> None:
    subject, rows, forward = engine(), list[int](), Runner.forward

    def noted(runner: Runner, batch: Batch, *rest: Any) -> torch.Tensor:
        rows.append(len(batch.tokens))
        return forward(runner, batch, *rest)

    with patch.object(Runner, "forward", noted):
        sequence = subject.submit(request(length=44, first=5, count=1))
        run(subject)
    assert rows == [16, 16, 16], "the last of them filled up"
    assert sequence.tokens == alone(length=44, first=5, count=1)


@pytest.mark.parametrize("fails", ["prompts", "answers"])
def test_of_two_batches_the_one_that_fails_is_tried_one_by_one(fails: str) -> None:
    subject = engine()
    first = subject.submit(request(7, 0, 20))
    while not first.tokens:
        subject.step()
    subject.scheduler.mixed_rows = 40
    late, forward, failed = subject.submit(request(70, 3, 6)), subject.runner.forward, []

    def failing(batch: Batch) -> torch.Tensor:
        if not failed and (fails == "answers") == (batch.answers == 1):
            failed.append(len(batch.tokens))
            raise MtmdError("a defect")
        return forward(batch)

    with patch.object(subject.runner, "forward", failing):
        run(subject)
    assert failed == [1 if fails == "answers" else 40]
    assert late.tokens == alone(length=70, first=3, count=6)
    assert first.tokens == alone(length=7, first=0, count=20)


def test_requests_that_come_and_go_are_each_as_alone() -> None:
    """Ten prompts of different lengths, four places, submitted while others decode."""
    rng, subject = Random(0), engine()
    requested = [
        {"length": rng.randint(1, 70), "first": rng.randint(0, 9), "count": rng.randint(1, 30)}
        for _ in range(10)
    ]
    expected = [alone(**a) for a in requested]
    answers: list[Sequence] = []
    for chosen in requested:
        answers.append(subject.submit(request(**chosen)))
        for _ in range(rng.randint(0, 6)):
            subject.step()
    run(subject)
    assert [g.tokens for g in answers] == expected
    assert all(g.finish == "length" and g.prefill_ms > 0 for g in answers)


def test_little_memory_makes_answersgive_way_and_changes_nothing() -> None:
    requested = [{"length": 20 + i, "first": i, "count": 60} for i in range(4)]
    expected = [alone(**a) for a in requested]
    subject = engine(pages=7)  # six pages for four sequences that grow to three each
    answers = [subject.submit(request(**a)) for a in requested]
    run(subject)
    assert [g.tokens for g in answers] == expected
    assert sum(g.preemptions for g in answers) > 0


def test_a_prompt_read_before_is_not_read_again() -> None:
    subject = engine()
    first = subject.submit(request(length=3 * PAGE + 5))
    run(subject)
    again = subject.submit(request(length=3 * PAGE + 5))
    run(subject)
    assert (first.reused, again.reused) == (0, 3 * PAGE) and again.tokens == first.tokens


def test_the_next_turn_goes_on_where_the_last_answer_ended() -> None:
    subject = engine()
    requested = request(length=20, count=40)
    first = subject.submit(requested)
    run(subject)
    turn = [*requested.spans, Span(tuple(first.tokens)), Span((7, 8, 9))]
    spans = [Span(s.tokens) for s in turn]
    second = subject.submit(request(spans=spans))
    run(subject)
    assert second.reused == PAGE  # of 59 tokens whose keys are kept, one full page
    assert second.tokens == alone(spans=spans)


@pytest.mark.parametrize(("content", "reused"), [(b"one", PAGE), (b"other", 0), (b"", 0)])
def test_pictures_are_known_by_their_content(content: bytes, reused: int) -> None:
    def spans(content: bytes) -> list[Span]:
        values = torch.randn(20, small.FAMILY.width, generator=torch.Generator().manual_seed(1))
        return [
            Span((1, 2)),
            Span((9,) * 20, values, block=True, content=content),
            Span(tuple(range(30))),
        ]

    subject = engine()
    subject.submit(request(spans=spans(b"one")))
    run(subject)
    second = subject.submit(request(spans=spans(content)))
    run(subject)
    assert second.reused == reused and second.tokens == alone(spans=spans(content))


def test_identities_count_through_a_picture() -> None:
    span = Span((9,) * 4, torch.zeros(4, 2), content=b"x")
    whole = list(identities([span]))
    rest = Span(span.tokens[1:], span.embeddings, content=b"x", offset=1)
    assert list(identities([span.cut(0, 1)])) + list(identities([rest])) == whole
    assert len(set(whole)) == 4 and list(identities([Span((9,))])) != whole[:1]


def test_draws_do_not_depend_on_the_others() -> None:
    requested = [{"temperature": 1.0, "seed": s, "length": 9 + s} for s in range(4)]
    expected = [alone(**a) for a in requested]
    subject = engine()
    answers = [subject.submit(request(**a)) for a in requested]
    run(subject)
    assert [g.tokens for g in answers] == expected


def test_stop_tokens_and_penalties() -> None:
    tokens = alone()
    subject = engine()
    stopped = subject.submit(request(stop=frozenset({tokens[3]})))
    penalized = subject.submit(request(repetition_penalty=1.5))
    run(subject)
    assert (stopped.tokens, stopped.finish) == (tokens[: tokens.index(tokens[3])], "stop")
    assert penalized.tokens == alone(repetition_penalty=1.5) != tokens


def test_what_repetitions_are_counted_of_does_not_grow_with_a_picture() -> None:
    spans, sequence = [Span((7,) * 4000, torch.zeros(4000, 4)), Span((7, 1))], Sequence(9)
    sequence.tokens += [7, 7, 3]
    seen = request(spans=spans, repetition_penalty=1.5).penalized(sequence.tokens)
    assert set(seen) == {7, 1, 3} and len(seen) == 2 + 3


def test_probabilities_are_told_when_asked_for() -> None:
    subject = engine()
    plain, reported = subject.submit(request()), subject.submit(request(alternatives=3))
    run(subject)
    assert all(t.logprob is None and t.top == () for t in plain.take())
    for token in reported.take():
        assert (
            token.logprob == token.top[0][1] and token.top[0][0] == token.id and len(token.top) == 3
        )
        assert token.logprob < 0 and token.top[0][1] >= token.top[1][1] >= token.top[2][1]
    assert reported.take() == []


def test_a_constraint_decides_what_may_come() -> None:
    class Odd(Slow):
        def mask(self, logits: torch.Tensor) -> torch.Tensor:
            return logits.masked_fill(torch.arange(len(logits)) % 2 == 0, -torch.inf)

    subject = engine()
    odd = Odd(is_ready=True)
    sequence = subject.submit(request(constraint=odd))
    run(subject)
    assert (
        sequence.tokens == odd.tokens
        and all(t % 2 for t in sequence.tokens)
        and len(sequence.tokens) == 12
    )


@pytest.mark.parametrize("after", [0, 1, 5])
def test_cancelling_frees_everything_at_once(after: int) -> None:
    subject = engine(sequences=1)
    first, second = subject.submit(request(count=50)), subject.submit(request())
    for _ in range(after):
        subject.step()
    subject.cancel(first)
    subject.cancel(first)
    assert first.finish == "cancelled" and subject.scheduler.pages.stored == 0
    run(subject)
    assert second.tokens == alone()


def test_one_who_waits_can_be_cancelled() -> None:
    subject = engine(sequences=1)
    first, second = subject.submit(request()), subject.submit(request())
    subject.step()
    subject.cancel(second)
    run(subject)
    assert (first.finish, second.finish, second.tokens) == ("length", "cancelled", [])


def test_what_does_not_fit_is_refused_at_once() -> None:
    subject = engine()
    with pytest.raises(PromptError, match="takes 128 tokens"):
        subject.submit(request(length=128))
    assert not subject.busy


def test_the_context_ends_an_answer() -> None:
    subject = engine(context=64)
    sequence = subject.submit(request(length=60, count=100))
    run(subject)
    assert sequence.finish == "length" and len(sequence.tokens) == 4


class Faulty:
    """A runner that fails at every batch in which a given token is read."""

    def __init__(self, subject: Engine, token: int, error: MtmdError):
        self.forward, self.token, self.error = subject.runner.forward, token, error
        self.failures = 0

    def __call__(self, batch: Any, observe: Any = None) -> torch.Tensor:
        if self.token in batch.tokens.tolist():
            self.failures += 1
            raise self.error
        return self.forward(batch, observe)


def test_one_that_fails_fails_alone() -> None:
    requested = [{"length": 9, "first": 2}, {"length": 9, "first": 40}, {"length": 12, "first": 3}]
    expected = [alone(**a) for a in requested]
    subject = engine()
    token = next(t for t in range(40, 49) if t not in expected[0] + expected[2])
    with patch.object(
        subject.runner, "forward", Faulty(subject, token, DeviceMemoryError("no memory for this"))
    ):
        answers = [subject.submit(request(**a)) for a in requested]
        run(subject)
    assert [g.finish for g in answers] == ["length", "error", "length"]
    assert answers[1].error is not None and "no memory for this" in str(answers[1].error)
    assert [answers[i].tokens for i in (0, 2)] == [expected[0], expected[2]]
    assert subject.scheduler.pages.stored == 0


def test_a_fault_that_passes_is_got_over() -> None:
    subject, expected = engine(), [alone(length=9), alone(length=30)]
    answers = [subject.submit(request(length=n)) for n in (9, 30)]
    forward, calls = subject.runner.forward, 0

    def sometimes(batch: Any, observe: Any = None) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls in (1, 6):
            raise DeviceMemoryError("for the moment")
        return forward(batch, observe)

    with patch.object(subject.runner, "forward", sometimes):
        run(subject)
    assert [g.tokens for g in answers] == expected and calls > 6


@pytest.mark.parametrize("maximum", [100, 40, 16, 0])
def test_batches_that_memory_is_short_for_are_smaller(maximum: int) -> None:
    """Where there is memory for `maximum` tokens at once, prompts are read in pieces; the least there
    is runs in any case.
    """
    requested = [{"length": 90 - 20 * i, "first": i, "count": 9} for i in range(4)]
    expected = [alone(**a) for a in requested]
    subject = engine()

    def may_run(plan: Plan) -> bool:
        return next(n.shape[0] for n, _ in plan.leaves if n.name == "inp.tokens") <= maximum

    with (
        patch.object(subject, "_may_run", may_run),
        patch.object(subject.runner, "forward", wraps=subject.runner.forward) as forward,
    ):
        answers = [subject.submit(request(**a)) for a in requested]
        run(subject)
        seen = [len(call.args[0].tokens) for call in forward.call_args_list]
    assert [g.tokens for g in answers] == expected
    assert max(seen) <= max(maximum, MIN_SHARE)
    assert subject.rows >= sum(a["length"] for a in requested)


class Slow:
    """A constraint that allows everything, and is ready when it is told to be."""

    def __init__(self, is_ready: bool = False, error: MtmdError | None = None):
        self.is_ready, self.error, self.requested = is_ready, error, 0
        self.begun = self.closed = 0
        self.tokens: list[int] = []

    def begin(self) -> None:
        self.begun += 1

    def ready(self, wait_s: float = 0) -> bool:
        assert 0 <= wait_s < 1
        self.requested += 1
        return self.is_ready

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        assert self.is_ready, "it would wait"
        if self.error is not None:
            raise self.error
        return logits

    def allowed(self, size: int) -> np.ndarray:
        finite = self.mask(torch.zeros(size)).isfinite()
        return np.packbits(finite.numpy(), bitorder="little")

    def accept(self, token: int) -> None:
        self.tokens.append(token)

    def close(self) -> None:
        self.closed += 1


def test_whose_constraint_is_not_ready_waits_alone() -> None:
    requested = [{"length": 9, "first": 2}, {"length": 40, "first": 7, "count": 30}]
    expected, slow, subject = [alone(**a) for a in requested], Slow(), engine()
    stored = subject.submit(request(**requested[0], constraint=slow))
    other = subject.submit(request(**requested[1]))
    while other.finish is None:
        subject.step()
    assert (stored.tokens, stored.finish, other.tokens) == ([], None, expected[1])
    requested_before = slow.requested
    assert subject.step() == [] and subject.busy and slow.requested > requested_before
    slow.is_ready = True
    run(subject)
    assert stored.tokens == slow.tokens == expected[0]
    assert (slow.begun, slow.closed) == (1, 1)


def test_it_may_lose_its_place_meanwhile() -> None:
    requested = [{"length": 40, "first": 3, "count": 60}, {"length": 40, "first": 8, "count": 30}]
    expected, slow, subject = [alone(**a) for a in requested], Slow(), engine(pages=5)
    other = subject.submit(request(**requested[0]))
    stored = subject.submit(request(**requested[1], constraint=slow))
    while other.finish is None:
        subject.step()
    assert stored.preemptions and not stored.tokens
    slow.is_ready = True
    run(subject)
    assert [other.tokens, stored.tokens] == expected and slow.closed == 1
    assert subject.scheduler.pages.stored == 0


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_constraint_that_fails_ends_its_own_answer(is_ready: bool) -> None:
    slow, subject = Slow(is_ready, MtmdError("no such answer")), engine()
    failing = subject.submit(request(length=9, constraint=slow))
    other = subject.submit(request(length=30))
    subject.step()
    slow.is_ready = True
    run(subject)
    assert (failing.finish, str(failing.error), slow.closed) == ("error", "no such answer", 1)
    assert other.tokens == alone(length=30)


def test_constraints_of_answers_given_up_are_closed() -> None:
    subject, slow = engine(), [Slow(), Slow(), Slow()]
    stored, _, waits = (subject.submit(request(length=9, constraint=s)) for s in slow)
    subject.cancel(waits)
    assert (slow[2].begun, slow[2].closed) == (0, 1)
    subject.step()
    subject.cancel(stored)
    assert (slow[0].begun, slow[0].closed) == (1, 1) and slow[1].closed == 0
    subject.reset()
    assert slow[1].closed == 1 and not subject.busy


def test_a_step_made_smaller() -> None:
    reading, decoding, block = (
        Sequence(500),
        Sequence(30, done=29),
        Sequence(100, blocks=((0, 100),)),
    )
    sizes, step = [], Step(((decoding, 1), (reading, 400), (block, 100)), (reading,), ())
    while (smaller := step.smaller()) is not None:
        assert smaller.admitted == (reading,)
        sizes.append([count for _, count in smaller.parts])
        step = smaller
    assert sizes == [[1, 200, 100], [1, 100, 100], [1, 50, 100], [1, 25, 100], [1, 25], [1]], (
        "a block is not cut"
    )


@pytest.mark.parametrize("speculate", ["off", 4])
def test_tokens_chosen_together_are_those_chosen_one_by_one(speculate: Any) -> None:
    """Greedy ones, drawn ones, with penalties, probabilities, a least length, thoughts and
    constraints, of which one is late and one fails.
    """
    answers = []
    for together in (False, True):
        late = Slow()
        subject = Engine(small.runner(128, sequences=11), speculate=speculate)
        subject.samples_batches = together
        odd = type("Odd", (Slow,), {"mask": lambda _, x: x.masked_fill(ODD, -torch.inf)})
        requested = [
            subject.submit(request(length=9 + 7 * i, first=i, count=20, **chosen))
            for i, chosen in enumerate(
                (
                    {},
                    {"temperature": 0.8, "seed": 3, "alternatives": 2},
                    {"temperature": 0.8, "seed": 4, "repetition_penalty": 1.5},
                    {"alternatives": 0, "stop": frozenset(range(30)), "min_tokens": 9},
                    {"constraint": odd(True), "temperature": 1.0, "seed": 5},
                    {"constraint": late},
                    {"constraint": Slow(True, MtmdError("no such answer"))},
                    {"spans": [Span((5, 6, 7, 8) * 6)], "temperature": 0.5, "seed": 6},
                    {"spans": [Span((5, 6, 7, 8) * 6)], "thought": Thought(9), "min_tokens": 3},
                    {"thought": Thought(3), "temperature": 0.8, "seed": 7, "alternatives": 2},
                )
            )
        ]
        for _ in range(5):
            subject.step()
        late.is_ready = True
        run(subject)
        answers.append(requested)
    for one, other in zip(*answers, strict=True):
        assert one.tokens == other.tokens and one.finish == other.finish
        assert str(one.error) == str(other.error)
        for a, b in zip(one.take(), other.take(), strict=True):
            assert a.id == b.id and a.logprob == pytest.approx(b.logprob, abs=1e-5)
            assert [t for t, _ in a.top] == [t for t, _ in b.top]


ODD = torch.arange(small.FAMILY.vocabulary) % 2 == 0


class Called(TorchDispatchMode):
    """Which of torch's operators have run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "chosen",
    [{}, {"min_tokens": 12, "stop": frozenset({3, 4})}, {"temperature": 1.0, "seed": 1}],
    ids=["greedy", "with a least length", "at random"],
)
def test_a_step_of_decoding_leaves_the_interpreter_to_itself(chosen: dict[str, Any]) -> None:
    # With each of torch's operators, and each tensor let go, the thread gives the interpreter away,
    # and beside threads that compute it comes back late.
    subject = engine()
    for first in range(4):
        subject.submit(request(first=5 + first, **chosen))
    while not all(s.decoding and len(s.tokens) > 3 for s in subject._prompts):
        subject.step()
    with Called() as called:
        changed = subject.step()
    assert len(changed) == 4
    assert len(called.names) <= 5  # memory for the logits, and how numpy comes by them


def scored(prompts: list[Prompt], **chosen: Any) -> list[Sequence]:
    subject = engine(**chosen)
    sequences = [subject.submit(prompt) for prompt in prompts]
    run(subject)
    return sequences


def test_tokens_of_a_prompt_have_the_probabilities_that_answers_would_have() -> None:
    prompt = request(70, count=2, alternatives=3, prompt_alternatives=3)
    (sequence,) = scored([prompt])
    tokens = [token for span in prompt.spans for token in span.tokens]
    assert sequence.scores is not None and [s.id for s in sequence.scores] == tokens[1:]
    for location in (1, 2, 33, 69):
        shorter = Prompt(
            [Span(tuple(tokens[:location]))],
            Sampler(Sampling()),
            max_tokens=1,
            alternatives=100_000,
        )
        (other,) = scored([shorter])
        (token,) = other.take()
        expected, actual = dict(token.top), sequence.scores[location - 1]
        assert actual.logprob == pytest.approx(expected[tokens[location]], abs=1e-5)
        assert [i for i, _ in actual.top] == [i for i, _ in token.top[:3]]
        assert [p for _, p in actual.top] == pytest.approx([p for _, p in token.top[:3]], abs=1e-5)
    plain = request(70, count=2, alternatives=3)
    assert scored([plain])[0].tokens == sequence.tokens


def test_probabilities_of_prompts_are_the_same_whatever_is_known_and_whoever_gives_way() -> None:
    """Also where a prompt is from the cache, is read in parts beside others, and where a
    sequence has to be read again, as there are too few pages.
    """
    prompts = [
        request(90, first, 30, prompt_alternatives=0 if first % 2 else 2)
        for first in (5, 8, 11, 14)
    ]
    expected = [scored([prompt])[0].scores for prompt in prompts]
    crowded = scored([*prompts, *prompts[:1]], pages=7)
    assert sum(sequence.preemptions for sequence in crowded) > 0
    subject = engine()
    for tokens in (7, 16, 33):  # at once
        subject.scheduler.tokens = tokens
        known = subject.submit(prompts[0])
        run(subject)
        assert not known.reused
        crowded.append(known)
    for actual, right in zip(crowded, [*expected, *[expected[0]] * 4], strict=True):
        assert actual.scores is not None and right is not None
        assert [s.id for s in actual.scores] == [s.id for s in right]
        assert [s.logprob for s in actual.scores] == pytest.approx(
            [s.logprob for s in right], abs=1e-5
        )
        assert [len(s.top) for s in actual.scores] == [len(s.top) for s in right]
    plain = subject.submit(request(90, 5, 3))
    run(subject)
    assert plain.reused and plain.scores is None


def test_a_prompt_of_one_token_has_no_probabilities() -> None:
    (sequence,) = scored([request(1, count=0, prompt_alternatives=1)])
    assert (sequence.scores, sequence.finish) == ([], "length")


def test_sampling_is_compiled_for_the_logits_there_are() -> None:
    """One program when the engine is made, another when logits of an answer may change: not at the
    token at which they do.
    """
    runner = small.runner(128, sequences=2)
    narrow = small.Runner(
        small.FAMILY, small.Noise(), runner.backends, dtype=torch.bfloat16, context=128
    )
    with (
        patch("mtmd.kernels.cpu.sampling.rows.compile_kernel", return_value=1) as compiled,
        patch("mtmd.kernels.cpu.sampling.rows._kernel", _kernel.__wrapped__),
    ):
        Engine(runner)
        assert [c.args[1] for c in compiled.call_args_list] == ["f32"]
        subject = Engine(narrow)
        subject.submit(request())
        assert [c.args[1] for c in compiled.call_args_list] == ["f32", "bf16"]
        subject.submit(request(repetition_penalty=1.5))
        assert [c.args[1] for c in compiled.call_args_list] == ["f32", "bf16", "f32"]
