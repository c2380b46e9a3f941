"""Thoughts on the page: folded above the answer, gone on with, sent back, and turned off."""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest
from browsing import Visitor
from scripted import writes
from serving import running
from thinking_templates import TEMPLATES

from mtmd import load
from mtmd.options.answer import AnswerOptions
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
    page.select_option("#settings select[name=think]", "off")
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/settings.png")
    page.click("#settings button[value=ok]")
    with writes(model, "Hello!"):
        ask(page, "hi")
        page.wait_for_selector(".answer .receipt")
    assert page.locator(".thought").count() == 0
    assert page.inner_text(".answer .answer-text").strip() == "Hello!"
    person.close()


@pytest.mark.parametrize("preset, shown", [("low", "low"), (True, "on"), (False, "off")])
def test_a_preset_is_shown_stays_and_can_be_left_to_the_model(browser, tmp_path, preset, shown):
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATES["opened"])
    model = load(chat_template=path, context=1024, threads=1)
    app = create_app(model.service, ServerSettings(port=0, answers={"think": preset}), Store(None))
    with running(model.service, app) as server:
        person = Visitor(browser, server.url)
        page = person.page
        page.evaluate("localStorage.setItem('mtmd.settings', JSON.stringify({ think: '' }))")
        page.reload()
        page.click("#open-settings")
        choice = page.locator("#settings select[name=think]")
        assert choice.input_value() == shown
        page.fill("#settings input[name=max_tokens]", "60")
        page.click("#settings button[value=ok]")
        answers = 0
        for chosen in (None, "auto", "high"):
            if chosen:
                page.click("#open-settings")
                page.select_option("#settings select[name=think]", chosen)
                page.click("#settings button[value=ok]")
            stored = page.evaluate("JSON.parse(localStorage['mtmd.settings']).think ?? null")
            assert stored == chosen
            with writes(model, "So.\n</think>\n\nYes."), requested(model.service) as result:
                ask(page, "hi")
                answers += 1
                person.until(f"document.querySelectorAll('.answer .receipt').length === {answers}")
            assert result == [{None: preset, "auto": None}.get(chosen, chosen)]
        person.close()


@contextmanager
def requested(service):
    """What answers are to do about thinking, as AnswerOptions have it."""
    result, submit = [], service.submit

    def noted(*given, **options):
        named = {n: v for n, v in options.items() if n in ("think", "think_budget")}
        result.append(AnswerOptions(**named).think)
        return submit(*given, **options)

    service.submit = noted
    try:
        yield result
    finally:
        del service.submit


def test_a_model_that_does_not_think_has_no_such_setting(person):
    person.page.click("#open-settings")
    assert not person.page.is_visible("#thinking-settings")
