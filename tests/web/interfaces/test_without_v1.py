from __future__ import annotations

import openai
import pytest
from fake_service import FakeService
from serving import client_for, running, user

from mtmd import OptionError
from mtmd.web.settings import ServerSettings


def test_the_official_client_without_the_prefix():
    with (
        running(FakeService()) as server,
        openai.OpenAI(base_url=server.url, api_key="unused", max_retries=0, timeout=20) as client,
    ):
        assert [model.id for model in client.models.list()] == ["fake"]
        result = client.chat.completions.create(model="fake", messages=[user("hi")])
        assert result.choices[0].message.content == "1 messages, pictures []: hi"
        with pytest.raises(openai.NotFoundError, match=r"has .fake"):
            client.models.retrieve("other")


def test_keys_hold_without_the_prefix():
    client = client_for(FakeService(), api_keys=("a-long-enough-key",))
    assert client.get("/models").status_code == 401
    assert client.get("/models", headers={"X-Api-Key": "a-long-enough-key"}).status_code == 200
    assert client.get("/models", headers={"X-Api-Key": "another-such-key"}).status_code == 401


def test_aliases_and_any_name():
    def ask(model, **settings):
        client = client_for(FakeService(), **settings)
        result = client.post(
            "/v1/chat/completions", json={"model": model, "messages": [user("hi")]}
        )
        return result.status_code, (result.get_json() or {}).get("model")

    assert ask("gpt-9") == (404, None)
    assert ask("gpt-9", aliases=("gpt-9",)) == (200, "gpt-9")
    assert ask("other", aliases=("gpt-9",)) == (404, None)
    assert ask("other", any_model=True) == (200, "fake")
    listed = client_for(FakeService(), aliases=("gpt-9", "fake")).get("/v1/models").get_json()
    assert [model["id"] for model in listed["data"]] == ["fake", "gpt-9"]
    with pytest.raises(OptionError, match="alias"):
        ServerSettings(aliases=(" ",))
