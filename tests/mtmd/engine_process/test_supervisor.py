"""What another process answers is what a service of this one would; and that process may end."""

from __future__ import annotations

import io
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dual_encoders import clip
from PIL import Image
from processes import descendants

from mtmd.base.cancellation import cancel_if
from mtmd.base.errors import (
    BusyError,
    ContextError,
    DeviceError,
    EngineError,
    ImageError,
    LeftError,
    MtmdError,
    OptionError,
    PromptError,
)
from mtmd.clip.video.limits import VideoLimits
from mtmd.embedding.embedder import load_embedder
from mtmd.engine_process import process, supervisor
from mtmd.engine_process.engine import _ToServer
from mtmd.engine_process.messages import Failed
from mtmd.engine_process.supervisor import EngineClient
from mtmd.events import Answer, Finished, Progress, TextPiece
from mtmd.loaded.device_thread import AGAIN
from mtmd.loading import DEMO_MODEL, load
from mtmd.prompt.conversation import RawPrompt
from mtmd.prompt.load_image import Picture, load_isolated
from mtmd.prompt.video_input import sent_video
from mtmd.service.service import Service

TEXT = [{"role": "user", "content": "How many shapes are there?"}]
TEXT_PART = [{"type": "text", "text": "What is shown?"}]
QUEUE = 2
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "count",
            "description": "Count shapes",
            "parameters": {"type": "object", "properties": {"color": {"type": "string"}}},
        },
    }
]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def started(hang_s: float | None = None, restarts: bool = False) -> EngineClient:
    made = EngineClient(hang_s=hang_s, restarts=restarts)
    made.load(None, {"parallel": 2, "threads": 1, "isolate": True})
    made.begin(queue=QUEUE, share_cache=False)
    return made


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineClient]:
    """A process with the demo model costs seconds to start: one for all that leave it alive."""
    with started(hang_s=300) as made:
        yield made
        made.close(20)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with load(device="cpu", parallel=2, threads=1) as model:
        yield Service(model, queue=QUEUE)


@pytest.fixture
def about(one: Path) -> list[dict[str, Any]]:
    image = {"type": "image", "image": load_isolated(one)}
    return [{"role": "user", "content": [image, {"type": "text", "text": "Describe the image."}]}]


def events(ticket: Any) -> list[Any]:
    return list(ticket)


def answer(ticket: Any) -> Answer:
    last = events(ticket)[-1]
    assert isinstance(last, Finished)
    return last.answer


def without_times(result: Answer) -> Answer:
    times = ("queued_ms", "preprocess_ms", "encode_ms", "prefill_ms", "decode_ms", "compile_ms")
    images = tuple(replace(image, cached=False) for image in result.receipt.images)
    receipt = replace(result.receipt, **dict.fromkeys(times, 0.0), images=images)
    calls = tuple(replace(call, id="") for call in result.tool_calls)
    return replace(
        result, receipt=replace(receipt, reused_tokens=0, kernels_compiled=0), tool_calls=calls
    )


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "nothing after 20 s"
        time.sleep(0.005)


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"logprobs": 3},
        {"stop": ("shape", "circle")},
        {"json_schema": SCHEMA},
        {"tools": TOOLS, "tool_choice": "required"},
        {"temperature": 0.8, "seed": 7},
        {"detail": "low", "max_tokens": 3},
    ],
    ids=lambda chosen: "-".join(chosen) or "greedy",
)
def test_answers_are_those_of_a_service_in_this_process(
    engine: EngineClient, service: Service, about: list[Any], chosen: dict[str, Any]
) -> None:
    options = {"max_tokens": 24} | chosen
    separate, here = (
        events(one.submit(about, tenant="me", **options))  # type: ignore[attr-defined]
        for one in (engine, service)
    )
    assert without_times(separate[-1].answer) == without_times(here[-1].answer)
    texts = ["".join(e.text for e in of if isinstance(e, TextPiece)) for of in (separate, here)]
    assert texts[0] == texts[1]
    stages = [e.stage for e in separate if isinstance(e, Progress)]
    assert stages[-1] == "prefill" and not isinstance(separate[0], TextPiece)
    assert separate[-1].answer.receipt.prefill_ms > 0


