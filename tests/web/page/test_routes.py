from __future__ import annotations

import base64
import io
import json
import re
import sqlite3
import threading

import pypdfium2
import pytest
from fake_service import CONTEXT, FakeService, until
from PIL import Image
from serving import noise, png

from mtmd import BusyError, MtmdError
from mtmd.base.cancellation import check_cancelled
from mtmd.web.app import create_app
from mtmd.web.page.answers import Answer
from mtmd.web.settings import HAS_LEFT, MediaBudget, ServerSettings
from mtmd.web.store.errors import (
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
)
from mtmd.web.store.store import Store


class Page:
    """What the page does, without a browser."""

    def __init__(self, service=None, store=None, key=None, **settings):
        self.service, self.store = service or FakeService(), store or Store(None)
        self.app = create_app(self.service, ServerSettings(**settings), self.store)
        self.client = self.app.test_client()
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    def call(self, method, path, body=None, status=200):
        result = self.client.open(f"/api{path}", method=method, json=body, headers=self.headers)
        assert result.status_code == status, result.get_data(as_text=True)
        return result.get_json(silent=True)

    def upload(self, data=None, name="a.png", status=200):
        result = self.client.post(
            f"/api/images?name={name}", data=data or png(), headers=self.headers
        )
        assert result.status_code == status, result.get_data(as_text=True)
        return result.get_json()

    def new(self):
        return self.call("POST", "/conversations", {})["id"]

    def say(self, conversation, text="what?", parent=None, images=()):
        body = {
            "parent": parent,
            "text": text,
            "images": [{"sha256": i["sha256"], "name": i["name"]} for i in images],
        }
        return self.call("POST", f"/conversations/{conversation}/messages", body)["message"]["id"]

    def ask(self, conversation, parent, status=200, **options):
        return self.call(
            "POST",
            f"/conversations/{conversation}/answers",
            {"parent": parent, "options": options},
            status,
        )

    def events(self, answer, last=0):
        """(id, data) of each event to the end."""
        result = self.client.get(
            f"/api/answers/{answer}/events", headers=self.headers | {"Last-Event-ID": str(last)}
        )
        assert result.status_code == 200, result.get_data(as_text=True)
        blocks = [
            dict(line.split(": ", 1) for line in block.split("\n"))
            for block in result.get_data(as_text=True).split("\n\n")[:-1]
        ]
        return [(int(b["id"]), json.loads(b["data"])) for b in blocks if "id" in b]

    def talk(self, text="what?", **more):
        conversation = self.new()
        requested = self.say(conversation, text, **more)
        answer = self.ask(conversation, requested)["id"]
        return conversation, requested, answer, self.events(answer)[-1][1]

    def messages(self, conversation):
        return self.call("GET", f"/conversations/{conversation}")["messages"]


@pytest.fixture
def page():
    return Page()


class ChecksCancellation(FakeService):
    def submit(self, messages, **options):
        check_cancelled()
        return super().submit(messages, **options)


def test_an_answer_is_begun_though_who_asked_has_left_the_page():
    page = Page(ChecksCancellation())
    conversation = page.new()
    message = page.say(conversation)
    gone = {HAS_LEFT: lambda: True}
    address = f"/api/conversations/{conversation}/answers"
    body = {"parent": message, "options": {}}
    result = page.client.post(address, json=body, environ_overrides=gone)
    assert result.status_code == 200 and page.events(result.get_json()["id"])


def test_a_question_about_a_picture_is_answered_and_kept(page):
    image = page.upload(png(30, 20), "cat.png")
    assert (image["width"], image["height"], image["kind"], image["name"]) == (
        30,
        20,
        "image/png",
        "cat.png",
    )
    conversation, requested, answer, end = page.talk("what is it?", images=[image])
    assert end["state"] == "complete" and end["unsaved"] is None
    assert end["message"]["text"] == "1 messages, pictures [(30, 20)]: what is it?"
    assert end["receipt"]["images"][0]["original_size"] == [30, 20]
    first, second = page.messages(conversation)
    assert (first["id"], second["id"], second["parent"]) == (
        requested,
        answer,
        requested,
    ) and second == end["message"]
    (listed,) = page.call("GET", "/conversations")["conversations"]
    assert (listed["title"], listed["head"], listed["running"]) == ("what is it?", answer, False)


