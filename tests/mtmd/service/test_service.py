"""Many requests over one model: each answered as if it were alone; pictures encoded between others'
tokens; faults stay where they are.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from mtmd.base import turns
from mtmd.base.errors import (
    BusyError,
    DeviceMemoryError,
    ImageError,
    MtmdError,
    OptionError,
    PromptError,
)
from mtmd.clip.image.decode import open_picture
from mtmd.events import Answer, Event, Finished, Progress, TextPiece
from mtmd.llm.batch import BatchShape
from mtmd.llm.batch_shapes import few_rows
from mtmd.loading import load
from mtmd.model import Model
from mtmd.prompt.conversation import user_message
from mtmd.service.run_loop import RunLoop
from mtmd.service.service import Service, ServiceStats, Ticket

COUNT = "How many shapes are there?"
HELLO = [{"role": "user", "content": "Hello"}]
T = TypeVar("T")


@pytest.fixture
def service() -> Iterator[Service]:
    result = load(device="cpu").service
    yield result
    result.close()


def answer(ticket: Ticket) -> Answer:
    *_, last = ticket
    assert isinstance(last, Finished)
    return last.answer


def within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises; AssertionError where it hangs."""
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:  # raised again below
            done.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = done.get(timeout=seconds)
    except queue.Empty:
        raise AssertionError(f"nothing after {seconds} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def requested(image: Any, prompt: str = COUNT) -> list[Any]:
    return [user_message(image, prompt)]


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (40, 60, 3), dtype=np.uint8)


def test_forty_pictures_at_once(service: Service, demo: Model, world: dict[int, Path]) -> None:
    """Different pictures, some of them twice, asked about by forty requests that share batches and
    the cache.
    """
    pictures = [world[1 + i % 4] if i % 2 else noise(i % 15) for i in range(40)]
    alone = {
        str(p) if isinstance(p, Path) else p.tobytes(): demo.answer(p, COUNT, max_tokens=12)
        for p in pictures
    }
    tickets = [service.submit(requested(p), max_tokens=12) for p in pictures]
    for picture, ticket in zip(pictures, tickets, strict=True):
        expected, actual = (
            alone[str(picture) if isinstance(picture, Path) else picture.tobytes()],
            answer(ticket),
        )
        assert (
            actual.output_token_ids == expected.output_token_ids
            and actual.prompt_token_ids == expected.prompt_token_ids
        )
        assert actual.receipt.images[0].sha256 == expected.receipt.images[0].sha256
    stats = service.stats()
    assert stats.finished == stats.requests == 40 and stats.images == 40
    assert stats.encode_tiles < 40 and stats.encode_batches < stats.encode_tiles, (
        "equal pictures once, others together"
    )
    assert stats.batch_rows > 2 * stats.batches and (
        stats.running,
        stats.waiting,
        stats.pages_used,
    ) == (0, 0, 0)


def test_threads_that_come_when_they_like(
    service: Service, demo: Model, world: dict[int, Path]
) -> None:
    prompts = [COUNT, "Describe the image."]
    alone = {(n, p): demo.answer(world[n], p).text for n in (1, 2, 3, 4) for p in prompts}
    result: dict[tuple[int, str, int], str] = {}

    def work(turn: int) -> None:
        for n, p in alone:
            result[n, p, turn] = answer(service.submit(requested(world[n], p))).text

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert result == {(n, p, turn): text for (n, p), text in alone.items() for turn in range(4)}


def test_events_come_in_order(service: Service, world: dict[int, Path]) -> None:
    events: list[Event] = list(
        service.submit(requested([world[1], world[2]], "Describe the image."))
    )
    encode = [e for e in events if isinstance(e, Progress) and e.stage == "encode"]
    assert (encode[0].done, encode[0].total) == (0, 2) and (encode[-1].done, encode[-1].total) == (
        2,
        2,
    )
    kinds = [e.stage if isinstance(e, Progress) else type(e).__name__ for e in events]
    assert kinds == ["encode"] * len(encode) + ["prefill"] + ["TextPiece"] * (
        len(kinds) - len(encode) - 2
    ) + ["Finished"]


