"""PDFs page by page, and answers as Markdown files."""

from __future__ import annotations

import json
from pathlib import Path

import pypdfium2
import pytest

from mtmd.base.errors import OptionError
from mtmd.batch.inputs import Input, in_pages
from mtmd.batch.markdown import check_folder, markdown_path, write_markdown
from mtmd.batch.output import Row
from mtmd.clip.image import formats


@pytest.fixture
def document(tmp_path: Path) -> Path:
    made = pypdfium2.PdfDocument.new()
    for side in (100, 120, 140):
        made.new_page(side, 100)
    path = tmp_path / "paper.pdf"
    made.save(path)
    made.close()
    return path


def test_a_pdf_is_read_page_by_page(document: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.pdf"
    broken.write_bytes(b"%PDF-1.4 cut")
    inputs = in_pages([Input(str(document)), Input(str(broken)), Input("photo.png")])
    assert [one.name.rpartition("/")[2] for one in inputs] == [
        *(f"paper.pdf#page={page}" for page in (1, 2, 3)),
        "broken.pdf",
        "photo.png",
    ]


def test_names_of_files(tmp_path: Path) -> None:
    assert markdown_path(tmp_path, "a/b.pdf#page=12") == tmp_path / "a" / "b.pdf-12.md"
    assert markdown_path(tmp_path, "/a/../b.png") == tmp_path / "a" / "b.png.md"
    write_markdown(tmp_path, Row("x/y.png", text="# One\n\n"))
    write_markdown(tmp_path, Row("x/z.png", error="cut"))
    assert (tmp_path / "x" / "y.png.md").read_text() == "# One\n"
    assert not (tmp_path / "x" / "z.png.md").exists()
    with pytest.raises(OptionError, match="found a file, expected a folder"):
        check_folder(tmp_path / "x" / "y.png.md")


def test_the_command(document: Path, tmp_path: Path, mtmd) -> None:  # type: ignore[no-untyped-def]
    out, pages = tmp_path / "rows.jsonl", tmp_path / "pages"
    options = ("--pages", "--markdown", str(pages), "--out", str(out), "--max-tokens", "3")
    assert mtmd("batch", str(document), *options).code == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["image"].rpartition("#")[2] for row in rows] == ["page=1", "page=2", "page=3"]
    for row in rows:
        written = markdown_path(pages, row["image"]).read_text()
        assert written == row["text"].rstrip("\n") + "\n"


def test_pages_that_are_not_read_are_named(document: Path, tmp_path: Path, mtmd) -> None:  # type: ignore[no-untyped-def]
    out, first = tmp_path / "rows.jsonl", "only the first page of the PDF"
    made = mtmd("batch", str(document), "-p", "?", "--out", str(out), "--max-tokens", "3")
    assert f"{first} is read; 'mtmd batch --pages' reads every page" in made.err
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert row["warnings"].startswith("only page 1 of 3 was read; --pages reads each")
    made = mtmd("describe", str(document), "-p", "?", "--max-tokens", "3")
    assert f"{first} was read; 'mtmd batch --pages' reads every page" in made.err
    made = mtmd("describe", "--each", str(document), "-p", "?", "--max-tokens", "3")
    assert f"{first} is read" in made.err
    pages = ("--pages", "--resume", "--out", str(out), "--max-tokens", "3")
    assert first not in mtmd("batch", str(document), "-p", "?", *pages).err


def test_pages_without_their_library_are_refused_before_the_model_is_loaded(
    document: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mtmd,  # type: ignore[no-untyped-def]
) -> None:
    monkeypatch.setattr(formats, "find_spec", lambda _: None)
    monkeypatch.setattr("mtmd.commands.batch.load_from", lambda _: pytest.fail("loaded"))
    out = tmp_path / "rows.jsonl"
    refused = mtmd("batch", document, "-p", "?", "--pages", "--out", out).refused()
    assert f"pages: {document} is a PDF; pypdfium2 reads it: " in refused
    assert "pip install" in refused and "[formats]'" in refused and not out.exists()


def test_a_damaged_pdf_is_not_said_to_be_read_in_part(tmp_path: Path, mtmd) -> None:  # type: ignore[no-untyped-def]
    broken, out = tmp_path / "broken.pdf", tmp_path / "rows.jsonl"
    broken.write_bytes(b"%PDF-1.4 cut")
    made = mtmd("batch", broken, "-p", "?", "--pages", "--out", out)
    assert made.code == 1 and "only the first page" not in made.err


def test_pages_take_the_place_of_the_error_of_their_file(
    document: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mtmd,  # type: ignore[no-untyped-def]
) -> None:
    """As after the library was installed."""
    out = tmp_path / "rows.jsonl"
    command = ("batch", document, "-p", "?", "--max-tokens", "3", "--out", out)
    with monkeypatch.context() as lacking:
        lacking.setattr(formats, "find_spec", lambda _: None)
        assert mtmd(*command).code == 1
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["image"] == str(document) and "pypdfium2 reads it" in row["error"]
    saved = out.read_text()
    made = mtmd(*command, "--pages", "--resume")
    assert "asked again" not in made.err and out.read_text().startswith(saved)
    assert len(out.read_text().splitlines()) == 4
    out.write_text(saved)
    made = mtmd(*command, "--pages", "--resume", "--retry-failed")
    assert made.code == 0 and "; 0 failed\n" in made.err
    assert "asked again: 1 of before failed\n" in made.err
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["image"] for row in rows] == [f"{document}#page={page}" for page in (1, 2, 3)]
    assert all(row["error"] is None for row in rows)


def test_lines_that_say_where_blocks_are_stay_out(tmp_path: Path) -> None:
    def written(text: str) -> str:
        write_markdown(tmp_path, Row("page.png", text=text))
        return (tmp_path / "page.png.md").read_text()

    block = "<|ref|>sub_title<|/ref|><|det|>[[1, 2, 3, 4]]<|/det|>\n"
    assert written(f"{block}# May\n\n{block}words\n") == "# May\n\nwords\n"
    lines = f"{block}<|ref|>Two words<|/ref|><|det|>[[5, 6, 7, 8]]<|/det|>\n"
    assert written(lines) == lines  # a list of texts and boxes has no others