def test_the_model_is_given_the_branch_and_no_other(page):
    conversation, requested, answer, _ = page.talk("one")
    other = page.ask(conversation, requested)["id"]
    page.events(other)
    page.service.words = "fine"
    second = page.say(conversation, "two", parent=answer)
    page.events(page.ask(conversation, second)["id"])
    stated = page.service.tickets[-1].messages
    assert [m["role"] for m in stated] == ["user", "assistant", "user"] and [
        m["content"] for m in stated
    ][::2] == ["one", "two"]
    assert {m["parent"] for m in page.messages(conversation)} == {None, requested, answer, second}


def test_an_edit_is_a_branch_with_its_own_pictures(page):
    first, second = page.upload(png(3, 3)), page.upload(png(4, 4))
    conversation, requested, _, _ = page.talk("one", images=[first])
    edited = page.say(conversation, "one, otherwise", images=[second])
    page.events(page.ask(conversation, edited)["id"])
    messages = {m["id"]: m for m in page.messages(conversation)}
    assert (
        messages[requested]["parent"] is messages[edited]["parent"] is None
        and messages[requested]["text"] == "one"
    )
    assert [p.size for p in page.service.tickets[-1].pictures] == [(4, 4)]
    page.call("PATCH", f"/conversations/{conversation}", {"head": requested})
    assert page.call("GET", f"/conversations/{conversation}")["conversation"]["head"] == requested


def test_what_was_said_twice_without_an_answer_is_one_turn(page):
    conversation = page.new()
    first = page.say(conversation, "one", images=[page.upload()])
    second = page.say(conversation, "two", parent=first)
    page.events(page.ask(conversation, second)["id"])
    (message,) = page.service.tickets[-1].messages
    assert message["role"] == "user" and [p["type"] for p in message["content"]] == [
        "image",
        "text",
        "text",
    ]


def test_options_reach_the_model_and_are_kept_with_the_answer(page):
    conversation = page.new()
    answer = page.ask(
        conversation,
        page.say(conversation),
        system="Be brief.",
        temperature=0.5,
        seed=7,
        max_tokens=9,
        detail="low",
    )["id"]
    page.events(answer)
    ticket = page.service.tickets[-1]
    assert ticket.messages[0] == {"role": "system", "content": "Be brief."}
    assert (
        ticket.settings.temperature,
        ticket.settings.seed,
        ticket.settings.max_tokens,
        ticket.settings.detail,
    ) == (0.5, 7, 9, "low")
    assert page.messages(conversation)[1]["options"]["system"] == "Be brief."


def test_progress_is_told_before_the_text_and_texts_together_are_one_event(page):
    page.service.words = "a b c d"
    answer = page.talk("x", images=[page.upload()])[2]
    ids, events = zip(*page.events(answer), strict=True)
    assert [e["type"] for e in events] == ["progress", "text", "end"] and events[1][
        "text"
    ] == "a b c d"
    assert list(ids) == sorted(ids)


def test_a_stream_goes_on_where_it_broke_off():
    page = Page(FakeService(pace_s=0.05))
    page.service.words = "one two three four five six"
    conversation = page.new()
    answer = page.ask(conversation, page.say(conversation))["id"]
    stream = page.client.get(f"/api/answers/{answer}/events", buffered=False)
    got, last = "", 0
    for chunk in stream.response:
        fields = dict(line.split(": ", 1) for line in chunk.decode().strip().split("\n"))
        last, data = int(fields["id"]), json.loads(fields["data"])
        if data["type"] == "text":
            got += data["text"]
            if "two" in got:
                break
    stream.close()
    rest = page.events(answer, last)
    assert got + "".join(e["text"] for _, e in rest if e["type"] == "text") == page.service.words
    assert "progress" not in {e["type"] for _, e in rest}
    assert page.events(answer, last=10**6)[-1][1]["type"] == "end", (
        "a number beyond the end gives the end"
    )


def test_an_answer_goes_on_without_anybody_listening():
    page = Page(FakeService(pace_s=0.01))
    conversation = page.new()
    answer = page.ask(conversation, page.say(conversation))["id"]
    assert page.messages(conversation)[1]["state"] == "running"
    assert page.call("GET", "/conversations")["conversations"][0]["running"]
    assert (
        until(lambda: page.messages(conversation)[1]["state"] == "complete")
        and page.messages(conversation)[1]["id"] == answer
    )


def test_stop_keeps_what_there_is():
    page = Page(FakeService(pace_s=0.02))
    page.service.words = "word " * 1000
    conversation = page.new()
    answer = page.ask(conversation, page.say(conversation))["id"]
    assert until(lambda: page.store.messages(conversation)[1].text)
    assert page.call("POST", f"/answers/{answer}/stop", {}) == {"stopped": True}
    end = page.events(answer)[-1][1]
    assert end["state"] == "stopped" and end["receipt"]["finish"] == "cancelled"
    assert page.messages(conversation)[1]["state"] == "stopped"


