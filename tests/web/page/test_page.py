from __future__ import annotations

import io
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from browsing import PHONE, Visitor
from PIL import Image
from serving import running

from mtmd import BusyError, DeviceError, Progress, PromptError
from mtmd.llm.sampling.options import ModelSampling
from mtmd.web.app import create_app
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import Store

EXAMPLES = Path(__file__).parents[3] / "examples"
SHAPES, WORD, FOUR = EXAMPLES / "shapes.png", EXAMPLES / "word.png", EXAMPLES / "four.png"
QUESTION = "Describe the image."
KEY = "a-key-of-this-server"


def test_a_pasted_picture_is_answered_rightly_with_its_receipt(browser, served_demo, model):
    person = Visitor(browser, served_demo)
    page = person.page
    person.paste(SHAPES)
    page.wait_for_selector("#meter-text:has-text('of 2,048')")
    assert page.inner_text(".thumb span") == "9 tokens"
    person.say(QUESTION)
    assert (
        person.texts("answer") == [model.describe(SHAPES, QUESTION)]
        and "black cross" in person.texts("answer")[0]
    )
    receipt = page.locator(".receipt")
    assert receipt.locator("summary").inner_text().startswith("1 picture, 9 tokens · ")
    receipt.locator("summary").click()
    facts = receipt.locator(".receipt-body").inner_text()
    for words in (
        "256 × 256 px",
        "96 × 96 px in 1 tile",
        "cpu, 1 thread, fp32",
        "encoder: flash; decoder: flash",
        "prefill",
        "decode",
        "most probable",
    ):
        assert words in facts
    receipt.locator(".picture").click()
    person.until("document.querySelector('#viewer-image').naturalWidth === 96")
    assert page.inner_text("#viewer-title") == "What the model saw"
    page.keyboard.press("Escape")
    person.say(QUESTION)  # a second turn; the picture of the first is known
    page.locator(".message.last .receipt summary").click()
    assert "from the cache" in page.locator(".message.last .receipt-body").inner_text()
    person.close()


def test_what_happened_to_the_history_is_said_until_it_is_put_away(browser, fake, tmp_path):
    (tmp_path / "conversations.db").write_bytes(b"this is no database" * 100)
    store = Store(tmp_path)
    with running(fake, create_app(fake, ServerSettings(port=0), store)) as server:
        person = Visitor(browser, server.url)
        for _ in range(2):
            person.page.wait_for_selector(".toast:has-text('database was damaged')")
            person.page.reload()
        person.page.locator(".toast button").click()
        person.page.reload()
        person.page.wait_for_selector("#model:has-text('fake')")
        assert person.page.locator(".toast").count() == 0
        person.close()
    store.close()


def test_an_answer_appears_word_by_word_and_stop_keeps_it(person, fake):
    fake.pace_s, fake.words = 0.1, "word " * 500
    person.say("go", wait=False)
    page = person.page
    person.until("document.querySelector('.text.growing')?.textContent.split(' ').length > 3")
    assert not page.is_visible("#send")
    page.click("#stop")
    person.answered()
    (text,) = person.texts("answer")
    assert (
        3 <= len(text.split()) < 400 and page.locator(".aside").inner_text() == "Stopped. Continue"
    )
    assert fake.ended == ["cancelled"]


def test_progress_is_shown_while_pictures_are_encoded(person, fake):
    opened, inner = threading.Event(), fake.submit

    def submit(messages, **chosen):
        ticket = inner(messages, **chosen)
        events = ticket.__iter__

        class Stored:
            cancel = ticket.cancel

            def __iter__(self):
                yield Progress("encode", 2, 5)
                opened.wait(20)
                yield from events()

        return Stored()

    fake.submit = submit
    person.say("look", wait=False)
    person.page.wait_for_selector(".progress:has-text('Encoding tile 3 of 5')")
    assert person.page.locator(".progress progress").evaluate("e => [e.value, e.max]") == [2, 5]
    opened.set()
    person.answered()


