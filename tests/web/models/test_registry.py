"""Who waits for which model, what is unloaded for it, what is told when it cannot be."""

from __future__ import annotations

import itertools
import random
import threading
import time
from contextlib import contextmanager, nullcontext

import pytest
from fake_models import GIB, FakeLoader, FakeOpened, registry_of
from fake_service import until
from flask import Flask

from mtmd import BusyError, DeviceError, ModelError
from mtmd.base.cancellation import cancel_if, shielded
from mtmd.base.errors import LeftError
from mtmd.base.turns import set_owner
from mtmd.checkpoint.hub import NotInCacheError
from mtmd.web.errors import ApiError
from mtmd.web.models import fetching, schedule
from mtmd.web.models import registry as module
from mtmd.web.models.choice import FAILED, LOADED, LOADING, UNLOADED
from mtmd.web.models.choice import state_of as state_of_server
from mtmd.web.models.presets import Preset
from mtmd.web.settings import HAS_LEFT


@pytest.fixture(autouse=True)
def nobody():
    """What a test does for somebody ends with it."""
    yield
    set_owner("")


@contextmanager
def started(needs, **options):
    registry, loader = registry_of(needs, **options)
    registry.start()
    try:
        yield registry, loader
    finally:
        loader.gate.set()
        loader.hub.set()
        registry.close()


def state_of(registry, name):
    return registry.find(name).state


def take(registry, name, **more):
    """In a thread: (the entry or the error, the thread)."""
    result = []

    def run():
        try:
            result.append(registry.take(name, **more))
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return result, thread


def test_it_is_loaded_when_it_is_asked_for_and_the_progress_is_told():
    with started({"a": 4, "b": 4}) as (registry, loader):
        loader.gate.clear()
        result, thread = take(registry, "b")
        assert until(lambda: "load b" in loader.log)
        loader.read = (42, 100)
        assert registry.loading()["progress"] == 0.42
        listed = registry.find("b")
        assert (listed.state, listed.progress) == (LOADING, 0.42)
        assert not result and state_of(registry, "a") == UNLOADED
        loader.gate.set()
        thread.join(10)
        assert result[0].served.name == "b" and registry.loading() is None
        assert registry.take("b") is result[0], "at once, now that it is there"
        assert registry.find(None).name == "b", "for requests that name none"


def test_what_is_not_here_is_told_with_what_is():
    with started({"tiny-a": 1, "tiny-b": 1}) as (registry, _):
        with pytest.raises(ApiError) as reported:
            registry.take("tiny-c")
        assert reported.value.status == 404 and reported.value.code == "model_not_found"
        assert (
            "did you mean 'tiny-" in reported.value.message and "'tiny-b'" in reported.value.message
        )


def test_the_demo_model_among_others_has_both_of_its_names():
    with started({"demo": 1, "b": 1}) as (registry, _):
        assert registry.take("demo model").name == registry.take("demo").name == "demo"
        with pytest.raises(ApiError, match="--any-model accepts other names"):
            registry.take("gpt-4o")


def test_aliases_and_any_name():
    presets = {"b": Preset(aliases=("gpt-4o",))}
    with started({"a": 1, "b": 1}, presets=presets, any_name=True) as (registry, _):
        assert registry.take("gpt-4o").name == "b"
        assert registry.take("whatever").name == "a"


def test_requests_that_name_no_model_go_to_the_default_whatever_was_used_last():
    with started({"a": 4, "b": 4}, default="a") as (registry, loader):
        registry.give_back(registry.take("b"))
        assert registry.find(None).name == "a"
        assert registry.at_hand(None).name == "b", "for who asks what is in memory"
        registry.give_back(registry.take(None))
        assert loader.log == ["load b", "load a"]
        registry.unload("a")
        assert until(lambda: state_of(registry, "a") == UNLOADED)
        loader.fails["a"] = ModelError("it is damaged")
        with pytest.raises(ApiError, match="it is damaged"):
            registry.take(None)
        with pytest.raises(ApiError, match="it is damaged"):
            registry.take(None)  # and no other model answers in its name


