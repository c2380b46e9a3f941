"""What somebody meets in the first minutes: an empty chat, pictures of any shape, a server that goes
away, answers that are cut, a deletion that was a mistake.
"""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from answer_kills import Kill
from answer_kills import run as kill_servers
from browsing import PHONE, QUEUE, Visitor
from PIL import Image
from serving import png, running
from wire import wire

from mtmd.clip.video.decode import open_video
from mtmd.display.grounding import find_regions
from mtmd.web.app import create_app
from mtmd.web.page.samples import SAMPLES
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import Store

EXAMPLES = Path(__file__).parents[3] / "examples"
STATIC = Path(__file__).parents[3] / "web" / "static" / "samples"
SHAPES = EXAMPLES / "shapes.png"


def file(width, height, name="a.png"):
    return {"name": name, "mimeType": "image/png", "buffer": png(width, height, "#336699")}


def test_samples_are_the_examples_at_their_size():
    for sample in SAMPLES:
        data = (STATIC / sample.file).read_bytes()
        assert data == (EXAMPLES / sample.file).read_bytes()
        size = sample.width, sample.height
        if sample.poster is None:
            assert Image.open(io.BytesIO(data)).size == size
            continue
        with closing(open_video(io.BytesIO(data))) as reader:
            assert (reader.facts.width, reader.facts.height) == size
            frames = [pixels for _, _, pixels in reader.take(range(50), size)]
        poster = np.asarray(Image.open(STATIC / sample.poster).convert("RGB")).astype(int)
        assert min(np.abs(poster - frame).mean() for frame in frames) < 2


def test_the_demo_model_is_right_about_every_sample_as_it_is_offered(model):
    stated = {(s.file, q): model.describe(EXAMPLES / s.file, q) for s in SAMPLES for q in s.asks}
    assert "black cross" in stated["shapes.png", "Describe the image."]
    boxed = find_regions(stated["shapes.png", "Where is the cross? Give its box."])
    assert boxed is not None and [r.label for r in boxed.regions] == ["black cross"]
    assert stated["four.png", "How many shapes are there?"] == "Four."
    assert "red" in stated["four.png", "What color is the triangle?"].lower()
    assert "fish" in stated["word.png", "What does the text say?"]
    assert "green" in stated["word.png", "What color is the text?"].lower()
    happens = "A blue circle moves to the right on a white background."
    assert stated["moves.mp4", "What happens in the video?"] == happens
    assert stated["moves.mp4", "Which way does the circle move?"] == "To the right."


def test_an_empty_chat_offers_pictures_to_ask_about(browser, served_demo):
    person = Visitor(browser, served_demo)
    page = person.page
    person.until(
        "[...document.querySelectorAll('.sample img')].filter((i) => i.naturalWidth === 256).length === 3"
        " && document.querySelector('.sample video').poster.includes('moves')"
    )
    words = page.inner_text("#welcome")
    assert "demo model" in words and "mtmd serve -m HuggingFaceTB/SmolVLM-500M-Instruct" in words
    assert words.index("demo model") < words.index("Describe the image.")
    page.fill("#prompt", "half a thought")
    page.click(".ask:has-text('How many shapes')")

    person.answered("How many shapes are there?")
    assert person.texts("answer") == ["Four."]
    assert page.input_value("#prompt") == "half a thought"
    page.click("#new-chat")
    page.wait_for_selector(".sample .picture")
    page.click(".sample .video")
    person.until("document.querySelector('.sample video').currentTime > 0.2")
    assert page.get_attribute(".sample .video", "aria-pressed") == "true"
    page.click(".sample .video")
    assert page.evaluate("document.querySelector('.sample video').paused")
    page.click(".sample .picture >> nth=0")
    person.until("document.querySelector('#viewer-image').naturalWidth === 256")
    person.close()


def test_another_model_is_offered_general_questions_and_no_word_of_the_demo(person, fake):
    page = person.page
    assert page.locator(".sample").count() == 4 and "demo" not in page.inner_text("#welcome")
    page.click(".ask:has-text('Which colors')")
    person.answered("Which colors do you see?")
    assert [p.size for p in fake.tickets[-1].pictures] == [(256, 256)]


def test_a_model_without_eyes_is_offered_no_pictures(visit, fake):
    fake.sees = False
    page = visit().page
    assert page.locator(".sample").count() == 0
    assert "reads text only" in page.inner_text("#welcome")