def test_several_answers_to_one_prompt(engine: EngineClient, service: Service) -> None:
    chosen: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "seed": 3}
    separate, here = (
        [answer(t).text for t in of.submit_several(TEXT, 2, tenant="me", **chosen)]
        for of in (engine, service)
    )
    assert separate == here and len(separate) == 2


def test_what_needs_no_answer(engine: EngineClient, service: Service, about: list[Any]) -> None:
    assert (engine.name, engine.context, engine.capacity, engine.sees) == (
        service.name,
        service.context,
        service.capacity,
        service.sees,
    )
    assert engine.chat_template == service.chat_template
    assert engine.checkpoint_facts == service.checkpoint_facts
    assert engine.count(about, tenant="me") == service.count(about, tenant="me")
    ids = service.tokens_of("Two circles", around=True)
    assert engine.tokens_of("Two circles", around=True) == ids
    assert engine.text_of(ids) == service.text_of(ids)
    assert engine.spelling_of(ids) == service.spelling_of(ids)
    assert engine.rendered(TEXT) == service.rendered(TEXT)
    assert str(engine.warmup_report.graphs) == str(service.warmup_report.graphs)
    assert engine.load_image(about[0]["content"][0]["image"].pixels).size


def test_what_the_model_saw_of_a_picture(engine: EngineClient, about: list[Any]) -> None:
    picture: Picture = about[0]["content"][0]["image"]
    answer(engine.submit(about, tenant="mine", max_tokens=1))
    tiles = engine.processed(picture.sha256, "mine")
    assert tiles and tiles[0].dtype == np.uint8 and tiles[0].shape[2] == 3
    assert engine.processed(picture.sha256, "another's") is None


@pytest.mark.parametrize(
    ("messages", "chosen", "kind"),
    [
        ([], {}, PromptError),
        ([{"role": "user", "content": "word " * 9000}], {}, ContextError),
        (RawPrompt(()), {}, PromptError),
        (TEXT, {"temperature": -1}, OptionError),
        (TEXT, {"json_schema": "{"}, OptionError),
        ([{"role": "user", "content": [{"type": "image", "image": b"no"}]}], {}, ImageError),
    ],
    ids=["empty", "long", "raw", "option", "schema", "picture"],
)
def test_mistakes_are_told_in_the_same_words(
    engine: EngineClient, service: Service, messages: Any, chosen: dict[str, Any], kind: type
) -> None:
    result = []
    for one in (engine, service):
        with pytest.raises(kind) as caught:
            one.submit(messages, **chosen)  # type: ignore[attr-defined]
        result.append(caught.value)
    assert type(result[0]) is type(result[1]) and str(result[0]) == str(result[1])
    assert {k: v for k, v in vars(result[0]).items() if k != "__notes__"} == vars(result[1])
    assert not engine.busy


def test_who_cancels_gives_a_place_back(engine: EngineClient) -> None:
    endless: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}
    tickets = [engine.submit(TEXT, **endless) for _ in range(engine.capacity)]
    with pytest.raises(BusyError) as caught:
        engine.submit(TEXT)
    assert caught.value.retry_after_s > 0 and engine.busy
    begun = iter(tickets[0])
    while not isinstance(next(begun), TextPiece):
        pass
    for ticket in tickets[1:]:
        ticket.cancel()
        assert answer(ticket).receipt.finish == "cancelled"
    begun.close()  # type: ignore[attr-defined]  # as who leaves the loop
    until(lambda: not engine.busy)
    assert answer(engine.submit(TEXT, max_tokens=2)).receipt.output_tokens == 2
    stats = engine.stats()
    assert stats.cancelled >= len(tickets) and stats.rejected >= 1 and stats.running == 0
    assert engine.latencies.first_token.counts[-1] > 0