def test_one_that_fails_fails_only_those_who_wait_for_it_and_is_tried_again_later():
    clock = [1000.0]
    with started({"a": 4, "b": 4}, clock=lambda: clock[0]) as (registry, loader):
        loader.fails["a"] = ModelError("config.json: model_type is 'x', expected another")
        with pytest.raises(ApiError) as reported:
            registry.take("a")
        assert reported.value.status == 503 and reported.value.code == "model_not_loaded"
        assert reported.value.message.endswith("config.json: model_type is 'x', expected another")
        assert registry.take("b").served.name == "b"
        assert loader.taken == {"b": 4}, "what it had taken is given back"
        with pytest.raises(ApiError):  # at once: it is not tried for every request
            registry.take("a")
        assert loader.log.count("load a") == 1
        del loader.fails["a"]
        clock[0] += module.TRIED_AGAIN_S
        assert registry.take("a").served.name == "a"


def test_a_mistake_in_loading_is_no_text_for_clients(caplog):
    with started({"a": 4}) as (registry, loader):
        loader.fails["a"] = KeyError("secret")
        with pytest.raises(ApiError) as reported:
            registry.take("a")
        assert reported.value.message.endswith("internal error: KeyError")
    assert "secret" in caplog.text


class Panic(BaseException):
    """As what a library in Rust ends by."""


@pytest.mark.parametrize("error", [KeyError("x"), Panic("x")], ids=["error", "panic"])
def test_whatever_goes_wrong_others_are_loaded_after_it(monkeypatch, error, caplog):
    """In a load; where one is unloaded; where the next step is chosen."""
    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    monkeypatch.setattr(module, "LONGEST_WAIT_S", 10.0)
    with started({"a": 4, "b": 4}) as (registry, loader):
        loader.fails["a"] = error
        with pytest.raises(ApiError, match="internal error"):
            registry.take("a")
        entry = registry.take("b")
        registry.give_back(entry)
        entry.opened.close = failing(error)
        registry.unload("b")
        assert until(lambda: registry.find("b").state == FAILED)
        registry.load("b")
        assert until(lambda: registry.find("b").state == LOADED)
        loader.fails.clear()
        with monkeypatch.context() as broken:
            broken.setattr(registry, "_next_step", failing(error))
            registry._entries["a"].state = UNLOADED
            with pytest.raises(ApiError, match="internal error"):
                registry.take("a")
        registry.load("a")
        assert until(lambda: registry.find("a").state == LOADED)
    assert "Traceback" in caplog.text


def test_one_that_fails_after_its_start_or_in_closing_gives_its_memory_back(caplog):
    """It is not counted any more: what it still took would be missing to all others."""
    loader = FakeLoader({"a": 8, "b": 8})
    close, raised = FakeOpened.close, []

    class Opened(FakeOpened):
        def start(self, aliases, preset):
            served = super().start(aliases, preset)
            if self.name == "a":
                served.service.on_fault = failing(KeyError("a"))
            return served

        def close(self):
            if hasattr(self, "service") and not raised:
                raised.append(self.name)
                raise KeyError("closing")
            close(self)

    loader.open = lambda source, preset: Opened(loader, source, preset)
    with started(loader.needs, loader=loader) as (registry, _):
        raised.append("not yet")
        with pytest.raises(ApiError, match="internal error"):
            registry.take("a")
        assert not loader.taken and registry.room()["cpu"]["taken"] == 0
        registry.give_back(registry.take("b"))
        raised.clear()
        registry.unload("b")
        assert until(lambda: state_of(registry, "b") == FAILED)
        assert raised == ["b"] and not loader.taken
    assert "Traceback" in caplog.text


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


def test_where_the_files_lie_is_for_the_log_and_not_for_clients(caplog):
    with started({"a": 4}) as (registry, loader):
        loader.fails["a"] = ModelError("/models/a/config.json: found no JSON")
        with pytest.raises(ApiError, match=r"cannot be loaded: a/config.json: found no JSON"):
            registry.take("a")
    assert caplog.text.count("/models/a/config.json: found no JSON") == 1


def test_too_little_memory_is_told_as_that_also_in_the_words_of_torch():
    class OutOfMemoryError(RuntimeError):
        pass

    with started({"a": 4}) as (registry, loader):
        loader.fails["a"] = OutOfMemoryError("CUDA out of memory. Tried to allocate ...")
        with pytest.raises(ApiError, match="not enough memory"):
            registry.take("a")


