from __future__ import annotations

import gzip
import hashlib
import json
import re

import pytest
from fake_service import FakeService

from mtmd.web.app import create_app
from mtmd.web.page.assets import FOLDER, Assets
from mtmd.web.settings import ServerSettings


@pytest.fixture(scope="module")
def client():
    return create_app(FakeService(), ServerSettings()).test_client()


def test_what_a_page_names_is_kept_for_good_and_compressed(client):
    html = client.get("/").get_data(as_text=True)
    names = re.findall(r'(?:href|src)="\./(static/[^"]+)"', html)
    assert any(name.endswith("markdown/blocks.js") for name in names)  # which chat.js imports
    for name in names:
        result = client.get(f"/{name}", headers={"Accept-Encoding": "gzip"})
        assert result.status_code == 200 and "immutable" in result.headers["Cache-Control"]
        assert result.headers["Vary"] == "Accept-Encoding", name
        packed = result.headers.get("Content-Encoding") == "gzip"
        data = gzip.decompress(result.data) if packed else result.data
        assert data == (FOLDER / name.split("/", 2)[2]).read_bytes()
        assert packed or name.endswith((".png", ".woff2"))
        assert client.get(f"/{name}").headers.get("Content-Encoding") is None


def test_other_addresses_are_asked_for_again_and_cheaply(client):
    for path in ("/static/icon.svg", "/static/0123456789ab/icon.svg"):
        result = client.get(path)
        assert result.headers["Cache-Control"] == "no-cache" and result.status_code == 200
        again = client.get(path, headers={"If-None-Match": result.headers["ETag"]})
        assert again.status_code == 304 and not again.data
    for path in (
        "/static/none.js",
        "/static/x/none.js",
        "/static/..%2fapp.py",
        "/static/x/../app.py",
    ):
        assert client.get(path).status_code == 404


def test_the_digest_tells_any_change(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.js").write_text('import { x } from "../c.js";\nimport "./d.js";\n')
    (tmp_path / "c.js").write_text("export const x = 1;\n")
    (tmp_path / "a" / "d.js").write_text('import { x } from "../c.js";\n')
    before = Assets(tmp_path)
    assert set(before.modules("a/b.js")) == {"c.js", "a/d.js"}
    assert Assets(tmp_path).digest == before.digest
    (tmp_path / "c.js").write_text("export const x = 2;\n")
    assert Assets(tmp_path).digest != before.digest


def test_the_libraries_of_others_are_as_published_with_their_licences():
    folder = FOLDER / "vendor"
    known = json.loads((folder / "vendor.json").read_text())
    there = {
        name: {
            path.relative_to(folder / name).as_posix(): hashlib.sha256(
                path.read_bytes()
            ).hexdigest()
            for path in sorted((folder / name).rglob("*"))
            if path.is_file()
        }
        for name in known
    }
    assert there == {name: library["sha256"] for name, library in known.items()}
    assert {path.name for path in folder.iterdir() if path.is_dir()} == set(known)
    assert all("LICENSE" in library["sha256"] for library in known.values())
