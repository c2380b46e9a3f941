"""What clients meet before replicas, without Ray: replicas here are functions."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import replace
from zlib import compress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mtmd.web.api_keys import NamedKey
from mtmd.web.replicas.forwarded import Full, Head, Lost, Taken
from mtmd.web.replicas.front import STRANGERS, TAKEN_S, Front
from mtmd.web.settings import ConnectionLimits, MediaBudget, ServerSettings

KEY = "k" * 20
PLAIN = ServerSettings()
KEYED = ServerSettings(named_keys=(NamedKey("anna", KEY),))
CHAT = "/v1/chat/completions"
FILE = "file-b-0123456789abcdef0123456789abcdef"
WHOLE = [Head(200, [("Content-Type", "text/plain"), ("Connection", "close")], "a"), b"one", b" two"]


class Replicas:
    """Each call does what is next in `plays`: yields what it holds, raises errors in it, and waits
    for ever at None.
    """

    def __init__(self, *plays, names=("a", "b")):
        self.plays, self.names, self.calls, self.closed = list(plays), names, [], 0

    async def answer(self, request, route):
        self.calls.append((request, route))
        try:
            for part in self.plays.pop(0):
                if part is None:
                    await asyncio.Event().wait()
                if isinstance(part, Exception):
                    raise part
                yield part
        finally:
            self.closed += 1


class Report:
    def __init__(self, sent):
        start, *bodies = sent
        self.status = start["status"]
        self.headers = {n.decode().lower(): v.decode() for n, v in start["headers"]}
        self.body = b"".join(message["body"] for message in bodies)
        self.ended = bool(bodies) and not bodies[-1].get("more_body")

    @property
    def code(self):
        return json.loads(self.body)["error"]["code"]


def ask(
    replicas, settings=PLAIN, path=CHAT, method="POST", body=b"{}", headers=(), *,
    affinity=True, messages=None, leaves=False,
):  # fmt: skip
    """What a client is told, and, where the connection broke, by what."""
    sent, broke = [], None

    async def run():
        nonlocal broke
        coming = list(messages or [{"type": "http.request", "body": body}])

        async def receive():
            if coming:
                return coming.pop(0)
            while not leaves or not sent:
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": b"x=1", "scheme": "http", "client": ("10.1.2.3", 5000),
            "headers": [(n.lower().encode(), v.encode()) for n, v in headers],
        }  # fmt: skip
        try:
            await Front(replicas, settings, affinity)(scope, receive, send)
        except Exception as error:
            broke = error

    asyncio.run(run())
    return (Report(sent) if sent else None), broke


def with_key(key=KEY):
    return [("Authorization", f"Bearer {key}")]


def test_a_request_goes_to_a_replica_and_its_answer_comes_back():
    replicas = Replicas(WHOLE)
    headers = [("X-Request-Id", "mine"), ("X-Forwarded-For", "1.2.3.4"), ("Expect", "100-continue")]
    reported, _ = ask(replicas, body=b'{"prompt": "x"}', headers=headers)
    assert (reported.status, reported.body, reported.ended) == (200, b"one two", True)
    assert reported.headers == {"content-type": "text/plain", "x-mtmd-replica": "a"}
    [(request, route)] = replicas.calls
    assert (request.method, request.target) == ("POST", f"{CHAT}?x=1")
    assert request.body == b'{"prompt": "x"}'
    assert dict(request.headers) == {
        "x-request-id": "mine", "X-Forwarded-Proto": "http", "X-Forwarded-For": "10.1.2.3",
    }  # fmt: skip
    assert route.key and not route.only and not route.firmly


def test_a_compressed_body_goes_on_as_it_is():
    """The replica reads it, within its limits."""
    replicas, body = Replicas(WHOLE), gzip.compress(b'{"prompt": "x"}')
    reported, _ = ask(replicas, body=body, headers=[("Content-Encoding", "gzip")])
    request, route = replicas.calls[0]
    assert reported.status == 200 and request.body == body
    assert dict(request.headers)["content-encoding"] == "gzip" and not route.firmly
    assert route.key == route_of({"prompt": "x"}).key != ""


def route_of(request, encoded=bytes, headers=()):
    replicas = Replicas(WHOLE)
    reported, _ = ask(replicas, body=encoded(json.dumps(request).encode()), headers=headers)
    assert reported.status == 200
    return replicas.calls[0][1]


@pytest.mark.parametrize(
    "encoding, encode", [("gzip", gzip.compress), ("X-GZip", gzip.compress), ("deflate", compress)]
)
@pytest.mark.parametrize(
    "request_, named",
    [
        ({"previous_response_id": "resp_req-b-0123456789abcdef", "input": "x"}, "b"),
        ({"messages": [{"content": [{"type": "file", "file": {"file_id": FILE}}]}]}, "b"),
        ({"messages": [{"content": [{"image_url": {"url": "data:;base64,QUFB"}}]}]}, ""),
        ({"input": [{"image_url": "data:image/png;base64," + "QUFB" * 50_000}]}, ""),
    ],
)
def test_a_compressed_body_goes_where_the_plain_one_goes(encoding, encode, request_, named):
    result = route_of(request_, encode, [("Content-Encoding", encoding)])
    assert result == route_of(request_)
    assert result.only == named and (result.key or named)


@pytest.mark.parametrize(
    "body, encoding, status",
    [
        (gzip.compress(b"{}" * 500, mtime=0)[:-4], "gzip", 400),
        (gzip.compress(bytes(20 << 20)), "gzip", 413),
        (b"{}", "compress", 415),
    ],
)
def test_a_compressed_body_that_cannot_be_read_goes_to_nobody(body, encoding, status):
    replicas, settings = Replicas(), ServerSettings(media=MediaBudget(bytes=1 << 20))
    reported, _ = ask(replicas, settings, body=body, headers=[("Content-Encoding", encoding)])
    assert reported.status == status and not replicas.calls


def test_what_a_compressed_body_becomes_counts_among_the_bodies():
    replicas, settings = Replicas(), ServerSettings(connections=ConnectionLimits(body_bytes=50_000))
    body, headers = gzip.compress(bytes(200_000)), [("Content-Encoding", "gzip")]
    reported, _ = ask(replicas, settings, body=body, headers=headers)
    assert (reported.status, reported.code) == (503, "server_busy") and not replicas.calls


def test_what_a_trusted_proxy_says_goes_on():
    replicas = Replicas(WHOLE)
    headers = [("X-Forwarded-For", "1.2.3.4"), ("X-Forwarded-Proto", "https")]
    ask(replicas, ServerSettings(trusted_proxy=("10.0.0.0/8",)), headers=headers)
    stated = dict(replicas.calls[0][0].headers)
    assert stated == {"x-forwarded-proto": "https", "X-Forwarded-For": "1.2.3.4, 10.1.2.3"}


def test_what_is_for_the_connection_alone_goes_no_further():
    replicas = Replicas(
        [Head(200, [("Connection", "close, X-Hop"), ("x-hop", "1"), ("X-Kept", "2")], "a")]
    )
    headers = [("Connection", "keep-alive, X-Hop"), ("X-Hop", "1"), ("X-Kept", "2")]
    reported, _ = ask(replicas, headers=headers)
    names = {name for name, _ in replicas.calls[0][0].headers}
    assert "x-kept" in names and names.isdisjoint({"x-hop", "connection"})
    assert reported.headers == {"x-kept": "2", "x-mtmd-replica": "a"}


def test_other_characters_than_ascii_are_not_changed_on_the_way():
    replicas = Replicas(WHOLE)
    ask(replicas, path="/v1/models/ü%20", method="GET", headers=[("X-Name", "ü")])
    request = replicas.calls[0][0]
    assert request.target == "/v1/models/%C3%BC%20?x=1"
    assert dict(request.headers)["x-name"].encode() == b"\xc3\xbc", "as aiohttp writes it"
    sent = []
    scope = {
        "type": "http", "method": "GET", "path": CHAT, "scheme": "http", "client": ("10.1.2.3", 1),
        "headers": [(b"x-name", b"\xfc")],
    }  # fmt: skip

    async def send(message):
        sent.append(message)

    asyncio.run(Front(replicas, PLAIN)(scope, None, send))
    assert Report(sent).status == 400


@pytest.mark.parametrize("lost", [[Lost("a")], [WHOLE[0], Lost("a")]], ids=["at once", "after the head"])  # fmt: skip
def test_another_replica_answers_where_one_was_lost_and_nothing_was_sent(lost):
    replicas = Replicas(lost, WHOLE)
    reported, broke = ask(replicas)
    assert (reported.status, reported.body, reported.ended, broke) == (200, b"one two", True, None)
    assert replicas.calls[1][1].avoid == ("a",) and replicas.calls[0][0] == replicas.calls[1][0]
    assert replicas.closed == 2


def test_an_answer_of_which_something_was_sent_is_not_begun_again():
    replicas = Replicas([*WHOLE, Lost("a")], WHOLE)
    reported, broke = ask(replicas)
    assert reported.body == b"one two" and not reported.ended
    assert isinstance(broke, Lost) and len(replicas.calls) == 1


def test_a_request_that_two_replicas_were_lost_with_is_given_up():
    replicas = Replicas([Lost("a")], [Lost("b")], WHOLE)
    reported, _ = ask(replicas, path="/v1/messages")
    assert reported.status == 503 and reported.headers["retry-after"] == "1"
    assert json.loads(reported.body)["error"]["type"] == "overloaded_error", (
        "as Anthropic's clients read"
    )
    assert len(replicas.calls) == 2


class Busy(Replicas):
    """Answers take until `go`; `a` ends with all that it has once `killed`."""

    def __init__(self):
        super().__init__()
        self.go, self.killed, self.now, self.maximum = asyncio.Event(), asyncio.Event(), 0, 0

    async def answer(self, request, route):
        self.calls.append((request, route))
        name = "b" if "a" in route.avoid else "ab"[len(self.calls) % 2]
        yield Taken(name)
        if name == "b":
            self.now += 1
            self.maximum = max(self.maximum, self.now)
            await self.go.wait()
            self.now -= 1
            yield Head(200, [], "b")
            yield b"x"
        else:
            await self.killed.wait()
            raise Lost("a")


def test_what_a_lost_replica_had_waits_for_places_of_the_others_and_goes_first():
    """Ray's router, which cannot place what is too much, would hold up all the rest."""

    async def run():
        replicas = Busy()
        front = Front(replicas, PLAIN, each=4)
        done = []

        async def one(number):
            coming = [{"type": "http.request", "body": b"{}"}]

            async def receive():
                return coming.pop() if coming else await asyncio.Event().wait()

            async def send(message):
                if "status" in message:
                    done.append((number, message["status"]))

            scope = {
                "type": "http", "method": "POST", "path": CHAT, "scheme": "http", "headers": [],
                "client": ("10.1.2.3", 1),
            }  # fmt: skip
            await front(scope, receive, send)

        tasks = [asyncio.ensure_future(one(number)) for number in range(12)]
        while len(replicas.calls) < 8:
            await asyncio.sleep(0)
        replicas.killed.set()
        while len(front._slots._answers._line) < 8:  # those that were lost, and who waited
            await asyncio.sleep(0)
        assert len(replicas.calls) == 8 and replicas.maximum == 4
        replicas.go.set()
        await asyncio.gather(*tasks)
        return [number for number, _ in done], {status for _, status in done}, replicas.maximum

    order, statuses, maximum = asyncio.run(run())
    assert statuses == {200} and maximum == 4
    assert set(order[:8]) == set(range(8)) and set(order[8:]) == set(range(8, 12))