def test_the_text_so_far_is_saved_while_it_grows():
    page = Page(FakeService(pace_s=0.05))
    page.service.words = "word " * 1000
    conversation = page.new()
    answer = page.ask(conversation, page.say(conversation))["id"]
    assert until(lambda: "word word" in page.store.messages(conversation)[1].text)
    assert page.store.messages(conversation)[1].state == "running"
    page.call("POST", f"/answers/{answer}/stop", {})
    page.events(answer)


def test_an_answer_cut_off_by_a_crash_is_shown_as_far_as_it_went(tmp_path):
    before = Page(FakeService(pace_s=0.05), Store(tmp_path))
    before.service.words = "word " * 1000
    conversation = before.new()
    answer = before.ask(conversation, before.say(conversation))["id"]
    assert until(lambda: "word word" in before.store.messages(conversation)[1].text)
    after = Page(store=Store(tmp_path))  # as a new server finds it
    message = after.messages(conversation)[1]
    assert message["state"] == "interrupted" and "word word" in message["text"]
    after.call("GET", f"/answers/{answer}/events", status=404)
    again = after.say(conversation, "go on", parent=answer)
    assert after.events(after.ask(conversation, again)["id"])[-1][1]["state"] == "complete"
    before.service.close()
    before.events(answer)
    after.store.close()
    before.store.close()


def test_closing_the_store_ends_and_saves_what_is_being_written(tmp_path):
    page = Page(FakeService(pace_s=0.02), Store(tmp_path))
    page.service.words = "word " * 1000
    conversation = page.new()
    page.ask(conversation, page.say(conversation))
    assert until(lambda: "word word" in page.store.messages(conversation)[1].text)
    page.store.close()
    again = Store(tmp_path)
    answer = again.messages(conversation)[1]
    assert (
        answer.state == "stopped"
        and answer.receipt["output_tokens"] == len(answer.text.split()) >= 2
    )
    again.close()


def test_one_answer_at_a_time_in_a_conversation():
    page = Page(FakeService(pace_s=0.05))
    page.service.words = "word " * 100
    conversation = page.new()
    requested = page.say(conversation)
    answer = page.ask(conversation, requested)["id"]
    assert "being written" in page.ask(conversation, requested, status=409)["error"]["message"]
    other = page.new()
    second = page.ask(other, page.say(other))["id"]
    for id_ in (answer, second):
        page.call("POST", f"/answers/{id_}/stop", {})
        page.events(id_)


@pytest.mark.parametrize(
    "refusal, status", [(BusyError("full"), 429), (MtmdError("a secret of the inside"), 500)]
)
def test_a_refused_answer_leaves_the_message(page, refusal, status):
    conversation = page.new()
    requested = page.say(conversation)
    page.service.refuses = refusal
    assert "secret" not in json.dumps(page.ask(conversation, requested, status=status))
    assert [m["id"] for m in page.messages(conversation)] == [requested]
    page.service.refuses = None
    assert page.events(page.ask(conversation, requested)["id"])[-1][1]["state"] == "complete"


def test_a_failure_in_mid_answer_is_told_and_kept(page):
    page.service.fails = BusyError("no room left")
    conversation, _, _, end = page.talk()
    assert (end["state"], end["error"]) == ("failed", "no room left")
    assert page.messages(conversation)[1]["error"] == "no room left"


def test_a_defect_in_mid_answer_does_not_tell_of_the_inside(page, caplog):
    page.service.fails = ZeroDivisionError("/home/someone/secret.py")
    end = page.talk()[3]
    assert end["state"] == "failed" and "secret" not in end["error"] and "secret.py" in caplog.text


def test_a_full_disk_at_the_end_is_told_and_the_answer_shown_all_the_same(page, monkeypatch):
    def fail(*_, **__):
        raise StoreError("conversations: is the disk full?")

    monkeypatch.setattr(page.store, "finish", fail)
    end = page.talk("hello")[3]
    assert (
        "disk full" in end["unsaved"]
        and "hello" in end["message"]["text"]
        and end["message"]["state"] == "complete"
    )


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (StoreBusyError, 503, "history_busy"),
        (StoreDamagedError, 503, "history_damaged"),
        (StoreFullError, 507, "not_saved"),
        (StoreReadOnlyError, 507, "history_read_only"),
    ],
)
def test_what_the_store_cannot_do_is_told_by_its_cause(page, monkeypatch, error, status, code):
    def fail(*_, **__):
        raise error("conversations: the cause")

    monkeypatch.setattr(page.store, "create", fail)
    result = page.client.post("/api/conversations", json={})
    assert (result.status_code, result.get_json()["error"]["code"]) == (status, code)
    assert result.get_json()["error"]["message"] == "conversations: the cause"
    assert result.headers.get("Retry-After") == ("1" if error is StoreBusyError else None)


