"""What every route passes, and that there is no way around it."""

from __future__ import annotations

import io
import json
import threading
from urllib.request import urlopen

import pytest
from fake_service import FakeService, until
from PIL import Image
from pydantic import ValidationError
from serving import client_for, data_url, image_part, png, post_chat, raw_request, running, user

from mtmd.web.app import create_app
from mtmd.web.intake import picture_budget
from mtmd.web.intake.request_limits import Body, GatedFlask, Work, takes, takes_of
from mtmd.web.interfaces.openai_requests import ChatRequest
from mtmd.web.settings import JsonLimits, MediaBudget, ServerSettings
from mtmd.web.store.store import Store

JSON = {"Content-Type": "application/json"}
BODIES = {  # what each route takes from outside; a new one is added here with open eyes
    ("GET", "/"): (Body.NOTHING, Work.QUICK),
    ("GET", "/c/<id_>"): (Body.NOTHING, Work.QUICK),
    ("GET", "/favicon.ico"): (Body.NOTHING, Work.QUICK),
    ("GET", "/diagnostics"): (Body.NOTHING, Work.QUICK),
    ("GET", "/docs"): (Body.NOTHING, Work.QUICK),
    ("GET", "/static/<path:filename>"): (Body.NOTHING, Work.QUICK),
    ("GET", "/health"): (Body.NOTHING, Work.QUICK),
    ("POST", "/api/conversations/<id_>/messages/read"): (Body.SMALL_JSON, Work.DOWNLOAD),
    ("GET", "/api/last"): (Body.NOTHING, Work.QUICK),
    ("POST", "/api/pages"): (Body.PICTURE, Work.ANSWER),
    ("GET", "/api/images/<sha256>/small"): (Body.NOTHING, Work.DOWNLOAD),
    ("GET", "/lora-adapters"): (Body.NOTHING, Work.QUICK),
    ("POST", "/lora-adapters"): (Body.JSON, Work.QUICK),
    ("GET", "/props"): (Body.NOTHING, Work.QUICK),
    ("GET", "/warmup"): (Body.NOTHING, Work.QUICK),
    ("GET", "/metrics"): (Body.NOTHING, Work.QUICK),
    ("GET", "/openapi.json"): (Body.NOTHING, Work.QUICK),
    ("GET", "/v1/models"): (Body.NOTHING, Work.QUICK),
    ("GET", "/v1/models/<path:name>"): (Body.NOTHING, Work.QUICK),
    ("POST", "/v1/chat/completions"): (Body.JSON_WITH_PICTURES, Work.ANSWER),
    ("POST", "/v1/chat/completions/input_tokens"): (Body.JSON_WITH_PICTURES, Work.ANSWER),
    ("POST", "/v1/completions"): (Body.JSON, Work.ANSWER),
    ("POST", "/v1/embeddings"): (Body.JSON_WITH_PICTURES, Work.ANSWER),
    ("POST", "/v1/rerank"): (Body.JSON_WITH_PICTURES, Work.ANSWER),
    ("POST", "/v2/rerank"): (Body.JSON_WITH_PICTURES, Work.ANSWER),
    ("POST", "/v1/reranking"): (Body.JSON_WITH_PICTURES, Work.ANSWER),
    ("POST", "/v1/score"): (Body.JSON_WITH_PICTURES, Work.ANSWER),
    ("POST", "/api/embed"): (Body.JSON, Work.QUICK),
    ("POST", "/api/embeddings"): (Body.JSON, Work.QUICK),
    ("POST", "/v1/messages"): (Body.JSON_WITH_PICTURES, Work.ANSWER),
    ("POST", "/v1/messages/count_tokens"): (Body.JSON_WITH_PICTURES, Work.ANSWER),
    ("POST", "/v1/responses"): (Body.JSON_WITH_PICTURES, Work.ANSWER),
    ("GET", "/v1/responses/<id_>"): (Body.NOTHING, Work.QUICK),
    ("DELETE", "/v1/responses/<id_>"): (Body.NOTHING, Work.QUICK),
    ("POST", "/tokenize"): (Body.JSON, Work.ANSWER),
    ("POST", "/completion"): (Body.JSON, Work.ANSWER),
    ("GET", "/load"): (Body.NOTHING, Work.QUICK),
    ("POST", "/detokenize"): (Body.JSON, Work.ANSWER),
    ("GET", "/tokenizer_info"): (Body.NOTHING, Work.QUICK),
    ("POST", "/apply-template"): (Body.JSON_WITH_PICTURES, Work.ANSWER),
    ("GET", "/slots"): (Body.NOTHING, Work.QUICK),
    ("GET", "/version"): (Body.NOTHING, Work.QUICK),
    ("GET", "/ready"): (Body.NOTHING, Work.QUICK),
    ("POST", "/v1/audio/transcriptions"): (Body.FORM, Work.ANSWER),
    ("POST", "/v1/audio/translations"): (Body.FORM, Work.ANSWER),
    ("POST", "/v1/files"): (Body.FORM, Work.ANSWER),
    ("GET", "/v1/files"): (Body.NOTHING, Work.QUICK),
    ("GET", "/v1/files/<id_>"): (Body.NOTHING, Work.QUICK),
    ("DELETE", "/v1/files/<id_>"): (Body.NOTHING, Work.QUICK),
    ("GET", "/v1/files/<id_>/content"): (Body.NOTHING, Work.DOWNLOAD),
    ("GET", "/api/version"): (Body.NOTHING, Work.QUICK),
    ("GET", "/api/tags"): (Body.NOTHING, Work.QUICK),
    ("GET", "/api/ps"): (Body.NOTHING, Work.QUICK),
    ("POST", "/api/show"): (Body.JSON, Work.QUICK),
    ("POST", "/api/chat"): (Body.JSON_WITH_PICTURES, Work.ANSWER),
    ("POST", "/api/generate"): (Body.JSON_WITH_PICTURES, Work.ANSWER),
    ("GET", "/api/about"): (Body.NOTHING, Work.QUICK),
    ("GET", "/api/stats"): (Body.NOTHING, Work.QUICK),
    ("GET", "/api/report"): (Body.NOTHING, Work.QUICK),
    ("GET", "/api/verdict"): (Body.NOTHING, Work.QUICK),
    ("GET", "/api/report.txt"): (Body.NOTHING, Work.QUICK),
    ("GET", "/api/conversations"): (Body.NOTHING, Work.DOWNLOAD),
    ("POST", "/api/conversations"): (Body.SMALL_JSON, Work.QUICK),
    ("GET", "/api/conversations/<id_>"): (Body.NOTHING, Work.DOWNLOAD),
    ("PATCH", "/api/conversations/<id_>"): (Body.SMALL_JSON, Work.QUICK),
    ("DELETE", "/api/conversations/<id_>"): (Body.NOTHING, Work.QUICK),
    ("GET", "/api/conversations/<id_>/export"): (Body.NOTHING, Work.DOWNLOAD),
    ("GET", "/api/export"): (Body.NOTHING, Work.DOWNLOAD),
    ("POST", "/api/import"): (Body.HISTORY, Work.ANSWER),
    ("POST", "/api/conversations/<id_>/messages"): (Body.SMALL_JSON, Work.QUICK),
    ("POST", "/api/conversations/<id_>/answers"): (Body.SMALL_JSON, Work.ANSWER),
    ("POST", "/api/count"): (Body.SMALL_JSON, Work.ANSWER),
    ("GET", "/api/answers/<id_>/events"): (Body.NOTHING, Work.FOLLOW),
    ("POST", "/api/answers/<id_>/read"): (Body.SMALL_JSON, Work.QUICK),
    ("POST", "/api/answers/<id_>/stop"): (Body.NOTHING, Work.QUICK),
    ("POST", "/api/images"): (Body.PICTURE, Work.ANSWER),
    ("GET", "/api/images/<sha256>"): (Body.NOTHING, Work.DOWNLOAD),
    ("GET", "/api/processed/<sha256>"): (Body.NOTHING, Work.QUICK),
    ("GET", "/api/processed/<sha256>/<int:number>"): (Body.NOTHING, Work.DOWNLOAD),
}
BODIES |= {  # as clients call them whose address has no /v1
    (method, rule.removeprefix("/v1")): what
    for (method, rule), what in BODIES.items()
    if rule.startswith("/v1/")
}