@pytest.mark.parametrize("located", [True, False])
def test_what_rays_router_cannot_place_is_taken_back_and_tried_again(located, monkeypatch):
    monkeypatch.setattr("mtmd.web.replicas.front.TAKEN_S", 0.01)
    replicas = Replicas([None], [None], [Taken("a"), *WHOLE] if located else [None])
    reported, _ = ask(replicas, path="/v1/models", method="GET", body=b"")
    assert (
        reported.status == (200 if located else 503) and len(replicas.calls) == replicas.closed == 3
    )
    assert located or reported.code == "replica_late"


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/files", "/v1/embeddings"])
def test_what_may_have_begun_is_not_sent_again(path, monkeypatch):
    monkeypatch.setattr("mtmd.web.replicas.front.TAKEN_S", 0.01)
    replicas = Replicas([None], WHOLE)
    reported, _ = ask(replicas, path=path)
    assert (reported.status, reported.code, reported.headers["retry-after"]) == (
        503,
        "replica_late",
        "1",
    )
    assert len(replicas.calls) == replicas.closed == 1, (
        "and who may have it is told that nobody waits"
    )


def test_a_long_body_has_longer_to_come(monkeypatch):
    given = []

    async def wait_for(coming, seconds):
        given.append(seconds)
        return await coming

    monkeypatch.setattr("mtmd.web.replicas.front.asyncio.wait_for", wait_for)
    for count in (0, 16 << 20):
        ask(Replicas([Taken("a"), *WHOLE]), body=b"x" * count)
    assert given == [TAKEN_S, TAKEN_S + 16]