def test_how_far_a_load_is_waits_for_nobody():
    """The loop of connections asks, for /ready: a driver that hangs must not stop it."""
    with started({"a": 4, "b": 4}) as (registry, loader):
        loader.gate.clear()
        registry.load("a")
        assert until(lambda: registry.find("a").state == LOADING)
        stored = []
        with registry._changed:
            requesting = threading.Thread(
                target=lambda: stored.append(registry.loading()), daemon=True
            )
            requesting.start()
            requesting.join(10)
            assert stored and stored[0]["status"] == "loading"
        loader.gate.set()
        free = loader.free

        def requested():
            assert not registry._changed._is_owned(), "others would wait"
            return free()

        loader.free = requested
        registry.listed(), registry.find("a"), registry.room(), registry.take("b")


def test_one_that_panics_where_it_is_looked_at_is_told_in_the_list(caplog):
    loader = FakeLoader({"a": 4, "b": 4})
    loader.fails["open b"] = Panic("x")
    with started({"a": 4, "b": 4}, loader=loader) as (registry, _):
        assert until(lambda: registry.find("b").state == FAILED)
        assert registry.take("a").name == "a"
    assert "b cannot be loaded" in caplog.text


def test_one_makes_room_for_the_other_once_its_answers_are_written():
    clock = [1000.0]
    with started({"a": 8, "b": 8}, clock=lambda: clock[0]) as (registry, loader):
        a = registry.take("a")
        a.served.service.under_way.append("an answer")
        registry.give_back(a)
        result, thread = take(registry, "b")
        clock[0] += 100  # its turn is over
        assert until(lambda: state_of(registry, "a") == "unloading")
        assert "unload a" not in loader.log, "an answer is under way"
        late, late_thread = take(registry, "a")  # nobody new is let in
        assert not late_thread.join(0.05) and not late
        a.served.service.under_way.clear()
        clock[0] += 100
        thread.join(10)
        assert result[0].name == "b" and loader.log[-2:] == ["unload a", "load b"]
        registry.give_back(result[0])
        clock[0] += 100
        late_thread.join(10)
        assert late[0].name == "a" and loader.log[-2:] == ["unload b", "load a"]


def test_those_who_waited_are_let_in_before_it_can_go_again():
    clock = [1000.0]
    with started({"a": 8, "b": 8}, clock=lambda: clock[0]) as (registry, loader):
        loader.gate.clear()
        waiting = [take(registry, "a") for _ in range(3)]
        assert until(lambda: len(registry._entries["a"].waiters) == 3)
        other, thread = take(registry, "b")
        loader.gate.set()
        for result, each in waiting:
            each.join(10)
            assert result[0].name == "a"
        assert registry._entries["a"].users == 3 and "unload a" not in loader.log
        for result, _ in waiting:
            registry.give_back(result[0])
        clock[0] += 100
        thread.join(10)
        assert other[0].name == "b"


def test_beside_an_endless_answer_others_are_let_in_again_and_its_model_leaves_at_its_end():
    clock = [1000.0]
    with started({"a": 8, "b": 8}, clock=lambda: clock[0]) as (registry, loader):
        a = registry.take("a")
        a.served.service.under_way.append("an endless answer")
        registry.give_back(a)
        other, other_thread = take(registry, "b")
        for patience_s in (30, 60):
            clock[0] += 100
            assert until(lambda: registry._entries["a"].state == "unloading")
            late = [take(registry, "a", client=name) for name in ("kim", "lee")]
            assert until(lambda: len(a.waiters) == 2)
            assert not any(result for result, _ in late)
            clock[0] += patience_s
            for result, late_thread in late:
                late_thread.join(10)
                assert result[0] is a and not other
                registry.give_back(a)
        a.served.service.under_way.clear()
        clock[0] += 200
        other_thread.join(10)
        assert other[0].name == "b" and loader.log[-1] == "load b"
        registry.give_back(other[0])


def test_what_never_fits_is_refused_with_the_numbers_and_others_go_on():
    with started({"a": 4, "b": 40}) as (registry, _):
        with pytest.raises(ApiError) as reported:
            registry.take("b")
        assert "needs 40.0 GiB of memory (cpu)" in reported.value.message
        assert registry.take("a").name == "a"


