"""Somebody who is faster than the network: types before the page has begun, opens another
conversation before the one before has come, goes elsewhere while a message is on its way.
"""

from __future__ import annotations

import re

from browsing import stored

CONVERSATION = re.compile(r"/api/conversations/[0-9a-f]+$")


def two_conversations(person):
    for question in ("about ships", "about elephants"):
        person.say(question)
        person.page.click("#new-chat")
        person.page.wait_for_selector("#welcome:visible")
    person.lists("about elephants", "about ships")


def test_what_is_typed_before_the_page_has_begun_stays_and_no_click_is_lost(person, fake):
    page = person.page
    with stored(page, "**/api/about") as result:
        page.reload(wait_until="commit")
        person.wait(lambda: result)
        page.type("#prompt", "first words")
    page.click("#open-settings")
    page.fill("[name=temperature]", "0.3")
    page.click("#settings >> text=Done")
    assert page.input_value("#prompt") == "first words"
    page.press("#prompt", "Enter")
    person.answered("first words")
    assert fake.tickets[-1].settings.temperature == 0.3


def test_of_conversations_opened_one_after_another_the_last_is_shown(person):
    two_conversations(person)
    page = person.page
    with stored(page, CONVERSATION) as result:
        page.click("#list a:has-text('about ships')")
        person.wait(lambda: result)
        page.click("#list a:has-text('about elephants')")
        person.answered("about elephants")
    page.wait_for_timeout(200)  # in which the other one comes
    assert person.texts("user") == ["about elephants"]
    person.say("how large")
    assert person.texts("user") == ["about elephants", "how large"]


def test_what_is_typed_while_a_conversation_comes_is_sent_there(person, fake):
    two_conversations(person)
    page = person.page
    page.fill("#prompt", "a new chat's own draft")
    with stored(page, CONVERSATION) as result:
        page.click("#list a:has-text('about ships')")
        person.wait(lambda: result)
        assert page.input_value("#prompt") == ""
        page.type("#prompt", "how large")
        page.press("#prompt", "Enter")
        page.wait_for_timeout(100)
        assert len(fake.tickets) == 2
    person.answered("how large")
    assert person.texts("user") == ["about ships", "how large"]
    page.click("#new-chat")
    page.wait_for_selector("#welcome:visible")
    assert page.input_value("#prompt") == "a new chat's own draft"


def test_who_goes_elsewhere_while_a_message_is_sent_finds_it_answered(person, fake):
    two_conversations(person)
    page = person.page
    page.click("#list a:has-text('about ships')")
    person.answered("about ships")
    with stored(page, "**/messages", "POST") as result:
        person.say("how large", wait=False)
        person.wait(lambda: result)
        page.click("#list a:has-text('about elephants')")
        person.answered("about elephants")
        page.type("#prompt", "and how old")
    person.wait(lambda: len(fake.tickets) == 3)
    assert person.texts("user") == ["about elephants"]
    assert page.input_value("#prompt") == "and how old"
    page.click("#list a:has-text('about ships')")
    person.answered("how large")
    assert person.texts("user") == ["about ships", "how large"] and len(fake.tickets) == 3
    assert page.input_value("#prompt") == ""
    page.click("#list a:has-text('about elephants')")
    person.answered("about elephants")
    assert page.input_value("#prompt") == "and how old"


def test_a_new_chat_left_while_its_first_message_is_sent_is_answered(person, fake):
    two_conversations(person)
    page = person.page
    with stored(page, "**/api/conversations", "POST") as result:
        person.say("about cats", wait=False)
        person.wait(lambda: result)
        page.click("#list a:has-text('about ships')")
        person.answered("about ships")
    person.lists("about cats", "about elephants", "about ships")
    assert person.texts("user") == ["about ships"] and page.url.endswith(
        page.get_attribute("#list a:has-text('about ships')", "href")
    )
    page.click("#new-chat")
    page.wait_for_selector("#welcome:visible")
    assert page.input_value("#prompt") == ""
    page.click("#list a:has-text('about cats')")
    person.answered("about cats")
    assert len(fake.tickets) == 3