def test_where_too_many_wait_it_is_said():
    reported, _ = ask(Replicas([Full()]))
    assert (reported.status, reported.code, reported.headers["retry-after"]) == (
        429,
        "server_busy",
        "1",
    )


def test_answers_that_fill_all_replicas_hold_up_no_list():
    replicas = Replicas(*[[*WHOLE, None]] * 2, WHOLE)
    front, reported = Front(replicas, replace(PLAIN, queue=1), each=1), []

    async def ask_for(method, path):
        async def receive():
            if path in came:
                await asyncio.Event().wait()
            came.add(path)
            return {"type": "http.request", "body": b"{}"}

        async def send(message):
            reported.append((path, message.get("status")))

        came = set()
        scope = {
            "type": "http", "method": method, "path": path, "scheme": "http", "headers": [],
            "client": ("10.1.2.3", 1),
        }  # fmt: skip
        await front(scope, receive, send)

    async def run():
        tasks = [asyncio.ensure_future(ask_for("POST", CHAT)) for _ in range(4)]
        while len([1 for _, status in reported if status]) < 3:
            await asyncio.sleep(0)
        await ask_for("GET", "/v1/models")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), 10))
    statuses = [status for path, status in reported if path == CHAT and status]
    assert sorted(statuses) == [200, 200, 429], "one waits, and one is too many"
    assert ("/v1/models", 200) in reported and len(replicas.calls) == 3


