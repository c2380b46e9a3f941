"""One question over many pictures."""

from __future__ import annotations

import csv
import io

from browsing import PHONE, stored
from PIL import Image


def folder_of(tmp_path, count):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(1, count + 1):
        Image.new("RGB", (10 * number, 20), "red").save(folder / f"p{number}.png")
    (folder / "notes.txt").write_text("not a picture")
    return folder


def rows(page):
    return [
        [cell.strip() for cell in row.locator("th, td").all_inner_texts()[:2]]
        for row in page.locator("#table-rows tr").all()
    ]


def test_a_folder_becomes_a_table_that_goes_on_after_a_reload(visit, fake, tmp_path):
    person = visit()
    page = person.page
    fake.pace_s, fake.words = 0.2, "=SUM(1) of " + "words " * 300
    page.set_input_files("#folder", str(folder_of(tmp_path, 12)))
    page.wait_for_selector("#over-count:has-text('12 pictures; 1 other file left out')")
    page.fill("#over-question", "How wide?")
    page.click("#over button.primary")
    page.wait_for_selector("#table-rows tr:nth-child(12)")
    page.wait_for_selector(".c-answer .growing:has-text('of words')")
    assert len(fake.tickets) < 12  # as many at once as there are places
    page.click("#table-stop")
    page.wait_for_selector("#table-go:visible")
    page.reload()
    page.wait_for_selector("#table-go:visible")
    requested = len(fake.tickets)
    fake.pace_s = 0.0
    page.click("#table-go")
    page.wait_for_selector("#table-state:has-text('12 of 12 pictures answered')")
    assert len(fake.tickets) == 12 + requested and not page.is_visible("#table-go")
    assert {t.pictures[0].size[0] for t in fake.tickets} == {10 * n for n in range(1, 13)}
    assert all(len(t.pictures) == 1 and len(t.messages) == 1 for t in fake.tickets)
    assert [name for name, _ in rows(page)] == [f"p{n}.png" for n in range(1, 13)]
    page.click("#table-head >> text=Picture")
    page.click("#table-head >> text=Picture")
    assert [name for name, _ in rows(page)][:2] == ["p12.png", "p11.png"]
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("Picture")
    with page.expect_download() as download:
        page.click("#table-csv")
    table = list(csv.reader(io.StringIO(download.value.path().read_text("utf-8-sig"))))
    assert table[0][:3] == ["picture", "question", "answer"] and len(table) == 13
    assert table[1][:2] == ["p12.png", "How wide?"] and table[1][2].startswith("'=SUM(1)")
    page.locator("#table-rows .link").first.click()
    assert page.locator(".message").count() == 2 and not page.is_visible("#table")
    fake.words = "as a conversation"
    person.say("and how high?")
    assert len(fake.tickets[-1].messages) == 3
    page.click("#table-back")
    page.wait_for_selector("#table:visible")
    person.page.set_viewport_size(PHONE)
    assert person.overflow() == 0
    page.fill("#prompt", "Another question")
    page.press("#prompt", "Enter")
    page.wait_for_selector("#table-question:has-text('Another question')")
    page.wait_for_selector("#table-state:has-text('12 of 12 pictures answered')")
    assert next(text for _, text in rows(page)).startswith("as a conversation")


def test_rows_asked_for_when_a_table_is_stopped_are_stopped(person, fake, tmp_path):
    page = person.page
    fake.pace_s, fake.words = 60, "one two"
    with stored(page, "**/answers", "POST", maximum=3) as result:
        page.set_input_files("#folder", str(folder_of(tmp_path, 3)))
        page.fill("#over-question", "How wide?")
        page.click("#over button.primary")
        person.wait(lambda: result)
        page.click("#table-stop")
    page.wait_for_selector("#table-go:visible")
    assert all(ticket.cancelled.is_set() for ticket in fake.tickets)
