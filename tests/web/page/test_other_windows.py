"""One conversation in two windows: what is sent in one shows in the other, and nobody goes on from a turn that is not the newest
without being told.
"""

from __future__ import annotations

import pytest
from browsing import Visitor
from serving import running

from mtmd.web.app import create_app
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import Store


class Window:
    """Another window of the same browser, with the steps of a person in it."""

    say, answered, texts, until, wait, lists = (
        Visitor.say,
        Visitor.answered,
        Visitor.texts,
        Visitor.until,
        Visitor.wait,
        Visitor.lists,
    )
    fingers = False

    def __init__(self, person):
        self.page = person.context.new_page()
        self.complaints = []
        self.page.on("pageerror", lambda e: self.complaints.append(str(e)))
        self.page.goto(person.page.url)
        self.page.wait_for_selector("#model:has-text('fake')")


@pytest.fixture
def two(person):
    """(a window with a conversation of one turn, another one with the same)."""
    person.say("one")
    other = Window(person)
    other.page.wait_for_selector(".message.answer.last .actions")
    yield person, other
    assert other.complaints == []
    other.page.close()


def test_a_turn_of_one_window_shows_in_the_other_which_goes_on_from_it(two, fake):
    person, other = two
    fake.words = "the second answer"
    person.say("two")
    other.answered("two")
    assert other.texts("answer") == person.texts("answer")
    fake.words = "the third answer"
    other.say("three")
    assert [m["content"] for m in fake.tickets[-1].messages if m["role"] == "user"] == [
        "one",
        "two",
        "three",
    ]
    person.answered("three")
    assert person.texts("user") == ["one", "two", "three"]
    assert person.page.locator(".branches").count() == 0


def test_an_answer_is_followed_in_both_and_can_be_stopped_in_either(two, fake):
    person, other = two
    fake.pace_s, fake.words = 0.05, "word " * 400
    person.say("two", wait=False)
    other.page.wait_for_selector(".text.growing:has-text('word word')")
    other.page.fill("#prompt", "a draft")
    other.page.click("#stop")
    for window in (person, other):
        window.page.wait_for_selector(".aside:has-text('Stopped.')")
        window.page.wait_for_selector("#send:visible")
    assert other.page.input_value("#prompt") == "a draft"


def test_what_another_device_did_shows_when_the_window_is_looked_at(browser, fake):
    """It sends nothing to this browser."""
    with running(fake, create_app(fake, ServerSettings(port=0), Store(None))) as server:
        person, device = Visitor(browser, server.url), Visitor(browser, server.url, locale="de")
        person.say("one")
        device.page.goto(person.page.url)
        device.answered("one")
        device.say("two")
        assert person.texts("user") == ["one"]
        person.page.evaluate("dispatchEvent(new Event('focus'))")
        person.answered("two")
        device.say("three")
        person.expects = ("409",)
        person.page.fill("#prompt", "another three")
        person.page.press("#prompt", "Enter")  # which has not been looked at since
        person.page.wait_for_selector(".toast:has-text('another window has continued')")
        person.answered("three")
        assert person.page.input_value("#prompt") == "another three" and len(fake.tickets) == 3
        person.page.press("#prompt", "Enter")
        person.answered("another three")
        requested = [m["content"] for m in fake.tickets[-1].messages if m["role"] == "user"]
        assert requested == ["one", "two", "three", "another three"]
        device.close()
        person.close()


def test_another_version_is_offered_and_moves_nobody(two, fake):
    person, other = two
    fake.words = "another answer"
    person.page.click("[aria-label='Answer again']")
    other.page.wait_for_selector(".branches:has-text('1 / 2')")
    assert other.texts("answer") == ["1 messages, pictures []: one"]
    other.page.click(".toast >> text=Show it")
    other.wait(lambda: other.texts("answer") == ["another answer"])


def test_what_is_edited_or_asked_again_is_a_branch_on_purpose(two, fake):
    person, other = two
    person.say("two")
    other.answered("two")
    other.page.press("#prompt", "ArrowUp")
    other.page.fill("#prompt", "two, otherwise")
    other.page.press("#prompt", "Enter")
    other.answered("two, otherwise")
    assert len(fake.tickets) == 3
    person.page.wait_for_selector(".message.user .branches:has-text('1 / 2')")


def test_titles_and_deletions_show_in_other_windows(two):
    person, other = two
    person.lists("one")
    page = person.page
    page.hover("#list .item")
    page.click("#list .item .icon-button")
    page.click(".menu >> text=Rename")
    page.fill("#list input", "Elephants")
    page.keyboard.press("Enter")
    other.lists("Elephants")
    other.page.wait_for_selector("#title:has-text('Elephants')")
    other.page.fill("#prompt", "half a thought")
    page.hover("#list .item")
    page.click("#list .item .icon-button")
    page.click(".menu >> text=Delete")
    page.click(".toast [aria-label=Dismiss]")
    other.page.wait_for_selector(".toast:has-text('deleted in another window')")
    other.page.wait_for_selector("#welcome:visible")
    assert other.page.input_value("#prompt") == "half a thought"


def test_a_receipt_that_is_open_stays_open(two):
    person, other = two
    other.page.click(".receipt summary")
    person.say("two")
    other.answered("two")
    assert other.page.locator(".receipt").first.get_attribute("open") is not None
