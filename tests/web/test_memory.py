"""What requests leave behind in the server: caches that are full stay as they are, nothing else does."""

from __future__ import annotations

import gc
import re
from collections import Counter

from fake_service import until
from serving import client_for, data_url, image_part, png, post_chat, user

from mtmd import Service, load
from mtmd.service import processed_tiles
from mtmd.web.page import pictures

PLANS = "mtmd.kernels.", "mtmd.llm.engine.", "mtmd.llm.batch"  # bounded by number, made as needed
FEW = 4
PICTURE_BYTES = 3 * 9 * 9


def test_requests_leave_nothing_behind_but_what_caches_hold(monkeypatch):
    monkeypatch.setattr(processed_tiles, "PICTURES", FEW)
    monkeypatch.setattr(pictures, "STORED_MAX", FEW)
    model = load(device="cpu")
    cache = model.prompts.bridge.cache
    monkeypatch.setattr(cache, "_maximum", FEW)
    with Service(model) as service:
        client = client_for(service)

        def ask(first, count):
            """Sound and damaged pictures, each on all ways in. -> what lives now, by type"""
            for number in range(first, first + count):
                data = png(9, 9, (number, 0, 0))
                for sent, status in ((data, 200), (data[:-30], 400), (b"not a picture", 400)):
                    part = image_part(data_url(sent))
                    body = {"messages": [user("count", part)]}
                    answers = (
                        post_chat(client, "What?", part, max_tokens=1),
                        client.post("/v1/chat/completions/input_tokens", json=body),
                        client.post("/api/images", data=sent, content_type="image/png"),
                    )
                    assert [answer.status_code for answer in answers] == [status] * 3
            service.exclusively(lambda: None)  # once the device has done with all of them
            return living()

        early = ask(0, 2 * FEW)
        cached = gauges(client)
        assert cached["image_cache_bytes"] == cache.stored > 0
        assert cached["held_bytes", "page pictures"] == FEW * PICTURE_BYTES
        late = ask(2 * FEW, 3 * FEW)
        stored = "held_bytes", "conversations"  # pictures themselves, where no folder has them
        assert gauges(client) | {stored: 0} == cached | {stored: 0}
        assert late == early or until(lambda: living() == early), late - early


def living():
    """Objects of this package, by type."""
    gc.collect()
    kinds = (f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())
    return Counter(k for k in kinds if k.startswith("mtmd.") and not k.startswith(PLANS))


def test_responses_that_may_be_gone_on_from_are_counted():
    with Service(load(device="cpu")) as service:
        client = client_for(service)
        stated = {"input": "hi", "max_output_tokens": 16}
        assert client.post("/v1/responses", json=stated).status_code == 200
        assert gauges(client)["held_bytes", "responses"] > 4096


def gauges(client):
    """Bytes by what holds them, and with which label."""
    text = client.get("/metrics").get_data(as_text=True)
    result = re.findall(r'^mtmd_(\w+_bytes)(?:\{what="([^"]+)"\})? (\S+)$', text, re.MULTILINE)
    return {(name, what) if what else name: float(value) for name, what, value in result}
