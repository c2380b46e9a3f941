"""Pictures that are no files, for every command that takes pictures: addresses of the web, data URLs,
standard input.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from dual_encoders import clip
from PIL import Image

from mtmd import ImageError
from mtmd.batch.inputs import find_inputs
from mtmd.prompt import fetch_url as fetch
from mtmd.prompt.fetch_url import Denied, Fetched
from mtmd.prompt.url_kinds import url_identity, url_name
from mtmd.terminal.transcript import attach

ADDRESS = "https://me:secret@pictures.test/a.png?key=1"
SHOWN = url_identity(ADDRESS)
INSIDE = "http://inside.test/b.png"
COUNT = ("-p", "How many shapes are there?")
REMOTE = "--allow-remote-media"


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch, one: Path) -> list[str]:
    """The addresses asked, at each of which the picture lies, but at INSIDE."""
    requested: list[str] = []

    def get(url: str, *_: Any) -> Fetched:
        requested.append(url)
        if url == INSIDE:
            raise Denied("an address that is not public")
        return Fetched(None, one.read_bytes())

    monkeypatch.setattr(fetch, "_get", get)
    return requested


@pytest.fixture
def data_url(one: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(one.read_bytes()).decode()}"


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Any:
    def pipe(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))

    return pipe


@pytest.fixture(scope="module")
def dual(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("clip")
    clip(folder)
    return str(folder)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_name_tells_pictures_apart_and_no_secret() -> None:
    assert SHOWN.startswith("https://pictures.test/a.png?") and len(SHOWN) == 27 + 1 + 16
    assert url_identity(ADDRESS.replace("key=1", "key=2")) != SHOWN
    assert url_identity("https://a.test/b.png") == "https://a.test/b.png"
    name = url_identity("data:image/png;base64,AAAA")
    assert name.startswith("data:image/png;sha256=") and len(name) == 22 + 16
    assert url_identity("data:\x1b[31m,x").startswith("data:;sha256=")
    assert url_identity("https://a.test/\ud800.png").isprintable()


@pytest.mark.parametrize("user", ["ann:pass", "ann@mail.test:pass", "ann:p@ss", "pass@"])
def test_no_part_of_a_user_is_in_a_name_nor_can_be_guessed_from_it(user: str) -> None:
    address = f"https://{user}@a.test/b@c//d@e.png"
    assert url_name(address) == "https://a.test/b@c//d@e.png"
    assert url_name(f"ftp://{user}@a.test?b") == "ftp://a.test"
    assert url_name("photos//a@b.png") == "photos//a@b.png"
    name = url_identity(address)
    assert "ss" not in name and "ann" not in name and "mail" not in name
    assert name == url_identity(address.replace(user, "another:word"))


def test_each_takes_all_of_them(
    mtmd: Any, requested: list[str], data_url: str, piped: Any, one: Path
) -> None:
    piped(one.read_bytes())
    given = (one, ADDRESS, data_url, "-")
    ran = mtmd("describe", "--each", REMOTE, "--json", *given, *COUNT)
    rows = [json.loads(line) for line in ran.out.splitlines()]
    assert ran.code == 0 and [row["text"] for row in rows] == ["One."] * 4
    names = [str(one), SHOWN, url_identity(data_url), "standard input"]
    assert [row["image"] for row in rows] == names and requested == [ADDRESS]
    assert len({row["sha256"] for row in rows}) == 1
    assert "secret" not in ran.out and "key=1" not in ran.out


def test_each_is_told_what_is_wrong_before_a_model_is_loaded(
    mtmd: Any, requested: list[str], piped: Any, one: Path
) -> None:
    reported = mtmd("describe", "--each", one, ADDRESS).refused()
    assert "found a web address" in reported and REMOTE in reported and "secret" not in reported
    piped(b"")
    assert "found nothing, expected a picture" in mtmd("describe", "--each", "-").refused()
    assert "found twice" in mtmd("describe", "--each", "-", "-").refused()
    assert requested == []


def test_an_address_inside_is_a_failed_row_with_the_reason(mtmd: Any, requested: list[str]) -> None:
    ran = mtmd("describe", "--each", REMOTE, "--json", INSIDE, ADDRESS, *COUNT)
    first, second = [json.loads(line) for line in ran.out.splitlines()]
    assert ran.code == 1 and "an address that is not public" in first["error"]
    assert second["text"] == "One." and sorted(requested) == sorted([INSIDE, ADDRESS])


def test_a_batch_takes_urls_named_and_listed_and_goes_on(
    mtmd: Any, requested: list[str], data_url: str, one: Path, tmp_path: Path
) -> None:
    out, listed = tmp_path / "a.jsonl", tmp_path / "list.txt"
    listed.write_text(f"{INSIDE}\n{data_url}\n{one}\n")
    given = ("batch", ADDRESS, "--list", listed, "--out", out, *COUNT)
    ran = mtmd(*given, REMOTE)
    assert ran.code == 1, "one is inside"
    rows = {row["image"]: row for row in rows_of(out)}
    assert set(rows) == {SHOWN, INSIDE, url_identity(data_url), str(one)}
    assert [rows[name]["text"] for name in (SHOWN, url_identity(data_url))] == ["One."] * 2
    assert "not public" in rows[INSIDE]["error"] and "secret" not in out.read_text()
    requested.clear()
    again = mtmd(*given, REMOTE, "--resume")
    assert again.code == 1 and requested == [] and "0 rows" in again.err, "all have a row"
    mtmd(*given, REMOTE, "--retry-failed")
    assert requested == [INSIDE] and len(rows_of(out)) == 4


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ((ADDRESS,), "found a web address"),
        (("-",), "--list - reads paths from standard input"),
        ((ADDRESS, REMOTE, "--every", "1s"), "--every: found a URL, expected files"),
        ((ADDRESS, REMOTE, "--ray", "local"), "--allow-remote-media: found with --ray"),
    ],
)
def test_a_batch_says_what_it_does_not_take(
    arguments: tuple[str, ...], reported: str, mtmd: Any, requested: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "a.jsonl"
    assert reported in mtmd("batch", *arguments, "--out", out).refused()
    assert requested == [] and not out.exists()


def test_vectors_of_all_of_them(
    mtmd: Any, dual: str, requested: list[str], data_url: str, piped: Any, one: Path
) -> None:
    piped(one.read_bytes())
    given = (one, ADDRESS, data_url, "-", INSIDE)
    ran = mtmd("embed", "-m", dual, REMOTE, "--query", "a", "--json", *given)
    result = json.loads(ran.out)
    names = [str(one), SHOWN, url_identity(data_url), "standard input"]
    assert ran.code == 1 and result["images"] == names and set(result["failed"]) == {INSIDE}
    assert len({hit["cosine"] for hit in result["queries"][0]["images"]}) == 1
    assert requested == [ADDRESS, INSIDE]
    refused = mtmd("embed", "-m", dual, "--query", "a", ADDRESS).refused()
    assert "found a web address" in refused
    reported = mtmd("embed", "-m", dual, "--query", "a", "-", "--list", "-").refused()
    assert "standard input is read once" in reported


def test_a_chat_about_urls_is_saved_and_loaded(
    mtmd: Any, requested: list[str], data_url: str, piped: Any, tmp_path: Path
) -> None:
    saved = tmp_path / "saved.json"
    lines = [COUNT[1], f"/save {saved}", "/clear", f"/image {ADDRESS}", COUNT[1], "/images"]
    piped("".join(f"{line}\n" for line in lines).encode())
    ran = mtmd("chat", REMOTE, data_url)
    assert ran.code == 0 and ran.err == "" and requested == [ADDRESS]
    assert ran.out.count("One.\n") == 2 and f"question 1: {SHOWN} (" in ran.out
    assert "secret" not in ran.out and data_url not in ran.out
    piped(f"/load {saved}\n/images\n".encode())
    again = mtmd("chat")
    assert again.code == 0 and f"question 1: {url_identity(data_url)} (" in again.out


def test_a_chat_asks_no_address_unless_it_may(
    mtmd: Any, requested: list[str], piped: Any, tmp_path: Path
) -> None:
    assert "found a web address" in mtmd("chat", ADDRESS).refused()
    assert "standard input is what is said" in mtmd("chat", "-").refused()
    saved = tmp_path / "saved.json"
    piped(f"/image {ADDRESS}\n{COUNT[1]}\n/save {saved}\n".encode())
    assert mtmd("chat", REMOTE).code == 0 and requested == [ADDRESS]
    piped(f"/image {ADDRESS}\n/load {saved}\n".encode())
    ran = mtmd("chat")
    assert ran.code == 1 and ran.err.count("found a web address") == 2 and "secret" not in ran.err
    assert requested == [ADDRESS]


def test_a_file_address_is_its_path_everywhere(tmp_path: Path) -> None:
    """So its row is known by it, wherever a later run goes on from."""
    location = tmp_path / "a b.png"
    Image.new("RGB", (8, 8)).save(location)
    address, listed = f"file://{tmp_path}/a%20b.png", tmp_path / "list.txt"
    listed.write_text(address)
    assert attach(address).path == location
    for result in (find_inputs([address, str(location)]), find_inputs([], [str(listed)])):
        assert [one.name for one in result.inputs] == [str(location)]
    assert [one.path for one in find_inputs([f"file://{tmp_path}"]).inputs] == [str(location)]


def test_a_home_of_nobody_is_no_file() -> None:
    with pytest.raises(ImageError, match="found no such file"):
        attach(Path("~nobody at all/a.png"))