def test_answering_again_makes_a_branch_and_both_can_be_shown(person, fake):
    fake.words = "first"
    person.say("a question")
    fake.words = "second"
    page = person.page
    page.click("[aria-label='Answer again']")
    page.wait_for_selector(".branches:has-text('2 / 2')")
    assert person.texts("answer") == ["second"] and fake.tickets[-1].settings.temperature > 0
    page.click("[aria-label='Side by side']")
    assert person.texts("answer") == ["first", "second"]
    words = page.locator(".settings-of").all_inner_texts()
    assert words[0] == "the most probable token each time" and words[1].startswith(
        "temperature 0.7"
    )
    page.click("text=One at a time")
    page.click("[aria-label='Previous version']")
    assert person.texts("answer") == ["first"]
    fake.words = "third"
    person.say("go on")
    assert person.texts("answer") == ["first", "third"]
    assert [m["content"] for m in fake.tickets[-1].messages] == ["a question", "first", "go on"]
    page.reload()
    page.wait_for_selector(".branches:has-text('1 / 2')")
    assert person.texts("answer") == ["first", "third"]


def test_editing_makes_a_branch_with_other_words_and_pictures(person, fake):
    person.attach(SHAPES, WORD)
    person.say("what is it")
    page = person.page
    page.press("#prompt", "ArrowUp")
    assert (
        page.input_value("#prompt") == "what is it"
        and page.locator(".thumb").count() == 2
        and page.is_visible("#editing")
    )
    page.click(".thumb [aria-label='Remove shapes.png']")
    person.say("what is that")
    assert (
        person.texts("user") == ["what is that"]
        and page.locator(".message.user .picture").count() == 1
    )
    assert len(fake.tickets[-1].pictures) == 1 and len(fake.tickets[-1].messages) == 1
    page.click(".message.user [aria-label='Previous version']")
    assert (
        person.texts("user") == ["what is it"]
        and page.locator(".message.user .picture").count() == 2
    )
    page.press("#prompt", "ArrowUp")
    page.keyboard.press("Escape")
    assert page.input_value("#prompt") == "" and not page.is_visible("#editing")


def test_a_reload_in_mid_answer_goes_on(person, fake):
    fake.pace_s, fake.words = 0.08, " ".join(f"w{i}" for i in range(60))
    person.say("go", wait=False)
    page = person.page
    page.wait_for_selector(".text.growing:has-text('w5')")
    page.reload()
    page.wait_for_selector(".text.growing:has-text('w8')")
    assert page.inner_text(".text.growing").startswith("w0 w1 w2")
    fake.pace_s = 0
    person.answered()
    assert person.texts("answer") == [fake.words] and len(fake.tickets) == 1


def test_a_lost_connection_in_mid_answer_is_taken_up_again(person, fake):
    fake.pace_s, fake.words = 0.05, " ".join(f"w{i}" for i in range(80))
    broken = []

    def cut(route):
        if len(broken) < 2:
            broken.append(route.request.headers.get("last-event-id"))
            route.abort()
        else:
            route.continue_()
            fake.pace_s = 0

    person.page.route("**/events", cut)
    person.expects = ("ERR_FAILED",)
    person.say("go")
    assert person.texts("answer") == [fake.words] and len(broken) == 2


def test_another_conversation_can_be_looked_at_meanwhile(person, fake):
    fake.pace_s, fake.words = 0.05, " ".join(f"w{i}" for i in range(60))
    person.say("slow one", wait=False)
    page = person.page
    page.wait_for_selector(".text.growing:has-text('w3')")
    page.click("#new-chat")
    page.wait_for_selector("#welcome")
    page.wait_for_selector(".item .dot")
    fake.pace_s = 0.0
    fake.words = "quick"
    person.say("quick one")
    page.click("#list a:has-text('slow one')")
    person.answered("slow one")
    assert person.texts("answer")[0].startswith("w0 w1") and person.texts("answer")[0].endswith(
        "w59"
    )