def test_a_client_that_leaves_ends_its_answer():
    replicas = Replicas([*WHOLE, None])
    reported, broke = ask(replicas, leaves=True)
    assert not reported.ended and broke is None and replicas.closed == 1


@pytest.mark.parametrize("headers", [(), with_key("wrong" * 5)], ids=["none", "wrong"])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/metrics", "/v1/files"])
def test_without_a_key_no_body_is_read_and_no_replica_asked(path, headers):
    replicas = Replicas(WHOLE)
    reported, _ = ask(replicas, KEYED, path, body=b"x" * 100, headers=headers)
    assert (reported.status, reported.headers["www-authenticate"], replicas.calls) == (
        401,
        "Bearer",
        [],
    )
    error = json.loads(reported.body)["error"]
    assert error["type"] == "authentication_error"
    assert path == "/v1/messages" or error["code"] == "invalid_api_key"
    reported, _ = ask(Replicas(WHOLE), KEYED, CHAT, body=b"x" * 100, headers=with_key())
    assert reported.status == 200


def test_who_has_no_key_reads_what_is_open_but_takes_few_places():
    replicas = Replicas(*[[*WHOLE, None]] * 2 * STRANGERS)
    front, reported = Front(replicas, KEYED), []

    def scope(path):
        return {
            "type": "http", "method": "GET", "path": path, "scheme": "http", "headers": [],
            "client": ("10.1.2.3", 1),
        }  # fmt: skip

    async def send(message):
        reported.append(message.get("status"))

    async def run():
        waits = [front(scope("/docs"), asyncio.Event().wait, send) for _ in range(STRANGERS + 3)]
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        while sum(status is not None for status in reported) < len(tasks):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert reported.count(429) == 3 and reported.count(200) == len(replicas.calls) == STRANGERS
    assert front._strangers == 0


def test_browsers_are_told_beforehand_without_a_replica():
    """As one server tells them: the headers are those of tests/web/test_access.py."""
    settings = replace(KEYED, cors_origins=("https://one.example",))
    headers = [
        ("Origin", "https://one.example"),
        ("Access-Control-Request-Private-Network", "true"),
    ]
    replicas = Replicas(WHOLE)
    reported, _ = ask(replicas, settings, method="OPTIONS", headers=headers)
    assert (reported.status, reported.body, replicas.calls) == (204, b"", [])
    assert reported.headers["access-control-allow-origin"] == "https://one.example"
    assert reported.headers["access-control-allow-headers"] == "Authorization, *"
    assert reported.headers["access-control-allow-private-network"] == "true"
    headers[0] = ("Origin", "https://other.example")
    assert ask(replicas, settings, method="OPTIONS", headers=headers)[0].status == 401