SHAPES_OF_PICTURES = (
    (3000, 2000),
    (1920, 1080),
    (2000, 400),
    (400, 1600),
    (64, 48),
    (1, 1),
    (3000, 20),
)


@pytest.mark.parametrize("size", [QUEUE, PHONE], ids=["desk", "phone"])
def test_a_picture_of_any_shape_fills_its_frame(visit, size):
    person = visit(size=size)
    page = person.page
    for width, height in SHAPES_OF_PICTURES:
        page.set_input_files("#files", files=[file(width, height)])
        page.wait_for_selector(".thumb:not(.loading)")
        person.say(f"{width} by {height}")
        picture = "[...document.querySelectorAll('.message.user .picture')].at(-1)"
        person.until(f"{picture}.querySelector('img').naturalWidth === {width}")
        frame, shown = (
            page.evaluate(
                f"(() => {{ const r = {one}.getBoundingClientRect(); return [r.width, r.height]; }})()"
            )
            for one in (picture, f"{picture}.firstChild")
        )
        assert [f - s for f, s in zip(frame, shown, strict=True)] == pytest.approx([2, 2], abs=0.1)
        assert max(shown[0] / 320, shown[1] / 240) <= 1 and min(shown) >= 48
        if 1 / 5 <= width / height <= 6 and width > 48:
            assert shown[0] / shown[1] == pytest.approx(width / height, rel=0.02)
        assert person.overflow() == 0


def test_a_picture_alone_is_described_and_the_answer_names_the_conversation(person, fake):
    fake.words = "A red bird on a branch."
    person.attach(SHAPES)
    person.page.press("#prompt", "Enter")
    person.answered()
    assert person.texts("user") == ["Describe the image."]
    person.until("document.querySelector('#title').textContent === 'A red bird on a branch.'")
    person.lists("A red bird on a branch.")


def test_text_and_picture_pasted_together_are_both_kept(person):
    page = person.page
    page.fill("#prompt", "Sum: ")
    page.evaluate("""() => {
        const data = new DataTransfer();
        data.setData("text/plain", "1\\t2");
        const canvas = document.createElement("canvas");
        const bytes = Uint8Array.from(atob(canvas.toDataURL("image/png").split(",")[1]), (c) => c.charCodeAt(0));
        data.items.add(new File([bytes], "image.png", { type: "image/png" }));
        document.querySelector("#prompt").focus();
        document.querySelector("#prompt").dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true }));
    }""")
    page.wait_for_selector(".thumb:not(.loading)")
    assert page.input_value("#prompt") == "Sum: 1\t2"


def test_nothing_is_sent_without_the_picture_that_was_attached(person, fake):
    person.expects = ("400",)
    page = person.page
    broken = {"name": "broken.png", "mimeType": "image/png", "buffer": png(50, 50)[:60]}
    page.fill("#prompt", "what is it")
    page.set_input_files("#files", files=[broken])
    page.press("#prompt", "Enter")
    page.wait_for_selector(".toast:has-text('broken.png: found a truncated PNG')")
    page.wait_for_selector(".thumb", state="detached")
    page.wait_for_selector(".toast:has-text('Not sent')")
    assert page.input_value("#prompt") == "what is it" and fake.tickets == []
    assert page.locator(".message").count() == 0
    page.press("#prompt", "Enter")  # now that it is known
    person.answered("what is it")


def test_an_upload_that_could_not_arrive_is_tried_again_when_it_is_sent(person, fake):
    person.expects = ("ERR_FAILED",)
    page = person.page
    page.route("**/api/images?**", lambda route: route.abort())
    page.set_input_files("#files", files=[file(40, 30)])
    page.wait_for_selector(".thumb.failed")
    person.say("what", wait=False)
    page.wait_for_selector(".toast:has-text('is not attached')")
    assert fake.tickets == [] and page.input_value("#prompt") == "what"
    page.unroute("**/api/images?**")
    page.press("#prompt", "Enter")
    person.answered("what")
    assert [p.size for p in fake.tickets[-1].pictures] == [(40, 30)]


