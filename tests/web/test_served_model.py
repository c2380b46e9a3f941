"""By which names a model answers, and since when."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import pytest
from fake_service import CONTEXT, FakeService
from serving import client_for

from mtmd import load
from mtmd.llm.sampling.options import ModelSampling
from mtmd.options.answer import PresetSampling
from mtmd.web.errors import ApiError
from mtmd.web.models.choice import OneModel
from mtmd.web.served_model import ServedModel


def _service(name: str) -> SimpleNamespace:
    """What is known of a model without adapters."""
    return SimpleNamespace(name=name, checkpoint_facts=SimpleNamespace(adapters=()))


@pytest.mark.parametrize("name", ["demo model", "demo"])
def test_the_demo_model_answers_to_both_of_its_names(name):
    """`describe(p, model="demo")` works, and the README's client says "demo model"."""
    served = ServedModel(_service(name))
    assert served.answers_to("demo") and served.answers_to("demo model")
    assert served.called("demo") == "demo" and served.called(None) == served.called("x") == name
    assert served.names == (name,), "lists show it once"
    other = ServedModel(_service("other"))
    assert not other.answers_to("demo") and not served.answers_to("demos")


def test_who_asks_for_another_is_told_how_it_may_be_let_in():
    expected = r"did you mean 'gemma-3'\? this server has .* --alias NAME and --any-model"
    with pytest.raises(ApiError, match=expected) as reported:
        OneModel(ServedModel(_service("gemma-3"))).choose("gemma3")
    assert reported.value.status == 404


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


def test_what_holds_where_a_request_says_nothing():
    """The model's own settings, up to the end of the context; a preset comes first."""
    served = ServedModel(FakeService())
    assert served.options({}) == {"max_tokens": CONTEXT, "sampling": "model", "detail": "auto"}
    preset = {"temperature": 0.2, "sampling": "off"}
    served = ServedModel(FakeService(), preset=preset)
    own = {"max_tokens": CONTEXT, "detail": "low"}
    noted = {"sampling": PresetSampling("off", ("temperature",))}
    assert served.options({}, "low") == preset | own | noted
    assert served.options({"temperature": 0.2}, "low") == preset | own


def test_a_receipt_says_what_a_preset_gave():
    model = load(threads=1)
    answers = {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.2}
    client = client_for(model.service, answers=answers)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "top_p": 0.9}
    result = client.post("/v1/chat/completions", json=body | {"sampling": "greedy"}).get_json()
    model.close()
    used = result["usage"]["mtmd_receipt"]["sampling"]
    assert {name: (one["value"], one["source"]) for name, one in used.items()} == {
        "temperature": (0.5, "preset"),
        "top_p": (0.9, "request"),
        "repetition_penalty": (1.2, "preset"),
    }


def test_lists_show_how_tokens_are_chosen():
    """llama.cpp's /props and Ollama's /api/show have the model's settings, and the server's."""
    service = FakeService()
    own = ModelSampling("x.json", {"temperature": 0.7, "repetition_penalty": 1.05})
    service.checkpoint_facts = replace(service.checkpoint_facts, sampling=own)
    for answers, shown in (
        ({}, {"temperature": 0.7, "repetition_penalty": 1.05}),
        ({"sampling": "greedy"}, {"repetition_penalty": 1.05}),
        ({"sampling": "off"}, {}),
        ({"temperature": 0.1}, {"temperature": 0.1, "repetition_penalty": 1.05}),
    ):
        client = client_for(service, answers=answers)
        result = client.get("/props").get_json()["default_generation_settings"]["params"]
        assert result == shown, answers
        reported = client.post("/api/show", json={"model": "fake"}).get_json()["parameters"]
        names = {"repetition_penalty": "repeat_penalty"}
        assert reported.splitlines() == [f"{names.get(n, n)} {v:g}" for n, v in shown.items()]
        about = client.get("/api/about").get_json()
        assert (
            about["sampling"]["source"] == "x.json" and answers.items() <= about["preset"].items()
        )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
        ("/api/chat", {"messages": [{"role": "user", "content": "hi"}], "stream": False}),
        ("/api/generate", {"prompt": "hi", "stream": False}),
        ("/completion", {"prompt": "hi"}),
    ],
)
def test_every_interface_answers_by_the_models_own_settings_to_the_end(path, body):
    """As many tokens as the context has room for, but where a length is required."""
    service = FakeService()
    client = client_for(service, answers={"sampling": "model", "stop_repeating": True})
    assert client.post(path, json={"model": "fake"} | body).status_code == 200
    chosen = service.tickets[-1].chosen
    assert (chosen["sampling"], chosen["stop_repeating"]) == ("model", True)
    assert chosen["max_tokens"] == body.get("max_tokens", CONTEXT)
    assert "temperature" not in chosen, "only what is given goes before the model's own"
