"""The history: found again, seen at a glance, taken along, brought from elsewhere, and turns dropped
where a conversation is too long.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace

from browsing import PHONE, Visitor
from serving import png, running

from mtmd.web.app import create_app
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import Store

SHAPES = Path(__file__).parents[3] / "examples" / "shapes.png"


def chatgpt():
    def node(id_, parent, role, *parts, **more):
        content = {"content_type": "multimodal_text", "parts": list(parts)}
        message = {"id": id_, "author": {"role": role}, "content": content, "create_time": 1.7e9}
        return {"id": id_, "parent": parent, "children": [], "message": message | more}

    hidden = {"metadata": {"is_visually_hidden_from_conversation": True}}
    nodes = [
        {"id": "root", "parent": None, "children": ["s"], "message": None},
        node("s", "root", "system", "You are helpful."),
        node("h", "s", "user", "about me", **hidden),
        node("a", "h", "user", {"content_type": "image_asset_pointer"}, "Which bird is it?"),
        node("t", "a", "tool", "searching"),
        node("b", "t", "assistant", "A **kestrel**."),
        node("c", "a", "assistant", "A sparrow."),
    ]
    return [
        {
            "title": "A bird",
            "create_time": 1.7e9,
            "update_time": 1.7e9 + 5,
            "mapping": {n["id"]: n for n in nodes},
            "current_node": "b",
        }
    ]


def open_webui():
    picture = f"data:image/png;base64,{base64.b64encode(png(12, 8)).decode()}"
    requested = {
        "id": "1",
        "parentId": None,
        "role": "user",
        "content": "What colour?",
        "timestamp": 1.7e9,
    }
    requested["files"] = [{"type": "image", "url": picture}, {"type": "file", "url": "x"}]
    stated = {
        "id": "2",
        "parentId": "1",
        "role": "assistant",
        "content": "Blue it is.",
        "timestamp": 1.7e9,
    }
    history = {"messages": {"2": stated, "1": requested}, "currentId": "2"}
    return [
        {
            "id": "x",
            "title": "Colours",
            "chat": {"title": "Colours", "history": history},
            "created_at": 1.7e9,
            "updated_at": 1.7e9,
        }
    ]


def bring(page, data):
    file = {
        "name": "conversations.json",
        "mimeType": "application/json",
        "buffer": json.dumps(data).encode(),
    }
    page.set_input_files("#import-file", files=[file])


def test_conversations_of_other_programs_are_imported_found_and_taken_along(person):
    page = person.page
    bring(page, chatgpt())
    page.wait_for_selector(".toast:has-text('1 conversation imported')")
    bring(page, open_webui())
    page.wait_for_selector(".item:has-text('Colours')")
    person.lists("A bird", "Colours", in_order=False)
    person.until("document.querySelector('.item .first')?.naturalWidth > 0")
    assert page.locator(".item .first").count() == 1  # the one that has a picture
    bring(page, [{"some": "thing"}])
    page.wait_for_selector(".toast:has-text('has no conversations of')")
    page.fill("#search", "sparrow")
    page.wait_for_selector(".item .around:has-text('sparrow')")
    page.click(".item:has-text('A bird') a")
    page.wait_for_selector(".message.answer.found")  # on another branch than the one shown
    assert person.texts("user") == ["[picture]\n\nWhich bird is it?"]
    assert person.texts("answer") == ["A sparrow."]
    assert page.evaluate("[...CSS.highlights.get('found')].map(String)") == ["sparrow"]
    page.click("[aria-label='Next version'], [aria-label='Previous version']")
    assert page.locator(".message.answer strong").inner_text() == "kestrel"
    page.click("[aria-label='More about A bird']")
    with page.expect_download() as download:
        page.click("text=Export as Markdown")
    text = download.value.path().read_text()
    assert text.startswith(
        "# A bird\n\n## You\n\n[picture]\n\nWhich bird is it?\n\n## Answer\n\nA "
    )
    page.fill("#search", "")
    page.click(".item:has-text('Colours') a")
    page.wait_for_selector(".message.user .picture")
    person.say("and now?")
    assert person.page.set_viewport_size(PHONE) is None and person.overflow() == 0


def test_an_exported_conversation_has_every_line_as_it_was_written(person, fake):
    fake.words = (
        "TOTAL 12.50\nCASH 20.00\n\n- **「重点」**内容\n  שלום\n\n| a | b |\n|---|---|\n| 1 | 2 |"
    )
    requested = "one\ntwo"
    person.say(requested)
    page = person.page
    page.click("#list .item .icon-button")
    with page.expect_download() as download:
        page.click("text=Export as Markdown")
    text = download.value.path().read_text()
    assert text == f"# one two\n\n## You\n\n{requested}\n\n## Answer\n\n{fake.words}\n"


def test_the_oldest_turns_are_dropped_where_there_is_no_room(person, fake):
    page = person.page
    person.attach(SHAPES)
    for number in range(4):
        person.say(f"question {number}")

    def count(messages, *_, **__):
        return SimpleNamespace(
            prompt_tokens=100 * len(messages),
            image_tokens=(),
            video_tokens=(),
            audio_tokens=(),
            context=512,
        )

    fake.count = count
    page.fill("#prompt", "question 4")
    page.wait_for_selector("#meter-text:has-text('too long')")
    page.click("#meter >> text=Drop the oldest turns")
    page.wait_for_selector("#meter-text:has-text('300 of 512')")
    assert page.locator(".message.user:has(.dropped) .bubble").inner_text() == "question 3"
    page.press("#prompt", "Enter")
    person.answered("question 4")
    assert [m["content"] for m in fake.tickets[-1].messages if m["role"] == "user"] == [
        "question 3",
        "question 4",
    ]
    assert fake.tickets[-1].pictures == []
    page.reload()
    page.wait_for_selector(".dropped")
    assert person.texts("user") == [f"question {n}" for n in range(5)]  # all is there to be read
    person.say("question 5")
    assert len(fake.tickets[-1].messages) == 5


SEEN = """text => [...document.querySelectorAll(".message")].some((message) => {
  const { top, bottom } = message.getBoundingClientRect();
  return message.textContent.includes(text) && top < innerHeight && bottom > 0;
})"""


def test_of_a_long_conversation_there_is_what_is_looked_at(browser, fake):
    store = Store(None)
    fake.context = 1 << 16  # else so long a conversation is refused
    long, parent = store.create("anybody", "long"), None
    for number in range(400):
        text = f"word{number}x of this message. " * 12
        role = ("user", "assistant")[number % 2]
        parent = store.add(long.id, parent, role, text).id
    with running(fake, create_app(fake, ServerSettings(port=0), store)) as server:
        person = Visitor(browser, server.url)
        page = person.page
        page.click(".item a")
        page.wait_for_selector(".message.last:has-text('word399x')")
        assert page.locator(".message").count() <= 60
        page.mouse.move(700, 300)
        while page.locator(".message:has-text('word330x')").count() == 0:
            page.mouse.wheel(0, -4000)
            page.wait_for_timeout(20)
            assert page.locator(".message").count() <= 150
        page.fill("#search", "word17x")
        page.wait_for_selector(".item .around")
        page.click(".item a")
        page.wait_for_function(SEEN, arg="word17x")  # its colour is there for a moment only
        assert page.locator(".message.light").count() == 0
        assert page.locator(".message").count() <= 80 and page.is_visible("#down")
        page.click("#down")
        page.wait_for_selector(".message.last:has-text('word399x')")
        person.say("the next one")
        assert len(fake.tickets[-1].messages) == 401  # the model sees all of it
        with page.expect_download() as download:
            page.click(".item .icon-button", force=True)
            page.click("text=Export as Markdown")
        assert download.value.path().read_text().count("## ") == 402
        person.close()
