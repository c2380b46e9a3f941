"""Keys of input methods, what is pasted, and how long notices stay. Events of an input method are made by the test: no browser
here has one.
"""

from __future__ import annotations

import pytest

# What a browser sends where Enter or Escape goes to an input method: most say that a composition is under way; Safari, whose event
# comes after the end of the composition, gives only the key code.
COMPOSING = {"isComposing": True, "keyCode": 229}
SAFARI = {"isComposing": False, "keyCode": 229}
PRESS = """(target, [key, more]) => {
    const event = new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...more });
    target.dispatchEvent(event);
    return event.defaultPrevented;
}"""
KINDS = pytest.mark.parametrize("kind", [COMPOSING, SAFARI], ids=["composing", "safari"])


def press(page, selector, key, kind):
    assert page.locator(selector).evaluate(PRESS, [key, kind]) is False


@KINDS
def test_enter_and_escape_of_an_input_method_send_nothing(person, fake, kind):
    person.say("first")
    page = person.page
    page.fill("#prompt", "にほん")
    press(page, "#prompt", "Enter", kind)
    page.fill("#prompt", "")
    press(page, "#prompt", "ArrowUp", kind)
    assert not page.is_visible("#editing")
    page.press("#prompt", "ArrowUp")
    assert page.input_value("#prompt") == "first" and page.is_visible("#editing")
    press(page, "#prompt", "Escape", kind)
    assert page.is_visible("#editing")
    page.press("#prompt", "Escape")
    page.fill("#prompt", "日本")
    page.press("#prompt", "Enter")
    person.answered("日本")
    assert person.texts("user") == ["first", "日本"] and len(fake.tickets) == 2


@KINDS
def test_an_input_method_does_not_stop_an_answer(person, fake, kind):
    fake.pace_s, fake.words = 0.1, "word " * 300
    person.say("go", wait=False)
    page = person.page
    page.wait_for_selector(".text.growing:has-text('word')")
    press(page, "#prompt", "Escape", kind)
    assert not fake.tickets[-1].cancelled.is_set() and page.is_visible("#stop")
    page.press("#prompt", "Escape")
    person.answered()
    assert fake.ended == ["cancelled"]


@KINDS
def test_a_title_is_kept_by_the_second_enter(person, kind):
    person.say("first")
    person.lists("first")
    page = person.page
    page.hover("#list .item")
    page.click("#list .item .icon-button")
    page.click(".menu >> text=Rename")
    page.fill("#list input", "にほん")
    press(page, "#list input", "Enter", kind)
    press(page, "#list input", "Escape", kind)
    assert page.locator("#list input").count() == 1
    page.fill("#list input", "日本")
    page.press("#list input", "Enter")
    person.lists("日本")


@KINDS
def test_what_is_searched_for_stays_when_a_composition_is_given_up(person, kind):
    page = person.page
    page.fill("#search", "にほん")
    press(page, "#search", "Escape", kind)
    assert page.input_value("#search") == "にほん"
    page.press("#search", "Escape")
    assert page.input_value("#search") == ""


@KINDS
def test_an_input_method_neither_submits_nor_closes_a_dialog(person, kind):
    page = person.page
    page.click("#open-settings")
    press(page, "[name=system]", "Enter", kind)
    page.locator("#settings-form").evaluate("(form) => form.requestSubmit()")
    assert page.is_visible("#settings")
    press(page, "[name=system]", "Escape", kind)
    cancel = "(e) => e.dispatchEvent(new Event('cancel', { cancelable: true }))"
    assert page.locator("#settings").evaluate(cancel) is False
    page.click("#settings >> text=Done")  # which is no key
    page.wait_for_selector("#settings", state="hidden")


PASTE = """(target, [names, text]) => {
    const data = new DataTransfer();
    const png = Uint8Array.from(atob("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="), (c) => c.charCodeAt(0));
    for (const name of names) data.items.add(new File([png], name, { type: "image/png" }));
    if (text) data.setData("text/plain", text);
    target.focus();
    target.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true }));
}"""


@pytest.mark.parametrize(
    ("names", "text", "typed"),
    [
        (["b.png"], "b.png", ""),
        (["b.png"], "/home/ana/pictures/b.png\n", ""),
        (["b.png", "c d.png"], "b.png\nc d.png", ""),
        (["b c.png"], "file:///home/ana/b%20c.png", ""),
        (["写真.png"], "C:\\Users\\ana\\写真.png", ""),
        (["image.png"], "1\t2\n3\t4", "1\t2\n3\t4"),
        (["b.png"], "see b.png", "see b.png"),
        (["b.png"], "", ""),
    ],
)
def test_the_name_of_a_pasted_file_is_not_written_too(person, names, text, typed):
    page = person.page
    page.locator("#prompt").evaluate(PASTE, [names, text])
    page.wait_for_selector(f".thumb:not(.loading) >> nth={len(names) - 1}")
    assert page.locator(".thumb").count() == len(names)
    assert page.input_value("#prompt") == typed


# What the timers of notices are set to, by text, with what is done with the notice before.
TIMED = """async ([texts, more]) => {
    const { toast } = await import("./MODULE");
    const real = window.setTimeout, set = [];
    window.setTimeout = (run, ms) => set.push([run, ms]);
    for (const text of texts) toast(text, more);
    window.setTimeout = real;
    return set.map(([, ms]) => ms);
}"""


def test_a_notice_stays_as_long_as_it_takes_to_read(person):
    page = person.page
    module = page.locator("link[href$='shared/dom.js']").get_attribute("href")

    def times(*texts, **more):
        return page.evaluate(TIMED.replace("MODULE", module), [texts, more])

    short, long = "Not sent.", "Not sent: " + "why it could not be. " * 15
    (quick,), (slow,) = times(short), times(long)
    assert 5000 < quick < 6000 and slow > 20_000
    assert times(short, ms=8000) == [8000] and times(long, sticky=True) == []


def test_a_notice_under_the_pointer_stays(person):
    page = person.page
    module = page.locator("link[href$='shared/dom.js']").get_attribute("href")
    page.evaluate(
        """async () => {
        const { toast } = await import("./MODULE");
        const real = window.setTimeout;
        window.setTimeout = (run) => { window.overdue = run; };
        toast("A notice");
        window.setTimeout = real;
    }""".replace("MODULE", module)
    )
    page.hover(".toast")
    page.evaluate("overdue()")
    assert page.locator(".toast").count() == 1
    page.mouse.move(0, 0)
    page.evaluate("overdue()")
    assert page.locator(".toast").count() == 0
