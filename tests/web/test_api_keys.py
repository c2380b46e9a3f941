"""Keys from files and variables: read, named, taken back while the server runs."""

from __future__ import annotations

import logging
import os
import threading
from io import BytesIO
from pathlib import Path

import pytest
from fake_service import FakeService
from serving import client_for, data_url, image_part, png, post_chat, running, user

from mtmd import OptionError, Service, load
from mtmd.web import api_keys as module
from mtmd.web.api_keys import ANYBODY, Keys, NamedKey, parse_keys
from mtmd.web.settings import ServerSettings

ANNA, BEN, NEW = "key-number-one-of-anna", "key-number-one-of-ben", "a-new-key-that-anna-got"


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(autouse=True)
def _looks(monkeypatch):
    """A file is looked at for every request here, where nothing else is said."""
    monkeypatch.setattr(module, "LOOK_S", 0.0)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys.txt"
    path.write_text(f"# the keys of two people\n\nanna:{ANNA}\n  ben:{BEN}  \r\n")
    path.chmod(0o600)
    return path


def named(keys, key):
    result = keys.find(f"Bearer {key}")
    return result and result.name


def test_a_file_has_names_keys_and_comments(file):
    keys = Keys(file=file)
    assert (named(keys, ANNA), named(keys, BEN), named(keys, NEW)) == ("anna", "ben", None)
    assert keys.needed and keys.owners == 2 and keys.find(f"Bearer {ANNA}").owner == "anna"
    assert ANNA not in repr(vars(keys)) and named(keys, f"anna:{ANNA}") is None


@pytest.mark.parametrize("text", [f"\ufeffanna:{ANNA}", f"anna:{ANNA}\r\n#", f"\t anna:{ANNA}"])
def test_what_editors_leave_in_a_file_does_no_harm(text, file):
    file.write_text(text, "utf-8")
    assert named(Keys(file=file), ANNA) == "anna"


def test_a_key_may_have_colons_behind_its_name(file):
    file.write_text("anna:a:key:with:colons:in:it")
    assert named(Keys(file=file), "a:key:with:colons:in:it") == "anna"


@pytest.mark.parametrize(
    "text, reported",
    [
        ("", "no keys"),
        ("# nothing\n\n", "no keys"),
        (f"anna:{ANNA}\nben:short", r"entry 2: found a key of 5 characters, expected at least 16"),
        (f"anna:{ANNA}\n\nben:", r"entry 3: found a key of 0 characters"),
        (f"anna smith:{ANNA}", "with a name of letters"),
        (f":{ANNA}", "with a name of letters"),
        (f"{'n' * 65}:{ANNA}", "with a name of letters"),
        (f"key-{'0' * 32}:{ANNA}", "does not begin with 'key-'"),
        ("anna:a key with spaces in it", "printable ASCII"),
        ("anna:ümlauts-are-in-this-one", "printable ASCII"),
        (f"anna:{ANNA}\nben:{ANNA}", "given as 'anna' and as 'ben'"),
        ("".join(f"n{i}:{ANNA}{i}\n" for i in range(1001)), "at most 1000"),
        ("#" * ((1 << 20) + 1), "more than 1,048,576 bytes"),
    ],
)
def test_a_wrong_file_is_told_by_its_line_and_never_by_its_keys(text, reported, file):
    file.write_text(text, "utf-8")
    with pytest.raises(OptionError, match=reported) as error:
        Keys(file=file)
    assert ANNA not in str(error.value) and "spaces in it" not in str(error.value)


def test_a_file_that_is_none_is_told(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00\x01" * 10)
    for name, reported in (
        ("missing", "No such file"),
        ("", "regular file|directory"),
        ("pipe", "regular file"),
        ("bytes", "UTF-8"),
    ):
        with pytest.raises(OptionError, match=reported):
            ServerSettings(api_key_file=tmp_path / name)


def test_a_key_is_taken_back_and_another_given_without_a_restart(file, caplog):
    keys = Keys(file=file)
    file.write_text(f"anna:{NEW}\nanna:{ANNA}\n")
    assert (named(keys, NEW), named(keys, ANNA), named(keys, BEN)) == ("anna", "anna", None)
    assert keys.owners == 1, "two keys of one person"
    other = file.with_name("other")
    other.write_text(f"anna:{NEW}\n")
    other.replace(file)
    assert (named(keys, NEW), named(keys, ANNA)) == ("anna", None)
    assert [r.getMessage() for r in caplog.records] == [
        "api-key-file: changed: 2 keys before, 2 now",
        "api-key-file: changed: 2 keys before, 1 now",
    ]
    file.write_text(f"anna:{ANNA}\n")
    assert named(keys, ANNA) == "anna"
    assert caplog.records[-1].getMessage() == "api-key-file: changed: 1 key before, 1 now"


def test_a_key_that_was_taken_back_is_good_for_a_second_at_most(file, monkeypatch):
    """Many requests look at the file once; a clock that is set back makes it no longer."""
    monkeypatch.setattr(module, "LOOK_S", 1.0)
    now, looks, stat = 1e10, [], Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **how: looks.append(path) or stat(path, **how))
    keys = Keys(file=file, clock=lambda: now)
    file.write_text(f"anna:{NEW}\n")
    now += 0.999
    assert [named(keys, BEN) for _ in range(50)] == ["ben"] * 50 and not looks
    now += 0.001
    assert [named(keys, BEN), named(keys, NEW)] == [None, "anna"] and looks == [file]
    file.write_text(f"ben:{BEN}\n")
    now -= 3600
    assert named(keys, NEW) is None