def test_who_leaves_before_it_has_begun_is_not_waited_for(engine: EngineClient) -> None:
    before = engine.stats()
    os.kill(engine.pid, signal.SIGSTOP)
    cancel_if(lambda: True)
    try:
        with pytest.raises(LeftError):
            engine.submit(TEXT, max_tokens=1500, ignore_eos=True)
    finally:
        cancel_if(None)
        os.kill(engine.pid, signal.SIGCONT)
    assert not engine.busy
    until(lambda: engine.stats().running == 0)
    assert engine.stats().finished == before.finished


def test_it_is_no_fork_and_outlives_what_a_terminal_sends(engine: EngineClient) -> None:
    reported = Path(f"/proc/{engine.pid}/cmdline").read_bytes()
    assert b"mtmd.engine_process.boot" in reported
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(engine.pid, number)
    assert answer(engine.submit(TEXT, max_tokens=2)).receipt.output_tokens == 2


def test_a_sink_that_fails_is_no_fault_of_the_process(
    engine: EngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        if threading.current_thread() is not threading.main_thread():  # what waits is handed here
            raise ValueError("no writer")

    ticket = engine.submit(TEXT, max_tokens=1500, ignore_eos=True)
    ticket.redirect(broken)
    until(lambda: not engine.busy)
    assert engine.fault is None and "no writer" in caplog.text
    assert answer(engine.submit(TEXT, max_tokens=2)).receipt.output_tokens == 2


def test_a_record_that_does_not_fit_its_form_raises_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    handler = _ToServer(SimpleNamespace(put=lambda _: None))  # type: ignore[arg-type]
    record = logging.LogRecord("mtmd", logging.INFO, "x.py", 1, "%d of %d", ("one",), None)
    handler.handle(record)
    assert "Logging error" in capsys.readouterr().err


def test_it_is_closed_when_what_is_under_way_has_been_told() -> None:
    with started() as separate:
        ticket = separate.submit(TEXT, max_tokens=1500, ignore_eos=True)
        separate.close(20)
        assert answer(ticket).receipt.finish == "cancelled" and not separate.busy
        with pytest.raises(MtmdError, match="the service is closed"):
            separate.submit(TEXT)
        assert separate.stats().cancelled == 1 and separate.fault is None
        separate.close(20)
        processes = descendants(separate.pid)
    until(lambda: not any(Path(f"/proc/{p}").exists() for p in processes))


def test_a_process_that_is_killed_is_a_fault() -> None:
    with started() as separate:
        reported: list[DeviceError] = []
        separate.on_fault(reported.append)
        tickets = [separate.submit(TEXT, max_tokens=1500, ignore_eos=True) for _ in range(3)]
        before = separate.stats()
        os.kill(separate.pid, signal.SIGKILL)
        for ticket in tickets:
            with pytest.raises(DeviceError, match=r"process has ended \(by SIGKILL\)"):
                list(ticket)
        until(lambda: reported)
        assert separate.fault is reported[0] and not separate.busy
        with pytest.raises(DeviceError, match="start the process again"):
            separate.submit(TEXT)
        assert separate.stats().requests == before.requests
        late: list[DeviceError] = []
        separate.on_fault(late.append)
        assert late == reported
        separate.close(1)


@pytest.mark.parametrize("is_fault", [True, False], ids=["in a fault", "loading"])
def test_one_that_the_system_keeps_is_not_waited_for(
    is_fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a driver may, whatever is sent to it: its end of the link stays open."""
    monkeypatch.setattr(process, "ENDS_S", 0.1)
    separate = EngineClient()
    saved = separate._connection.process._process
    os.kill(separate.pid, signal.SIGSTOP)
    if is_fault:
        separate._connection._take(Failed(DeviceError("the device hangs")))
    with monkeypatch.context() as patch:
        patch.setattr(saved, "kill", lambda: None)
        leaves = threading.Thread(target=separate.__exit__, args=(None, None, None), daemon=True)
        leaves.start()
        leaves.join(10)
        is_left = not leaves.is_alive()
    saved.kill()
    saved.wait()
    assert is_left


def test_who_is_in_a_call_when_it_ends_is_told() -> None:
    result: list[BaseException] = []

    def ask(separate: EngineClient) -> None:
        with pytest.raises(MtmdError) as caught:
            separate.text_of([1])
        result.append(caught.value)

    with started() as separated:
        os.kill(separated.pid, signal.SIGSTOP)
        thread = threading.Thread(target=ask, args=(separated,), daemon=True)
        thread.start()
        until(lambda: separated._connection._replies)
        threading.Timer(0.2, os.kill, (separated.pid, signal.SIGCONT)).start()
    thread.join(20)
    assert [str(error) for error in result] == ["the service is closed; start another"]


def test_a_process_that_hangs_holds_up_nobody_and_is_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With more sent to it than the socket takes."""
    monkeypatch.setattr(supervisor, "TICK_S", 0.1)
    monkeypatch.setattr(supervisor, "SILENT_MIN_S", 1.0)
    result: list[BaseException] = []

    def ask(separate: EngineClient) -> None:
        with pytest.raises(DeviceError) as caught:
            separate.tokens_of("a" * (16 << 20))
        result.append(caught.value)

    with started() as separated:
        os.kill(separated.pid, signal.SIGSTOP)
        threads = [threading.Thread(target=ask, args=(separated,), daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        lock = separated._connection.process.link._sending
        until(lock.locked)
        stats = separated.stats()  # whose call has a limit
        assert lock.locked() and not stats.finished
        separated._hang_s = 1.0
        with pytest.raises(DeviceError, match="has not responded for 1 s"):
            separated.submit(TEXT)
        for thread in threads:
            thread.join(20)
        assert len(result) == 2 and all("has not responded" in str(error) for error in result)


def test_who_leaves_waits_for_nobody(engine: EngineClient) -> None:
    """Not for an engine that reads nothing, with more sent to it than the socket takes."""
    ticket = engine.submit(TEXT, max_tokens=1500, ignore_eos=True)
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        asks = threading.Thread(target=engine.tokens_of, args=("a" * (4 << 20),), daemon=True)
        asks.start()
        until(engine._connection.process.link._sending.locked)
        leaves = threading.Thread(target=ticket.cancel, daemon=True)
        leaves.start()
        leaves.join(10)
        assert not leaves.is_alive() and asks.is_alive()
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    assert [type(event) for event in ticket][-1] is Finished
    asks.join(60)


def test_one_that_lives_is_not_given_up_between_two_signs(
    engine: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SILENT_MIN_S", 20.0)
    monkeypatch.setattr(supervisor, "TICK_S", 0.1)
    monkeypatch.setattr(engine, "_hang_s", 0.01)
    beats = engine._connection.beats
    until(lambda: engine._connection.beats > beats + 1)
    assert engine.fault is None and engine._supervisor.is_alive()


def test_a_model_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    with EngineClient() as separate, pytest.raises(MtmdError, match="nosuch"):
        separate.load(str(tmp_path / "nosuch"), {})


def test_frames_of_a_video_are_chosen_by_the_model(engine: EngineClient, service: Service) -> None:
    file, colors = io.BytesIO(), ("red", "blue", "green")
    first, *others = (Image.new("RGB", (64, 64), color) for color in colors)
    first.save(file, "GIF", save_all=True, append_images=others, duration=500)
    video = sent_video(file.getvalue(), VideoLimits(), "clip")
    shown = [{"role": "user", "content": [{"type": "video", "video": video}, *TEXT_PART]}]
    separate, here = (
        answer(one.submit(shown, tenant="me", max_tokens=4))  # type: ignore[attr-defined]
        for one in (engine, service)
    )
    assert separate.text == here.text and separate.prompt_token_ids == here.prompt_token_ids
    assert separate.receipt.videos[0].sha256 == here.receipt.videos[0].sha256


def test_a_dual_encoder_gives_the_vectors_of_an_embedder(tmp_path: Path, one: Path) -> None:
    clip(tmp_path)
    picture = load_isolated(one)
    with EngineClient() as separate:
        separate.load(str(tmp_path), {"threads": 1})
        separate.begin(queue=QUEUE, share_cache=False)
        assert not separate.writes and not separate.busy
        made = separate.embeddings([picture], ["a cat"])
        here = load_embedder(tmp_path, threads=1)
        assert (separate.name, separate.width, separate.context) == (
            here.name,
            here.width,
            here.checkpoint.family.text.context,
        )
        assert np.abs(made.vectors - here.embed([picture], ["a cat"])).max() < 1e-5
        assert made.receipt.images[0].sha256 == picture.sha256
        assert separate.stats().images == 1
        with pytest.raises(PromptError, match="text 1"):
            separate.embeddings([], ["word " * 900], whole=True)


def test_a_dual_encoder_has_no_use_for_some_options(tmp_path: Path) -> None:
    clip(tmp_path)
    with (
        EngineClient() as separate,
        pytest.raises(OptionError, match=r"--context: .* dual encoder"),
    ):
        separate.load(str(tmp_path), {"context": 99})


def test_one_of_several_is_opened_and_dropped() -> None:
    with EngineClient() as separate:
        facts = separate.open("demo", {"context": 256, "threads": 1}, "mine")
        assert facts["context"] == 256 and facts["sees"] and facts["needs"]["cpu"] > 10 << 20
        assert separate.weights_read()[0] == 0
        separate.drop()
        memory = separate.memory({"memory_limit": "1GiB"})
        assert memory["limits"] == {"cpu": 1 << 30} and memory["free"]["cpu"] > 0
        limited = separate.open("demo", {"threads": 1, "memory_limit": "1GiB"}, "mine")
        assert limited["needs"]["cpu"] < 1 << 30
        separate.begin(queue=QUEUE, share_cache=False)
        assert separate.name == "mine"
        assert answer(separate.submit(TEXT, max_tokens=2)).receipt.output_tokens == 2


def test_a_process_that_fails_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "DELAY_S", 0.1)
    began = time.monotonic()
    with started(restarts=True) as separate:
        took_s, before = (time.monotonic() - began) / 2, separate.pid
        tickets = [separate.submit(TEXT, max_tokens=1500, ignore_eos=True) for _ in range(2)]
        os.kill(before, signal.SIGKILL)
        for ticket in tickets:
            with pytest.raises(EngineError, match=r"by SIGKILL\); it is restarting"):
                list(ticket)
        until(lambda: separate.failure)
        with pytest.raises(EngineError) as caught:
            separate.submit(TEXT)
        assert caught.value.retry_after_s >= took_s and not separate.busy
        until(lambda: separate.failure is None)
        assert all(
            record.message.startswith("demo model: the model's") for record in caplog.records
        )
        assert separate.pid != before and separate.fault is None
        assert answer(separate.submit(TEXT, max_tokens=2)).receipt.output_tokens == 2


def test_one_that_cannot_be_started_again_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor, "DELAY_S", 0.01)
    monkeypatch.setattr(supervisor, "STARTS_MAX", 2)
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    with EngineClient(restarts=True) as separate:
        separate.load(str(model), {"threads": 1})
        separate.begin(queue=QUEUE, share_cache=False)
        reported: list[DeviceError] = []
        separate.on_fault(reported.append)
        shutil.rmtree(model)
        os.kill(separate.pid, signal.SIGKILL)
        until(lambda: reported)
        assert "model" in str(reported[0]) and "start the process again" in str(reported[0])
        with pytest.raises(DeviceError, match="start the process again"):
            separate.submit(TEXT)


def test_a_fault_of_the_device_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever hangs in a device would not let it go."""
    monkeypatch.setattr(supervisor, "DELAY_S", 0.1)
    with started(restarts=True) as separate:
        before = separate.pid
        fault = DeviceError(f"the device hangs; {AGAIN}")
        separate._connection._take(Failed(fault))
        until(lambda: separate.failure is None and separate.pid != before)
        assert not Path(f"/proc/{before}").exists()
        assert answer(separate.submit(TEXT, max_tokens=2)).receipt.output_tokens == 2