def test_a_file_of_another_kind_is_told_what_is_taken(person):
    person.expects = ("400",)
    pdf = {"name": "doc.pdf", "mimeType": "application/pdf", "buffer": b"%PDF-1.7 hello"}
    text = {"name": "notes.png", "mimeType": "image/png", "buffer": b"%!PS-Adobe-3.0"}
    person.page.set_input_files("#files", files=[pdf])
    person.page.wait_for_selector(".toast:has-text('doc.pdf: found a truncated PDF')")
    person.page.set_input_files("#files", files=[text])
    person.page.wait_for_selector(".toast:has-text('notes.png: found a PostScript document')")
    words = person.page.locator(".toast").last.inner_text()
    assert "expected a JPEG, PNG, WebP, AVIF, HEIC, GIF, BMP or TIFF picture" in words
    assert person.page.locator(".thumb").count() == 0


@pytest.mark.parametrize("arrives", [False, True], ids=["lost on its way", "its answer lost"])
def test_a_message_that_fails_keeps_its_draft_and_is_never_there_twice(person, fake, arrives):
    person.expects = ("ERR_FAILED",)
    page = person.page
    person.attach(SHAPES)

    def cut(route):
        if arrives:
            route.fetch()
        route.abort()

    page.route("**/messages", cut)
    person.say("once", wait=False)
    page.wait_for_selector(".toast:has-text('Not sent')")
    assert page.input_value("#prompt") == "once" and page.locator(".thumb").count() == 1
    page.unroute("**/messages")
    page.press("#prompt", "Enter")
    person.answered("once")
    assert page.input_value("#prompt") == "" and page.locator(".thumb").count() == 0
    page.reload()
    page.wait_for_selector(".message.answer")
    assert person.texts("user") == ["once"] and page.locator(".branches").count() == 0
    assert len(fake.tickets) == 1


def test_an_answer_whose_start_was_lost_is_found_and_not_asked_for_twice(person, fake):
    person.expects = ("ERR_FAILED",)
    page = person.page
    page.route("**/answers", lambda route: (route.fetch(), route.abort()))
    person.say("once", wait=False)
    page.wait_for_selector(".problem:has-text('cannot be reached')")
    page.unroute("**/answers")
    page.click("button:has-text('Try again')")
    person.answered("once")
    assert len(fake.tickets) == 1 and page.locator(".branches").count() == 0


def test_what_was_read_stays_when_the_server_is_killed_and_nothing_is_sent_twice(browser, tmp_path):
    """`make hostile` kills it at twenty moments."""
    at_once, within = Kill(), Kill(words=3, wait=True)
    counts = kill_servers(browser, tmp_path, [at_once, within], words=30)
    assert counts["whole"] + counts["said where it ended"] == 2
    assert counts["gone on with"] == counts["said where it ended"] > 0


def test_an_answer_goes_on_over_every_cut_of_the_wire(browser, fake):
    fake.pace_s, fake.words = 0.01, " ".join(f"w{i}" for i in range(240))
    with (
        running(fake, create_app(fake, ServerSettings(port=0), Store(None))) as server,
        wire(server.port) as line,
    ):
        person = Visitor(browser, line.url)
        person.expects = ("ERR_",)
        page = person.page
        person.say("go", wait=False)
        for word in ("w5", "w30", "w90"):
            page.wait_for_selector(f".growing:has-text('{word} ')")
            line.cut()
            page.wait_for_selector(".reconnecting:visible")
            line.to = server.port
        person.answered()
        assert person.texts("answer") == [fake.words] and len(fake.tickets) == 1
        person.close()


def test_who_stops_waiting_for_a_server_keeps_what_was_read(browser, fake):
    fake.pace_s, fake.words = 0.02, " ".join(f"w{i}" for i in range(60))
    with (
        running(fake, create_app(fake, ServerSettings(port=0), Store(None))) as server,
        wire(server.port) as line,
    ):
        person = Visitor(browser, line.url)
        person.expects = ("ERR_",)
        page = person.page
        person.say("go", wait=False)
        page.wait_for_selector(".growing:has-text('w9')")
        line.cut()
        page.wait_for_selector(".reconnecting:visible")
        page.click("#stop")
        page.wait_for_selector(".aside:has-text('The connection was lost here')")
        assert person.texts("answer")[0].startswith("w0 w1 w2")
        line.to = server.port
        page.click("text=Look again")
        page.wait_for_selector(".message.answer:has-text('w59')")
        person.answered()
        assert person.texts("answer") == [fake.words] and len(fake.tickets) == 1
        person.close()