@pytest.fixture
def locked(tmp_path, monkeypatch):
    """A page on a folder whose database another program can hold: (page, that program)."""
    monkeypatch.setattr(Store, "change", lambda s: s.database.change(wait_s=0.1))
    page = Page(store=Store(tmp_path))
    other = sqlite3.connect(
        tmp_path / "conversations.db", isolation_level=None, check_same_thread=False
    )
    yield page, other
    other.close()
    page.store.close()


def test_while_another_program_holds_the_database_all_but_writing_goes_on(locked):
    page, other = locked
    conversation, requested, _, _ = page.talk("hello")
    other.execute("BEGIN EXCLUSIVE")
    assert page.client.get("/health").status_code == 200
    assert page.call("GET", "/conversations")["conversations"][0]["id"] == conversation
    assert len(page.messages(conversation)) == 2 and page.call("GET", "/about")["kept"]
    page.call("GET", f"/conversations/{conversation}/export")
    for _ in range(2):  # and once more: nothing is left behind that says an answer is under way
        page.ask(conversation, requested, status=503)
    result = page.client.delete(f"/api/conversations/{conversation}")
    assert result.status_code == 503 and result.headers["Retry-After"] == "1"
    assert "another program" in result.get_json()["error"]["message"]
    other.execute("ROLLBACK")
    page.ask(conversation, requested)


def test_an_answer_that_ends_while_the_database_is_held_is_saved_afterwards(locked, monkeypatch):
    page, other = locked
    tried, finish = threading.Event(), page.store.finish

    def busy_at_first(*arguments):
        if not tried.is_set():
            other.execute("BEGIN EXCLUSIVE")
            try:
                finish(*arguments)
            finally:
                other.execute("ROLLBACK")
                tried.set()
        finish(*arguments)

    monkeypatch.setattr(page.store, "finish", busy_at_first)
    conversation, _, _, end = page.talk("hello")
    assert tried.is_set() and end["unsaved"] is None
    assert page.messages(conversation)[1]["state"] == "complete"


def test_what_happened_to_the_history_is_told(tmp_path):
    (tmp_path / "conversations.db").write_bytes(b"this is no database" * 100)
    page = Page(store=Store(tmp_path))
    notice = page.call("GET", "/about")["notice"]
    assert "damaged" in notice["text"] and str(tmp_path) not in notice["text"]
    assert page.talk("hello")[3]["state"] == "complete"
    page.store.close()
    assert Page().call("GET", "/about")["notice"] is None


def test_a_message_that_cannot_be_saved_is_not_acknowledged(page, monkeypatch):
    conversation = page.new()

    def fail(*_, **__):
        raise StoreFullError("conversations: is the disk full?")

    monkeypatch.setattr(page.store, "add", fail)
    result = page.client.post(f"/api/conversations/{conversation}/messages", json={"text": "x"})
    assert result.status_code == 507 and "disk full" in result.get_json()["error"]["message"]
    monkeypatch.undo()
    requested = page.say(conversation)
    monkeypatch.setattr(page.store, "add", fail)
    page.ask(conversation, requested, status=507)
    assert page.service.tickets[-1].cancelled.is_set(), (
        "an answer that cannot be kept is not computed"
    )


def test_a_deleted_conversation_ends_its_answer():
    page = Page(FakeService(pace_s=0.05))
    page.service.words = "word " * 1000
    conversation = page.new()
    page.ask(conversation, page.say(conversation, images=[page.upload()]))
    assert page.call("DELETE", f"/conversations/{conversation}") == {"deleted": True}
    assert until(lambda: page.service.ended == ["cancelled"])
    page.call("GET", f"/conversations/{conversation}", status=404)


def test_search_rename_and_their_limits(page):
    conversation = page.talk("where is the needle?")[0]
    page.talk("hay")
    result = page.call("GET", "/conversations?q=needle")["conversations"]
    assert [f["id"] for f in result] == [conversation] and result[0]["around"] == ""
    page.call("PATCH", f"/conversations/{conversation}", {"title": "renamed"})
    result = page.call("GET", "/conversations?q=needle")["conversations"]
    assert result[0]["title"] == "renamed" and "needle" in result[0]["around"]
    for wrong in ({"title": ""}, {"title": "x" * 201}, {"titel": "x"}, {"head": "nothing"}):
        page.call(
            "PATCH", f"/conversations/{conversation}", wrong, status=404 if "head" in wrong else 400
        )


