"""Text that is read from right to left: Arabic and Hebrew in answers, messages, titles and fields."""

from __future__ import annotations

import re

import pytest

ARABIC, HEBREW, ENGLISH = "مرحبا بالعالم (test).", "שלום עולם!", "Hello world."
# Of every element of `selector` in a drawn text: on which side its first and its last character stand, and the side of its words
# in the block around them.
SIDES = """async ([text, selector]) => {
    const { AnswerText } = await import("./MODULE");
    const view = new AnswerText().draw(text, false);
    document.querySelector("#thread").hidden = false;
    document.querySelector("#thread").append(view.element);
    const box = (node, from, to) => {
        const range = document.createRange();
        range.setStart(node, from);
        range.setEnd(node, to);
        return range.getBoundingClientRect();
    };
    const all = [...view.element.querySelectorAll(selector)].map((element) => {
        const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
        let [first, last] = [null, null];
        while (walker.nextNode()) if (walker.currentNode.data.trim()) [first, last] = [first ?? walker.currentNode, walker.currentNode];
        const [begin, end] = [box(first, 0, 1), box(last, last.length - 1, last.length)];
        const outer = element.getBoundingClientRect();
        const range = document.createRange();
        range.selectNodeContents(element);
        const ink = range.getBoundingClientRect();
        return { reads: begin.left < end.left ? "ltr" : "rtl", stands: ink.left - outer.left < outer.right - ink.right ? "left" : "right",
            direction: getComputedStyle(element).direction };
    });
    view.element.remove();
    return all;
}"""


@pytest.fixture
def sides(drawn):
    def look(text, selector):
        result = drawn.page.evaluate(SIDES.replace("MODULE", drawn.module), [text, selector])
        return [(one["reads"], one["stands"]) for one in result]

    return look


RTL, LTR = ("rtl", "right"), ("ltr", "left")


@pytest.mark.parametrize("text", [ARABIC, HEBREW])
@pytest.mark.parametrize("mark", ["", "# ", "### ", "> ", "- ", "1. ", "- [x] ", "**", "> - "])
def test_each_block_is_read_in_its_own_direction(sides, text, mark):
    selector = "h1, h3, li, p"
    end = mark if mark == "**" else ""
    assert set(sides(f"{mark}{text}{end}", selector)) == {RTL}
    assert set(sides(f"{mark}{ENGLISH}{end}", selector)) == {LTR}
    assert sides(f"{mark}{text}{end}\n\n{ENGLISH}\n\n{text}", "p")[-2:] == [LTR, RTL]


def test_an_item_is_read_in_its_own_direction_beside_the_marker_of_its_list(sides, drawn):
    assert sides(f"- {ARABIC}\n- {ENGLISH}\n- {HEBREW}", "li") == [RTL, ("ltr", "right"), RTL]
    assert sides(f"- {ENGLISH}\n- {ARABIC}", "li") == [LTR, ("rtl", "left")]
    loose = sides(f"1. {ARABIC}\n\n   {ENGLISH}\n\n2. {ARABIC}", "li > p")
    assert loose == [RTL, ("ltr", "right"), RTL]
    assert sides(f"- {ENGLISH}\n  - {ARABIC}\n    - {ARABIC}", "li li li") == [RTL]
    html = drawn.draw(f"- {ARABIC}")
    assert '<ul dir="auto"><li>' in html


def test_a_quotation_has_its_line_where_it_begins(drawn):
    drawn.page.evaluate("() => document.querySelector('#thread').replaceChildren()")
    for text, side in ((ARABIC, "right"), (ENGLISH, "left")):
        width = drawn.page.evaluate(
            SIDES.replace("MODULE", drawn.module).replace(
                "const all =",
                "const border = (side) => parseFloat(getComputedStyle(view.element.querySelector('blockquote'))[`border${side}Width`]);\n"
                "    const widths = [border('Left'), border('Right')]; view.element.remove(); return widths; const all =",
            ),
            [f"> {text}", "p"],
        )
        assert [w > 0 for w in width] == [side == "left", side == "right"]


def test_a_table_begins_on_the_side_of_its_first_words(sides, drawn):
    rows = "|{}|{}|\n|---|---|\n|{}|12|\n|{}|{}|"
    cells = sides(rows.format("عمود", "قيمة", ARABIC, ENGLISH, HEBREW), "td, th")
    assert [c[0] for c in cells if c[0] != "ltr"] == ["rtl"] * 4 and cells[4] == LTR
    where = drawn.page.evaluate(
        SIDES.replace("MODULE", drawn.module).replace(
            "const all =",
            "const lefts = [...view.element.querySelectorAll('th')].map((cell) => cell.getBoundingClientRect().left);"
            " view.element.remove(); return lefts; const all =",
        ),
        [rows.format("عمود", "قيمة", "أ", "ب", "ت"), "p"],
    )
    assert where[0] > where[1]
    cells = sides(rows.format("Word", "Arabic", "one", "two", ARABIC), "td, th")
    assert cells[-1][0] == "rtl" and cells[2] == LTR


def test_code_addresses_and_formulas_stay_as_they_are(sides, drawn):
    text = f"`git push` {ARABIC}\n\nhttps://example.com/x {HEBREW}\n\n$x + y$ {ARABIC}"
    assert [side for _, side in sides(text, "p")] == ["right"] * 3
    assert sides(f"{ARABIC} `a = b + 1` {ARABIC}", "code")[0][0] == "ltr"
    assert sides(f'{ARABIC}\n\n```py\nprint("{ARABIC}")\n```', "pre code") == [LTR]
    html = drawn.draw(f"- {ARABIC}\n\n  ```py\n  x = 1\n  ```")
    assert re.search(r'<figure class="code" dir="ltr">', html)


def test_lines_of_a_message_titles_and_fields_have_their_own_direction(person, fake):
    fake.words = ARABIC
    page = person.page
    page.fill("#prompt", ARABIC)
    direction = "(e) => getComputedStyle(e).direction"
    assert page.locator("#prompt").evaluate(direction) == "rtl"
    page.fill("#prompt", "")
    person.say(f"{HEBREW}\n{ENGLISH}")
    person.lists(f"{HEBREW} {ENGLISH}")
    for selector in ("#title", "#list .item a > span"):
        assert page.locator(selector).first.evaluate(direction) == "rtl"
    bubble = page.locator(".bubble").evaluate("""(e) => {
        const text = e.firstChild, range = document.createRange();
        const at = (from) => { range.setStart(text, from); range.setEnd(text, from + 1); return range.getBoundingClientRect().left; };
        const second = text.data.indexOf("\\n") + 1;
        return [at(0) > at(3), at(second) < at(second + 3)];
    }""")
    assert bubble == [True, True]
    page.hover("#list .item")
    page.click("#list .item .icon-button")
    page.click(".menu >> text=Rename")
    assert page.locator("#list input").evaluate(direction) == "rtl"
    page.keyboard.press("Escape")
    page.fill("#search", ARABIC)
    assert page.locator("#search").evaluate(direction) == "rtl"
    for selector in ("[name=system]", "#over-question", "[name=system-a]", "#video-title"):
        assert page.locator(selector).get_attribute("dir") == "auto"


def test_an_arabic_name_does_not_mix_up_a_sentence_of_the_page(person):
    person.say(ARABIC)
    page = person.page
    page.hover("#list .item")
    page.click("#list .item .icon-button")
    page.click(".menu >> text=Delete")
    assert f"Deleted “\u2068{ARABIC}\u2069”." in page.inner_text(".toast")