def test_a_growing_answer_has_a_caret_and_tells_its_pace(person, fake):
    fake.pace_s, fake.words = 0.02, "word " * 400
    person.say("go", wait=False)
    page = person.page
    page.wait_for_selector(".rate:has-text('tokens/s')")
    caret = "getComputedStyle(document.querySelector('.growing .caret')).width"
    assert float(page.evaluate(caret)[:-2]) > 4
    page.click("#stop")
    person.answered()
    assert page.locator(".growing, .rate").count() == 0


# Ten tokens, one each 50 ms of a clock of its own; a second later, when they were many at once, two.
PACE = """async () => {
    const { Growing } = await import("./MODULE");
    const one = new Growing(), clock = performance.now, found = [];
    try {
        let now = 0;
        performance.now = () => now;
        for (const [ms, tokens] of [[0, 3], ...Array(10).fill([50, 1]), [1500, 10], [8000, 0]]) {
            now += ms;
            one.take({ type: "text", text: "word ", tokens });
            found.push(one.rate.hidden ? null : one.rate.textContent);
        }
    } finally {
        performance.now = clock;
    }
    return found;
}"""


def test_the_pace_of_an_answer_is_of_the_tokens_seen_since_the_first(person):
    module = person.page.locator("link[href*='chat/message.js']").get_attribute("href")
    reported = person.page.evaluate(PACE.replace("MODULE", module))
    assert reported == [None] * 6 + ["20 tokens/s"] * 5 + ["10 tokens/s", "2 tokens/s"]


def test_an_answer_that_was_cut_goes_on_from_its_end(person, fake):
    page = person.page
    page.click("#open-settings")
    page.fill("[name=max_tokens]", "3")
    page.click("#settings >> text=Done")
    fake.words = "one two three four five"
    person.say("count")
    assert person.texts("answer") == ["one two three"]
    assert "Reached the length limit" in page.inner_text(".message.answer .aside")
    fake.words = " four five"
    page.click(".aside button:has-text('Continue')")
    page.wait_for_selector(".branches:has-text('2 / 2')")
    person.answered()
    assert person.texts("answer") == ["one two three four five"]
    assert fake.tickets[-1].settings.continue_final_message
    assert fake.tickets[-1].messages == [
        {"role": "user", "content": "count"},
        {"role": "assistant", "content": "one two three"},
    ]
    assert page.locator(".aside").count() == 0


def test_a_full_context_is_said_and_older_turns_make_room_to_go_on(person, fake):
    """The fake's prompts have 7 tokens of a context of 512."""
    fake.words = "first"
    person.say("one")
    page = person.page
    page.click("#open-settings")
    page.fill("[name=max_tokens]", "505")
    page.click("#settings >> text=Done")
    fake.words = "word " * 600
    person.say("two")
    assert page.inner_text(".message.last .aside").startswith("The context is full.")
    fake.words = " and on"
    page.click(".aside button:has-text('Drop the oldest turns and continue')")
    page.wait_for_selector(".branches:has-text('2 / 2')")
    person.answered()
    assert person.texts("answer")[-1].endswith("word word and on")
    first, second = fake.tickets[-1].messages
    assert first["content"] == "two" and second["content"].startswith("word word")
    assert page.locator(".dropped").count() == 1
    page.click("#new-chat")
    page.wait_for_selector("#welcome:visible")
    fake.words = "word " * 600
    person.say("only")
    page.click(".aside button:has-text('Drop the oldest turns and continue')")
    page.wait_for_selector(".toast:has-text('There is only one turn')")


def test_an_answer_of_the_demo_model_about_another_picture_says_that_it_is_a_guess(
    browser, served_demo
):
    person = Visitor(browser, served_demo)
    page = person.page
    page.click(".ask:has-text('How many shapes')")
    person.answered("How many shapes are there?")
    assert page.locator(".demo-answer").count() == 0  # it knows this one
    person.say("What color is the triangle?")
    assert page.locator(".demo-answer").count() == 0
    page.set_input_files("#files", [file(90, 60)])
    page.wait_for_selector(".thumb:not(.loading)")
    person.say("What is it?")
    assert page.locator(".demo-answer").all_inner_texts() == [
        "The demo model knows drawn shapes, short words and numbers; its answers about other "
        "pictures are guesses."
    ]
    page.click("#new-chat")
    page.wait_for_selector("#welcome:visible")
    person.say("Hello")
    assert page.locator(".demo-answer").count() == 0
    person.close()