def test_what_it_takes_may_be_known_only_once_it_is_opened():
    """The files say 1 GiB, the plan 8: then the other makes room after all."""
    loader = FakeLoader({"a": 8, "b": 8})
    ticks = itertools.count(1000.0, 10.0)
    registry, _ = registry_of({"a": 8, "b": 1}, loader=loader, clock=lambda: next(ticks))
    registry._to_survey.clear()
    registry.start()
    try:
        registry.give_back(registry.take("a"))
        assert registry.take("b").name == "b"
        assert loader.log == ["load a", "unload a", "load b"]
    finally:
        registry.close()


def test_nobody_makes_room_for_one_that_cannot_be_opened():
    """Whoever asked for it again and again would have all others loaded anew each time."""
    clock = [1000.0]
    loader = FakeLoader({"a": 8, "b": 8, "c": 8})
    loader.fails["open b"] = ModelError("no such architecture")
    made, _ = registry_of(loader.needs, loader=loader, clock=lambda: clock[0])
    made._to_survey.clear()
    made.start()
    try:
        made.give_back(made.take("a"))
        for _ in range(2):
            clock[0] += 100
            with pytest.raises(ApiError, match="no such architecture"):
                made.take("b")
            made.load("b")
            assert until(lambda: made.find("b").state == FAILED)
        assert loader.log == ["load a"]
        made.give_back(made.take("c"))
        assert loader.log == ["load a", "unload a", "load c"]
    finally:
        made.close()


def test_what_would_not_load_is_known_before_anybody_asks():
    with started({"a": 4, "b": 4, "c": 12}, loader=_failing_to_open("b")) as (registry, _):
        assert until(lambda: registry.find("b").state == FAILED)
        assert registry.find("b").reason == "no such architecture"
        assert until(lambda: registry.find("c").room == "too large")
        assert registry.find("a").room == "fits"
        registry.take("a")
        assert registry.find("a").room == "" and registry.room()["cpu"]["taken"] == 4 * GIB


def _failing_to_open(name):
    loader = FakeLoader({"a": 4, "b": 4, "c": 12})
    loader.fails["open " + name] = ModelError("no such architecture")
    return loader


def test_idle_ones_are_unloaded():
    clock = [1000.0]
    with started({"a": 4}, unload_after_s=60.0, clock=lambda: clock[0]) as (registry, _):
        entry = registry.take("a")
        clock[0] += 100
        idle = module.Room(None, {}, {}, unload_after_s=60.0)
        with registry._changed:
            assert isinstance(registry._next_step(idle), schedule.Wait), "somebody has it"
        registry.give_back(entry)
        clock[0] += 61
        with registry._changed:
            registry._changed.notify_all()
        assert until(lambda: state_of(registry, "a") == UNLOADED)


def test_by_hand():
    with started({"a": 4, "b": 4}) as (registry, loader):
        registry.load("a")
        assert until(lambda: state_of(registry, "a") == LOADED)
        registry.unload("a", 60.0)
        assert state_of(registry, "a") == UNLOADED
        assert loader.log == ["load a", "unload a"]
        entry = registry.take("a")
        registry.unload("a", 1e9)  # which is in use, and not waited for
        assert state_of(registry, "a") == "unloading"
        registry.give_back(entry)


def test_unloading_by_hand_takes_no_model_from_others():
    """Whoever asks for it after that keeps it, and after their answers it is not gone at once."""
    clock = [1000.0]
    with started({"a": 4}, clock=lambda: clock[0]) as (registry, loader):
        entry = registry.take("a", client="lee")
        set_owner("kim")
        registry.unload("a")
        assert state_of(registry, "a") == "unloading", "as lists show it"
        again = registry.take("a", client="lee")
        assert again is entry and state_of(registry, "a") == LOADED
        for _ in range(2):
            registry.give_back(entry)
        registry.unload("a")
        with registry._changed:
            assert registry._next_step(module.Room(None, {}, {})) == schedule.Wait(schedule.LOOK_S)
        clock[0] += 100
        assert until(lambda: state_of(registry, "a") == UNLOADED)
        set_owner("lee")
        registry.give_back(registry.take("a", client="lee"))
        registry.unload("a")
        assert until(lambda: loader.log.count("unload a") == 2), "their own, at once"


def test_one_that_somebody_wants_loaded_is_loaded_though_another_does_not():
    with started({"a": 4, "b": 4}) as (registry, loader):
        loader.gate.clear()
        registry.load("a")
        assert until(lambda: "load a" in loader.log)
        set_owner("kim")
        registry.load("b")
        came = registry._entries["b"].requested_at
        set_owner("lee")
        registry.load("b")
        registry.unload("b")
        assert registry._entries["b"].requested_at == came
        loader.gate.set()
        assert until(lambda: state_of(registry, "b") == LOADED)