def test_every_route_says_what_it_takes():
    app = create_app(FakeService(), ServerSettings())
    result = {}
    for rule in app.url_map.iter_rules():
        what = takes_of(app.view_functions[rule.endpoint])
        for method in rule.methods - {"HEAD", "OPTIONS"}:
            result[method, rule.rule] = (what.body, what.work)
    assert result == BODIES


def test_a_route_that_does_not_say_so_cannot_be_registered():
    app = GatedFlask("mtmd.web", static_folder=None)
    with pytest.raises(TypeError, match=r"/new: found a view without @takes"):
        app.add_url_rule("/new", "new", lambda: "")
    with pytest.raises(TypeError, match="@takes"):
        app.route("/new")(lambda: "")
    app.route("/new")(takes(Body.NOTHING)(lambda: ""))


@pytest.mark.parametrize("route", BODIES, ids=" ".join)
def test_a_body_that_is_too_long_for_its_route_is_refused_before_the_route(route):
    method, rule = route
    body, _ = BODIES[route]
    media = MediaBudget(bytes=200_000)
    settings = ServerSettings(media=media, json=JsonLimits(bytes=100_000))
    app = create_app(FakeService(), settings)
    limit = {
        Body.NOTHING: 64 << 10,
        Body.SMALL_JSON: 100_000,
        Body.JSON: 100_000,
        Body.PICTURE: 200_000,
    }.get(body, settings.body_bytes)
    path = rule.replace("<id_>", "x").replace("<sha256>", "x").replace("<int:number>", "1")
    path = path.replace("<path:name>", "fake").replace("<path:filename>", "icon.svg")
    assert app.gate.body_limit(method, path) == limit
    result = app.test_client().open(path, method=method, data=b" " * (limit + 1), headers=JSON)
    assert result.status_code == 413 and f"at most {limit:,} on this route" in result.text