def test_the_rate_of_a_key_is_counted_before_replicas():
    front = Front(Replicas(*[WHOLE] * 20), replace(KEYED, rate_limit=60))
    scope = {
        "type": "http", "method": "POST", "path": CHAT, "scheme": "http",
        "headers": [(b"x-api-key", KEY.encode())], "client": ("10.1.2.3", 1),
    }  # fmt: skip

    async def status():
        sent = []

        coming = [{"type": "http.request", "body": b"{}"}]

        async def receive():
            return coming.pop() if coming else await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        await front(scope, receive, send)
        return sent[0]["status"]

    async def run():
        return [await status() for _ in range(12)]

    assert asyncio.run(run()) == [200] * 10 + [429] * 2


SMALL = ServerSettings(
    media=MediaBudget(bytes=3000),
    json=replace(ServerSettings().json, bytes=96),
    connections=ConnectionLimits(body_s=0.0, body_bytes=4000),
)


def pieces(*bodies):
    return [
        {"type": "http.request", "body": body, "more_body": n < len(bodies) - 1}
        for n, body in enumerate(bodies)
    ]


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (pieces(b"x" * 5000), [("Content-Length", "5000")], 413, "body_too_large"),
        (pieces(b"x" * 3000, b"x" * 3000), [], 413, "body_too_large"),
        ([{"type": "http.request", "body": b"x", "more_body": True}], [], 408, "too_slow"),
    ],
    ids=["as it says", "as it comes", "too slow"],
)
def test_limits_hold_for_bodies(body, headers, status, code):
    replicas = Replicas(WHOLE)
    settings = SMALL if status == 408 else replace(SMALL, connections=ConnectionLimits())
    reported, _ = ask(replicas, settings, headers=headers, messages=body)
    assert (reported.status, reported.code, replicas.calls) == (status, code, [])


def test_bodies_of_all_clients_have_a_limit_together():
    settings = replace(SMALL, connections=ConnectionLimits(body_bytes=1000))
    reported, _ = ask(Replicas(WHOLE), settings, body=b"x" * 2500)
    assert (reported.status, reported.code) == (503, "server_busy")


def test_a_body_counts_until_something_of_its_answer_is_there():
    settings = replace(SMALL, connections=ConnectionLimits(body_bytes=2000))
    replicas = Replicas([*WHOLE, None], names=("a",))
    front = Front(replicas, settings)

    async def run():
        seen, began = [], asyncio.Event()
        coming = [{"type": "http.request", "body": b"x" * 2000}]

        async def receive():
            return coming.pop() if coming else await asyncio.Event().wait()

        async def send(message):
            seen.append(front._bodies.budget.stored)
            if message["type"] == "http.response.body":
                began.set()

        scope = {
            "type": "http", "method": "POST", "path": CHAT, "scheme": "http", "headers": [],
            "client": ("10.1.2.3", 1),
        }  # fmt: skip
        task = asyncio.ensure_future(front(scope, receive, send))
        await began.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return seen

    assert set(asyncio.run(run())) == {0} and front._bodies.budget.stored == 0
    assert len(replicas.calls[0][0].body) == 2000


def test_bodies_have_more_room_where_more_replicas_answer():
    settings = replace(SMALL, connections=ConnectionLimits(body_bytes=1000))
    reported, _ = ask(Replicas(WHOLE), settings, body=b"x" * 1500)
    assert reported.status == 200
    reported, _ = ask(Replicas(WHOLE, names=("a",)), settings, body=b"x" * 1500)
    assert reported.status == 503


def test_probes_say_whether_any_replica_is_ready():
    assert ask(Replicas(), KEYED, "/health", "GET")[0].status == 200
    reported, _ = ask(Replicas(names=()), KEYED, "/ready", "GET")
    assert reported.status == 503 and json.loads(reported.body) == {"status": "loading"}