def test_a_change_that_shows_in_neither_time_nor_size_is_seen(file):
    """Two writes within one tick of the file system's clock."""
    keys, then = Keys(file=file), file.stat()
    file.write_text(file.read_text().replace(BEN, BEN[::-1]))
    os.utime(file, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert (named(keys, BEN), named(keys, BEN[::-1])) == (None, "ben")


def test_a_file_that_does_not_change_is_read_once(file, monkeypatch):
    os.utime(file, (1e9, 1e9))
    keys, opened = Keys(file=file), []
    monkeypatch.setattr(os, "open", lambda *a: opened.append(a))
    assert named(keys, ANNA) == "anna" and opened == []


def test_a_file_that_goes_wrong_leaves_the_keys_as_they_were_and_says_so_once(file, caplog):
    keys = Keys(file=file)
    for text, reported in (
        ("", "found no keys"),
        (f"anna:{ANNA}\nben", "entry 2: found a key of 3"),
        (None, "No such file"),
    ):
        file.unlink() if text is None else file.write_text(text)
        for _ in range(3):
            assert (named(keys, ANNA), named(keys, BEN), named(keys, NEW)) == ("anna", "ben", None)
        (record,) = caplog.records
        assert record.levelno == logging.ERROR and reported in record.getMessage()
        assert "the earlier keys (2) stay valid" in record.getMessage() and ANNA not in caplog.text
        caplog.clear()
    file.write_text(f"anna:{NEW}")
    assert (named(keys, NEW), named(keys, ANNA)) == ("anna", None)


def test_who_stands_in_the_file_before_and_after_is_never_refused(file):
    """Readers beside a writer that puts whole files in place, each of another length."""
    keys, ended, result = Keys(file=file), threading.Event(), set()

    def read():
        while not ended.is_set():
            result.add((named(keys, BEN), named(keys, BEN[:-1])))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for turn in range(100):
        part = file.with_name("part")
        part.write_text(f"ben:{BEN}\n" + f"anna:{ANNA}\n" * (turn % 2))
        part.replace(file)
    ended.set()
    for reader in readers:
        reader.join()
    assert result == {("ben", None)} and named(keys, ANNA) == "anna"


def test_an_unnamed_key_alone_is_the_person_that_was_there_without_one():
    assert Keys([ANNA]).find(f"Bearer {ANNA}").owner == ANYBODY
    two = Keys([ANNA], [NamedKey("ben", BEN)])
    owners = {two.find(f"Bearer {key}").owner for key in (ANNA, BEN)}
    assert len(owners) == 2 and ANYBODY not in owners and named(two, ANNA) == "key-1"


def test_a_single_key_in_a_file_is_not_everybody(file):
    """Another may be added, who must not find what the first one left."""
    file.write_text(ANNA)
    keys = Keys(file=file)
    first = keys.find(f"Bearer {ANNA}").owner
    file.write_text(f"{ANNA}\n{BEN}")
    assert keys.find(f"Bearer {BEN}").owner != keys.find(f"Bearer {ANNA}").owner == first != ANYBODY


def test_entries_of_a_variable(monkeypatch):
    from mtmd.environment import api_keys_from_environment

    monkeypatch.setenv("MTMD_API_KEYS", f"anna:{ANNA}, {BEN}\nanna:{NEW}")
    result = parse_keys(api_keys_from_environment(), "MTMD_API_KEYS")
    assert result == (NamedKey("anna", ANNA), NamedKey(None, BEN), NamedKey("anna", NEW))
    assert ANNA not in repr(result)
    monkeypatch.delenv("MTMD_API_KEYS")
    assert parse_keys(api_keys_from_environment(), "MTMD_API_KEYS") == ()


def test_keys_are_in_no_text_of_the_settings(file):
    settings = ServerSettings(
        api_keys=(NEW,), named_keys=(NamedKey("x", ANNA + "x"),), api_key_file=file
    )
    assert not any(key in repr(settings) for key in (ANNA, BEN, NEW))


def test_a_server_whose_file_changes(file):
    """What was begun with a key goes on to its end; the next request is refused."""
    service = FakeService(pace_s=0.001)
    client = client_for(service, api_key_file=file)
    service.words = "word " * 200
    ask = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    stream = client.post("/v1/chat/completions", json=ask, headers=bearer(BEN))
    lines = iter(stream.response)
    next(lines)
    file.write_text(f"anna:{ANNA}\n")
    assert client.get("/v1/models", headers=bearer(BEN)).status_code == 401
    assert client.get("/v1/models", headers=bearer(ANNA)).status_code == 200
    assert b"".join(c if isinstance(c, bytes) else c.encode() for c in lines).endswith(
        b"data: [DONE]\n\n"
    )


def test_long_bodies_are_read_for_the_keys_of_the_moment(file):
    with running(FakeService(), api_key_file=file) as server:
        import urllib.error
        import urllib.request

        def status(key):
            requested = urllib.request.Request(
                f"{server.url}/api/images?name=a.png", png(400, 400, kind="BMP"), bearer(key)
            )
            try:
                with urllib.request.urlopen(requested, timeout=10) as result:
                    return result.status
            except urllib.error.HTTPError as error:
                with error:
                    return error.code

        assert (status(ANNA), status(NEW)) == (200, 401)
        file.write_text(f"anna:{NEW}\n")
        assert (status(ANNA), status(NEW)) == (401, 200)


def test_names_and_never_keys_are_in_the_log_and_in_the_metrics(file, caplog):
    client = client_for(FakeService(), api_key_file=file)
    with caplog.at_level(logging.INFO, "mtmd.access"):
        client.get("/v1/models", headers=bearer(ANNA))
        client.get("/v1/models", headers=bearer(NEW))
    lines = [r.getMessage().split()[1:5] for r in caplog.records]
    assert lines == [["anna", "GET", "/v1/models", "200"], ["-", "GET", "/v1/models", "401"]]
    reported = client.get("/metrics", headers=bearer(BEN)).get_data(as_text=True)
    assert 'mtmd_key_responses_total{key="anna"} 1.0' in reported
    assert not any(key in caplog.text + reported for key in (ANNA, BEN, NEW))


def test_the_log_and_the_metrics_name_who_asks_too_often(file, caplog):
    client = client_for(FakeService(), api_key_file=file, rate_limit=1)
    with caplog.at_level(logging.INFO, "mtmd.access"):
        for _ in range(2):
            client.get("/v1/models", headers=bearer(ANNA))
    lines = [r.getMessage().split()[1:5] for r in caplog.records]
    assert lines == [["anna", "GET", "/v1/models", status] for status in ("200", "429")]
    reported = client.get("/metrics", headers=bearer(BEN)).get_data(as_text=True)
    assert 'mtmd_key_responses_total{key="anna"} 2.0' in reported


def test_uploads_are_shared_out_among_those_there_are(file):
    picture = png(200, 100, kind="BMP")
    room = 2 * len(picture) + 10_000  # a little is counted beside the bytes
    client = client_for(FakeService(), api_key_file=file, upload_bytes=room)

    def upload(key):
        form = {"purpose": "vision", "file": (BytesIO(picture), "x.png")}
        return client.post("/v1/files", data=form, headers=bearer(key)).status_code

    assert [upload(ANNA), upload(ANNA), upload(BEN)] == [200, 413, 200]
    file.write_text(f"anna:{ANNA}\n")
    assert upload(ANNA) == 200


def test_every_request_is_its_callers(file):
    service = FakeService()
    client = client_for(service, api_key_file=file)
    ask = {"messages": [{"role": "user", "content": "hi"}]}

    def post(path, body, key):
        result = client.post(path, json=body, headers=bearer(key))
        assert result.status_code == 200, result.get_data(as_text=True)
        return result.get_json()

    post("/v1/chat/completions", ask, ANNA)
    post("/v1/chat/completions/input_tokens", ask, BEN)
    post("/v1/completions", {"prompt": "hi"}, ANNA)
    post("/api/count", {"text": "hi"}, BEN)
    talk = post("/api/conversations", {}, ANNA)["id"]
    stated = post(f"/api/conversations/{talk}/messages", {"text": "hi"}, ANNA)["message"]["id"]
    post(f"/api/conversations/{talk}/answers", {"parent": stated}, ANNA)
    assert service.tenants == ["anna", "ben", "anna", "ben", "anna"]


@pytest.mark.parametrize("share", [False, True])
def test_what_a_key_asked_is_told_to_another_only_where_caches_are_shared(share, file):
    model = load(device="cpu")
    service = Service(model, share_cache=share)
    client = client_for(service, api_key_file=file, share_cache=share)
    ask = {
        "messages": [user("Describe the image. " * 10, image_part(data_url(png(96, 96))))],
        "max_tokens": 1,
    }

    def usage(key):
        result = client.post("/v1/chat/completions", json=ask, headers=bearer(key)).get_json()
        reported = result["usage"]
        image = reported["mtmd_receipt"]["images"][0]
        seen = client.get(f"/api/processed/{image['sha256']}", headers=bearer(BEN)).status_code
        return reported["prompt_tokens_details"]["cached_tokens"] >= 32, image["cached"], seen

    assert usage(ANNA) == (False, False, 404) and usage(ANNA) == (True, True, 404)
    assert usage(BEN) == (share, share, 200)
    service.close()


def test_chat_needs_a_key_of_the_file(file):
    client = client_for(FakeService(), host="0.0.0.0", api_key_file=file)
    assert post_chat(client, "hi").status_code == 401
    assert client.get("/health").status_code == 200