def text(count):
    return {"messages": [{"role": "user", "content": "x" * count}]}


@pytest.mark.parametrize(
    "what, body, status",
    [
        ("text", text(2_000_000), 413),
        ("text beside a picture", {"messages": [user("x" * 2_000_000, image_part(data_url(png())))]}, 413),
        ("values", {"messages": [{"role": "user", "content": [1] * 20_000}]}, 413),
        ("names", {"messages": [user("hi")], "metadata": {str(i): i for i in range(20_000)}}, 413),
        ("values of no field", {"messages": [user("hi")], "x": [[]] * 20_000}, 413),
        ("deep", {"messages": [user("hi")], "x": json.loads("[" * 100 + "]" * 100)}, 400),
        ("quotes in a text", {"messages": [user('"\\' * 100_000)]}, 400),
        ("a picture as text", text(1)["messages"] and {"messages": [user("data:" + "x" * 2_000_000)]}, 400),
        ("fine", {"messages": [user("a [ { , \\ \" text", image_part(data_url(png(300, 300))))]}, 200),
    ],
)  # fmt: skip
def test_json_is_measured_before_it_is_read(what, body, status, monkeypatch):
    limits = JsonLimits(bytes=1 << 20, values=10_000)
    if status == 413:
        monkeypatch.setattr(
            "mtmd.web.interfaces.openai_requests.ChatRequest.model_validate_json", None
        )
    result = client_for(FakeService(), json=limits).post("/v1/chat/completions", json=body)
    assert result.status_code == status, (what, result.get_json())


def test_the_page_sends_json_as_such_and_little_of_it():
    client = client_for(FakeService())
    result = client.post("/api/conversations", data="{}", content_type="text/plain")
    assert result.status_code == 415
    result = client.post("/api/conversations", json={str(i): 1 for i in range(5000)})
    assert result.status_code == 413
    assert client.post("/api/import", data="{}", content_type="text/plain").status_code == 415


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": [{"role": "user", "content": [1] * 9000}]},
        {"messages": [user("hi", *[{"type": "text"}] * 9000)]},
        {"messages": [1] * 4000},
        {"messages": [user("hi")], "stop": [1] * 10},
    ],
)
def test_of_many_mistakes_only_the_first_is_built(wrong):
    """190 s and 60 GB, for a body of 98 MB, when each was."""
    with pytest.raises(ValidationError) as error:
        ChatRequest.model_validate_json(json.dumps(wrong))
    assert error.value.error_count() < 20


def test_so_it_is_in_a_history():
    client = client_for(FakeService())
    file = {"format": "mtmd conversations", "version": 1, "images": {}}
    result = client.post("/api/import", json=file | {"conversations": [1] * 9000})
    assert result.status_code == 400 and "conversations.0" in result.get_json()["error"]["message"]
    result = client.post("/api/import", json={str(i): 1 for i in range(50_000)})
    assert result.status_code == 400 and len(result.data) < 1000