def test_history_is_searched_renamed_and_deleted(person):
    for question in ("about elephants", "about <b>ships</b>"):
        person.say(question)
        person.page.click("#new-chat")
    page = person.page
    person.lists("about <b>ships</b>", "about elephants")
    page.fill("#search", "elephANT")
    person.until("document.querySelectorAll('#list .item').length === 1")
    page.fill("#search", "nothing like it")
    page.wait_for_selector("#list .empty:has-text('Nothing found')")
    page.fill("#search", "")
    person.until("document.querySelectorAll('#list .item').length === 2")
    page.hover("#list .item:has-text('elephants')")
    page.click("[aria-label='More about about elephants']")
    page.click(".menu >> text=Rename")
    page.fill("#list input", "Grey animals")
    page.keyboard.press("Enter")
    page.wait_for_selector("#list a:has-text('Grey animals')")
    page.click("[aria-label='More about Grey animals']")
    page.click(".menu >> text=Pin")
    page.wait_for_selector("#list h2:has-text('Pinned') + .item:has-text('Grey animals')")
    page.hover("#list .item:has-text('ships')")
    page.click("[aria-label='More about about <b>ships</b>']")
    page.click(".menu >> text=Delete")
    person.until("document.querySelectorAll('#list .item').length === 1")
    page.click("#list a:has-text('Grey animals')")
    page.wait_for_selector(".message.answer")
    assert (
        person.texts("user") == ["about elephants"] and page.inner_text("#title") == "Grey animals"
    )


def test_a_conversation_survives_export_and_import(person, tmp_path):
    person.attach(SHAPES)
    person.say("first words")
    person.page.click("#new-chat")
    person.say("second words")
    page = person.page
    with page.expect_download() as result:
        page.click("#export-all")
    file = tmp_path / "export.json"
    result.value.save_as(file)
    assert (
        result.value.suggested_filename.startswith("mtmd-conversations-")
        and len(json.loads(file.read_text())["conversations"]) == 2
    )
    page.set_input_files("#import-file", str(file))
    page.wait_for_selector(".toast:has-text('2 conversations imported.')")
    person.until("document.querySelectorAll('#list .item').length === 4")
    page.locator("#list a:has-text('first words')").last.click()
    person.until("document.querySelector('.message.user img')?.naturalWidth === 256")
    assert person.texts("user") == ["first words"] and person.texts("answer") == [
        "1 messages, pictures [(256, 256)]: first words"
    ]
    (tmp_path / "other.json").write_text("{}")
    page.set_input_files("#import-file", str(tmp_path / "other.json"))
    page.wait_for_selector(".toast:has-text('has no conversations of')")


def test_several_pictures_at_once_are_counted_shown_and_taken_off(person, fake):
    person.attach(SHAPES, WORD, FOUR)
    page = person.page
    page.wait_for_selector("#meter-text:has-text('22 of 512')")
    page.click(".thumb [aria-label='Remove word.png']")
    page.wait_for_selector("#meter-text:has-text('18 of 512')")
    page.click(".thumb [aria-label='Show four.png large']")
    assert page.inner_text("#viewer-title") == "four.png (2 of 2)"
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#viewer-title") == "shapes.png (1 of 2)"
    page.keyboard.press("Escape")
    person.say("both")
    assert [p.size for p in fake.tickets[-1].pictures] == [(256, 256)] * 2


def test_a_dropped_file_that_is_no_picture_is_refused_in_words(person):
    person.expects = ("400",)
    person.page.evaluate("""() => {
        const data = new DataTransfer();
        data.items.add(new File(["%!PS-Adobe-3.0"], "drawing.eps", { type: "image/x-eps" }));
        document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }));
    }""")
    person.page.wait_for_selector(".toast:has-text('drawing.eps')")
    assert person.page.locator(".thumb").count() == 0
    assert "PostScript" in person.page.inner_text(".toast")