def test_the_note_on_the_demo_model_is_seen_first_on_a_phone(browser, served_demo):
    person = Visitor(browser, served_demo, size=PHONE, has_touch=True, is_mobile=True)
    edges = person.page.locator("#welcome-model p").last.bounding_box()
    composer = person.page.locator("#composer").bounding_box()
    assert edges["y"] + edges["height"] < composer["y"]
    person.close()


def test_no_other_model_has_the_note_of_the_demo_model(person):
    person.page.set_input_files("#files", [file(90, 60)])
    person.page.wait_for_selector(".thumb:not(.loading)")
    person.say("What is it?")
    assert person.page.locator(".demo-answer, #welcome-model p").count() == 0


def test_the_demo_model_goes_on_in_mid_sentence(model):
    whole = model.describe(SHAPES)
    begun = " ".join(whole.split()[:9])
    message = {
        "role": "user",
        "content": [
            {"type": "image", "image": str(SHAPES)},
            {"type": "text", "text": "Describe the image."},
        ],
    }
    messages = [message, {"role": "assistant", "content": begun}]
    *_, end = model.service.submit(messages, continue_final_message=True)
    assert begun + end.answer.text == whole


def test_a_deletion_can_be_undone(person):
    for question in ("about elephants", "about ships"):
        person.say(question)
        person.page.click("#new-chat")
    page = person.page
    person.until("document.querySelectorAll('#list .item').length === 2")
    for keep in (True, False):
        page.hover("#list .item:has-text('ships')")
        page.click("[aria-label='More about about ships']")
        page.click(".menu >> text=Delete")
        person.until("document.querySelectorAll('#list .item').length === 1")
        page.click(".toast >> text=Undo" if keep else ".toast [aria-label=Dismiss]")
        if keep:
            person.until("document.querySelectorAll('#list .item').length === 2")
    page.wait_for_timeout(200)
    page.reload()
    person.lists("about elephants")


def test_a_deletion_is_made_when_the_page_is_left_before_its_time(person):
    person.say("about ships")
    page = person.page
    page.hover("#list .item")
    page.click("[aria-label='More about about ships']")
    page.click(".menu >> text=Delete")
    page.wait_for_selector("#welcome:visible")
    person.go("/diagnostics")
    person.go("/")
    page.wait_for_selector("#list .empty")
    person.lists()


def test_a_wrong_key_is_told(browser, fake):
    keys = {"api_keys": ("a-key-of-this-server",)}
    with running(
        fake, create_app(fake, ServerSettings(port=0, **keys), Store(None)), **keys
    ) as server:
        person = Visitor(browser, server.url, begins="#key-dialog[open]")
        person.expects = ("401",)
        page = person.page
        assert not page.is_visible("#key-wrong")
        page.fill("#key-input", "a-wrong-key-to-begin-with")
        page.click("#key-dialog >> text=Continue")
        page.wait_for_selector("#key-wrong:has-text('does not know this key')")
        person.close()


def test_a_receipt_that_opens_is_not_behind_the_message_box(visit, fake):
    fake.words = "word " * 300
    person = visit(size={"width": 1280, "height": 600})
    page = person.page
    person.say("go")
    page.click(".receipt summary")
    page.wait_for_timeout(200)
    bottom = page.evaluate("document.querySelector('.receipt').getBoundingClientRect().bottom")
    assert bottom <= page.evaluate(
        "document.querySelector('#composer').getBoundingClientRect().top"
    )


def test_the_first_screen_fits_every_window(visit):
    person = visit()
    person.until("document.querySelectorAll('.sample').length === 4")
    for width in (360, 768, 1280, 1920):
        person.page.set_viewport_size({"width": width, "height": 720})
        assert person.overflow() == 0


def test_an_address_without_anything_is_a_page_for_people_and_json_for_programs(visit):
    person = visit()
    person.expects = ("404",)
    page = person.page
    address = page.url
    person.go("/nothing/here")
    page.wait_for_selector("h1:has-text('There is no such page')")
    assert person.overflow() == 0
    page.click("text=To the chat")
    page.wait_for_selector("#welcome:visible")
    for accepted in ("*/*", "application/json"):
        reported = page.request.get(f"{address}nothing", headers={"Accept": accepted})
        assert reported.status == 404 and reported.json()["error"]["message"]


