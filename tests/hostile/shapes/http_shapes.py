"""Requests of every shape to every route: whole ones with bodies that are wrong, huge, deep or wide,
tools and options of all kinds, odd heads, wrong lengths, other pages' origins, keys that are none,
damaged bytes, clients that leave.
"""

from __future__ import annotations

import json
import random
from typing import Any

from attempts import Attempt, chat, damaged, picture_part, post, request
from damaged_pictures import small_picture
from interfaces import bodies, calls, changed, options, tools
from mutations import mutate_json
from routes import Route, routes

from mtmd.web.intake.request_limits import Body

ODD_TEXTS = (
    "",
    "\0\x1b[2J\u202e\ufeff\U0010ffff",
    "<start_of_image><|image|></s><|im_end|>{{7*7}}{% for %}",
    "<box>" + " " * 2500,
    "<u" * 20_000,
    "é" * 9000,
    "a" * 300_000,
    "[*_" * 20_000,
    "../../etc/passwd",
    "<script>alert(1)</script>",
    "=cmd|' /C calc'!A0",
)
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1 << 64,
    10**400,
    1e308,
    "x",
    [],
    {},
    [[]],
    {"$ne": 1},
    ["x"] * 300,
    "😀" * 300,
)
FIELDS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "n",
    "stream",
    "stream_options",
    "model",
    "logprobs",
    "top_logprobs",
    "response_format",
    "tools",
    "logit_bias",
    "messages",
    "metadata",
    "user",
    "__proto__",
    "repetition_penalty",
)
READ = ("/", "/health", "/props", "/metrics", "/openapi.json", "/v1/models", "/api/stats")
IDS = (
    "0",
    "x" * 64,
    "%00",
    "%2e%2e",
    "..%2f..%2fetc%2fpasswd",
    "%27;%20drop%20table%20conversations;%20--",
    "%C3%A9",
    "%ff",
    "resp_0",
    "file-0",
    "1e9",
    "-1",
    "demo%20model",
)
URLS = (
    "http://127.0.0.1/",
    "http://169.254.169.254/latest/meta-data/",
    "http://[::ffff:127.0.0.1]/",
    "http://2130706433/",
    "file:///etc/passwd",
    "../../etc/passwd",
    "file-../../etc/passwd",
    "gopher://127.0.0.1:11211/_stats",
    "data:image/png;base64,",
    "data:;base64,%%%",
    "http://[::ffff:0:127.0.0.1]/",
)
CHAT = "/v1/chat/completions"
ANSWERS = (CHAT, "/v1/completions", "/v1/chat/completions/input_tokens")
JSON = (Body.JSON, Body.SMALL_JSON, Body.JSON_WITH_PICTURES, Body.HISTORY)


def of_kind(*kinds: Body) -> list[Route]:
    """Routes that take such a body."""
    return [r for r in routes() if r.body in kinds and r.method not in ("GET", "OPTIONS")]


def _somewhere(rng: random.Random) -> str:
    """An address that takes JSON."""
    return CHAT if rng.random() < 0.3 else rng.choice(of_kind(*JSON)).path(rng.choice(IDS))


def http_shape(rng: random.Random, key: str) -> Attempt:
    name = rng.choice([*KINDS, *OFTEN])
    return KINDS[name](rng, key)


def _ordinary(rng: random.Random, key: str) -> Attempt:
    body = chat("hello", picture_part(small_picture(rng)), stream=rng.random() < 0.5)
    return Attempt("ordinary", post(CHAT, body, key))


