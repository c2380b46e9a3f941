"""What stands in a body of JSON, and what is refused about it, does not depend on whether its long
pictures are taken out before it is read.
"""

from __future__ import annotations

import base64
import json
import random
import re
from unittest.mock import patch

import pytest
from clips import video
from fake_service import FakeService
from pydantic_core import from_json
from serving import (
    client_for,
    data_url,
    image_part,
    noise,
    png,
    post_chat,
    raw_request,
    running,
    user,
)

from mtmd.prompt.load_image import load_image
from mtmd.web.errors import ApiError
from mtmd.web.intake import long_texts
from mtmd.web.intake import media as media_module
from mtmd.web.intake.json_limits import PICTURES, check_json
from mtmd.web.intake.long_texts import LONG, CutBody, CutText
from mtmd.web.settings import JsonLimits

BEGINS = [begin.decode().replace("\\", "") for begin in PICTURES if begin != b"data:"]


def in_base64(data):
    return base64.b64encode(data).decode()


ONE, TWO = noise(1), noise(2, 180)
URL, PLAIN = data_url(ONE), in_base64(ONE)


@pytest.fixture
def service():
    made = FakeService()
    made.context = 1 << 20
    return made


@pytest.fixture
def all_cut(monkeypatch):
    """No picture reaches the media as a text."""
    monkeypatch.setattr(media_module, "decoded", None)


@pytest.fixture
def short(monkeypatch):
    """Texts are long, and pieces end, after a few bytes."""
    monkeypatch.setattr(long_texts, "LONG", 24)
    monkeypatch.setattr(long_texts, "PIECE", 7)


def hashes(service):
    return [picture.sha256 for picture in service.tickets[-1].pictures]


def sha256(data):
    return load_image(data).sha256


def anthropic(*blocks, **more):
    return {
        "model": "fake",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": [*blocks, {"type": "text", "text": "hm"}]}],
        **more,
    }


def block(source):
    return {"type": "image", "source": source}


ENCODED = {"type": "base64", "media_type": "image/png", "data": PLAIN}
RESULT = {"type": "tool_result", "tool_use_id": "x", "content": [block(ENCODED)]}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}
INPUT_IMAGE = {"type": "input_image", "image_url": URL}
REQUESTS = {
    "openai": ("/v1/chat/completions", {"messages": [user("hm", image_part(URL))]}),
    "anthropic": ("/v1/messages", anthropic(block(ENCODED))),
    "anthropic, url": ("/v1/messages", anthropic(block({"type": "url", "url": URL}))),
    "anthropic, result": (
        "/v1/messages",
        anthropic() | {"messages": [user("a"), CALL, {"role": "user", "content": [RESULT]}]},
    ),
    "ollama": (
        "/api/chat",
        {
            "model": "fake",
            "stream": False,
            "messages": [{"role": "user", "content": "hm", "images": [PLAIN]}],
        },
    ),
    "ollama, generate": (
        "/api/generate",
        {"model": "fake", "stream": False, "prompt": "hm", "images": [URL]},
    ),
    "responses": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [INPUT_IMAGE]}], "model": "fake"},
    ),
    "responses, result": (
        "/v1/responses",
        {
            "model": "fake",
            "input": [
                {"role": "user", "content": "hm"},
                {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "x", "output": [INPUT_IMAGE]},
            ],
        },
    ),
}


@pytest.mark.usefixtures("all_cut")
@pytest.mark.parametrize("slashes", ["/", "\\/"])
@pytest.mark.parametrize("name", REQUESTS)
def test_every_interface_sees_the_same_picture(service, name, slashes):
    path, body = REQUESTS[name]
    data = json.dumps(body).replace("/", slashes)
    result = client_for(service).post(path, data=data, content_type="application/json")
    assert result.status_code == 200, result.get_json()
    assert hashes(service) == [sha256(ONE)]


@pytest.mark.usefixtures("all_cut")
@pytest.mark.parametrize("path", ["/v1/chat/completions/input_tokens", "/apply-template"])
def test_so_do_those_that_answer_nothing(service, path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "fake_service._pictures",
        lambda messages: seen.extend(p["image"].sha256 for p in messages[0]["content"][1:]) or [],
    )
    result = client_for(service).post(path, json={"messages": [user("hm", image_part(URL))]})
    assert result.status_code == 200 and seen == [sha256(ONE)]


@pytest.mark.usefixtures("all_cut")
def test_a_response_that_is_gone_on_from_keeps_its_picture(service):
    client = client_for(service)
    path, body = REQUESTS["responses"]
    first = client.post(path, json=body).get_json()
    more = {"model": "fake", "input": "and now?", "previous_response_id": first["id"]}
    assert client.post(path, json=more).status_code == 200
    assert hashes(service) == [sha256(ONE)]


