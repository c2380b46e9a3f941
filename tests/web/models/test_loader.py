"""Models in processes of their own: opened, loaded, and their memory given back."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_service import until

from mtmd import DeviceError, MtmdError, OptionError
from mtmd.base.errors import EngineError
from mtmd.checkpoint.collection import Source, read_sources
from mtmd.checkpoint.hub import Result
from mtmd.checkpoint.pull import Arriving, Pulled
from mtmd.engine_process import supervisor
from mtmd.loading import DEMO_MODEL
from mtmd.web.models.loader import ProcessLoader
from mtmd.web.models.presets import NONE, Preset
from mtmd.web.models.start import make_registry
from mtmd.web.settings import ServerSettings

OPTIONS = {"threads": 1, "parallel": 2}
SERVICE = {"queue": 8, "share_cache": False, "hang_s": None}
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def source():
    return read_sources(["demo"])[0]


@pytest.fixture
def loader():
    made = ProcessLoader(OPTIONS | {"memory_limit": "1GiB"}, **SERVICE, warm_up=False)
    yield made
    made.close()


def test_a_process_is_opened_loaded_and_ended(loader, source):
    """Each costs seconds to start: one takes all of the ways that there are."""
    assert loader.limits == {"cpu": 1 << 30} and loader.free()["cpu"] > 0
    surveyed = loader._ready.pid
    opened = loader.open(source, Preset(load={"context": 256}))
    assert opened.facts.sees and opened.facts.context == 256
    assert source.bytes < opened.facts.needs["cpu"] < 100 << 20
    assert opened.weights_read()[0] == 0
    opened.close()
    assert opened.weights_read() == (0, 0), "for who asks how far it is"
    opened.close()  # as a server that ends while it is unloaded

    opened = loader.open(source, NONE)
    served = opened.start(("small",), Preset(system="Be brief."))
    assert served.service.pid == surveyed and loader._ready is None
    assert (served.name, served.names, served.system) == ("demo", ("demo", "small"), "Be brief.")
    assert until(lambda: opened.weights_read()[0] > 0)  # said four times a second
    assert list(served.service.submit(HELLO, max_tokens=2))[-1].answer.receipt.model == "demo"
    opened.close()
    assert not loader._loaded and not Path(f"/proc/{surveyed}").exists()
    assert loader.free()["cpu"] > 0 and loader._ready is None, "read without a process"


def test_a_process_that_fails_while_it_opens_a_model_is_not_used_again(loader, source, monkeypatch):
    def crash(engine, *_):
        os.kill(engine.pid, signal.SIGKILL)
        return really(engine, *_)

    really = supervisor.EngineClient.open
    monkeypatch.setattr(supervisor.EngineClient, "open", crash)
    with pytest.raises(DeviceError, match="by SIGKILL"):
        loader.open(source, NONE)
    assert loader._ready is None


def test_what_is_free_on_a_device_is_asked_of_a_process(loader):
    """Of any; an earlier number stands where it does not answer."""
    answers = [MtmdError("it fails"), {"limits": {}, "free": {"cuda": 3, "cpu": 4}}]

    def memory(*_):
        result = answers.pop()
        if isinstance(result, Exception):
            raise result
        return result

    loader._free = {"cuda": 1, "cpu": 2}
    assert loader.free() == {"cuda": 1, "cpu": loader.free()["cpu"]}
    loader._loaded = [SimpleNamespace(memory=memory)]
    assert loader.free() == {"cuda": 3, "cpu": 4}
    assert loader.free() == {"cuda": 3, "cpu": 4} and not answers


def test_what_was_fetched_is_opened_without_asking_the_hub(tmp_path, monkeypatch, loader):
    """A branch that has moved on would be fetched in the midst of loading, others waiting."""
    commit = "0" * 40
    snapshot = tmp_path / "models--org--demo" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in DEMO_MODEL.iterdir():
        (snapshot / file.name).symlink_to(file)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    opened = loader.open(Source("me", "org/demo", 5, ""), NONE)
    assert opened.facts.sees
    opened.close()


def test_a_fetch_tells_how_far_it_is_and_how_large_it_was(monkeypatch):
    arriving = Arriving(Path("none"), 0, 30)
    reported = []

    def pull(model, *, report):
        assert model == "org/x:Q4_0"
        report(arriving)
        return Pulled(Result(Path("none")), 2, 40, 30, ())

    monkeypatch.setattr("mtmd.checkpoint.pull.pull", pull)
    away = Source("x", "org/x:Q4_0", None, "")
    here = ProcessLoader(OPTIONS, **SERVICE).fetch(away, reported.append)
    assert (here.name, here.bytes, here.is_here) == ("x", 40, True)
    assert reported[0]() == (0, 30)


def make(*given, first=None, maximum=None, unload_after_s=0.0, presets=None):
    return make_registry(
        given,
        first,
        ServerSettings(),
        OPTIONS,
        presets=presets,
        maximum=maximum,
        unload_after_s=unload_after_s,
        warm_up=False,
    )


def test_from_the_options_of_the_command_to_an_answer_and_its_memory_given_back(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(supervisor, "DELAY_S", 0.1)
    file = tmp_path / "presets.json"
    file.write_text('{"demo": {"aliases": ["small"]}}')
    registry = make("demo", presets=str(file))
    registry.start()
    try:
        entry = registry.take("small")
        service = entry.served.service
        ticket = service.submit(HELLO, max_tokens=2)
        assert list(ticket)[-1].answer.receipt.model == "demo"
        assert registry.find("demo").needs_bytes["cpu"] > 10 << 20
        first = service.pid
        ticket = service.submit(HELLO, max_tokens=1500, ignore_eos=True)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(EngineError):
            list(ticket)
        assert until(lambda: registry.failures())
        assert until(lambda: not registry.failures(), 60)
        assert service.pid != first and registry.find("demo").state == "loaded"
        assert list(service.submit(HELLO, max_tokens=2))[-1].answer.receipt.model == "demo"
        registry.give_back(entry)
        registry.unload("demo")
        assert until(lambda: registry.find("demo").state == "unloaded")
        assert not Path(f"/proc/{service.pid}").exists()
        assert not registry._loader._loaded
    finally:
        registry.close()


def test_the_first_is_the_default_and_is_added_where_it_is_not_there(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"0" * 60)
    registry = make(str(tmp_path), first="demo")
    assert [m.name for m in registry.listed()] == ["x", "demo"]
    assert registry.find(None).name == "demo"
    registry.close()
    same = make(str(tmp_path), first=str(tmp_path / "x.gguf"))
    assert [m.name for m in same.listed()] == ["x"]
    same.close()


def test_a_default_is_one_model_and_not_the_first_of_a_folder(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF" + b"0" * 60)
    with pytest.raises(OptionError, match=r"holds 2 models, expected one; .*/a\.gguf$"):
        make("demo", first=str(tmp_path))


@pytest.mark.parametrize(
    "options, reported", [({"maximum": 0}, "models-max"), ({"unload_after_s": 0.5}, "unload-after")]
)
def test_options_out_of_their_ranges(options, reported):
    with pytest.raises(OptionError, match=reported):
        make("demo", **options)