def test_a_draft_survives_a_reload(person):
    person.attach(SHAPES)
    person.page.fill("#prompt", "half a thou")
    person.page.reload()
    person.page.wait_for_selector(".thumb")
    assert person.page.input_value("#prompt") == "half a thou"


def test_boxes_and_points_are_drawn_where_they_belong(person, fake):
    fake.words = '```json\n[{"bbox_2d": [250, 500, 750, 1000], "label": "cat"}, {"point_2d": [100, 200], "label": "eye"}]\n```'
    person.attach(SHAPES)
    person.say("where")
    page = person.page
    page.wait_for_selector(".figure rect")
    location = """() => {
        const [image, box, point] = ["img", "rect", "circle"].map((s) => document.querySelector(`.figure ${s}`).getBoundingClientRect());
        const share = (x, y) => [(x - image.left) / image.width, (y - image.top) / image.height];
        const middle = share(point.left + point.width / 2, point.top + point.height / 2);
        return [...share(box.left, box.top), ...share(box.right, box.bottom), ...middle];
    }"""
    assert page.evaluate(location) == pytest.approx([0.25, 0.5, 0.75, 1, 0.1, 0.2], abs=0.02)
    assert "cat" in page.locator(".figure svg").text_content()
    page.click(".figure")
    assert "no number is above 1000" in page.inner_text("#viewer-info")
    page.select_option("#viewer-units", "original")
    page.keyboard.press("Escape")
    person.until("document.querySelector('.figure rect').getAttribute('x') > 200")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.select_option("#viewer-units", "1000") if page.is_visible("#viewer-units") else None
    page.click(".grounding >> text=copy in pixels")
    assert json.loads(page.evaluate("navigator.clipboard.readText()"))[0] == {
        "label": "cat",
        "bbox_2d": [250, 256, 256, 256],
    }


@pytest.mark.parametrize("by", ["mouse", "keys"])
def test_a_region_is_asked_about_with_its_place_and_its_pixels(person, fake, by, tmp_path):
    left_red = tmp_path / "halves.png"
    image = Image.new("RGB", (200, 100), "blue")
    image.paste("red", (0, 0, 100, 100))
    image.save(left_red)
    person.attach(left_red)
    person.say("what")
    page = person.page
    page.click(".message.user .picture")
    person.until("document.querySelector('#viewer-image').naturalWidth === 200")
    if by == "mouse":
        edges = page.locator("#viewer-image").bounding_box()
        page.mouse.move(edges["x"] + 1, edges["y"] + 1)
        page.mouse.down()
        page.mouse.move(
            edges["x"] + edges["width"] * 0.4, edges["y"] + edges["height"] * 0.8, steps=4
        )
        page.mouse.up()
        page.click("#viewer-ask")
    else:
        page.click("#viewer-select")
        for key, times in (("ArrowLeft", 12), ("Shift+ArrowLeft", 5), ("ArrowUp", 12)):
            for _ in range(times):
                page.keyboard.press(key)
        page.keyboard.press("Enter")
    page.wait_for_selector(".thumb:not(.loading)")
    assert page.input_value("#prompt") == ""  # it is a picture with its thumbnail, no numbers
    assert (
        page.locator(".thumb .picture").get_attribute("aria-label")
        == "Show region of halves.png large"
    )
    person.say("colour?")
    assert person.texts("user")[-1] == "colour?"
    crop = fake.tickets[-1].pictures[-1]
    assert crop.size == pytest.approx((80, 80 if by == "mouse" else 50), abs=2)
    assert (crop.pixels == (255, 0, 0)).all()


def test_keys_send_break_lines_and_stop(person, fake):
    fake.pace_s, fake.words = 0.1, "word " * 300
    page = person.page
    page.keyboard.press("Control+k")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("?")
    page.locator("#search").blur()
    page.keyboard.press("?")
    assert page.inner_text("#keys dt:has-text('Ctrl') + dd") == "Search the conversations"
    page.keyboard.press("Escape")
    page.focus("#prompt")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    page.wait_for_selector(".text.growing:has-text('word')")
    assert person.texts("user") == ["one\ntwo"]
    page.keyboard.press("Escape")
    person.answered()
    assert fake.ended == ["cancelled"]
    page.keyboard.press("Enter")
    assert len(fake.tickets) == 1, "nothing is sent where nothing is written"


