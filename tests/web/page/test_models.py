"""The list of models on the page, and two answers side by side."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from browsing import PHONE, QUEUE, Visitor
from fake_models import FakeLoader, registry_of
from serving import running

from mtmd import ModelError
from mtmd.checkpoint import collection
from mtmd.checkpoint.cached_models import Cache
from mtmd.web.app import create_app_of_many
from mtmd.web.models.presets import Preset
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import Store

NEEDS = {"left": 4, "right": 8, "broken": 1, "huge": 40, "far": 1}


@pytest.fixture
def loader():
    made = FakeLoader(NEEDS)
    made.fails["open broken"] = ModelError("config.json: not there")
    return made


@pytest.fixture
def registry(loader):
    presets = {"right": Preset("Be brief.", {"temperature": 0.5})}
    made, _ = registry_of(NEEDS, presets, loader, away=("far",))
    made.start()
    yield made
    loader.gate.set()
    loader.hub.set()
    made.close()


def test_a_model_is_chosen_loaded_with_its_progress_and_asked(browser, registry, loader):
    app = create_app_of_many(registry, ServerSettings(port=0), Store(None))
    with running(registry, app) as server:
        person = Visitor(browser, server.url)
        page = person.page
        page.click("#model-open")

        def row(name):
            return page.locator(f".model-row[data-name='{name}']")

        page.wait_for_selector(".model-row[data-name='huge'] .tight:has-text('more memory than')")
        assert "needs 4.3 GB of memory" in row("left").inner_text()
        assert "Cannot be loaded: config.json: not there" in row("broken").inner_text()
        assert "Fits into memory" in row("right").inner_text()
        assert person.axe() == []
        loader.gate.clear()
        loader.read = (1, 4)
        row("right").locator(".button").click()
        page.wait_for_selector(".model-row[data-name='right'] :text('25 %')")
        page.emulate_media(color_scheme="dark")
        assert person.axe() == []
        row("right").locator(".model-pick").click()
        page.wait_for_selector("#model-open:has-text('right')")
        person.say("hello", wait=False)
        page.wait_for_selector(".message.answer .progress:has-text('Loading right')")
        page.wait_for_selector(".message.answer progress[value='0.25']")
        assert person.axe() == []
        page.click("#stop")
        page.wait_for_selector(".message.answer :text('Stopped.')")
        person.say("hello", wait=False)
        page.wait_for_selector(".message.answer .progress:has-text('Loading right')")
        loader.gate.set()
        person.answered("hello")
        answer = person.texts("answer")[-1]
        assert answer.startswith("right says") and "2 messages" in answer, (
            "the preset's system prompt"
        )
        page.click("#open-settings")
        assert page.input_value("[name=temperature]") == "0.5"
        assert "right" in page.inner_text("#settings-title")
        page.keyboard.press("Escape")
        page.reload()  # the choice is kept
        page.wait_for_selector("#model-open:has-text('right')")
        person.answered()
        page.click("#model-open")
        row("right").locator("button:has-text('Unload')").click()
        page.wait_for_selector(".model-row[data-name='right'] .button:has-text('Load')")
        assert row("far").locator(".button").inner_text() == "Fetch"
        loader.hub.clear()
        row("far").locator(".model-pick").click()
        page.wait_for_selector("#models:not([open])", state="attached")
        person.expects = ("503",)  # until it is here
        person.say("hello again", wait=False)
        page.wait_for_selector(".message.user .progress:has-text('fetching it')")
        loader.hub.set()
        person.answered("hello again")
        assert person.texts("answer")[-1].startswith("far says")
        page.click("#model-open")
        page.set_viewport_size(PHONE)
        assert person.overflow() == 0
        person.close()


def test_one_message_is_answered_twice_and_one_answer_is_gone_on_with(person, fake):
    page = person.page
    page.click("#add")
    page.click("#compare-open")
    page.fill("[name=temperature-b]", "0.9")
    page.fill("[name=system-b]", "Answer in French.")
    assert person.axe() == []
    page.click("#compare-form .primary")
    page.wait_for_selector("#comparing:has-text('temperature 0.9')")
    fake.pace_s, fake.words = 0.5, "some words to read"
    person.say("which one", wait=False)
    page.wait_for_selector(".columns.two .answer:nth-child(2) .text.growing")
    assert page.locator(".columns.two .answer").count() == 2
    fake.pace_s = 0.0
    page.wait_for_selector(".go-on >> nth=1")
    assert page.locator(".columns .receipt").count() == 2
    left, right = page.locator(".settings-of").all_inner_texts()
    assert "most probable" in left and "temperature 0.9" in right and "Answer in French." in right
    assert sorted(t.settings.temperature for t in fake.tickets) == [0, 0.9]  # sent at once
    assert person.axe() == []
    page.set_viewport_size(PHONE)
    assert person.overflow() == 0
    page.set_viewport_size(QUEUE)
    page.locator(".go-on").nth(1).click()
    page.wait_for_selector(".branches:has-text('2 / 2')")
    assert page.is_hidden("#comparing")
    person.say("and now")
    ticket = fake.tickets[-1]
    assert ticket.settings.temperature == 0.9
    assert ticket.messages[0] == {"role": "system", "content": "Answer in French."}
    assert [m["role"] for m in ticket.messages[1:]] == ["user", "assistant", "user"]


def test_a_model_is_added_by_its_name_on_the_hub(browser, registry, loader, monkeypatch):
    def hub(model, repo, *_, **__):
        if repo != "org/new":
            raise ModelError(f"model {model!r} is neither a local folder nor found on the hub")
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename="new-Q4_K_M.gguf")])

    monkeypatch.setattr(collection, "ask_hub", hub)
    monkeypatch.setattr(collection, "read_cache", lambda: Cache((), ()))
    loader.needs = NEEDS | {"org/new:Q4_K_M": 1}
    app = create_app_of_many(registry, ServerSettings(port=0), Store(None))
    with running(registry, app) as server:
        person = Visitor(browser, server.url)
        person.expects = ("400",)
        page = person.page
        page.click("#model-open")
        page.fill("#models-name", "org/nothing")
        page.press("#models-name", "Enter")
        page.wait_for_selector("#models-problem:has-text('nor found on the hub')")
        assert person.axe() == []
        loader.hub.clear()
        loader.read = (1, 4)
        page.fill("#models-name", "org/new:Q4_K_M")
        page.press("#models-name", "Enter")
        page.wait_for_selector(".model-row[data-name='org/new:Q4_K_M'] :text('25 %')")
        assert page.is_hidden("#models-problem") and page.input_value("#models-name") == ""
        loader.hub.set()
        page.wait_for_selector(".model-row[data-name='org/new:Q4_K_M'] .model-dot.loaded")
        page.emulate_media(color_scheme="dark")
        assert person.axe() == []
        page.set_viewport_size(PHONE)
        assert person.overflow() == 0
        person.close()


def test_a_server_that_adds_no_models_has_no_box_for_it(browser, registry):
    app = create_app_of_many(registry, ServerSettings(port=0, add_models=False), Store(None))
    with running(registry, app) as server:
        person = Visitor(browser, server.url)
        person.page.click("#model-open")
        person.page.wait_for_selector(".model-row")
        assert person.page.is_hidden("#models-add")
        person.close()