def test_one_client_that_asks_for_one_model_after_another_does_not_stand_before_others():
    clock = [1000.0]
    with started({"a": 8, "b": 8, "c": 8}, clock=lambda: clock[0]) as (registry, loader):
        set_owner("kim")
        loader.gate.clear()
        result, thread = take(registry, "a", client="kim")
        assert until(lambda: "load a" in loader.log)
        waiting = [take(registry, "b", client="kim")]
        assert until(lambda: len(registry._entries["b"].waiters) == 1)
        clock[0] += 10
        waiting.append(take(registry, "c", client="lee"))
        assert until(lambda: len(registry._entries["c"].waiters) == 1)
        loader.gate.set()
        thread.join(10)
        registry.give_back(result[0])
        clock[0] += 100
        assert until(lambda: waiting[1][0]) and not waiting[0][0]
        assert loader.log == ["load a", "unload a", "load c"]
        registry.give_back(waiting[1][0][0])
        clock[0] += 100
        assert until(lambda: waiting[0][0])
        registry.give_back(waiting[0][0][0])


def test_one_that_is_not_here_is_fetched_while_others_are_loaded_and_answer(monkeypatch):
    monkeypatch.setattr(fetching, "LOOKED_S", 0.01)
    with started({"a": 4, "b": 4, "c": 1}, away=("b", "c")) as (registry, loader):
        loader.hub.clear()
        with pytest.raises(ApiError, match=r"is being downloaded .* 0% so far") as reported:
            registry.take("b")
        assert (reported.value.status, reported.value.code) == (503, "model_loading")
        assert reported.value.headers["Retry-After"]
        assert until(lambda: "fetch b" in loader.log) and registry.fetching
        loader.read = (42, 100)
        assert until(lambda: registry.find("b").progress == 0.42)
        with pytest.raises(ApiError, match="42% so far"):
            registry.take("b")
        listed = registry.find("b")
        assert (listed.state, listed.progress, listed.file_bytes) == (LOADING, 0.42, None)
        assert "fetching" in listed.stage and registry.loading()["progress"] == 0.42
        with pytest.raises(ApiError, match="'c' waits until another one is fetched"):
            registry.take("c")
        assert registry.find("c").stage == "waiting until another one is fetched"
        registry.give_back(registry.take("a"))
        assert loader.log == ["fetch b", "load a"]
        loader.hub.set()
        assert until(lambda: state_of(registry, "b") == state_of(registry, "c") == LOADED)
        assert registry.find("b").file_bytes == 4 * GIB and registry.loading() is None
        assert until(lambda: not registry.fetching)
        assert loader.log[2:] in (["fetch c", "load b", "load c"], ["load b", "fetch c", "load c"])


def test_one_that_was_removed_from_the_cache_is_fetched_again():
    clock = [1000.0]
    with started({"a": 4}, clock=lambda: clock[0]) as (registry, loader):
        assert until(lambda: registry.find("a").context)
        loader.fails["open a"] = NotInCacheError("model 'a' is not in the local cache")
        with pytest.raises(ApiError, match="cannot be loaded: model 'a' is not in the local cache"):
            registry.take("a")
        assert registry.find("a").file_bytes is None
        del loader.fails["open a"]
        clock[0] += module.TRIED_AGAIN_S
        with pytest.raises(ApiError, match="is being downloaded"):
            registry.take("a")
        assert until(lambda: state_of(registry, "a") == LOADED)
        assert loader.log == ["fetch a", "load a"] and registry.find("a").file_bytes


def test_how_far_a_fetch_is_waits_for_no_disk():
    """The cache may lie on one that hangs; the loop of connections asks, and all who choose."""
    looking, answered = threading.Event(), threading.Event()

    def read():
        looking.set()
        assert answered.wait(20)
        return 42, 100

    loader = FakeLoader({"a": 4})
    loader.hub.clear()
    fetch = loader.fetch
    loader.fetch = lambda source, report: fetch(source, lambda _: report(read))
    with started({"a": 4}, loader=loader, away=("a",)) as (registry, _):
        registry.load("a")
        assert looking.wait(10)
        reported = []
        requesting = threading.Thread(
            target=lambda: reported.extend([registry.loading(), registry.find("a")]), daemon=True
        )
        requesting.start()
        requesting.join(10)
        assert [reported[0]["progress"], reported[1].progress] == [0.0, 0.0]
        answered.set()
        assert until(lambda: registry.loading()["progress"] == 0.42)