def test_what_is_marked_up_in_an_answer_is_shown_and_harms_nobody(person, fake):
    fake.words = (
        "**bold** `code` <img src=x onerror=alert(1)> <script>alert(2)</script> "
        "[link](javascript:alert(3)) "
        "![p](https://example.com/p.png) [ok](https://example.com)\n\n| a | b |\n|---|---|\n| 1 | "
        "2 |"
    )
    person.say("<i>markup</i> & more")
    text = person.page.locator(".message.answer .text")
    assert text.locator("strong").inner_text() == "bold" and text.locator(
        "td"
    ).all_inner_texts() == ["1", "2"]
    assert text.locator("img, script").count() == 0 and person.texts("user") == [
        "<i>markup</i> & more"
    ]
    assert text.locator("a").evaluate_all(
        "all => all.map((a) => [a.getAttribute('href'), a.rel])"
    ) == [
        ["https://example.com/p.png", "noopener noreferrer nofollow"],
        ["https://example.com", "noopener noreferrer nofollow"],
    ]


def test_settings_show_the_models_own_and_where_they_come_from(visit, fake):
    own = ModelSampling(
        "generation_config.json",
        {"temperature": 0.7, "top_k": 20},
        ("no_repeat_ngram_size 3 (not supported)",),
    )
    fake.checkpoint_facts = replace(fake.checkpoint_facts, sampling=own)
    person = visit()
    page = person.page
    page.click("#open-settings")
    assert page.input_value("[name=temperature]") == "0.7"
    assert page.input_value("[name=max_tokens]") == ""
    assert page.inner_text("#settings-source") == (
        "Defaults: temperature 0.7, top k 20 (generation_config.json). Not applied: "
        "no_repeat_ngram_size 3 (not supported)."
    )
    page.click("#settings >> text=Done")
    person.say("hi")
    assert fake.tickets[-1].chosen.keys() & {"temperature", "top_k"} == set()
    assert fake.tickets[-1].chosen["sampling"] == "model"
    page.click("#open-settings")
    page.fill("[name=temperature]", "0")
    page.click("#settings >> text=Done")
    person.say("again")
    assert fake.tickets[-1].chosen["temperature"] == 0, "0 is greedy, and not left out"
    page.click("#open-settings")
    page.fill("[name=temperature]", "")
    page.click("#settings >> text=Done")
    person.say("and again")
    assert "temperature" not in fake.tickets[-1].chosen, "nothing is the default"


def test_settings_are_used_and_kept(person, fake):
    page = person.page
    page.click("#open-settings")
    page.fill("[name=system]", "Be brief.")
    page.fill("[name=temperature]", "0.3")
    page.check("[name=detail][value=high]")
    page.click("#settings >> text=Done")
    person.say("hi")
    ticket = fake.tickets[-1]
    assert ticket.messages[0] == {"role": "system", "content": "Be brief."}
    assert (ticket.settings.temperature, ticket.settings.detail, ticket.settings.max_tokens) == (
        0.3,
        "high",
        512,  # the context: no answer is cut before its end
    )
    page.reload()
    page.click("#open-settings")
    assert page.input_value("[name=temperature]") == "0.3"
    page.click("#settings-reset")
    page.keyboard.press("Escape")
    person.say("again")
    assert (
        fake.tickets[-1].messages[0]["role"] == "user"
        and fake.tickets[-1].settings.detail == "auto"
    )


