"""Models of this package, loaded one beside the other and let go again."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
from fake_service import until

from mtmd import OptionError
from mtmd.checkpoint.collection import Source, read_sources
from mtmd.checkpoint.hub import Found
from mtmd.checkpoint.pull import Arriving, Pulled
from mtmd.kernels.plan import free_memory
from mtmd.loading import DEMO_MODEL
from mtmd.web.models.loader import PackageLoader
from mtmd.web.models.presets import NONE, Preset
from mtmd.web.models.start import make_registry
from mtmd.web.settings import ServerSettings

OPTIONS = {"threads": 1, "parallel": 2}
SERVICE = {"queue": 8, "share_cache": False, "hang_s": None}


@pytest.fixture(autouse=True)
def collection():
    """As it was: models are left out of it while they are in memory."""
    yield
    gc.unfreeze()


@pytest.fixture
def source():
    return read_sources(["demo"])[0]


def test_what_it_takes_is_known_before_a_weight_is_read(source):
    opened = PackageLoader(OPTIONS, **SERVICE).open(source, Preset(load={"context": 256}))
    assert opened.facts.sees and opened.facts.context == 256
    assert source.bytes < opened.facts.needs["cpu"] < 100 << 20
    assert opened.weights_read()[0] == 0
    opened.close()
    assert opened.weights_read() == (0, 0), "for who asks how far it is"
    opened.close()  # as a server that ends while it is unloaded


def test_a_model_whose_service_could_not_be_closed_is_closed_the_next_time(source, monkeypatch):
    loader = PackageLoader(OPTIONS, **SERVICE, warm_up=False)
    opened = loader.open(source, NONE)
    service, loaded = opened.start((), NONE).service, opened._model.loaded
    close, ended = service.close, []
    monkeypatch.setattr(service, "close", lambda _: 1 / 0)
    monkeypatch.setattr(loaded, "close", lambda: ended.append(True))
    with pytest.raises(ZeroDivisionError):
        opened.close()
    assert not loader.loaded and not ended
    opened.close()
    assert ended
    monkeypatch.undo()
    close(), loaded.close()


def test_memory_is_measured_anew_when_a_model_has_given_its_own_back(source, monkeypatch):
    """A moment ago there was no room for the next one, which would be refused for good."""
    loader = PackageLoader(OPTIONS, **SERVICE)
    opened = loader.open(source, NONE)
    monkeypatch.setattr(free_memory, "_measure", lambda _: 1)
    monkeypatch.setattr(free_memory, "KEPT_S", 1000.0)
    monkeypatch.setattr(free_memory, "_known", {})
    assert loader.free() == {"cpu": 1}
    monkeypatch.setattr(free_memory, "_measure", lambda _: 2)
    assert loader.free() == {"cpu": 1}
    opened.close()
    assert loader.free() == {"cpu": 2}


def test_a_limit_is_that_of_all_together(source):
    """A model that is alone keeps it, too: the part that it is predicted to take is its own."""
    loader = PackageLoader(OPTIONS | {"memory_limit": "1GiB"}, **SERVICE)
    assert loader.limits == {"cpu": 1 << 30}
    opened = loader.open(source, NONE)
    assert opened._model.options.memory_limit == opened.facts.needs["cpu"]
    opened.close()


def test_what_was_fetched_is_opened_without_asking_the_hub(tmp_path, monkeypatch):
    """A branch that has moved on would be fetched in the midst of loading, others waiting."""
    commit = "0" * 40
    snapshot = tmp_path / "models--org--demo" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in DEMO_MODEL.iterdir():
        (snapshot / file.name).symlink_to(file)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("mtmd.checkpoint.hub.ask_hub", lambda *_: pytest.fail("asked"))
    opened = PackageLoader(OPTIONS, **SERVICE).open(Source("me", "org/demo", 5, ""), NONE)
    assert opened._model.name == "me"
    opened.close()


def test_a_fetch_tells_how_far_it_is_and_how_large_it_was(monkeypatch):
    arriving = Arriving(Path("none"), 0, 30)
    told = []

    def pull(model, *, tell):
        assert model == "org/x:Q4_0"
        tell(arriving)
        return Pulled(Found(Path("none")), 2, 40, 30, ())

    monkeypatch.setattr("mtmd.checkpoint.pull.pull", pull)
    away = Source("x", "org/x:Q4_0", None, "")
    here = PackageLoader(OPTIONS, **SERVICE).fetch(away, told.append)
    assert (here.name, here.bytes, here.is_here) == ("x", 40, True)
    assert told[0]() == (0, 30)


def test_small_models_keep_their_one_thread_when_others_were_looked_at(source, monkeypatch):
    """Whatever is opened is planned for all threads; those in memory go on with theirs."""
    loader, settled = PackageLoader(OPTIONS, **SERVICE), []
    monkeypatch.setattr(loader.shared, "settle_threads", settled.append)
    loader.open(source, NONE).close()
    assert settled == [], "nothing is in memory"
    small = loader.open(source, NONE)
    loader.loaded.append(small._model)
    loader.open(source, NONE).close()
    assert settled == [[small._model.checkpoint.weight_bytes]]
    loader.loaded.clear()
    small.close()


def make(*given, first=None, most=None, unload_after_s=0.0, presets=None):
    return make_registry(
        given,
        first,
        ServerSettings(),
        OPTIONS,
        presets=presets,
        most=most,
        unload_after_s=unload_after_s,
        warm_up=False,
    )


def test_from_the_options_of_the_command_to_an_answer_and_its_memory_given_back(tmp_path):
    file = tmp_path / "presets.json"
    file.write_text('{"demo": {"aliases": ["small"]}}')
    registry = make("demo", presets=str(file))
    registry.start()
    try:
        entry = registry.take("small")
        ticket = entry.served.service.submit([{"role": "user", "content": "hi"}], max_tokens=2)
        assert list(ticket)[-1].answer.receipt.model == "demo"
        assert registry.find("demo").needs_bytes["cpu"] > 10 << 20
        loaded = weakref.ref(entry.opened._model.loaded)
        weights = weakref.ref(loaded().runner.residency)
        assert loaded().weights_read()[0] > 5 << 20
        registry.give_back(entry)
        registry.unload("demo")
        assert until(lambda: registry.find("demo").state == "unloaded")
        assert loaded() is None and weights() is None, "nobody holds on to it"
        ticket.cancel()  # as a page may that keeps it
        assert not registry._loader.loaded
    finally:
        registry.close()


def test_the_first_is_the_default_and_is_added_where_it_is_not_there(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"0" * 60)
    registry = make(str(tmp_path), first="demo")
    assert [m.name for m in registry.listed()] == ["x", "demo"]
    assert registry.find(None).name == "demo"
    same = make(str(tmp_path), first=str(tmp_path / "x.gguf"))
    assert [m.name for m in same.listed()] == ["x"]


def test_a_default_is_one_model_and_not_the_first_of_a_folder(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF" + b"0" * 60)
    with pytest.raises(OptionError, match=r"holds 2 models, expected one; .*/a\.gguf$"):
        make("demo", first=str(tmp_path))


@pytest.mark.parametrize(
    "options, told", [({"most": 0}, "models-max"), ({"unload_after_s": 0.5}, "unload-after")]
)
def test_options_out_of_their_ranges(options, told):
    with pytest.raises(OptionError, match=told):
        make("demo", **options)
