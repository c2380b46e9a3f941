"""LoRA adapters over HTTP: chosen as a model, by name, by number, and for who chooses none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters import write_adapter
from serving import client_for

from mtmd import load

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder: Path = tmp_path_factory.mktemp("adapters")
    paths = {name: write_adapter(folder / name, seed=i) for i, name in enumerate("ab")}
    with load(device="cpu", lora=paths) as model:
        yield client_for(model.service)


def adapters(client: Any, path: str = CHAT, **body: Any) -> dict[str, float]:
    """What the receipt says of an answer."""
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    response = client.post(path, json={"max_tokens": 2, **prompt, **body})
    assert response.status_code == 200, response.json
    applied: dict[str, float] = response.json.get("usage", response.json)["mtmd_receipt"][
        "adapters"
    ]
    return applied


def test_listed_and_chosen_as_models(client: Any) -> None:
    listed = {one["id"]: one.get("parent") for one in client.get("/v1/models").json["data"]}
    assert listed == {"demo model": None, "a": "demo model", "b": "demo model"}
    assert client.get("/v1/models/b").json["parent"] == "demo model"
    assert adapters(client, model="a") == {"a": 1.0}
    assert (
        client.post(CHAT, json={"model": "a", "messages": HELLO, "max_tokens": 1}).json["model"]
        == "a"
    )
    assert adapters(client, model="demo model") == {}
    response = client.post(CHAT, json={"model": "c", "messages": HELLO})
    assert response.status_code == 404


def test_chosen_by_name_and_number(client: Any) -> None:
    for path in (CHAT, "/v1/completions"):
        assert adapters(client, path, adapter={"a": 0.5, "b": 0.25}) == {"a": 0.5, "b": 0.25}
        assert adapters(client, path, model="a", adapter="b:2") == {"b": 2.0}
        assert adapters(client, path, lora=[{"id": 1, "scale": 0.5}]) == {"b": 0.5}
    assert adapters(client, "/completion", lora=[{"id": 0}]) == {"a": 1.0}
    for wrong in (
        {"lora": [{"id": 2}]},
        {"lora": [{"id": -1}]},
        {"lora": [{"id": 0, "scale": 1e9}]},
        {"adapter": "../etc/passwd"},
        {"adapter": "c"},
        {"adapter": ["a"] * 99},
    ):
        response = client.post(CHAT, json={"messages": HELLO, **wrong})
        assert response.status_code == 400, wrong
        assert response.json["error"]["param"].startswith(next(iter(wrong)))


def test_for_who_chooses_none(client: Any) -> None:
    expected = [{"id": i, "name": name, "path": name, "scale": 0.0} for i, name in enumerate("ab")]
    assert client.get("/lora-adapters").json == expected
    answer = client.post("/lora-adapters", json=[{"id": 1, "scale": 0.5}])
    assert answer.json == {"success": True}
    try:
        assert [one["scale"] for one in client.get("/lora-adapters").json] == [0.0, 0.5]
        assert adapters(client) == {"b": 0.5}
        assert adapters(client, lora=[]) == {}
        assert adapters(client, model="a") == {"a": 1.0}
        assert client.post("/lora-adapters", json=[{"id": 7}]).status_code == 400
        assert client.post("/lora-adapters", json={"id": 0}).status_code == 400
    finally:
        client.post("/lora-adapters", json=[])
    assert adapters(client) == {}