@pytest.mark.parametrize(
    "path", ["/", "/c/1", "/api/conversations", "/api/images/1", "/diagnostics"]
)
def test_what_one_server_keeps_for_its_page_is_refused_by_name(path):
    replicas = Replicas()
    reported, _ = ask(replicas, path=path, method="GET")
    assert reported.status == 404 and b"without --ray" in reported.body and replicas.calls == []


def test_an_id_says_which_replica_is_asked():
    for path, body in [
        (f"/v1/files/{FILE}", b""),
        (f"/files/{FILE}/content", b""),
        (CHAT, json.dumps({"messages": [{"content": [{"image_url": {"url": FILE}}]}]}).encode()),
    ]:
        replicas = Replicas(WHOLE)
        ask(replicas, path=path, body=body, affinity=False)
        assert replicas.calls[0][1].only == "b"


def test_uploads_of_a_client_lie_together():
    replicas = Replicas(WHOLE, WHOLE)
    for body in (b"one", b"two"):
        ask(replicas, KEYED, "/v1/files", body=body, headers=with_key())
    first, second = (route for _, route in replicas.calls)
    assert first == second and first.firmly and first.key == "anna"


def test_caches_of_others_are_no_reason_to_go_anywhere():
    keys = []
    for settings, headers in [(KEYED, with_key()), (replace(KEYED, share_cache=True), with_key())]:
        replicas = Replicas(WHOLE)
        ask(replicas, settings, body=b'{"prompt": "x"}', headers=headers)
        keys.append(replicas.calls[0][1].key)
    assert keys[0] != keys[1]
    replicas = Replicas(WHOLE)
    ask(replicas, body=b'{"prompt": "x"}', affinity=False)
    assert replicas.calls[0][1].key == ""


def test_the_metrics_of_all_replicas_are_one_text():
    text = b"# HELP n_total Things.\n# TYPE n_total counter\nn_total %d.0\n"
    replicas = Replicas(
        [Head(200, [("Content-Type", "text/plain")], "a"), text % 3],
        [Head(200, [("Content-Type", "text/plain")], "b"), text % 4],
        [Lost("c")],
        names=("a", "b", "c"),
    )
    reported, _ = ask(replicas, path="/metrics", method="GET", body=b"")
    result = {
        (sample.name, sample.labels["replica"]): sample.value
        for family in text_string_to_metric_families(reported.body.decode())
        for sample in family.samples
    }
    assert result == {
        ("n_total", "a"): 3, ("n_total", "b"): 4,
        ("mtmd_replica_up", "a"): 1, ("mtmd_replica_up", "b"): 1, ("mtmd_replica_up", "c"): 0,
    }  # fmt: skip
    assert [route.only for _, route in replicas.calls] == ["a", "b", "c"]


def test_what_another_replica_says_is_not_told_as_of_one_that_has_gone():
    """Where the name is not there any more, Ray's router asks any other."""
    text = b"# HELP n_total Things.\n# TYPE n_total counter\nn_total 3.0\n"
    stated = [Head(200, [("Content-Type", "text/plain")], "b"), text]
    reported, _ = ask(
        Replicas(stated, stated, names=("gone", "b")), path="/metrics", method="GET", body=b""
    )
    result = {
        (sample.name, sample.labels["replica"]): sample.value
        for family in text_string_to_metric_families(reported.body.decode())
        for sample in family.samples
    }
    assert result == {
        ("n_total", "b"): 3, ("mtmd_replica_up", "b"): 1, ("mtmd_replica_up", "gone"): 0,
    }  # fmt: skip


def test_uploads_are_listed_from_everywhere_or_not_at_all():
    def listed(name):
        return [Head(200, [], name), json.dumps({"object": "list", "data": [name]}).encode()]

    reported, _ = ask(Replicas(listed("a"), listed("b")), path="/v1/files", method="GET", body=b"")
    assert json.loads(reported.body) == {"object": "list", "data": ["a", "b"]}
    reported, _ = ask(Replicas(listed("a"), [Lost("b")]), path="/v1/files", method="GET", body=b"")
    assert reported.status == 503
    refused = [Head(403, [], "b"), b"no"]
    reported, _ = ask(Replicas(listed("a"), refused), path="/v1/files", method="GET", body=b"")
    assert (reported.status, reported.body) == (403, b"no")
