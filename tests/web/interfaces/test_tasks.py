"""A task in the place of a prompt, in the requests of every interface."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from fake_service import FakeService
from serving import client_for, data_url, image_part, png, user

RED = png(20, 10)
BARE = base64.b64encode(RED).decode()
SOURCE = {"type": "base64", "media_type": "image/png", "data": BARE}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [user(image_part(data_url(RED)))]},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_image", "image_url": data_url(RED)}]}
        ]
    },
    "/v1/messages": {
        "model": "fake",
        "max_tokens": 8,
        "messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}],
    },
    "/api/chat": {
        "model": "fake",
        "stream": False,
        "messages": [{"role": "user", "content": "", "images": [BARE]}],
    },
    "/api/generate": {"model": "fake", "stream": False, "images": [BARE]},
}


@pytest.mark.parametrize("path", REQUESTS)
def test_a_task_is_an_option_of_the_answer(path: str) -> None:
    service = FakeService()
    client = client_for(service)
    made = client.post(path, json=REQUESTS[path] | {"task": "table"})
    assert made.status_code == 200, made.text
    assert service.tickets[-1].chosen["task"] == "table"
    assert len(service.tickets[-1].pictures) == 1
    refused = client.post(path, json=REQUESTS[path] | {"task": "poem"})
    assert refused.status_code == 400 and "task" in refused.text