def _read(rng: random.Random, key: str) -> Attempt:
    method = rng.choice(("GET", "GET", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH", "TRACE"))
    if method == "HEAD":  # no body follows
        method = "GET"
    path = rng.choice([r for r in routes() if r.method == "GET"]).path(rng.choice(IDS))
    path += rng.choice(
        ("", "?" + "a=b&" * 100, "/../../etc/passwd", "/%2e%2e/%00", "/" + "x" * 900)
    )
    return Attempt(f"{method} of what is read", request(method, path, key=key))


def _odd_field(rng: random.Random, key: str) -> Attempt:
    body = chat(rng.choice(ODD_TEXTS)) | {rng.choice(FIELDS): rng.choice(ODD_VALUES)}
    return Attempt("an odd field", post(rng.choice(ANSWERS), body, key))


def _odd_text(rng: random.Random, key: str) -> Attempt:
    texts = [rng.choice(ODD_TEXTS) for _ in range(rng.randint(1, 5))]
    body = chat(*texts, stop=[t[:256] for t in texts if t][:16], stream=rng.random() < 0.5)
    return Attempt("odd text", post(rng.choice(ANSWERS), body, key))


def _mutated(rng: random.Random, key: str) -> Attempt:
    body = chat("hi", picture_part(small_picture(rng)), stop=["x"], seed=3, temperature=0.5)
    data, _ = mutate_json(json.dumps(body).encode(), rng)
    return Attempt(
        "JSON with values changed", request("POST", rng.choice(ANSWERS), bytes(data), key=key)
    )


def _damaged_body(rng: random.Random, key: str) -> Attempt:
    data = damaged(json.dumps(chat("hi", stop=["x"], max_tokens=2)).encode(), rng)
    return Attempt("a damaged body", request("POST", _somewhere(rng), data, key=key))


def _large(rng: random.Random, key: str) -> Attempt:
    count = int(10 ** rng.uniform(2, 5.3))
    wide = rng.choice(
        (
            lambda: chat() | {"messages": [{"role": "user", "content": [1] * count}]},
            lambda: chat("hi", stop=["x"] * count),
            lambda: chat("hi", tools=[{}] * count),
            lambda: {"messages": [{"role": "user", "content": "hi"}] * count, "max_tokens": 1},
            lambda: chat("hi", **{f"f{i}": i for i in range(count // 4)}),
            lambda: chat("hi", stop="x" * count),
            lambda: {"conversations": [1] * count},
            lambda: {"text": "x" * count, "images": [{"sha256": "0"}] * (count // 10)},
        )
    )()
    return Attempt("large JSON", post(_somewhere(rng), wide, key))


def _deep(rng: random.Random, key: str) -> Attempt:
    depth = int(10 ** rng.uniform(1, 5))
    opened, closed = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")))
    value = (opened * depth + "1" + (closed * depth if rng.random() < 0.7 else "")).encode()
    data = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1,"metadata":' + value + b"}"
    return Attempt("deep JSON", request("POST", _somewhere(rng), data, key=key))


def _address(rng: random.Random, key: str) -> Attempt:
    part = {"type": "image_url", "image_url": {"url": rng.choice(URLS)}}
    return Attempt("a picture's address", post(rng.choice(ANSWERS[::2]), chat("hi", part), key))


def _page(rng: random.Random, key: str) -> Attempt:
    route = rng.choice([r for r in routes() if "<" in r.rule])
    method = rng.choice((route.method, route.method, "GET", "POST", "PATCH", "DELETE"))
    body = b"" if method == "GET" else json.dumps({"text": rng.choice(ODD_TEXTS)[:999]}).encode()
    path = route.path(rng.choice(IDS), rng.choice(IDS))
    return Attempt("something that is not there", request(method, path, body, key=key))


def _any_route(rng: random.Random, key: str) -> Attempt:
    """Each with a body that it takes in form."""
    route = rng.choice(routes())
    path = route.path(rng.choice(IDS), rng.choice(IDS))
    if route.body is Body.NOTHING or route.method == "OPTIONS":
        return Attempt("any route", request(route.method, path, key=key))
    if route.body is Body.PICTURE:
        return Attempt(
            "any route", request(route.method, path, small_picture(rng), "image/png", key)
        )
    if route.body is Body.FORM:
        return _form(rng, key, path)
    made = bodies(rng)
    own = made.get(route.rule) or made.get("/v1" + route.rule) or chat("hi")
    data = json.dumps(changed(own, rng) if rng.random() < 0.8 else own).encode()
    return Attempt("any route", request(route.method, path, data, key=key))


def _interface(rng: random.Random, key: str) -> Attempt:
    path, body = rng.choice(sorted(bodies(rng).items(), key=lambda item: item[0]))
    how = rng.random()
    body = changed(body, rng) if how < 0.7 else body
    data = json.dumps(body).encode()
    if how > 0.9:
        data = damaged(data, rng, 3)
    return Attempt(f"a body of {path}", request("POST", path, data, key=key))


def _tools(rng: random.Random, key: str) -> Attempt:
    body = chat("hi", **tools(rng), stream=rng.random() < 0.5)
    if rng.random() < 0.5:
        body["messages"] = calls(rng)
    return Attempt("tools", post(CHAT, changed(body, rng) if rng.random() < 0.4 else body, key))


def _options(rng: random.Random, key: str) -> Attempt:
    body = chat("hi") | options(rng)
    if rng.random() < 0.3:
        body |= {"prompt": "hi"}
        body.pop("messages")
        return Attempt("options", post("/v1/completions", body, key))
    return Attempt("options", post(CHAT, body, key))


def _form(rng: random.Random, key: str, path: str = "/v1/files") -> Attempt:
    edge = "x" * rng.choice((1, 30, 70, 2000))
    name = rng.choice(("../../../etc/cron.d/x", 'a"\r\nSet-Cookie: x=1', "\0", "x" * 5000, ""))
    part = f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    purpose = f'--{edge}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n'
    data = purpose.encode() + part.encode() * rng.choice((1, 1, 200)) + small_picture(rng)
    data += f"\r\n--{edge}--\r\n".encode() if rng.random() < 0.7 else b""
    kind = f"multipart/form-data; boundary={edge}"
    return Attempt("a form", request("POST", path, data, kind, key))


def _stranger(rng: random.Random, key: str) -> Attempt:
    headers = rng.choice(
        (
            {"Origin": "https://evil.example"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Host": "evil.example"},
            {"Host": "localhost:1@evil.example"},
            {"Authorization": "Bearer " + "x" * rng.choice((1, 16, 5000))},
            {"Authorization": "Basic eDp5"},
            {"X-Forwarded-Host": "localhost", "X-HTTP-Method-Override": "DELETE"},
            {"Cookie": "a=" + "b" * 4000},
            {"Content-Encoding": "gzip"},
            {"Expect": "200-ok"},
            {"Range": "bytes=0-,1-,2-"},
        )
    )
    body = json.dumps(chat("hi")).encode()
    return Attempt(
        "a stranger",
        request("POST", _somewhere(rng), body, key=rng.choice((key, "")), headers=headers),
    )


def _other_type(rng: random.Random, key: str) -> Attempt:
    kind = rng.choice(("text/plain", "", "application/x-www-form-urlencoded", "a" * 900, "a/b;c=d"))
    return Attempt("another type", request("POST", _somewhere(rng), b"{}", kind, key))


def _odd_head(rng: random.Random, key: str) -> Attempt:
    body = json.dumps(chat("hi")).encode()
    size = str(len(body))
    lines = rng.choice(
        (
            f"Content-Length: {size}\r\nContent-Length: 5",
            f"Content-Length: {size}\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding: xchunked",
            "Content-Length: -1",
            "Content-Length: ten",
            "Content-Length: 99999999999999999999",
            "Content-Length : 5",
            "X-A: b\r\n c\r\nContent-Length: 0",
            "nonsense",
            "X-A: \0",
            f"X-A: {'a' * 300_000}",
            "X-A: b\r\n" * 5000 + "X-B: c",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
            "Host: evil.example",
        )
    )
    line = rng.choice(("POST /v1/completions HTTP/1.1", "GET / HTTP/9.9", "BREW / HTTP/1.1"))
    head = f"{line}\r\nHost: localhost\r\nConnection: close\r\n{lines}\r\n\r\n"
    return Attempt("an odd head", head.encode() + body, whole=False)


def _chunked(rng: random.Random, key: str) -> Attempt:
    body = json.dumps(chat("hi")).encode()
    size = rng.choice((f"{len(body):x}", "fffffffffffffffff", "-1", "zz", f"{len(body):x};a=b", ""))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: "
    head += f"application/json\r\nAuthorization: Bearer {key}\r\nTransfer-Encoding: chunked\r\n\r\n"
    end = rng.choice((b"\r\n0\r\n\r\n", b"\r\n0\r\nX: y\r\n\r\n", b"", b"\r\n"))
    return Attempt("chunks", head.encode() + size.encode() + b"\r\n" + body + end, whole=False)


def _damaged_request(rng: random.Random, key: str) -> Attempt:
    data = damaged(post(CHAT, chat("hi", stream=rng.random() < 0.5), key), rng)
    return Attempt("a damaged request", data, whole=False)


def _noise(rng: random.Random, key: str) -> Attempt:
    data = rng.choice((b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03", b"PRI * HTTP/2.0\r\n\r\n", b""))
    return Attempt("noise", data + rng.randbytes(rng.randint(0, 5000)), whole=False)


def _pipelined(rng: random.Random, key: str) -> Attempt:
    one = request("GET", rng.choice(READ), key=key, headers={"Connection": "keep-alive"})
    return Attempt("many at once", one * rng.randint(2, 200) + request("GET", "/health"), False)


def _leaves(rng: random.Random, key: str) -> Attempt:
    data = post(CHAT, chat("go on", max_tokens=500, stream=rng.random() < 0.5), key)
    cut = len(data) if rng.random() < 0.7 else rng.randrange(len(data))
    return Attempt("one that leaves", data[:cut], whole=False, leaves=True)


KINDS = {
    "ordinary": _ordinary,
    "read": _read,
    "odd field": _odd_field,
    "odd text": _odd_text,
    "mutated": _mutated,
    "damaged body": _damaged_body,
    "large": _large,
    "deep": _deep,
    "address": _address,
    "page": _page,
    "any route": _any_route,
    "interface": _interface,
    "tools": _tools,
    "options": _options,
    "form": _form,
    "stranger": _stranger,
    "other type": _other_type,
    "odd head": _odd_head,
    "chunked": _chunked,
    "damaged request": _damaged_request,
    "noise": _noise,
    "pipelined": _pipelined,
    "leaves": _leaves,
}
OFTEN = ("any route", "interface", "tools")