def test_a_full_conversation_goes_on_in_a_new_one_with_what_was_written(person, fake):
    person.say("the first words")
    page, count = person.page, fake.count
    fake.count = lambda *a, **k: replace_tokens(count(*a, **k), 600 if len(a[0]) > 1 else 10)
    person.attach(SHAPES)
    page.fill("#prompt", "one word more")
    page.wait_for_selector("#meter-text:has-text('too long')")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".toast:has-text('no room for another message')")
    assert len(fake.tickets) == 1
    page.click("#meter >> text=Continue in a new chat")
    page.wait_for_selector("#welcome:visible")
    assert page.input_value("#prompt") == "one word more" and page.locator(".thumb").count() == 1
    page.press("#prompt", "Enter")
    person.answered("one word more")
    assert len(fake.tickets[-1].messages) == 1
    person.until("document.querySelectorAll('#list .item').length === 2")


def replace_tokens(count, tokens):
    count.prompt_tokens = tokens
    return count


def test_of_many_files_each_one_refused_is_told(person):
    names = [f"broken{i}.png" for i in range(5)]
    person.expects = ("400",)
    person.page.set_input_files(
        "#files", [{"name": n, "mimeType": "image/png", "buffer": png()[:40]} for n in names]
    )
    for name in names:
        person.page.wait_for_selector(f".toast:has-text('{name}: found a truncated PNG')")
    assert person.page.locator(".toast").count() == 1


@pytest.mark.parametrize("size", [QUEUE, {"width": 390, "height": 844}], ids=["desk", "phone"])
def test_a_notice_covers_nothing(size, visit):
    phone = {"is_mobile": True, "has_touch": True} if size != QUEUE else {}
    person = visit(size=size, **phone)
    person.expects = ("400",)
    page = person.page
    for text in ("one", "two", "three", "four", "five", "six"):
        person.say(text)
    person.until(f"({EDGES}).under >= 0")
    broken = {"name": "broken.png", "mimeType": "image/png", "buffer": png()[:40]}
    page.set_input_files("#files", [broken])
    page.wait_for_selector(".toast:has-text('found a truncated PNG')")
    person.until(f"({EDGES}).apart >= 0 && ({EDGES}).under >= 0")
    page.locator("#scroll").hover()
    page.mouse.wheel(0, -5000)
    person.until("document.querySelector('#scroll').scrollTop === 0")
    page.wait_for_selector("#down:visible")
    assert page.evaluate(f"({EDGES}).down") >= 0, "the way back to the end is in nobody's way"
    page.click(".toast [aria-label=Dismiss]")
    page.wait_for_timeout(100)
    assert page.evaluate("document.querySelector('#scroll').scrollTop") == 0, "who reads may go on"
    page.click("#down")
    person.until(f"({EDGES}).under >= 0")


# pixels from what ends the last answer to the notice, and to the end of the thread's window; from
# the button that leads there to the notice
EDGES = """(() => {
    const edge = (name, side) => document.querySelector(name)?.getBoundingClientRect()[side] ?? NaN;
    const end = edge(".message.answer.last", "bottom"), notice = edge(".toast", "top");
    return { apart: notice - end, under: edge("#scroll", "bottom") - end, down: notice - edge("#down", "bottom") };
})()"""


@pytest.mark.parametrize(
    ("tokens", "context"), [(12_345, 131_072), (600, 512)], ids=["fits", "not"]
)
def test_the_count_is_whole_on_a_phone_and_send_keeps_its_corner(tokens, context, visit, fake):
    count = fake.count

    def counted(*args, **options):
        result = replace_tokens(count(*args, **options), tokens)
        result.context = context
        return result

    fake.count = counted
    person = visit(size=PHONE)
    page = person.page
    page.fill("#prompt", "some words")
    page.wait_for_selector(f"#meter-text:has-text('{tokens:,} of {context:,}')")
    hidden, gap = page.evaluate("""() => {
        const [text, tools, send] = ["#meter-text", ".tools", "#send"].map((one) => document.querySelector(one));
        const gap = tools.getBoundingClientRect().right - send.getBoundingClientRect().right;
        return [text.scrollWidth - text.clientWidth, gap];
    }""")
    assert hidden <= 0 and 0 <= gap < 12 and person.overflow() == 0