def test_where_no_thread_can_be_started_a_fetch_fails_and_the_next_one_is_tried(monkeypatch):
    clock = [1000.0]
    with started({"a": 4, "b": 4}, away=("a", "b"), clock=lambda: clock[0]) as (registry, _):
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", failing(RuntimeError("can't start new thread")))
            with pytest.raises(
                ApiError, match=r"fetched now \(can't start new thread\); try again"
            ):
                registry.take("a")
        assert not registry.fetching and state_of(registry, "a") == FAILED
        registry.load("b")
        assert until(lambda: state_of(registry, "b") == LOADED)
        clock[0] += module.TRIED_AGAIN_S
        registry.load("a")
        assert until(lambda: state_of(registry, "a") == LOADED)


def test_one_that_cannot_be_fetched_says_why_and_is_tried_again():
    clock = [1000.0]
    with started({"a": 4}, away=("a",), clock=lambda: clock[0]) as (registry, loader):
        loader.fails["fetch a"] = ModelError("model 'a' is gated on the Hugging Face hub")
        registry.load("a")
        assert until(lambda: registry.find("a").state == FAILED)
        with pytest.raises(ApiError, match="cannot be loaded: model 'a' is gated"):
            registry.take("a")
        del loader.fails["fetch a"]
        clock[0] += module.TRIED_AGAIN_S
        with pytest.raises(ApiError, match="is being downloaded"):
            registry.take("a")
        assert until(lambda: state_of(registry, "a") == LOADED)
        assert loader.log == ["fetch a", "fetch a", "load a"]


def test_who_leaves_while_it_is_loaded_is_not_let_in_but_for_what_is_wanted_in_any_case(
    monkeypatch,
):
    monkeypatch.setattr(module, "GONE_EVERY_S", 0.01)
    app, result = Flask("test"), {}
    has_left = {HAS_LEFT: lambda: True}

    def choose(registry, name, shielded):
        cancel_if(lambda: True)
        with app.test_request_context(environ_overrides=has_left), shielded:
            try:
                result[name] = registry.choose("a").name
            except Exception as error:
                result[name] = type(error)

    with started({"a": 4}) as (registry, loader):
        registry.register(app)
        loader.gate.clear()
        answers = threading.Thread(target=choose, args=(registry, "page", shielded()))
        answers.start()
        assert until(lambda: registry._entries["a"].waiters)
        leaves = threading.Thread(target=choose, args=(registry, "api", nullcontext()))
        leaves.start()
        leaves.join(10)
        assert result == {"api": LeftError}, "it has looked meanwhile, too"
        loader.gate.set()
        answers.join(10)
        assert result["page"] == "a" and registry._entries["a"].users == 0, "given back, and once"