def test_who_shares_with_another_key_may_have_half():
    keys = ("a-long-enough-key", "another-such-key")
    service = FakeService(pace_s=30)
    client = client_for(service, api_keys=keys, queue=4, rate_limit=0)

    def ask(key):
        return client.post(
            "/v1/chat/completions",
            json={"messages": [user("hi")], "stream": True},
            headers={"Authorization": f"Bearer {key}"},
            buffered=False,
        )

    stored = [ask(keys[0]) for _ in range(4)]
    other = [ask(keys[1]) for _ in range(5)]
    assert [r.status_code for r in stored + other] == [200] * 8 + [429]
    refused = ask(keys[0])
    assert refused.status_code == 429 and refused.headers["Retry-After"]
    for response in stored + other:
        response.close()
    service.pace_s = 0
    assert ask(keys[0]).status_code == 200


class Page:
    def __init__(self, service=None, **settings):
        self.service = service or FakeService()
        self.store = Store(None)
        self.app = create_app(self.service, ServerSettings(**settings), self.store)
        self.client = self.app.test_client()

    def upload(self, data):
        return self.client.post("/api/images", data=data)

    def ask_about(self, *images):
        id_ = self.client.post("/api/conversations", json={}).get_json()["id"]
        body = {"text": "what?", "images": [{"sha256": i["sha256"]} for i in images]}
        parent = self.client.post(f"/api/conversations/{id_}/messages", json=body).get_json()
        return self.client.post(
            f"/api/conversations/{id_}/answers", json={"parent": parent["message"]["id"]}
        )


def gif(side):
    out = io.BytesIO()
    Image.new("P", (side, side)).save(out, "GIF")
    return out.getvalue()


def test_what_the_page_uploads_counts_among_all_pixels(monkeypatch):
    page = Page(media=MediaBudget(pixels=10_000, server_pixels=15_000))
    inside, go_on = threading.Semaphore(0), threading.Event()
    real = picture_budget.load_isolated

    def slow(*args):
        inside.release()
        assert go_on.wait(20)
        return real(*args)

    monkeypatch.setattr(picture_budget, "load_isolated", slow)
    result = []
    thread = threading.Thread(target=lambda: result.append(page.upload(gif(100)).status_code))
    thread.start()
    assert inside.acquire(timeout=20)
    refused = page.upload(gif(90))
    assert refused.status_code == 429 and refused.headers["Retry-After"]
    go_on.set()
    thread.join()
    assert result == [200] and page.upload(gif(90)).status_code == 200
    assert page.upload(gif(101)).status_code == 400


def test_pictures_of_answers_of_the_page_count_until_their_end():
    service = FakeService(pace_s=60)
    page = Page(service, media=MediaBudget(pixels=10_000, server_pixels=15_000))
    image = page.upload(gif(100)).get_json()
    assert page.ask_about(image).status_code == 200
    assert page.ask_about(image).status_code == 429
    body = {"text": "x", "images": [{"sha256": image["sha256"]}]}
    assert page.client.post("/api/count", json=body).status_code == 429
    assert post_chat(page.client, "hi", image_part(data_url(png(100, 100)))).status_code == 429
    service.tickets[0].cancel()
    assert until(lambda: page.client.post("/api/count", json=body).status_code == 200)
    assert page.ask_about(image).status_code == 200


def test_answers_of_the_page_take_the_places_of_the_api():
    service = FakeService(pace_s=60)
    page = Page(service, queue=1)
    for _ in range(5):
        assert page.ask_about().status_code == 200
    assert post_chat(page.client, "hi").status_code == 429
    assert page.ask_about().status_code == 429
    for ticket in service.tickets:
        ticket.cancel()
    service.pace_s = 0
    assert until(lambda: post_chat(page.client, "hi").status_code == 200)


def test_pictures_that_no_message_shows_have_a_room():
    page = Page(upload_bytes=20_000)
    saved = [page.upload(png(i + 1, 1)) for i in range(4)]
    assert [k.status_code for k in saved] == [200] * 4
    refused = page.upload(png(50, 50))
    assert (refused.status_code, refused.get_json()["error"]["code"]) == (413, "storage_full")
    assert page.ask_about(saved[0].get_json()).status_code == 200
    assert page.upload(png(50, 50)).status_code == 200


