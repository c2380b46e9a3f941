"""Thoughts on the page: folded above the answer, gone on with, sent back, and turned off."""

from __future__ import annotations

import os

import pytest
from browsing import Visitor
from scripted import writes
from serving import running
from thinking_templates import TEMPLATES

from mtmd import load
from mtmd.web.app import create_app
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import Store

SHOTS = os.environ.get("SCREENSHOTS")  # a folder


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A model whose prompt opens the thought, and a server with it."""
    path = tmp_path_factory.mktemp("templates") / "chat.jinja"
    path.write_text(TEMPLATES["opened"])
    model = load(chat_template=path, context=1024, threads=1)
    app = create_app(model.service, ServerSettings(port=0), Store(None))
    with running(model.service, app) as server:
        yield model, server.url


def ask(page, text):
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def test_a_thought_is_folded_kept_and_sent_back(browser, thinker):
    model, url = thinker
    person = Visitor(browser, url)
    page = person.page
    with writes(model, "The user greets me.\n</think>\n\nHello!"):
        ask(page, "hi")
        page.wait_for_selector(".answer .thought summary")
        page.wait_for_selector(".answer .receipt")
    assert page.inner_text(".answer .thought summary").startswith("Thoughts, 4 words")
    assert page.inner_text(".answer .answer-text > .text:not(.thought-text)").strip() == "Hello!"
    page.click(".answer .thought summary")
    assert "The user greets me." in page.inner_text(".answer .thought")
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/thought.png")
    prompts, write = [], model.prompts.text.write

    def noted(messages, box, read, *more):
        return write(messages, box, lambda text: (prompts.append(text), read(text))[1], *more)

    page.reload()
    page.wait_for_selector(".answer .thought summary")
    model.prompts.text.write = noted
    try:
        with writes(model, "So.\n</think>\n\nYes."):
            ask(page, "and?")
            person.until("document.querySelectorAll('.answer .thought').length === 2")
            person.until("document.querySelectorAll('.answer .receipt').length === 2")
    finally:
        del model.prompts.text.write
    assert "<think>\nThe user greets me.\n</think>\n\nHello!" in prompts[-1]
    person.close()


def test_a_thought_that_was_cut_goes_on(browser, thinker):
    model, url = thinker
    person = Visitor(browser, url)
    page = person.page
    page.evaluate("localStorage.setItem('mtmd.settings', JSON.stringify({ max_tokens: 6 }))")
    page.reload()
    with writes(model, "The user greets me and I wonder"):
        ask(page, "hi")
        page.wait_for_selector(".answer .receipt")
    page.evaluate("localStorage.setItem('mtmd.settings', JSON.stringify({ max_tokens: 60 }))")
    page.reload()
    page.wait_for_selector(".answer .thought")
    with writes(model, " now.\n</think>\n\nHello!"):
        page.get_by_role("button", name="Continue").click()
        person.until("document.querySelector('.answer')?.textContent.includes('Hello!')")
        page.wait_for_selector(".answer .receipt")
    assert page.locator(".answer .thought").count() == 1
    assert page.inner_text(".answer .answer-text > .text:not(.thought-text)").strip() == "Hello!"
    person.close()


def test_thinking_can_be_turned_off_in_the_settings(browser, thinker):
    model, url = thinker
    person = Visitor(browser, url)
    page = person.page
    page.click("#open-settings")
    page.check("#settings input[name=think][value=off]")
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/settings.png")
    page.click("#settings button[value=ok]")
    with writes(model, "Hello!"):
        ask(page, "hi")
        page.wait_for_selector(".answer .receipt")
    assert page.locator(".thought").count() == 0
    assert page.inner_text(".answer .answer-text").strip() == "Hello!"
    person.close()


def test_a_model_that_does_not_think_has_no_such_setting(person):
    person.page.click("#open-settings")
    assert not person.page.is_visible("#thinking-settings")