def test_no_more_wait_than_there_are_threads_for_and_no_client_has_all_places(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    with started({"a": 4, "b": 1}) as (registry, loader):
        loader.gate.clear()
        waiting = [take(registry, "a", client="kim")]
        assert until(lambda: registry._slots.taken == 1)
        waiting.append(take(registry, "a", client="lee"))
        assert until(lambda: registry._slots.taken == 2)
        with pytest.raises(
            BusyError, match=r"1 requests wait until .* for this client"
        ) as reported:
            registry.take("b", client="kim")
        assert reported.value.retry_after_s >= 1
        with pytest.raises(BusyError, match="2 requests wait until"):
            registry.take("b", client="ann")
        loader.gate.set()
        for result, thread in waiting:
            thread.join(10)
            assert result[0].name == "a"
        assert registry.take("b", client="ann").name == "b" and not registry._slots.taken


def test_answers_are_ended_at_once_where_the_server_ends_while_another_is_loaded():
    with started({"a": 4, "b": 4}) as (registry, loader):
        service = registry.take("a").served.service
        loader.gate.clear()
        take(registry, "b")
        assert until(lambda: "load b" in loader.log)
        closing = threading.Thread(target=registry.close, daemon=True)
        closing.start()
        assert until(lambda: service.closed)
        assert closing.is_alive(), "the load is waited for"
        loader.gate.set()
        closing.join(10)
        assert not closing.is_alive() and not loader.taken


def test_one_that_was_to_be_unloaded_while_it_was_opened_stays_when_it_is_loaded_after_all():
    """It was found to be larger than it looked, and others had to make room first."""
    ticks, opened = itertools.count(1000.0, 10.0), []
    loader = FakeLoader({"a": 8, "b": 8})
    registry, _ = registry_of({"a": 8, "b": 1}, loader=loader, clock=lambda: next(ticks))
    registry._to_survey.clear()
    open_it = loader.open

    def open_and_unload(source, preset):
        if source.name == "b" and not opened:
            opened.append(source.name)
            registry.unload("b")
        return open_it(source, preset)

    loader.open = open_and_unload
    registry.start()
    try:
        registry.give_back(registry.take("a"))
        assert registry.take("b").name == "b"
        assert not registry._entries["b"].to_unload and state_of(registry, "b") == LOADED
    finally:
        registry.close()


def test_whether_it_is_busy_is_asked_while_nothing_is_unloaded():
    with started({"a": 4}) as (registry, _):
        entry = registry.take("a")

        class UnderWay:
            def __bool__(self):
                return registry._changed._is_owned()

        registry.give_back(entry)
        assert not registry.busy
        entry.served.service.under_way = UnderWay()
        assert registry.busy, "a model that is unloaded meanwhile has no service"
        entry.served.service.under_way = []


def test_a_model_whose_process_has_failed_for_good_is_loaded_anew_while_others_answer():
    with started({"a": 4, "b": 4}) as (registry, loader):
        first = registry.take("a").served.service
        first.submit([{"role": "user", "content": "hi"}])
        other = registry.take("b").served.service
        fault = DeviceError("the model's process has ended (by SIGKILL)")
        first.fail(fault)
        assert until(lambda: state_of(registry, "a") == FAILED)
        assert first.closed and registry.fault is None and "a" not in loader.taken
        with pytest.raises(ApiError, match="by SIGKILL"):
            registry.take("a")
        assert registry.take("b").served.service is other and not other.closed
        registry.load("a")
        assert until(lambda: state_of(registry, "a") == LOADED)
        assert registry.take("a").served.service is not first
        assert registry.measured()[0].stats.requests == 1


def test_models_that_are_being_started_again_are_named():
    with started({"a": 4, "b": 4}) as (registry, _):
        registry.take("a").served.service.failure = "it has ended"
        registry.take("b")
        assert registry.failures() == {"a": "it has ended"}
        state, status = state_of_server(registry, "ok")
        assert (state["status"], status) == ("ok", 200)
        assert state["restarting"] == [{"model": "a", "reason": "it has ended"}]


def test_a_fault_is_the_servers_where_that_was_chosen():
    reported = []
    with started({"a": 4, "b": 4}, ends_on_fault=True) as (registry, _):
        registry.on_fault(reported.append)
        registry.take("a").served.service.fail(DeviceError("the device hangs"))
        assert str(reported[0]) == "the device hangs" and registry.fault is reported[0]
        with pytest.raises(DeviceError):
            registry.take("b")


def test_numbers_go_on_when_it_is_loaded_anew():
    with started({"a": 4}) as (registry, _):
        entry = registry.take("a")
        service = entry.served.service
        service.latencies.whole.add(1.0)
        service.submit([{"role": "user", "content": "hi"}])
        registry.give_back(entry)
        registry.unload("a")
        assert until(lambda: state_of(registry, "a") == UNLOADED)
        (saved,) = registry.measured()
        assert saved.labels == {"model": "a"} and saved.stats.requests == 1
        again = registry.take("a").served.service
        again.submit([{"role": "user", "content": "hi"}])
        again.latencies.whole.add(2.0)
        (both,) = registry.measured()
        assert both.stats.requests == 2 and both.latencies.whole.total_s == 3.0
        assert both.latencies.whole.counts[-1] == 2
        assert registry.lives()["a"].loads == 2


def test_many_at_once_all_get_their_turn(monkeypatch):
    """The loader sees to it that what is in memory fits; nothing is closed in anybody's hands."""
    for name, value in (("TURN_S", 0.02), ("QUIET_S", 0.002), ("QUIET_LOADS", 0.0)):
        monkeypatch.setattr(schedule, name, value)
    monkeypatch.setattr(schedule, "TURN_LOADS", 0.0)
    monkeypatch.setattr(schedule, "LOOK_S", 0.002)
    needs, answered, wrong = {"a": 6, "b": 6, "c": 3}, [], []
    with started(needs) as (registry, loader):

        def client(seed):
            chance = random.Random(seed)
            for _ in range(12):
                name = chance.choice("abc")
                entry = registry.take(name)
                service = entry.served.service
                service.under_way.append(seed)
                registry.give_back(entry)  # prepared: from here on the service knows of it
                time.sleep(chance.random() / 500)
                wrong.extend([name] * (service.closed or entry.name != name))
                service.under_way.pop()
                answered.append(name)

        threads = [threading.Thread(target=client, args=(n,), daemon=True) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert len(answered) == 6 * 12 and not wrong
    assert 3 <= len([line for line in loader.log if line.startswith("load")]) < 6 * 12


class Asker:
    """Asks for a model, and may leave. Nobody looks after its claim, as where its response is held
    back.
    """

    def __init__(self, registry, name):
        self.gone = False
        cancel_if(lambda: self.gone)
        try:
            self.claim = registry.claim(name)
        finally:
            cancel_if(None)


def test_who_leaves_while_it_is_loaded_has_no_claim_though_nobody_gives_it_back():
    with started({"a": 4, "b": 4}) as (registry, loader):
        loader.gate.clear()
        asker = Asker(registry, "a")
        assert until(lambda: "load a" in loader.log) and registry.busy
        asker.gone = True
        assert not registry.busy and registry.lives()["a"].waiting == 0
        loader.gate.set()
        assert until(lambda: state_of(registry, "a") == LOADED)
        assert not registry._entries["a"].in_use
        with pytest.raises(LeftError):
            asker.claim.wait()
        asker.claim.give_back()
        assert registry._entries["a"].users == 0, "once is enough"


def test_those_who_have_left_leave_room_for_those_who_come(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 1)
    with started({"a": 4}) as (registry, loader):
        loader.gate.clear()
        asker = Asker(registry, "a")
        with pytest.raises(BusyError):
            registry.claim("a")
        asker.gone = True
        registry.claim("a").give_back()


def test_who_leaves_once_it_is_there_does_not_keep_it_in_memory():
    with started({"a": 8, "b": 8}) as (registry, _):
        asker = Asker(registry, "a")
        assert until(lambda: state_of(registry, "a") == LOADED)
        assert not registry._slots.taken, "it waits no more"
        assert asker.claim.wait(0) and registry._entries["a"].in_use
        asker.gone = True
        assert not registry.busy
        with pytest.raises(LeftError):
            asker.claim.chosen()


def test_a_load_that_fails_gives_places_back_though_nobody_asks():
    with started({"a": 4}) as (registry, loader):
        loader.fails["a"] = ModelError("it is damaged")
        asker = Asker(registry, "a")
        assert until(lambda: state_of(registry, "a") == FAILED)
        assert not registry._slots.taken
        with pytest.raises(ApiError, match="it is damaged"):
            asker.claim.wait()


def test_a_claim_that_nobody_asks_for_ends_by_itself(monkeypatch):
    with started({"a": 4}) as (registry, _):
        asker = Asker(registry, "a")
        assert until(lambda: state_of(registry, "a") == LOADED)
        assert registry.busy
        monkeypatch.setattr(module, "UNASKED_S", -1.0)
        assert not registry.busy
        with pytest.raises(ApiError) as reported:
            asker.claim.wait()
        assert reported.value.code == "model_loading" and reported.value.status == 503


def test_a_claim_given_back_from_elsewhere_ends_who_waits_for_it():
    with started({"a": 4}) as (registry, loader):
        loader.gate.clear()
        claim, result = registry.claim("a"), []

        def run():
            try:
                claim.wait()
            except Exception as error:
                result.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        claim.give_back()
        thread.join(10)
        assert [type(error) for error in result] == [LeftError] and not registry.busy


def test_a_claim_is_used_without_a_request_and_let_go_of():
    with started({"a": 4}) as (registry, _):
        claim = registry.claim("a")
        assert claim.wait()
        with claim.using() as served:
            assert served.name == "a" and registry.busy
        assert not registry.busy