def test_the_form_of_answers(person, fake):
    page, schema = person.page, '{"type": "object", "properties": {"text": {"type": "string"}}}'
    page.click("#open-settings")
    page.click("summary:has-text('Form of the answer')")
    page.fill("[name=json_schema]", "{type")
    page.fill("[name=stop]", "END\n\n###")  # leaves the field before
    assert page.inner_text("#schema-problem").startswith("Not used, as it is no JSON: ")
    page.fill("[name=json_schema]", schema)
    page.click("#settings >> text=Done")
    person.say("hi")
    chosen = fake.tickets[-1].chosen
    assert chosen["stop"] == ["END", "###"] and json.loads(chosen["json_schema"]) == json.loads(
        schema
    )
    page.reload()
    page.click("#open-settings")
    assert page.input_value("[name=stop]") == "END\n\n###"
    assert page.input_value("[name=json_schema]") == schema
    page.click("summary:has-text('Form of the answer')")
    page.fill("[name=json_schema]", "")
    page.fill("[name=stop]", "")
    page.click("#settings >> text=Done")
    person.say("again")
    assert not fake.tickets[-1].chosen.keys() & {"stop", "json_schema"}


def test_a_refusal_is_said_under_the_message_and_can_be_tried_again(person, fake):
    person.expects = ("429",)
    fake.refuses = BusyError("too many wait; try again later")
    person.say("hello", wait=False)
    person.page.wait_for_selector(".problem:has-text('Too many wait')")
    fake.refuses = None
    person.page.click("button:has-text('Try again')")
    person.answered()
    assert person.texts("user") == ["hello"] and len(person.texts("answer")) == 1


def test_a_failed_answer_can_be_tried_again(person, fake):
    fake.fails = PromptError("the context is full")
    person.say("hello", wait=False)
    person.page.wait_for_selector(".problem:has-text('the context is full')")
    fake.fails = None
    person.page.click("button:has-text('Try again')")
    person.page.wait_for_selector(".branches:has-text('2 / 2')")
    assert person.texts("answer") == ["1 messages, pictures []: hello"]


def test_dark_and_light_follow_the_system_unless_chosen(visit):
    person = visit(color_scheme="dark")
    page = person.page
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.click("#theme")  # light
    light = page.evaluate(background)
    assert sum(map(int, dark[4:-1].split(","))) < 200 < 600 < sum(map(int, light[4:-1].split(",")))
    page.reload()
    assert page.evaluate(background) == light
    page.click("#theme")  # dark
    page.click("#theme")  # as the system
    page.emulate_media(color_scheme="light")
    assert page.evaluate(background) == light


def test_everything_fits_a_phone(visit, fake):
    fake.words = f'A long word: {"x" * 200}\n\n| a | b |\n|---|---|\n| 1 | {"y" * 100} |\n\n{{"bbox_2d": [1, 2, 300, 400]}}'
    person = visit(size=PHONE, has_touch=True, is_mobile=True)
    page = person.page
    assert not page.evaluate("document.querySelector('#side').getBoundingClientRect().right > 0")
    page.click("#add")
    assert page.is_visible("#shoot") and person.overflow() == 0
    page.keyboard.press("Escape")
    assert page.get_attribute("#camera", "capture") == "environment"
    person.attach(SHAPES, WORD, FOUR)
    assert person.overflow() == 0
    person.say("what is it")
    page.click(".receipt summary")
    assert person.overflow() == 0
    for opener, closer in (
        ("#open-side", "#close-side"),
        ("#open-settings", "#settings [aria-label=Close]"),
        (".message.user .picture", "#viewer-close"),
    ):
        page.click(f"{opener} >> nth=0")
        assert person.overflow() == 0
        page.click(closer)
    person.go("/diagnostics")
    page.wait_for_selector(".chart, #report section")
    assert person.overflow() == 0


def test_diagnostics_show_the_report_and_what_is_going_on(browser, served_demo):
    person = Visitor(browser, served_demo)
    person.attach(SHAPES)
    person.say(QUESTION)
    page = person.page
    person.go("/diagnostics")
    page.wait_for_selector(".chart")
    page.wait_for_selector("#since div:has-text('answers') dd")
    words = page.inner_text("main")
    for expected in (
        "Memory on cpu",
        "Nodes by backend",
        "Flash attention, encoder",
        "every op runs on cpu",
        "Mean time of an answer, by stage",
        "decoder, prefill",
    ):
        assert expected in words
    assert page.locator(".chart svg rect").count() > 8
    person.close()