def test_a_second_question_about_a_picture_reads_only_the_question(
    service: Service, world: dict[int, Path]
) -> None:
    first = answer(service.submit(requested(world[3], "Describe the image.")))
    turn = [
        *requested(world[3], "Describe the image."),
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": COUNT},
    ]
    second = answer(service.submit(turn))
    assert (
        second.receipt.images[0].cached
        and second.receipt.encode_ms == 0
        and second.receipt.reused_tokens >= 32
    )
    assert first.receipt.reused_tokens == 0 < first.receipt.encode_ms


def test_counting_encodes_nothing(service: Service, world: dict[int, Path]) -> None:
    count = service.count(requested([world[1], world[2]]))
    assert service.stats().encode_tiles == 0
    result = answer(service.submit(requested([world[1], world[2]])))
    assert (
        count.prompt_tokens == result.receipt.prompt_tokens
        and sum(count.image_tokens) == result.receipt.image_tokens
    )


def test_what_the_encoder_got(service: Service, world: dict[int, Path]) -> None:
    result = answer(service.submit(requested(world[2]))).receipt.images[0]
    (tile,) = service.processed(result.sha256) or ()
    assert (
        tile.dtype == np.uint8
        and tile.shape == (*reversed(result.processed_size), 3)
        and tile.std() > 5
    )
    assert service.processed("0" * 64) is None


@pytest.mark.parametrize("after", ["nothing", "encode", "prefill", "text"])
def test_cancelling(after: str, service: Service, demo: Model, world: dict[int, Path]) -> None:
    ticket = service.submit(
        requested(world[1], "Describe the image."), max_tokens=4000, ignore_eos=True
    )
    events = iter(ticket)
    if after != "nothing":
        for event in events:
            if (isinstance(event, TextPiece) and after == "text") or (
                isinstance(event, Progress) and event.stage == after
            ):
                break
    ticket.cancel()
    *_, last = events
    assert isinstance(last, Finished) and last.answer.receipt.finish == "cancelled"
    assert answer(service.submit(requested(world[1]))).text == demo.describe(world[1], COUNT)
    stats = service.stats()
    assert (stats.running, stats.waiting, stats.encoding, stats.pages_used, stats.cancelled) == (
        0,
        0,
        0,
        0,
        1,
    )


def test_leaving_the_loop_gives_the_request_up(service: Service, world: dict[int, Path]) -> None:
    for event in service.submit(
        requested(world[1], "Describe the image."), max_tokens=4000, ignore_eos=True
    ):
        if isinstance(event, TextPiece):
            break
    deadline = time.monotonic() + 20
    while service.stats().cancelled == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert service.stats().cancelled == 1 and service.stats().running == 0


def test_mistakes_are_told_at_once(service: Service, world: dict[int, Path]) -> None:
    for wrong, error in (
        ({"messages": requested("no such.png")}, ImageError),
        ({"messages": []}, PromptError),
        ({"messages": requested(world[1]), "temperature": -1}, OptionError),
        ({"messages": requested(world[1], "word " * 9000)}, PromptError),
    ):
        with pytest.raises(error):
            service.submit(**wrong)  # type: ignore[arg-type]
    assert service.stats().requests == 0


def test_too_many(world: dict[int, Path]) -> None:
    model = load(device="cpu", parallel=1)
    with_queue = Service(model, queue=1)
    tickets = [
        with_queue.submit(
            requested(world[1], "Describe the image."), max_tokens=200, ignore_eos=True
        )
        for _ in range(2)
    ]
    deadline = time.monotonic() + 20
    while with_queue.stats().requests < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(BusyError, match="2 requests are being answered or wait"):
        with_queue.submit(requested(world[1]))
    assert with_queue.stats().rejected == 1 and len({answer(t).text for t in tickets}) == 1
    with_queue.close()


