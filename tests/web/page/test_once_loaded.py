"""Answers of the page whose model is being loaded: how far it is, stopped meanwhile, or failed."""

from __future__ import annotations

import json
import weakref

import pytest
from fake_models import FakeLoader, registry_of
from fake_service import until

from mtmd import Finished, ModelError
from mtmd.web.app import create_app_of_many
from mtmd.web.page.once_loaded import NotBegun, OnceLoaded
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import Store


@pytest.fixture
def loader():
    made = FakeLoader({"slow": 4, "quick": 4})
    made.gate.clear()
    made.read = (1, 4)
    return made


@pytest.fixture
def registry(loader, monkeypatch):
    monkeypatch.setattr("mtmd.web.page.once_loaded.REPORTED_S", 0.001)
    made, _ = registry_of(loader.needs, loader=loader)
    made.start()
    yield made
    loader.gate.set()
    made.close()


class Page:
    def __init__(self, registry):
        self.store = Store(None)
        self.client = create_app_of_many(registry, ServerSettings(), self.store).test_client()
        self.conversation = self.post("/api/conversations", {})["id"]

    def post(self, path, body, status=200):
        result = self.client.post(path, json=body)
        assert result.status_code == status, result.get_data(as_text=True)
        return result.get_json()

    def ask(self, status=200, **body):
        path = f"/api/conversations/{self.conversation}"
        parent = self.post(f"{path}/messages", {"text": "hi"})["message"]["id"]
        requested = {"parent": parent, "options": {"model": "slow"}} | body
        return self.post(f"{path}/answers", requested, status)

    def events(self, answer):
        """As they come."""
        result = self.client.get(f"/api/answers/{answer}/events", buffered=False)
        for piece in result.iter_encoded():
            yield json.loads(piece.decode().partition("data: ")[2])


@pytest.fixture
def page(registry):
    made = Page(registry)
    yield made
    made.store.close()


def test_it_is_there_at_once_and_tells_how_far_its_model_is(page, loader, registry):
    answer = page.ask()
    assert (answer["state"], answer["role"]) == ("running", "assistant")
    events = page.events(answer["id"])
    event = next(events)
    while event.get("progress") != 0.25:
        event = next(events)
    assert event == {
        "type": "loading",
        "model": "slow",
        "stage": "reading weights",
        "progress": 0.25,
    }
    loader.gate.set()
    *_, end = events
    assert end["state"] == "complete" and end["message"]["text"].startswith("slow says")
    assert not registry.busy


def test_it_can_be_stopped_meanwhile_and_nobody_waits_for_its_model_then(page, loader, registry):
    answer = page.ask()["id"]
    assert registry.busy
    assert page.post(f"/api/answers/{answer}/stop", {}) == {"stopped": True}
    *_, end = page.events(answer)
    assert (end["state"], end["receipt"], end["error"]) == ("stopped", None, None)
    assert not registry.busy and not loader.gate.is_set()
    again = page.ask()
    assert again["state"] == "running", "another one may be asked for"


def test_what_goes_wrong_with_its_model_is_how_it_ends(page, loader, registry):
    loader.fails["slow"] = ModelError("tokenizer.json: not there")
    answer = page.ask()["id"]
    loader.gate.set()
    *_, end = page.events(answer)
    assert end["state"] == "failed" and "tokenizer.json: not there" in end["error"]
    assert not registry.busy
    assert "not there" in page.ask(503)["error"]["message"], "known before it is begun"


def test_what_goes_wrong_with_the_question_is_told_once_the_model_is_there(page, loader, registry):
    answer = page.ask(options={"model": "slow", "temperature": 1e9})["id"]
    loader.gate.set()
    *_, end = page.events(answer)
    assert end["state"] == "failed" and "temperature" in end["error"]
    assert not registry.busy


def test_one_that_has_ended_keeps_nothing_of_its_request(loader, registry):
    """It is kept for pages that come back."""

    class Stored:
        def __call__(self, served):
            return served.service.submit([{"role": "user", "content": "hi"}])

    begin, claim = Stored(), registry.claim("slow")
    answer, stored = OnceLoaded("slow", claim, begin), weakref.ref(begin)
    del begin
    loader.gate.set()
    assert any(isinstance(event, Finished) for event in answer)
    assert stored() is None
    stopped, begin = registry.claim("quick"), Stored()
    loader.gate.clear()
    answer, stored = OnceLoaded("quick", stopped, begin), weakref.ref(begin)
    del begin
    answer.cancel()
    assert isinstance([*answer][-1], NotBegun) and stored() is None


def test_a_conversation_that_is_deleted_meanwhile_waits_for_nothing(page, registry):
    page.ask()
    assert page.client.delete(f"/api/conversations/{page.conversation}", json={}).status_code == 200
    assert until(lambda: not registry.busy)


def test_a_server_that_ends_stops_it(page, registry):
    answer = page.ask()["id"]
    for end in page.store.before_close:
        end()
    *_, last = page.events(answer)
    assert last["state"] == "stopped" and not registry.busy