def test_pictures_of_all_conversations_have_a_room():
    page = Page(storage_bytes=1 << 20)
    noise = Image.effect_noise((640, 640), 99)
    statuses = []
    for i in range(4):
        out = io.BytesIO()
        noise.rotate(90 * i).save(out, "PNG")
        result = page.upload(out.getvalue())
        statuses.append(result.status_code)
        if result.status_code == 200:
            page.ask_about(result.get_json())
    assert statuses[0] == 200 and statuses[-1] == 507


def test_a_picture_that_browsers_do_not_show_is_decoded_within_the_budget():
    page = Page(media=MediaBudget(pixels=10_000, server_pixels=15_000))
    out = io.BytesIO()
    Image.new("RGB", (100, 100)).save(out, "TIFF")
    stored = page.upload(out.getvalue()).get_json()
    with page.app.gate.budget.stored(10_000):
        assert page.client.get(f"/api/images/{stored['sha256']}").status_code == 429
    assert page.client.get(f"/api/images/{stored['sha256']}").status_code == 200


def test_readers_of_answers_take_no_places_from_others():
    service = FakeService(pace_s=60)
    page = Page(service)
    answer = page.ask_about().get_json()["id"]
    with running(service, page.app) as server:
        readers = [
            raw_request(server, {}, f"/api/answers/{answer}/events", "GET") for _ in range(130)
        ]
        heads = [sock.recv(12) for sock in readers]
        assert heads.count(b"HTTP/1.1 200") == 16 and heads.count(b"HTTP/1.1 429") == 114
        with raw_request(server, {}, "/health", "GET") as sock:
            assert sock.recv(12) == b"HTTP/1.1 200"
        for sock in readers:
            sock.close()
        service.tickets[0].cancel()


def test_a_panic_in_a_library_leaves_its_place_free():
    class Panic(BaseException):
        pass

    def panic(*_, **__):
        raise Panic("inside")

    service = FakeService()
    service.submit = panic
    app = create_app(service, ServerSettings())
    with app.test_client() as client:
        assert post_chat(client, "hi").status_code == 500
    assert app.gate.taken(Work.ANSWER) == 0


def test_a_reply_that_turns_out_long_is_a_download():
    page = Page(downloads=1)
    page.service.words = "x" * (1 << 20)
    page.ask_about()
    assert until(lambda: page.service.ended)
    (listed,) = page.client.get("/api/conversations").get_json()["conversations"]
    first = page.client.get(f"/api/conversations/{listed['id']}", buffered=False)
    assert first.status_code == 200 and page.app.gate.taken(Work.DOWNLOAD) == 1
    assert page.client.get(f"/api/conversations/{listed['id']}").status_code == 429
    first.close()
    assert page.app.gate.taken(Work.DOWNLOAD) == 0
    assert page.client.get(f"/api/conversations/{listed['id']}").status_code == 200


def test_as_many_downloads_as_may_be():
    service = FakeService()
    page = Page(service, downloads=4)
    out = io.BytesIO()
    Image.effect_noise((2600, 2600), 99).save(out, "BMP")
    sha256 = page.upload(out.getvalue()).get_json()["sha256"]
    with running(service, page.app) as server:
        readers = [
            raw_request(server, {}, f"/api/images/{sha256}", "GET", receive=4096) for _ in range(4)
        ]
        assert [sock.recv(12) for sock in readers] == [b"HTTP/1.1 200"] * 4
        with raw_request(server, {}, f"/api/images/{sha256}", "GET") as sock:
            assert sock.recv(12) == b"HTTP/1.1 429"
        for sock in readers:
            sock.close()
        assert until(lambda: page.app.gate.taken(Work.DOWNLOAD) == 0)


def test_a_long_file_gives_its_place_back(monkeypatch):
    monkeypatch.setattr("mtmd.web.intake.request_limits.LONG_RESPONSE", 10)
    service = FakeService()
    app = create_app(service, ServerSettings(port=0, downloads=1))
    with running(service, app) as server:
        for _ in range(3):
            with urlopen(f"{server.url}/static/chat/chat.js", timeout=10) as result:
                assert result.read().endswith(b"\n")
            assert until(lambda: not app.gate.taken(Work.DOWNLOAD))
