"""By which names a model answers, and since when."""

from __future__ import annotations

import time
from datetime import datetime
from types import SimpleNamespace

import pytest
from fake_service import FakeService
from serving import client_for

from mtmd.web.errors import ApiError
from mtmd.web.models.choice import OneModel
from mtmd.web.served_model import ServedModel


@pytest.mark.parametrize("name", ["demo model", "demo"])
def test_the_demo_model_answers_to_both_of_its_names(name):
    """`describe(p, model="demo")` works, and the README's client says "demo model"."""
    served = ServedModel(SimpleNamespace(name=name))
    assert served.answers_to("demo") and served.answers_to("demo model")
    assert served.called("demo") == "demo" and served.called(None) == served.called("x") == name
    assert served.names == (name,), "lists show it once"
    other = ServedModel(SimpleNamespace(name="other"))
    assert not other.answers_to("demo") and not served.answers_to("demos")


def test_who_asks_for_another_is_told_how_it_may_be_let_in():
    expected = r"did you mean 'gemma-3'\? this server has .* --alias NAME and --any-model"
    with pytest.raises(ApiError, match=expected) as told:
        OneModel(ServedModel(SimpleNamespace(name="gemma-3"))).choose("gemma3")
    assert told.value.status == 404


def test_lists_say_since_when_it_is_there():
    before = int(time.time())
    client = client_for(FakeService())
    (listed,) = client.get("/v1/models").get_json()["data"]
    (tag,) = client.get("/api/tags").get_json()["models"]
    assert before <= listed["created"] <= time.time()
    assert (
        int(datetime.fromisoformat(tag["modified_at"].replace("Z", "+00:00")).timestamp())
        == listed["created"]
    )
    (same,) = client.get("/v1/models").get_json()["data"]
    assert same == listed


@pytest.mark.parametrize("name", ["demo", "demo model"])
def test_who_asks_for_a_model_by_its_name_finds_that(name):
    service = FakeService()
    service.name = "demo model"
    client = client_for(service)
    assert client.get(f"/v1/models/{name}").get_json()["id"] == name