def test_a_key_is_asked_for_once_and_kept(browser, fake):
    with running(
        fake,
        create_app(fake, ServerSettings(port=0, api_keys=(KEY,)), Store(None)),
        api_keys=(KEY,),
    ) as server:
        person = Visitor(browser, server.url, begins="#key-dialog[open]")
        person.expects = ("401",)
        page = person.page
        page.fill("#key-input", "a-wrong-key-to-begin-with")
        page.click("#key-dialog >> text=Continue")
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key-input", KEY)
        page.click("#key-dialog >> text=Continue")
        page.wait_for_selector("#model:has-text('fake')")
        person.attach(SHAPES)
        person.say("what")
        page.reload()
        person.until("document.querySelector('.message.user img')?.naturalWidth === 256")
        with page.expect_download() as result:
            page.click("#export-all")
        assert len(json.loads(Path(result.value.path()).read_text())["conversations"]) == 1
        person.close()


def test_two_people_take_turns_at_one_browser(browser, fake, tmp_path, monkeypatch):
    """Who changes the key begins anew, and finds nothing of who was there before."""
    monkeypatch.setattr("mtmd.web.api_keys.LOOK_S", 0.0)
    keys = tmp_path / "keys"
    keys.write_text("anna:the-key-that-anna-has\nben:the-key-that-ben-has-\n")
    app = create_app(fake, ServerSettings(port=0, api_key_file=keys), Store(None))
    with running(fake, app, api_key_file=keys) as server:
        person = Visitor(browser, server.url, begins="#key-dialog[open]")
        person.expects = ("401", "404")
        page = person.page
        page.fill("#key-input", "the-key-that-anna-has")
        page.click("#key-dialog >> text=Continue")
        page.wait_for_selector("#model:has-text('fake')")
        person.attach(SHAPES)
        person.say("a question of Anna's")
        page.wait_for_selector("#list:has-text('a question of Anna')")
        page.fill("#prompt", "a draft of Anna's")
        page.click("#open-settings")
        assert page.inner_text("#key-name") == "anna"
        page.click("#other-key")
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key-input", "the-key-that-ben-has-")
        page.click("#key-dialog >> text=Continue")
        page.wait_for_selector("#model:has-text('fake')")
        page.wait_for_selector("#welcome:visible")
        assert page.input_value("#prompt") == "" and "Anna" not in page.inner_text("body")
        keys.write_text("anna:the-key-that-anna-has\n")
        page.reload()
        page.wait_for_selector("#key-dialog[open]")
        person.close()


def test_a_device_that_has_failed_is_told_on_both_pages(visit, fake):
    person = visit()
    fake.fault = DeviceError("the device hangs: it has done nothing for 300 s")
    person.expects = ("503",)
    person.page.goto(person.page.url)
    person.page.wait_for_selector(".toast:has-text('cannot answer: the device hangs')")
    person.page.goto(person.page.url.split("/c/")[0].rstrip("/") + "/diagnostics")
    person.page.wait_for_selector("#verdict:has-text('The server cannot answer: the device hangs')")


def test_a_model_without_eyes_says_so(visit, fake):
    fake.sees = False
    person = visit()
    person.page.click("#add")
    assert person.page.locator("#add-menu [role=menuitem]:visible").all_inner_texts() == [
        "Text\nor paste them, or drop them on the page",
        "Compare\ntwo answers to the same message",
    ]
    person.page.keyboard.press("Escape")
    person.page.set_input_files(
        "#files", files=[{"name": "a.png", "mimeType": "image/png", "buffer": _png()}]
    )
    person.page.wait_for_selector(".toast:has-text('only takes text files')")


def _png():
    out = io.BytesIO()
    Image.new("RGB", (4, 4)).save(out, "PNG")
    return out.getvalue()