def test_counting_adds_the_draft_to_its_branch(page):
    image = page.upload()
    conversation, _, answer, _ = page.talk("x", images=[image])
    draft = {
        "conversation": conversation,
        "parent": answer,
        "text": "",
        "images": [{"sha256": image["sha256"], "name": "b"}],
    }
    assert page.call("POST", "/count", draft) == {
        "in_memory": True,
        "prompt_tokens": 18,
        "image_tokens": [4, 4],
        "video_tokens": [],
        "audio_tokens": [],
        "context": 512,
    }
    assert page.call("POST", "/count", {"text": "x"})["image_tokens"] == []
    assert len(page.service.tickets) == 1, "nothing is computed for it"


def test_export_and_import_make_the_same_again(page):
    conversation = page.talk("about it", images=[page.upload(png(7, 5))])[0]
    result = page.client.get(f"/api/conversations/{conversation}/export")
    assert "attachment" in result.headers["Content-Disposition"]
    other = Page()
    (made,) = other.call("POST", "/import", json.loads(result.get_data(as_text=True)))[
        "conversations"
    ]
    mine, theirs = (
        [(m["role"], m["text"], m["receipt"], m["images"]) for m in p.messages(c)]
        for p, c in ((page, conversation), (other, made["id"]))
    )
    assert theirs == mine
    assert other.client.get(f"/api/images/{theirs[0][3][0]['sha256']}").data == png(7, 5)
    assert (
        json.loads(page.client.get("/api/export").data)["conversations"][0]["messages"][0]["text"]
        == "about it"
    )


def test_a_large_picture_and_a_text_that_looks_like_one_are_imported(page):
    text, conversation = base64.b64encode(noise(2)).decode(), page.new()
    page.say(conversation, text, images=[page.upload(noise(1))])
    file = json.loads(page.client.get(f"/api/conversations/{conversation}/export").data)
    other = Page()
    (made,) = other.call("POST", "/import", file)["conversations"]
    stated = other.messages(made["id"])[0]
    assert stated["text"] == text
    assert other.client.get(f"/api/images/{stated['images'][0]['sha256']}").data == noise(1)


def test_a_text_that_cannot_fit_is_not_given_to_the_model(page):
    conversation = page.new()
    parent = page.say(conversation, "x" * (64 * CONTEXT + 1))
    refused = page.ask(conversation, parent, status=400)["error"]
    assert refused["code"] == "context_length_exceeded" and page.service.tenants == []


def test_an_import_with_what_is_no_picture_is_refused_whole(page):
    conversation = page.talk("x", images=[page.upload()])[0]
    file = json.loads(page.client.get(f"/api/conversations/{conversation}/export").data)
    file["images"] = dict.fromkeys(file["images"], "PHN2Zz4=")  # <svg>
    other = Page()
    assert "SVG" in other.call("POST", "/import", file, status=400)["error"]["message"]
    assert other.call("GET", "/conversations")["conversations"] == []


def test_pictures_are_served_as_they_came_and_those_no_browser_shows_as_png(page):
    jpeg, tiff = page.upload(png(9, 9, kind="JPEG")), page.upload(png(9, 9, kind="TIFF"))
    for image, kind in ((jpeg, "image/jpeg"), (tiff, "image/png")):
        result = page.client.get(f"/api/images/{image['sha256']}")
        assert result.mimetype == kind and "immutable" in result.headers["Cache-Control"]
        assert result.headers["X-Content-Type-Options"] == "nosniff"
    for path in ("/images/" + "0" * 64, "/images/..%2fconversations.db", "/processed/" + "0" * 64):
        page.call("GET", path, status=404)


@pytest.mark.parametrize("data", [b"<svg onload=alert(1)>", b"", b"GIF89a", b"%PDF-1.4"])
def test_what_is_no_picture_is_not_kept(page, data):
    result = page.client.post(
        "/api/images?name=x.png", data=data, content_type="application/octet-stream"
    )
    assert result.status_code == 400 and page.store.collect(unused_seconds=-1) == 0


def pdf(*sizes):
    document = pypdfium2.PdfDocument.new()
    for width, height in sizes:
        document.new_page(width, height)
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


