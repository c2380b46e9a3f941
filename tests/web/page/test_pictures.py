"""Pictures on the page before and after they are sent: pages of PDFs, turned, cut, parts asked about."""

from __future__ import annotations

import io

import numpy as np
import pypdfium2
from PIL import Image


def pdf(*sizes):
    document = pypdfium2.PdfDocument.new()
    for width, height in sizes:
        document.new_page(width, height)
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


def quarters(path):
    """Red above green on the left, blue above white on the right."""
    pixels = np.zeros((100, 200, 3), np.uint8)
    pixels[:50, :100], pixels[50:, :100] = (255, 0, 0), (0, 255, 0)
    pixels[:50, 100:], pixels[50:, 100:] = (0, 0, 255), (255, 255, 255)
    Image.fromarray(pixels).save(path)
    return path


def test_a_picture_is_turned_and_cut_before_it_is_sent(person, fake, tmp_path):
    page = person.page
    document = {
        "name": "paper.pdf",
        "mimeType": "application/pdf",
        "buffer": pdf((72, 72), (72, 144)),
    }
    page.set_input_files("#files", files=[document])
    page.wait_for_selector(".thumb [aria-label='Show paper.pdf, page 2 large']")
    person.attach(quarters(tmp_path / "q.png"))
    for name in ("paper.pdf, page 1", "paper.pdf, page 2"):
        page.click(f"[aria-label='Remove {name}']")
    page.click(".thumb .picture")
    person.until("document.querySelector('#viewer-image').naturalWidth === 200")
    page.click("#viewer-turn")
    person.until("document.querySelector('#viewer-image').naturalWidth === 100")
    assert page.inner_text("#viewer-info") == "100 × 200 px"
    page.click("#viewer-select")
    page.click("#viewer-frame")
    page.wait_for_selector("#selection", state="hidden")
    page.click("#viewer-close")
    page.wait_for_selector(".thumb:not(.loading)")
    person.say("what is in the frame?")
    (picture,) = fake.tickets[-1].pictures
    assert picture.size == (100, 200) and (picture.pixels[50, 40:60] == (224, 0, 0)).all()
    assert (picture.pixels[10, 10] != (224, 0, 0)).any()
    person.attach(quarters(tmp_path / "q.png"))
    page.click(".thumb .picture")
    person.until("document.querySelector('#viewer-image').naturalWidth === 200")
    page.click("#viewer-turn")
    person.until("document.querySelector('#viewer-image').naturalWidth === 100")
    page.click("#viewer-select")
    for key, times in (("ArrowLeft", 13), ("ArrowUp", 13), ("Shift+ArrowUp", 1)):
        for _ in range(times):
            page.keyboard.press(key)
    page.click("#viewer-cut")
    person.until("document.querySelector('#viewer-image').naturalWidth <= 51")
    page.click("#viewer-close")
    person.say("what")
    picture = fake.tickets[-1].pictures[-1]
    assert picture.size[0] <= 51 and picture.size[1] <= 100
    assert (picture.pixels[2:40, 2:40] == (0, 255, 0)).all()  # what was below on the left


def test_boxes_of_an_answer_are_clicked_to_ask_about_them(person, fake, tmp_path):
    fake.words = '[{"bbox_2d": [500, 0, 1000, 500], "label": "the blue one"}]'
    person.attach(quarters(tmp_path / "q.png"))
    person.say("where")
    page = person.page
    page.click(".region:has-text('the blue one')")
    page.wait_for_selector(".thumb:not(.loading) [aria-label='Show region of the blue one large']")
    page.click(".figure")
    person.until("document.querySelector('#viewer-image').naturalWidth === 200")
    page.click("#viewer-marks rect[data-region]")
    page.click("#viewer-ask")
    page.wait_for_selector(".thumb:nth-child(2):not(.loading)")
    assert page.input_value("#prompt") == ""
    person.say("what is it")
    for picture in fake.tickets[-1].pictures[-2:]:
        assert picture.size == (100, 50) and (picture.pixels == (0, 0, 255)).all()