def test_an_encoder_that_fails_on_one_picture(
    service: Service, demo: Model, world: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is tried again picture by picture: the bad one fails alone."""
    bad = service._prompts.bridge.prepare([open_picture(noise(1))])[0].plan.tiles[0]
    encoder = service._loaded.encoder
    assert encoder
    steps = encoder.steps

    def failing(tiles: Any, observe: Any = None, **ways: Any) -> Any:
        if any(np.array_equal(t, bad) for t in tiles):
            raise DeviceMemoryError("no memory for this picture")
        return (yield from steps(tiles, observe, **ways))

    monkeypatch.setattr(encoder, "steps", failing)
    tickets = [service.submit(requested(p)) for p in (world[1], noise(1), world[2], noise(1))]
    assert [answer(tickets[i]).text for i in (0, 2)] == [
        demo.describe(world[n], COUNT) for n in (1, 2)
    ]
    for i in (1, 3):
        with pytest.raises(DeviceMemoryError, match="no memory for this picture"):
            answer(tickets[i])
    assert service.stats().failed == 2 and service.stats().encoding == 0


def test_an_encoder_that_reads_the_prompt_and_lacks_memory_fails_one_request(
    service: Service, demo: Model, world: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such an encoder computes once the pictures are there, when spans are made."""
    bridge = service._prompts.bridge
    bad, make = bridge.prepare([open_picture(noise(1))])[0].content, bridge.spans

    def failing(pieces: Any, prepared: Any, embeddings: Any) -> Any:
        if [one.content for one in prepared] == [bad]:
            raise DeviceMemoryError("no memory for this prompt")
        return make(pieces, prepared, embeddings)

    monkeypatch.setattr(bridge, "spans", failing)
    tickets = [service.submit(requested(p)) for p in (world[1], noise(1), world[2])]
    assert [answer(tickets[i]).text for i in (0, 2)] == [
        demo.describe(world[n], COUNT) for n in (1, 2)
    ]
    with pytest.raises(DeviceMemoryError, match="no memory for this prompt"):
        answer(tickets[1])
    assert service.stats().failed == 1


def test_a_defect_ends_requests_and_not_the_service(
    service: Service, demo: Model, world: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(service._loaded.runner, "forward", lambda *_: 1 / 0)
        with pytest.raises(MtmdError, match="internal error: ZeroDivisionError"):
            answer(service.submit(requested(world[1])))
    assert answer(service.submit(requested(world[1]))).text == demo.describe(world[1], COUNT)


@pytest.mark.parametrize("where", ["taking", "cancelling"])
def test_a_defect_between_batches_ends_requests_and_not_the_service(
    where: str,
    service: Service,
    demo: Model,
    world: dict[int, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = [
        {"role": "user", "content": COUNT}
    ]  # nothing to encode: it goes to the engine when it is taken
    with monkeypatch.context() as broken:
        if where == "taking":
            broken.setattr(service._prompts.bridge, "spans", lambda *_: 1 / 0)
            ticket = service.submit(text)
        else:
            ticket = service.submit(text, max_tokens=4000, ignore_eos=True)
            service.exclusively(
                lambda: broken.setattr("mtmd.service.run_loop.make_receipt", lambda *_, **__: 1 / 0)
            )
            ticket.cancel()
        with pytest.raises(MtmdError, match="internal error: ZeroDivisionError"):
            within(20, lambda: answer(ticket))
    assert within(20, lambda: answer(service.submit(requested(world[1])))).text == demo.describe(
        world[1], COUNT
    )
    stats = service.stats()
    assert (stats.failed, stats.running, stats.pages_used) == (1, 0, 0)


def test_what_is_asked_while_the_service_closes_is_answered_or_refused(
    service: Service, world: dict[int, Path]
) -> None:
    """The device thread is busy; the service is closed; then somebody comes."""
    entered, gate = threading.Event(), threading.Event()
    busy = threading.Thread(
        target=lambda: service.exclusively(lambda: entered.set() or gate.wait(20))
    )
    closing = threading.Thread(target=service.close)
    busy.start()
    entered.wait(20)
    before = service.submit(requested(world[1]))
    closing.start()
    while not (service._device._closed or len(service._device.thread._inbox) > 1):
        time.sleep(0.001)
    with pytest.raises(MtmdError, match="the service is closed"):
        late = service.submit(requested(world[1]))
        gate.set()
        within(20, lambda: answer(late))
    gate.set()
    assert within(20, lambda: answer(before)).receipt.finish == "cancelled"
    closing.join(20)
    assert not closing.is_alive()


def test_one_who_comes_just_when_the_thread_has_waited_long_enough(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    came, device = threading.Event(), service._device.thread
    wait = device._wake.wait

    def come_late(timeout: float | None = None) -> bool:
        if came.is_set():
            return wait(timeout)
        device._inbox.append(
            came.set
        )  # after the time is up, and before the thread has the lock again
        return False

    monkeypatch.setattr(device._wake, "wait", come_late)
    service._device.post(lambda: None)
    assert came.wait(20)


def test_numbers_of_a_closed_service(service: Service, world: dict[int, Path]) -> None:
    answer(service.submit(requested(world[1]), max_tokens=2))
    service.close()
    assert service.stats().finished == 1


def test_leaving_a_request_of_a_closed_service(service: Service, world: dict[int, Path]) -> None:
    events = iter(service.submit(requested(world[1]), max_tokens=4000, ignore_eos=True))
    next(events)
    service.close()
    events.close()  # type: ignore[attr-defined]


def test_events_are_told_once(service: Service, world: dict[int, Path]) -> None:
    ticket = service.submit(requested(world[1]), max_tokens=2)
    assert isinstance(list(ticket)[-1], Finished) and within(20, lambda: list(ticket)) == []


def test_pictures_to_look_at_take_a_bounded_memory(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    tickets = [service.submit(requested(noise(0)), max_tokens=1)]
    (tile,) = next(iter(service._processed._entries.values())).tiles
    monkeypatch.setattr("mtmd.service.processed_tiles.SAVED_BYTES", 3 * tile.nbytes)
    tickets += [service.submit(requested(noise(seed)), max_tokens=1) for seed in range(1, 6)]
    shown = [answer(ticket).receipt.images[0].sha256 for ticket in tickets]
    assert [service.processed(sha) is not None for sha in shown] == [False] * 3 + [True] * 3


def test_probabilities(service: Service, world: dict[int, Path]) -> None:
    pieces = [
        e for e in service.submit(requested(world[1]), logprobs=2) if isinstance(e, TextPiece)
    ]
    tokens = [t for p in pieces for t in p.tokens]
    assert tokens and all(
        t.logprob <= 0 and len(t.top) == 2 and t.top[0][1] >= t.top[1][1] for t in tokens
    )
    assert all(t.top[0] == (t.text, t.logprob) for t in tokens), "greedy takes the most probable"


def test_closing(world: dict[int, Path]) -> None:
    service = load(device="cpu").service
    ticket = service.submit(
        requested(world[1], "Describe the image."), max_tokens=4000, ignore_eos=True
    )
    service.close()
    service.close()
    assert answer(ticket).receipt.finish == "cancelled"
    with pytest.raises(MtmdError, match="the service is closed"):
        service.submit(requested(world[1]))


def test_a_large_picture_keeps_nobody_waiting(
    service: Service, world: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one picture is encoded, which takes sixty slices, another request gets its tokens, of
    which enough are left when that begins.
    """
    encoder = service._loaded.encoder
    assert encoder
    steps, batches = encoder.steps, []

    def slow(tiles: Any, observe: Any = None, **ways: Any) -> Any:
        for _ in range(60):
            time.sleep(0.025)  # longer than a slice
            batches.append(service.engine.steps)
            yield
        return (yield from steps(tiles, observe, **ways))

    running = service.submit(
        requested(world[1], "Describe the image."), max_tokens=1200, ignore_eos=True
    )
    first = iter(running)
    next(e for e in first if isinstance(e, TextPiece))
    monkeypatch.setattr(encoder, "steps", slow)
    waiting = service.submit(requested(world[2]))
    *_, last = first
    assert isinstance(last, Finished) and len(last.answer.output_token_ids) == 1200
    assert len(set(batches)) >= 30, "the decoder had its turn between the slices"
    waiting.cancel()


def test_the_device_can_be_had_for_something_else(service: Service) -> None:
    assert service.exclusively(lambda: threading.current_thread().name) == "mtmd device"
    with pytest.raises(ZeroDivisionError):
        service.exclusively(lambda: 1 / 0)
    assert service.exclusively(torch.get_num_threads) >= 1


class ReadTogether(ServiceStats):
    """Statistics whose `rejected` two threads read before either of them writes, if they can."""

    meeting = threading.Barrier(2)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "rejected":
            with suppress(threading.BrokenBarrierError):
                self.meeting.wait(1)
        return value


def test_every_request_that_is_turned_away_is_counted(world: dict[int, Path]) -> None:
    service = Service(load(device="cpu", parallel=1), queue=0)
    ticket = service.submit(requested(world[1]), max_tokens=4000, ignore_eos=True)
    events = iter(ticket)
    next(events)
    counters = service._loop.counters
    counters.stats = ReadTogether(**vars(counters.stats))

    def turned_away() -> None:
        with pytest.raises(BusyError):
            service.submit(requested(world[1]))

    threads = [threading.Thread(target=turned_away) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = service.stats()
    ticket.cancel()
    service.close()
    assert stats.rejected == 2


def test_a_request_has_its_place_before_its_pictures_are_prepared(world: dict[int, Path]) -> None:
    """So that as many as come at once cannot all pass the gate."""
    service = Service(load(device="cpu", parallel=1), queue=0)
    prepare, entered, gate = service._prompts.prepare, threading.Event(), threading.Event()

    def slow(*arguments: Any, **more: Any) -> Any:
        entered.set()
        gate.wait(20)
        return prepare(*arguments, **more)

    service._prompts.prepare = slow  # type: ignore[method-assign]
    first: list[Ticket] = []
    caller = threading.Thread(target=lambda: first.append(service.submit(requested(world[1]))))
    caller.start()
    assert entered.wait(20)
    with pytest.raises(BusyError, match="1 requests are being answered or wait"):
        service.submit(requested(world[1]))
    gate.set()
    caller.join()
    assert answer(first[0]).receipt.finish == "stop"
    with pytest.raises(ImageError):
        service.submit(requested("no such.png"))
    assert answer(service.submit(requested(world[1]))).receipt.finish == "stop", "its place is free"
    service.close()


@pytest.mark.parametrize("stop", [(), ("e a",), ("never said",)], ids=["", "found", "not found"])
def test_proposals_change_no_event(world: dict[int, Path], stop: Any) -> None:
    """Texts, probabilities and ends of several answers at once, with forced proposals and without;
    beyond its end the demo model repeats itself.
    """
    chosen = {"ignore_eos": True, "max_tokens": 70, "logprobs": 1, "stop": stop}
    result = []
    for speculate in ("off", 5):
        service = load(device="cpu", speculate=speculate).service
        try:
            tickets = [service.submit(requested(world[i + 1]), **chosen) for i in range(3)]
            events = [list(ticket) for ticket in tickets]
            stats = service.stats()
        finally:
            service.close()
        pieces = [[e for e in one if isinstance(e, TextPiece)] for one in events]
        reported = [
            [(p.text, [(t.id, round(t.logprob, 3)) for t in p.tokens]) for p in one]
            for one in pieces
        ]
        answers = [one[-1].answer for one in events if isinstance(one[-1], Finished)]
        result.append((reported, [(a.text, a.output_token_ids, a.receipt.finish) for a in answers]))
        for given in answers:
            assert len(given.output_token_ids) == given.receipt.output_tokens
        assert stats.proposed_tokens >= stats.accepted_tokens
        assert stats.proposed_tokens == sum(a.receipt.proposed_tokens for a in answers)
    assert result[0] == result[1]
    assert stop == ("e a",) or stats.accepted_tokens > 0


def test_text_and_tokens_and_the_prompt(service: Service) -> None:
    text = "How many shapes <end_of_turn> are there?"
    plain, special = service.tokens_of(text, special=False), service.tokens_of(text)
    assert len(special) < len(plain)
    assert service.spelling_of(special) == service.spelling_of(plain) == text
    assert service.tokens_of(text, around=True) == special  # this tokenizer puts nothing there
    with pytest.raises(PromptError, match=r"found 99999999, expected ids of the vocabulary"):
        service.spelling_of([special[0], 99999999])
    messages = [{"role": "user", "content": f"{text}"}]
    rendered = service.rendered(messages)
    assert text in rendered and rendered != text and "\ufdd0" not in rendered
    assert "messages" in service.chat_template


def test_an_answer_tells_the_text_that_ended_it(service: Service) -> None:
    whole = answer(service.submit([{"role": "user", "content": COUNT}], max_tokens=20))
    assert whole.stop is None and len(whole.text) > 2
    end = whole.text[2]
    cut = answer(service.submit([{"role": "user", "content": COUNT}], max_tokens=20, stop=(end,)))
    assert (cut.stop, cut.text, cut.receipt.finish) == (
        end,
        whole.text[: whole.text.index(end)],
        "stop",
    )


def test_nobody_sits_down_to_compute_in_the_midst_of_a_batch() -> None:
    result = []

    def step() -> list[object]:
        result.append(turns._first.nobody.is_set())
        return []

    engine = SimpleNamespace(busy=True, step=step)
    loop = SimpleNamespace(encoding=None, engine=engine, _batch_s=0.0, _is_idle=False)
    loop.plans, loop._gathered = Mock(), nullcontext
    RunLoop.turn(loop)  # type: ignore[arg-type]
    assert result == [False] and turns._first.nobody.is_set()


def test_plans_are_made_ahead_when_nothing_else_is_to_do(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, met = service._loaded.runner, queue.SimpleQueue[BatchShape]()
    expected = few_rows(runner, service.engine.cache)
    monkeypatch.setattr(service._loop, "_make_plan", met.put)
    monkeypatch.setattr(service._loop.plans, "_make", met.put)
    service.plan_ahead()
    assert [met.get(timeout=60) for _ in expected] == expected
    assert not service._loop.plans.foreseen


@pytest.mark.parametrize("good", [0, 1], ids=["the first", "the second"])
@pytest.mark.parametrize("error", [DeviceMemoryError("out of memory"), RuntimeError("no memory")])
def test_plans_that_cannot_be_made_are_left_for_later(
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    good: int,
) -> None:
    runner = service._loaded.runner
    service.exclusively(lambda: runner.prepare(BatchShape(1).rounded(True)))
    fails = Mock(side_effect=[None] * good + [error])
    with monkeypatch.context() as patched:
        patched.setattr(runner, "prepare", fails)
        service.plan_ahead()
        within(60, lambda: all(iter(lambda: "made ahead" not in caplog.text, False)))
    assert fails.call_count == good + 1 and not service._loop.plans.foreseen
    assert answer(service.submit(HELLO, max_tokens=2)).text


def test_closing_waits_for_the_plan_that_is_being_made(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    may, begun = threading.Event(), threading.Event()

    def make(_: BatchShape) -> None:
        begun.set()
        assert may.wait(60)

    monkeypatch.setattr(service._loop.plans, "_make", make)
    service.plan_ahead()
    assert begun.wait(60)
    (thread,) = [t for t in threading.enumerate() if t.name == "mtmd plans"]
    # Who comes at that moment waits for no plan but his own
    assert within(60, lambda: answer(service.submit(HELLO, max_tokens=2))).text
    threading.Timer(0.05, may.set).start()
    service.close()
    assert may.is_set() and not thread.is_alive() and not service._loop.plans.foreseen


def test_an_answer_that_repeats_itself_is_noticed_and_can_be_stopped(service: Service) -> None:
    """A token that nothing keeps from coming again and again."""
    token = service.tokens_of("a")[0]
    loop = {"logit_bias": {token: 100}, "ignore_eos": True, "max_tokens": 256}
    (whole,) = [e.answer for e in service.submit(HELLO, **loop) if isinstance(e, Finished)]
    assert (whole.receipt.finish, whole.receipt.repeated_tokens) == ("length", 256)
    assert any("are the same 1 again and again" in w for w in whole.receipt.warnings)
    events = service.submit(HELLO, **loop, stop_repeating=True)
    (cut,) = [e.answer for e in events if isinstance(e, Finished)]
    assert (cut.receipt.finish, len(cut.output_token_ids)) == ("stop", 96)
    assert cut.text == whole.text[: len(cut.text)]
    assert any("so it was stopped (stop_repeating)" in w for w in cut.receipt.warnings)
    (short,) = [e.answer for e in service.submit(HELLO) if isinstance(e, Finished)]
    assert (short.receipt.repeated_tokens, short.receipt.warnings) == (0, ())


def test_an_answer_may_go_on_to_the_end_of_the_context() -> None:
    with load(device="cpu", context=64) as model:
        result = model.answer(prompt="Hello", max_tokens=-1, ignore_eos=True).receipt
    assert (result.finish, result.prompt_tokens + result.output_tokens) == ("length", 64)