def test_the_pages_of_a_pdf_are_pictures_of_their_own(page):
    result = page.client.post(
        "/api/pages?name=two.pdf",
        data=pdf((72, 144), (144, 72)),
        content_type="application/octet-stream",
    ).get_json()
    assert result["pages"] == 2
    assert [(i["name"], i["kind"], i["width"]) for i in result["images"]] == [
        ("two.pdf, page 1", "image/png", 300),
        ("two.pdf, page 2", "image/png", 600),
    ]
    one = page.upload(pdf((72, 72)), name="one.pdf")
    assert one["kind"] == "image/png" and (one["width"], one["height"]) == (300, 300)
    refused = page.client.post(
        "/api/pages", data=b"%PDF-1.7", content_type="application/octet-stream"
    )
    assert refused.status_code == 400


def test_lists_have_small_pictures(page):
    picture = page.upload(png(900, 300))
    small = page.client.get(f"/api/images/{picture['sha256']}/small")
    assert small.mimetype == "image/jpeg" and "immutable" in small.headers["Cache-Control"]
    assert Image.open(io.BytesIO(small.data)).size == (160, 53)
    assert page.client.get(f"/api/images/{'0' * 64}/small").status_code == 404


def test_what_the_model_saw_is_shown(page):
    import numpy as np

    tile = np.zeros((4, 6, 3), np.uint8)
    page.service.processed = lambda *requested: (
        (tile, tile) if requested == ("seen", "anybody") else None
    )
    assert page.call("GET", "/processed/seen")["tiles"] == [{"width": 6, "height": 4}] * 2
    result = page.client.get("/api/processed/seen/1")
    assert result.mimetype == "image/png" and result.data.startswith(b"\x89PNG")
    page.call("GET", "/processed/seen/2", status=404)


def test_a_conversation_may_not_hold_more_pictures_than_one_request():
    page = Page(media=MediaBudget(images=2))
    conversation = page.new()
    requested = page.say(conversation, images=[page.upload()] * 3)
    message = page.ask(conversation, requested, status=400)["error"]["message"]
    assert "3 pictures" in message and "at most 2" in message


def test_a_picture_beyond_the_limit_of_bytes_or_pixels_is_refused():
    page = Page(media=MediaBudget(bytes=1000, pixels=5000))
    page.upload(png(40, 40))
    page.upload(b"\x89PNG\r\n\x1a\n" + bytes(2000), status=413)
    page.upload(png(200, 200), status=400)


@pytest.mark.parametrize(
    "path, body",
    [
        ("/conversations", {"title": 5}),
        ("/conversations/{c}/messages", {"text": " "}),
        ("/conversations/{c}/messages", {"text": "x", "role": "system"}),
        ("/conversations/{c}/messages", {"text": "x", "images": [{"sha256": "gone"}]}),
        ("/conversations/{c}/answers", {}),
        ("/conversations/{c}/answers", {"parent": "{m}", "options": {"temperature": -1}}),
        ("/count", {"options": {"detail": "huge"}}),
        ("/conversations/{c}/answers", {"parent": "{m}", "options": {"stop": "x"}}),
        ("/import", []),
    ],
)
def test_wrong_requests_are_told_in_one_line(page, path, body):
    conversation = page.new()
    requested = page.say(conversation)
    if isinstance(body, dict) and body.get("parent"):
        body = body | {"parent": requested}
    result = page.call("POST", path.format(c=conversation), body, status=400)["error"]["message"]
    assert (
        result
        and "\n" not in result
        and [m["id"] for m in page.messages(conversation)] == [requested]
    )


def test_a_message_belongs_to_its_conversation(page):
    (one, requested, answer, _), other = page.talk(), page.new()
    for path, body in (
        (f"/conversations/{other}/messages", {"text": "x", "parent": requested}),
        (f"/conversations/{other}/answers", {"parent": requested}),
        (f"/conversations/{one}/answers", {"parent": answer}),
        ("/count", {"conversation": other, "parent": requested}),
    ):
        page.call("POST", path, body, status=404)


