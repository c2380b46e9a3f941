"""What requests of every interface have in common."""

from __future__ import annotations

import base64
import json

import pytest
from serving import noise

from mtmd.web.replicas.affinity import BEGINNING, Common, common, named_in
from mtmd.web.settings import JsonLimits

PICTURE = "iVBORw0KGgo" + "A" * 400
OTHER = "iVBORw0KGgo" + "B" * 400
URL = f"data:image/png;base64,{PICTURE}"
FILE = "file-ab12cd34-0123456789abcdef0123456789abcdef"
RESPONSE = "resp_req-ab12cd34-0123456789abcdef01234567"


def stated(value, tenant="anna"):
    return common(json.dumps(value).encode(), tenant, JsonLimits())


def openai(*parts, system="", **more):
    first = [{"role": "system", "content": system}] if system else []
    return {"messages": [*first, {"role": "user", "content": list(parts)}], **more}


def picture(url=URL):
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def text(words):
    return {"type": "text", "text": words}


ABOUT = {
    "openai": openai(text("How many?"), picture()),
    "openai, another question": openai(picture(), text("What colour?"), system="Be short."),
    "openai, two pictures": openai(picture(), picture(OTHER.join(["data:image/png;base64,", ""]))),
    "openai, as a file": openai({"type": "file", "file": {"file_data": URL}}, text("What?")),
    "responses, as a file": {
        "input": [{"role": "user", "content": [{"type": "input_file", "file_data": PICTURE}]}]
    },
    "openai, a later turn": {
        "messages": [
            *openai(picture(), text("How many?"))["messages"],
            {"role": "assistant", "content": "Three."},
            *openai(picture(f"data:image/png;base64,{OTHER}"), text("And here?"))["messages"],
        ]
    },
    "responses": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]
    },
    "anthropic": {
        "system": "Be short.",
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": PICTURE},
                    }
                ],
            }
        ],
    },
    "ollama": {"messages": [{"role": "user", "content": "How many?", "images": [PICTURE]}]},
    "ollama, generate": {"prompt": "How many?", "images": [PICTURE], "stream": False},
    "llama.cpp": {"prompt": {"prompt_string": "How many?", "multimodal_data": [PICTURE]}},
    "vectors": {"input": [{"image": URL}]},
}


@pytest.mark.parametrize("name", ABOUT)
def test_requests_about_a_picture_go_together_in_every_interface(name):
    assert stated(ABOUT[name]) == stated(ABOUT["openai"]) != Common()


@pytest.mark.parametrize("slashes", ["/", "\\/"])
def test_so_do_those_about_a_large_one(slashes):
    def about(request, large):
        body = json.dumps(request).replace(PICTURE, large).replace("/", slashes)
        return common(body.encode(), "anna", JsonLimits())

    larges = [base64.b64encode(noise(seed)).decode() for seed in (1, 2)]
    for large in larges:
        assert {about(request, large) for request in ABOUT.values()} == {
            about(ABOUT["openai"], large)
        }
    assert about(ABOUT["openai"], larges[0]) != about(ABOUT["openai"], larges[1])
    in_words = [stated(openai(text("hm"), system=large)) for large in larges]
    assert in_words[0] == stated(openai(text("hm"), system=larges[0])) != in_words[1]


def test_another_picture_and_another_client_are_something_else():
    keys = {
        stated(openai(picture(), text("How many?"))).key,
        stated(openai(picture(f"data:image/png;base64,{OTHER}"), text("How many?"))).key,
        stated(openai(picture(), text("How many?")), tenant="bert").key,
        stated(openai(text("How many?"))).key,
    }
    assert len(keys) == 4 and "" not in keys


def test_a_conversation_without_pictures_goes_by_how_it_begins():
    first = openai(text("Tell me of circles."), system="Be short.")
    later = {
        "messages": [
            *first["messages"],
            {"role": "assistant", "content": "They are round."},
            {"role": "user", "content": "And squares?"},
        ]
    }
    assert stated(first) == stated(later)
    assert stated(first) != stated(openai(text("Tell me of squares."), system="Be short."))
    assert stated(first) != stated(openai(text("Tell me of circles."), system="Be long."))
    long = "a" * BEGINNING
    assert (
        stated({"prompt": long + "b"}) == stated({"prompt": long + "c"}) != stated({"prompt": "a"})
    )
    assert (
        stated({"instructions": "Be short.", "input": "Circles"}).key
        == stated({"input": "Circles", "instructions": "Be short."}).key
    )


def test_what_is_kept_is_asked_for_where_it_is():
    assert stated({"input": "And now?", "previous_response_id": RESPONSE}).named == "ab12cd34"
    assert stated(openai(picture(FILE))).named == "ab12cd34"
    assert stated({"messages": [{"role": "user", "content": "?", "images": [FILE]}]}).named == (
        "ab12cd34"
    )
    by_id = {"type": "input_image", "file_id": FILE}
    assert stated({"input": [{"role": "user", "content": [by_id]}]}).named == "ab12cd34"
    assert stated(openai(text(f"What is {FILE}?"))).named == "", "spoken of, and not asked for"
    assert named_in("file-0123456789abcdef0123456789abcdef") == "", "of a server that is alone"
    assert named_in(f"/files/{FILE}/content") == "ab12cd34"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"\xff", b'"text"', b"17", b"[]", b"{}", b"[" * 100_000, b"1" * 5000,
        b"[" + b"0," * 200_000 + b"0]", b'{"messages": 3, "images": {"url": null}, "role": []}',
    ],
)  # fmt: skip
def test_what_is_no_request_has_nothing_in_common_and_raises_nothing(body):
    assert common(body, "anna", JsonLimits()) == Common()
