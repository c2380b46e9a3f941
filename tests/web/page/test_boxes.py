"""Places that an answer names: drawn over the picture, which comes first, and folded as the model wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest

SHAPES = Path(__file__).parents[3] / "examples" / "shapes.png"
BOX = '{"box_2d": [350, 350, 620, 610], "label": "black cross"}'
LIST = '[\n  {"bbox_2d": [1, 2, 3, 4], "label": "a ] in words"},\n  {"point_2d": [5, 6]}\n]'
TAGS = "<ref>the cat</ref><box>(1,2),(3,4)</box>"
CASES = [
    (BOX, "", BOX),
    (f"Here it is: {BOX}", "Here it is:", BOX),
    (f"One:\n```json\n{LIST}\n```\nDone.", "One:\nDone.", LIST),
    (f"{LIST}\n\nTwo places.", "Two places.", LIST),
    (f"{BOX}\n{BOX}", "", f"{BOX}\n{BOX}"),
    (
        'cut: [{"bbox": [1, 2, 3, 4], "label": "a"}, {"bb',
        "cut:",
        '[{"bbox": [1, 2, 3, 4], "label": "a"}, {"bb',
    ),
    ('```json\n{"bbox": [1, 2', '```json\n{"bbox": [1, 2'.replace("```json\n", ""), ""),
    ("[1, 2, 3, 4]", "", "[1, 2, 3, 4]"),
    ("The cross is at [350, 350, 620, 610].", "The cross is at [350, 350, 620, 610].", ""),
    ("It is at [350, 350, 620, 610]", "It is at [350, 350, 620, 610]", ""),
    (f"{TAGS}; {TAGS}", "", f"{TAGS}; {TAGS}"),
    (f"{TAGS} sits there.", f"{TAGS} sits there.", ""),
    ("<loc0001><loc0002><loc0003><loc0004> cat", "", "<loc0001><loc0002><loc0003><loc0004> cat"),
    ("cat<loc_1><loc_2><loc_3><loc_4>", "", "cat<loc_1><loc_2><loc_3><loc_4>"),
    ('```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', ""),
    (
        "A [link](https://example.com) and {braces}",
        "A [link](https://example.com) and {braces}",
        "",
    ),
]
SEPARATE = """async (text) => {
    const { withoutPlaces } = await import("./MODULE");
    const { words, notation } = withoutPlaces(text);
    return [words, notation];
}"""


@pytest.fixture
def separate(drawn):
    module = drawn.page.locator("link[href$='chat/regions.js']").get_attribute("href")
    return lambda text: drawn.page.evaluate(SEPARATE.replace("MODULE", module), text)


@pytest.mark.parametrize(("text", "words", "notation"), CASES)
def test_places_are_told_from_words(separate, text, words, notation):
    if text.startswith('```json\n{"bbox"'):  # a block that was cut: all of it is the place
        words, notation = "", '{"bbox": [1, 2'
    assert separate(text) == [words, notation]


def test_a_long_answer_of_brackets_is_read_once(separate):
    """Not a time: each of these would take minutes if it was read anew from each bracket."""
    for text in ("[{" * 200_000, "[{\n" * 100_000, "```\n" * 100_000, '{"' * 200_000):
        assert separate(text)[1] == ""


def test_the_picture_comes_first_and_the_notation_is_folded(person, fake):
    fake.words = f"The cross is black.\n\n{BOX}"
    person.attach(SHAPES)
    person.say("where")
    page = person.page
    page.wait_for_selector(".figure rect")
    answer = page.locator(".message.answer")
    assert answer.locator(".answer-text").inner_text() == "The cross is black."
    assert answer.evaluate(
        "(e) => Boolean(e.querySelector('.figure').compareDocumentPosition(e.querySelector('.answer-text')) & Node.DOCUMENT_POSITION_FOLLOWING)"
    )
    code = answer.locator(".notation code")
    assert not code.is_visible()
    page.click(".notation summary")
    assert code.inner_text() == BOX
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".message.answer .foot [aria-label=Copy]").click()
    assert page.evaluate("navigator.clipboard.readText()") == fake.words  # all that it said
    assert person.axe() == []


def test_an_answer_of_places_alone_is_its_picture(person, fake):
    fake.words = BOX
    person.attach(SHAPES)
    person.say("where")
    page = person.page
    page.wait_for_selector(".figure rect")
    assert page.locator(".message.answer > .answer-text .text").is_visible() is False
    fake.words = "No box."
    person.say("and now")
    assert person.texts("answer")[-1] == "No box."
    page.reload()
    page.wait_for_selector(".notation")
    assert BOX not in page.locator(".message.answer").first.locator(".answer-text").inner_text()


def test_json_without_a_picture_stays_in_the_answer(person, fake):
    fake.words = BOX
    person.say("where")
    assert person.texts("answer") == [BOX] and person.page.locator(".notation").count() == 0