def test_with_several_keys_each_has_its_own_conversations():
    keys = ("key-of-one-person", "key-of-another-person")
    mine = Page(api_keys=keys, key=keys[0])
    picture = mine.upload()
    conversation, requested, answer, _ = mine.talk("private", images=[picture])
    unsent = mine.upload(png(7, 5))
    exported = mine.client.get("/api/export", headers=mine.headers).data
    mine.headers = {"Authorization": f"Bearer {keys[1]}"}
    assert (
        mine.call("GET", "/conversations?q=private")["conversations"]
        == mine.call("GET", "/conversations")["conversations"]
        == []
    )
    for method, path in (
        ("GET", f"/conversations/{conversation}"),
        ("DELETE", f"/conversations/{conversation}"),
        ("GET", f"/conversations/{conversation}/export"),
        ("GET", f"/answers/{answer}/events"),
        ("POST", f"/answers/{answer}/stop"),
        ("PATCH", f"/conversations/{conversation}"),
        ("GET", f"/images/{picture['sha256']}"),
        ("GET", f"/images/{unsent['sha256']}"),
        ("GET", f"/processed/{picture['sha256']}"),
    ):
        mine.call(method, path, {} if method in ("POST", "PATCH") else None, status=404)
    other = mine.new()
    for image in (picture, unsent):
        shown = {"sha256": image["sha256"], "name": "x"}
        stated = {"text": "what is it?", "images": [shown]}
        mine.call("POST", f"/conversations/{other}/messages", stated, status=400)
        mine.call("POST", "/count", stated, status=400)
    mine.call("POST", "/count", {"text": "x", "conversation": conversation}, status=404)
    mine.call("POST", f"/conversations/{other}/answers", {"parent": requested}, status=404)
    assert (
        json.loads(mine.client.get("/api/export", headers=mine.headers).data)["conversations"] == []
    )
    mine.call("POST", "/import", json.loads(exported))  # who has a picture's bytes has the picture
    assert mine.client.get(f"/api/images/{picture['sha256']}", headers=mine.headers).data == png()
    mine.headers = {}
    mine.call("GET", "/conversations", status=401)


def test_the_pages_are_open_and_their_contents_are_not():
    page = Page(api_keys=("a-key-of-this-server",))
    for path in ("/", "/c/0123abcd", "/diagnostics", "/static/chat/chat.js"):
        with page.client.get(path) as result:
            assert result.status_code == 200 and b"fake" not in result.data
    policy = page.client.get("/").headers["Content-Security-Policy"]
    assert "script-src 'self'" in policy and "unsafe" not in policy
    for path in (
        "/about",
        "/stats",
        "/report",
        "/conversations",
        "/export",
        "/images/x",
        "/processed/x",
    ):
        page.call("GET", path, status=401)


