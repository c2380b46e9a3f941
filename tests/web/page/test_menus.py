"""The menu of what can be added to a message, and the names at the top of the page."""

from __future__ import annotations

import pytest
from browsing import PHONE, QUEUE, Visitor
from fake_models import FakeLoader, registry_of
from serving import png, running

from mtmd.web.app import create_app, create_app_of_many
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import Store

LONG = "SmolVLM2-2.2B-Instruct-Q4_K_M-with-a-long-name"


def entries(page):
    return [
        words.split("\n")[0] for words in page.locator("#add-menu button:visible").all_inner_texts()
    ]


def test_a_menu_says_in_words_what_can_be_added(person):
    page = person.page
    page.click("#add")
    shown = page.locator("#add-menu button:visible > span > span:first-child").all_inner_texts()
    assert shown == ["Pictures, videos, PDFs, text", "A folder of pictures", "Compare"]
    assert page.get_attribute("#add", "aria-expanded") == "true" and person.axe() == []
    with page.expect_file_chooser() as chosen:
        page.click("#pick")
    assert chosen.value.is_multiple() and not page.is_visible("#add-menu")
    assert page.get_attribute("#add", "aria-expanded") == "false"
    chosen.value.set_files([{"name": "a.png", "mimeType": "image/png", "buffer": png(9, 9, "red")}])
    page.wait_for_selector(".thumb:not(.loading)")


def test_the_menu_is_used_with_keys_and_closes_where_it_was_opened(person):
    page = person.page
    page.focus("#add")
    page.keyboard.press("Enter")
    focused = "document.activeElement.id"
    person.until(f"{focused} === 'pick'")
    for key, there in (
        ("ArrowDown", "pick-folder"),
        ("End", "compare-open"),
        ("ArrowDown", "pick"),
        ("ArrowUp", "compare-open"),
        ("Home", "pick"),
    ):
        page.keyboard.press(key)
        assert page.evaluate(focused) == there
    page.keyboard.press("Escape")
    person.until(f"{focused} === 'add'")
    assert not page.is_visible("#add-menu")
    page.click("#add")
    assert page.is_visible("#add-menu")
    page.click("#add")  # again
    assert not page.is_visible("#add-menu")
    page.click("#add")
    page.click("#compare-open")
    assert page.is_visible("#compare-form") and not page.is_visible("#add-menu")


@pytest.fixture
def registry():
    made, _ = registry_of({LONG: 4, "other": 4}, {}, FakeLoader({LONG: 4, "other": 4}))
    made.start()
    yield made
    made.close()


@pytest.mark.parametrize("many", [False, True])
def test_a_long_name_of_a_model_leaves_a_phone_its_title(browser, fake, registry, many):
    fake.name = LONG
    app = (
        create_app_of_many(registry, ServerSettings(port=0), Store(None))
        if many
        else create_app(fake, ServerSettings(port=0), Store(None))
    )
    with running(registry if many else fake, app) as server:
        person = Visitor(browser, server.url, size=PHONE, has_touch=True, is_mobile=True)
        page = person.page
        name = "#model-open" if many else "#model"
        page.wait_for_selector(f"{name}:has-text('Smol')")
        title = page.locator("#title").evaluate("(e) => [e.scrollWidth, e.clientWidth]")
        assert title[0] <= title[1]  # "New chat", whole
        edges = page.locator(name).bounding_box()
        assert edges["y"] >= page.locator("#title").bounding_box()["y"] + 10  # below it
        assert edges["x"] + edges["width"] <= page.locator("#theme").bounding_box()["x"]
        assert person.overflow() == 0 and person.axe() == []
        person.close()


def test_the_list_of_models_opens_below_the_name(browser, registry):
    app = create_app_of_many(registry, ServerSettings(port=0), Store(None))
    with running(registry, app) as server:
        person = Visitor(browser, server.url, size=QUEUE)
        page = person.page
        page.click("#model-open")
        page.wait_for_selector(".model-row")
        button, menu = (page.locator(s).bounding_box() for s in ("#model-open", "#models"))
        assert 0 <= menu["y"] - (button["y"] + button["height"]) < 20
        assert menu["x"] < button["x"] < menu["x"] + menu["width"] <= QUEUE["width"]
        person.close()