@pytest.mark.usefixtures("all_cut")
@pytest.mark.parametrize("kind", ["JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_formats_are_known_by_their_beginnings(service, kind):
    data = noise(3, 900, kind)
    body = {"model": "fake", "stream": False, "prompt": "hm", "images": [in_base64(data)]}
    assert client_for(service).post("/api/generate", json=body).status_code == 200
    assert hashes(service) == [sha256(data)]


@pytest.mark.usefixtures("all_cut")
def test_two_pictures_and_one_that_is_short(service):
    urls = [data_url(data) for data in (TWO, ONE)]
    result = post_chat(client_for(service), "hm", *map(image_part, urls))
    assert result.status_code == 200 and hashes(service) == [sha256(TWO), sha256(ONE)]


def test_one_that_is_short_stands_beside_them(service):
    urls = [data_url(data) for data in (TWO, png(5, 4), ONE)]
    assert post_chat(client_for(service), "hm", *map(image_part, urls)).status_code == 200
    assert hashes(service) == [sha256(TWO), sha256(png(5, 4)), sha256(ONE)]


@pytest.mark.usefixtures("all_cut")
def test_lines_of_base64(service):
    url = "data:image/png;base64," + base64.encodebytes(ONE).decode()
    assert post_chat(client_for(service), "hm", image_part(url)).status_code == 200
    assert hashes(service) == [sha256(ONE)]


@pytest.mark.usefixtures("all_cut")
@pytest.mark.parametrize("kind", ["video_url", "input_video"])
def test_videos(service, kind):
    clip = video(12) + b"\0\0\0\0free" + bytes(LONG)
    part = {"type": kind, kind: {"url": data_url(clip, "video/mp4")}}
    result = post_chat(client_for(service), "hm", part)
    assert result.status_code == 200, result.get_json()
    shown = [p for p in service.tickets[-1].messages[-1]["content"] if p["type"] == "video"]
    with shown[0]["video"].opened() as reader:
        assert reader.facts.frames == 12


@pytest.mark.usefixtures("all_cut")
def test_a_body_in_a_file(service):
    """One that is read from a connection, and waits on the disk."""
    data = noise(4, 2000)
    with running(service) as server:
        sock = raw_request(server, {"messages": [user("hm", image_part(data_url(data)))]})
        assert b" 200 " in sock.recv(100)
        sock.close()
    assert hashes(service) == [sha256(data)]


@pytest.mark.parametrize("slashes", ["/", "\\/"])
def test_no_step_is_long(slashes):
    data = json.dumps({"messages": [user(image_part(data_url(noise(5, 2000))))]})
    whole = data.replace("/", slashes).encode()
    with patch.object(base64, "b64decode", wraps=base64.b64decode) as calls:
        body = CutBody(whole)
    assert len(calls.call_args_list) > 10
    assert all(len(call.args[0]) <= long_texts.PIECE + 4 for call in calls.call_args_list)
    assert len(body.data) < 200


@pytest.mark.parametrize("text", [PLAIN, URL, "data: " + "x" * 100_000, "Qk" + "A" * 100_000])
@pytest.mark.parametrize("alongside", [(), (image_part(URL),)])
def test_a_text_is_a_text_whatever_it_looks_like(service, text, alongside):
    result = post_chat(client_for(service), text, *alongside, metadata={"url": URL}, other=[PLAIN])
    assert result.status_code == 200, result.get_json()
    assert service.tickets[-1].messages[0]["content"][0]["text"] == text
    assert hashes(service) == [sha256(ONE)] * len(alongside)


def test_a_text_that_is_too_long_is_measured_whole():
    result = post_chat(client_for(FakeService()), PLAIN)
    assert f"found {len(PLAIN):,} characters" in result.get_json()["error"]["message"]


def test_names_are_nobodys_to_guess(service):
    """One that stood in another body means nothing in this one."""
    bodies = [CutBody(json.dumps([URL, PLAIN]).encode()) for _ in range(2)]
    first, second = (from_json(body.data) for body in bodies)
    assert not {*first} & {*second}
    name = re.compile("[0-9a-f]{32}")
    assert all(name.search(text) for text in first)
    assert [bodies[1].take(text) for text in first] == first
    result = post_chat(client_for(service), first[0], image_part(URL), image_part(first[0]))
    assert result.status_code == 400
    assert "messages[0].content[2].image_url" in result.get_json()["error"]["message"]
    assert post_chat(client_for(service), first[0], image_part(URL)).status_code == 200
    assert service.tickets[-1].messages[0]["content"][0]["text"] == first[0]


def damaged(text, at, by):
    data = bytearray(json.dumps({"messages": [user("hm", image_part(text))]}).encode())
    at = data.index(b"data:") + at
    data[at : at + 1] = by
    return bytes(data)


WHOLE = json.dumps({"messages": [user("hm", image_part(URL))]}).encode()
WRONG = {
    "no base64": damaged(URL, 70_000, b"!"),
    "padding in the midst": damaged(URL, 70_000, b"="),
    "a character is missing": damaged(URL, 70_000, b""),
    "not utf-8": damaged(URL, 70_000, b"\xff"),
    "not utf-8 before it": damaged(URL, 7, b"\xff"),
    "a control character": damaged(URL, 70_000, b"\0"),
    "a line break": damaged(URL, 70_000, b"\n"),
    "an escape of JSON": damaged(URL, 70_000, b"\\u0041"),
    "no escape of JSON": damaged(URL, 70_000, b"\\x"),
    "an escaped backslash": damaged(URL, 70_000, b"\\\\/"),
    "escaped backslashes that make a line break": damaged(URL, 70_000, b"A\\\\nr"),
    "an escaped quotation mark": damaged(URL, 70_000, b'\\"'),
    "a quotation mark": damaged(URL, 70_000, b'"'),
    "cut off in it": WHOLE[:80_000],
    "cut off after it": WHOLE[:-3],
    "wrong before it": WHOLE.replace(b'"hm"', b"hm", 1),
    "wrong after it": WHOLE[:-3] + b",]}",
    "wrong on another line": WHOLE.replace(b", ", b",\n") + b"x",
    "no text": WHOLE.replace(b'"hm"', b"3"),
    "twice": WHOLE.replace(b'{"url"', b'{"url": "x", "url"'),
    "twice, the other way": WHOLE.replace(b'"}}]', b'", "url": "x"}}]'),
    "as a detail": WHOLE.replace(b'{"url"', b'{"url": "x", "detail"'),
    "as a role": WHOLE.replace(b'"role": "user"', b'"role": "%b"' % URL.encode()),
    "as a key": WHOLE.replace(b'"role": "user"', b'"%b": "user"' % URL.encode()),
    "as a model": WHOLE[:-1] + b', "model": "%b"}' % URL.encode(),
    "as a stop": WHOLE[:-1] + b', "stop": ["%b"]}' % PLAIN.encode(),
    "base64 for a url": json.dumps({"messages": [user("hm", image_part(PLAIN))]}).encode(),
    "no data url": WHOLE.replace(b";base64", b""),
    "a long type": WHOLE.replace(b"image/png", b"image/" + b"x" * 1000),
    "nothing of it but a file": b'"%b"' % URL.encode(),
    "behind a text": b'{"a""%b"}' % URL.encode(),
    "inside of a text": json.dumps({"messages": [user(f'a"{URL}"')]}).encode(),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("fields", ["ignore", "refuse"])
def test_errors_are_those_of_the_whole_body(what, fields, service, monkeypatch):
    def requested():
        client = client_for(service, unknown_fields=fields)
        result = client.post(
            "/v1/chat/completions", data=WRONG[what], content_type="application/json"
        )
        answer = result.get_json()
        return result.status_code, answer.get("error") or answer["choices"]

    cut = requested()
    monkeypatch.setattr(long_texts, "LONG", 1 << 30)
    assert cut == requested()


def test_a_data_url_is_no_base64_alone(service, monkeypatch):
    body = anthropic(block(ENCODED | {"data": URL}))
    cut = client_for(service).post("/v1/messages", json=body).get_json()["error"]
    monkeypatch.setattr(long_texts, "LONG", 1 << 30)
    assert cut == client_for(service).post("/v1/messages", json=body).get_json()["error"]
    assert "not base64" in cut["message"]


def test_a_body_is_read_three_times_at_most():
    """Though each time one less of its pictures is taken."""
    whole = json.dumps([URL] * 8).encode()
    body, calls = CutBody(whole), []

    def read(data):
        texts = from_json(data)
        calls.append(texts.count(URL))
        return [body.take(text) for text in texts[len(calls) :]], texts

    assert body.read(read)[1] == [URL] * 8
    assert calls == [0, 1, 8]


def written(chance, value):
    """As JSON, with slashes as PHP writes them or as they are, one way in all or now and then."""
    text = json.dumps(value, ensure_ascii=chance.random() < 0.5, indent=chance.choice((None, 1)))
    often = chance.choice((0, 0, 0.5, 1))
    return "".join("\\/" if c == "/" and chance.random() < often else c for c in text)


def some_text(chance):
    kind = chance.randrange(8)
    data = chance.randbytes(chance.randrange(90))
    if kind < 2:
        return "".join(chance.choice('ab\\"[]{},:é\n/=') for _ in range(chance.randrange(60)))
    encoded = in_base64(data)
    if kind == 2:
        encoded = base64.encodebytes(data).decode()
    elif kind == 3:
        at = chance.randrange(len(encoded) + 1)
        encoded = encoded[:at] + chance.choice('=!"\\é\0é A') + encoded[at:]
    heads = ["data:image/png;base64,", "data:;BASE64,", *BEGINS, "data:base64,", "data:", "da"]
    return chance.choice(heads[:3] if chance.random() < 0.5 else heads) + encoded


def some_value(chance, depth):
    kind = chance.randrange(6 if depth else 4)
    if kind < 3:
        return some_text(chance)
    if kind == 3:
        return chance.choice([1, -2.5, None, True])
    if kind == 4:
        return [some_value(chance, depth - 1) for _ in range(chance.randrange(4))]
    return {some_text(chance): some_value(chance, depth - 1) for _ in range(chance.randrange(4))}


def some_values(chance):
    return [some_value(chance, 3) for _ in range(4)]


def same(value):
    return value


def mapped(value, change, change_name=same):
    """`value` with every text in it changed, and every name in an object."""
    if isinstance(value, list):
        return [mapped(item, change, change_name) for item in value]
    if isinstance(value, dict):
        return {change_name(n): mapped(v, change, change_name) for n, v in value.items()}
    return change(value) if isinstance(value, (str, CutText)) else value


def outcome(call, *args):
    try:
        return call(*args)
    except (ApiError, ValueError) as error:
        return type(error), str(error)


@pytest.mark.usefixtures("short")
def test_what_is_put_back_is_what_was_there():
    chance, count = random.Random(11), 0
    for _ in range(1000):
        whole = written(chance, some_values(chance)).encode()
        body, expected = CutBody(whole), json.loads(whole)
        count += body.data != whole
        assert mapped(json.loads(body.data), body.text, body.text) == expected, whole
        for limits in (JsonLimits(60, 8, 2), JsonLimits(400, 8, 2), JsonLimits(400, 100, 9)):
            cut = outcome(check_json, body.data, limits, body.escapes)
            assert cut == outcome(check_json, whole, limits), whole
    assert count > 300


@pytest.mark.usefixtures("short")
def test_what_is_taken_is_what_its_base64_says():
    chance, count = random.Random(12), 0

    def read(data, body):
        """Some texts are pictures, others are not."""
        own = random.Random(5)
        return mapped(from_json(data), lambda t: body.take(t) if own.random() < 0.7 else t)

    def checked(value):
        nonlocal count
        if isinstance(value, str):
            return unpadded(value)
        count += 1
        encoded = in_base64(value.data)
        assert value.characters >= len(encoded.rstrip("=")) and value.byte_count >= len(value.data)
        return unpadded(value.begin + encoded)

    def unpadded(text):  # some is where none is needed; the last bits may stand for nothing
        head, comma, encoded = text.rpartition(",")
        encoded = encoded.rstrip("=")
        try:
            data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
        except ValueError:
            return text.rstrip("=")
        return head + comma + in_base64(data).rstrip("=")

    for _ in range(1000):
        value = mapped(some_values(chance), lambda text: text.replace("\n", ""))
        whole = written(chance, value).encode()
        body = CutBody(whole)
        result = body.read(lambda data, body=body: read(data, body))
        assert mapped(result, checked) == mapped(from_json(whole), unpadded), whole
    assert count > 300


@pytest.mark.usefixtures("short")
def test_what_is_no_json_is_refused_in_the_same_words():
    chance, wrong = random.Random(13), 0
    for _ in range(1000):
        data = bytearray(written(chance, some_values(chance)).encode())
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(data) + 1)
            data[at : at + chance.randrange(3)] = chance.choice(
                [b"", b'"', b"\\", b"{", b"]", b",", b"\xff", b"\n", b'"data:;base64,AAAA', b"x"]
            )
        whole = bytes(data)
        expected = outcome(from_json, whole)
        body = CutBody(whole)
        actual = outcome(body.read, from_json)
        assert json.dumps(actual, default=str) == json.dumps(expected, default=str), whole
        wrong += isinstance(expected, tuple)
    assert wrong > 500


def test_a_byte_order_mark_is_left_out_however_often_it_is_put_together() -> None:
    for stated in (b'{"a": "%b"}' % (b"QUFB" * LONG), b'{"a": 1}'):
        body, result = CutBody(b"\xef\xbb\xbf" + stated), list[bytes]()
        body.read(result.append)
        assert result[-1] == stated and not any(b"\xef\xbb\xbf" in data for data in result)
    assert CutBody(b"\xef\xbb\xbf" * 2 + b"{}").data == b"\xef\xbb\xbf{}"