def test_many_answers_at_once_each_keep_their_own():
    page = Page(FakeService(pace_s=0.002))
    result = {}

    def talk(index):
        conversation = page.new()
        answer = page.ask(conversation, page.say(conversation, f"number {index}"))["id"]
        result[index] = page.events(answer)[-1][1]["message"]["text"]

    threads = [threading.Thread(target=talk, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert result == {i: f"1 messages, pictures []: number {i}" for i in range(8)}


def test_texts_that_come_together_are_joined_once():
    """One by one, each was copied as often as others came after it."""

    class Text(str):
        def __add__(self, other):
            raise AssertionError("copied for a piece")

    answer = Answer("a", "c", None)
    for event in (
        {"type": "progress", "stage": "encode", "done": 1, "total": 2},
        {"type": "progress", "stage": "encode", "done": 2, "total": 2},
        *({"type": "text", "text": Text(f"{n} "), "tokens": 1} for n in range(1000)),
        {"type": "end"},
    ):
        answer.add(event)
    assert answer.after(0, 0) == (
        1003,
        [
            {"type": "progress", "stage": "encode", "done": 2, "total": 2},
            {"type": "text", "text": "".join(f"{n} " for n in range(1000)), "tokens": 1000},
            {"type": "end"},
        ],
    )
    assert answer.after(1002, 0) == (1003, [{"type": "end"}])


@pytest.mark.parametrize(
    ("path", "root"), [("/", "./"), ("/diagnostics", "./"), ("/c/0123abcd", "../")]
)
def test_links_of_the_pages_are_relative(path, root):
    """So that a proxy may put all of it under a path of its own."""
    html = Page().client.get(path).get_data(as_text=True)
    links = re.findall(r'(?:href|src)="([^"#][^"]*)"', html)
    assert re.search(rf"{re.escape(root)}static/[0-9a-f]+/shared/base.css", " ".join(links))
    assert all(link.startswith(root) for link in links)


def test_of_a_long_conversation_most_is_told_by_its_place_and_read_when_it_is_asked_for(page):
    store, image = page.store, page.upload(png(30, 20))
    long, made = page.new(), []
    for number in range(302):
        role, parent = ("user", "assistant")[number % 2], made[-1] if made else None
        pictures = [store.image(image["sha256"])] if number == 4 else []
        since = {"since": made[2]} if number == 5 else None
        made.append(store.add(long, parent, role, f"n{number}", images=pictures, options=since).id)
    other = store.add(long, made[6], "assistant", "another answer").id
    page.call("PATCH", f"/conversations/{long}", {"head": made[-1]})
    result = page.call("GET", f"/conversations/{long}")
    assert [m["text"] for m in result["messages"]] == [f"n{n}" for n in range(222, 302)]
    outline = result["outline"]
    assert outline["ids"] == [*made, other] and outline["up"] == [0] + [1] * 301 + [302 - 6]
    assert outline["roles"] == "ua" * 151 + "a" and outline["since"] == {"5": made[2]}
    assert [i["sha256"] for i in outline["images"]["4"]] == [image["sha256"]]
    read = page.call("POST", f"/conversations/{long}/messages/read", {"ids": [made[7], other]})
    assert [m["text"] for m in read["messages"]] == ["n7", "another answer"]


def test_an_answer_that_was_cut_in_a_character_goes_on_before_it(page):
    conversation, requested, _, _ = page.talk()
    cut = page.store.add(conversation, requested, "assistant", "a cat 👩\u200d\ufffd\ufffd").id
    address = f"/conversations/{conversation}/answers"
    answer = page.call("POST", address, {"parent": requested, "continues": cut, "options": {}})
    page.events(answer["id"])
    assert page.service.tickets[-1].messages[-1]["content"] == "a cat 👩\u200d"
    assert page.messages(conversation)[-1]["text"].startswith("a cat 👩\u200d")
    nothing = page.store.add(conversation, requested, "assistant", "\ufffd").id
    page.call("POST", address, {"parent": requested, "continues": nothing, "options": {}}, 400)


def test_a_message_that_is_to_be_the_newest_is_refused_where_there_is_another(page):
    conversation, requested, answer, _ = page.talk()
    address = f"/conversations/{conversation}/messages"
    newest = {"text": "two", "parent": answer, "newest": True}
    page.call("POST", address, newest)
    refused = page.call("POST", address, newest | {"text": "two, from elsewhere"}, 409)
    assert refused["error"]["code"] == "newer_turn"
    assert "another window has continued" in refused["error"]["message"]
    page.call("POST", address, newest | {"parent": None}, 409)
    page.call("POST", address, newest | {"parent": requested}, 409)
    page.call("POST", address, newest | {"newest": False})  # a branch on purpose
    assert [m["text"] for m in page.messages(conversation)][2:] == ["two", "two"]
    page.call("POST", f"/conversations/{page.new()}/messages", newest | {"parent": None})


def test_what_was_read_of_an_answer_that_a_server_took_with_it_is_kept(page):
    conversation, requested, whole, _ = page.talk()
    cut = page.store.add(conversation, requested, "assistant", "w0 w1", state="running").id
    for answer, text in ((whole, "more"), (cut, "w0 w"), (cut, "other words")):
        page.call("POST", f"/answers/{answer}/read", {"text": text}, 409)
    saved = page.call("POST", f"/answers/{cut}/read", {"text": "w0 w1 w2"})
    assert (saved["text"], saved["state"]) == ("w0 w1 w2", "interrupted")
    assert page.messages(conversation)[-1]["text"] == "w0 w1 w2"


def test_a_conversation_that_is_deleted_meanwhile_is_told_and_is_no_error_of_ours(
    page, monkeypatch
):
    """Between two looks at it, as while an answer waits for its model."""
    conversation, requested, *_ = page.talk()
    cut = page.store.add(conversation, requested, "assistant", "w0", state="running").id
    read = page.store.messages
    monkeypatch.setattr(page.store, "messages", lambda *_: [])
    for path, body in (
        (f"/answers/{cut}/read", {"text": "w0 w1"}),
        (f"/conversations/{conversation}/answers", {"parent": requested}),
        ("/count", {"conversation": conversation, "parent": requested, "text": "hi"}),
    ):
        assert page.call("POST", path, body, 404)["error"]["code"] == "no_conversation"
    looks = iter([read, lambda *_: []])
    monkeypatch.setattr(page.store, "messages", lambda *given: next(looks)(*given))
    page.call("POST", f"/conversations/{conversation}/answers", {"parent": requested}, 404)


def test_what_is_pinned_stands_first_and_an_export_does_not_tell_it(page):
    first, second, third = (page.talk(f"q{n}")[0] for n in range(3))
    page.call("PATCH", f"/conversations/{first}", {"pinned": True})
    listed = page.call("GET", "/conversations")["conversations"]
    assert [(c["id"], c["pinned"]) for c in listed] == [
        (first, True),
        (third, False),
        (second, False),
    ]
    page.call("PATCH", f"/conversations/{first}", {"pinned": False})
    assert page.call("GET", "/conversations")["conversations"][0]["id"] == third
    assert "pinned" not in page.client.get("/api/export").get_data(as_text=True)
