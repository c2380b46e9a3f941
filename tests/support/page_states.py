"""The states that somebody may find the page in, one after another: for the test that looks for
violations of accessibility in each, and for pictures of all of them (`tools/screenshots.py`).
"""

from __future__ import annotations

import io
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from browsing import PHONE, QUEUE, Visitor
from fake_service import FakeService
from PIL import Image
from serving import running
from wire import wire

from mtmd import BusyError, DeviceError, Progress, PromptError
from mtmd.kernels.report.facts import RefusedOp
from mtmd.loading import DEMO_NAME
from mtmd.web.app import create_app
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import Store

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPES, WORD, FOUR = (EXAMPLES / f"{name}.png" for name in ("shapes", "word", "four"))
WIDE = {"width": 1920, "height": 1080}
KEY = "a-key-of-this-server"
ANSWER = "A small purple square at the top, a large black cross at the center and a large purple diamond at the bottom left on a white background."
THOUGHT = (
    "<think>The user wants the shapes. I see *three* of them; the largest is the cross.</think>\n\n"
)
MARKDOWN = """## What is there

Three shapes on a plain ground, of which **the cross** is the largest; see [the list](https://example.org/shapes).

| Shape | Colour | Place | Area |
|:------|:-------|:------|-----:|
| square | purple | top | 1,024 |
| cross | black | center | 5,120 |
| diamond | purple | bottom left | 4,096 |

```python
def area(shape: str, side: float) -> float:
    \"\"\"Of a square or a diamond.\"\"\"
    return side**2 if shape == "square" else side**2 / 2  # a diamond by its diagonal
```

The share of the ground is \\(s = \\frac{a}{w h}\\), and over all shapes

$$S = \\sum_{i=1}^{n} \\frac{a_i}{w h} \\approx 0.16$$

- [x] counted the shapes
- [ ] measured them
"""
BOXES = 'The cross is at the center.\n\n```json\n[{"bbox_2d": [270, 270, 730, 730], "label": "black cross"}, {"bbox_2d": [60, 620, 400, 960], "label": "purple diamond"}, {"point_2d": [500, 130], "label": "square"}]\n```'
REFUSED = RefusedOp("encoder", "rope", "n7", 3, "cuda", "head size 72 is not known", "cpu", ())


class Shown(FakeService):
    """Answers with what it is told to, and knows what every picture looked like."""

    def __init__(self):
        super().__init__()
        self.name, self.words, self.context = DEMO_NAME, ANSWER, 2048
        self.stage_ms = dict(zip(self.stage_ms, (2.0, 3.1, 15.2, 23.0, 76.4), strict=True))
        self.stored = None  # while it is set, pictures are encoded

    def count(self, messages, *_, **__):
        images = sum(isinstance(m["content"], list) for m in messages)
        return SimpleNamespace(
            prompt_tokens=40 * len(messages),
            image_tokens=(9,) * 2 * images,
            video_tokens=(),
            audio_tokens=(),
            context=2048,
        )

    def processed(self, _sha256, _tenant):
        return (np.full((96, 96, 3), 200, np.uint8),)

    def submit(self, messages, **chosen):
        ticket = super().submit(messages, **chosen)
        stored, events = self.stored, ticket.__iter__
        if stored is None:
            return ticket

        class Stored:
            cancel, id = ticket.cancel, ticket.id

            def __iter__(self):
                yield Progress("encode", 2, 5)
                stored.wait(30)
                yield from events()

        return Stored()


def photo(width, height, seed=1):
    """A picture like none of the samples: a landscape of bands."""
    rng = np.random.default_rng(seed)
    rows = np.linspace(0, 1, height)[:, None, None]
    sky, ground = rng.integers(90, 220, (2, 3))
    pixels = (sky * (1 - rows) + ground * rows) * np.ones((1, width, 1))
    out = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def file(data, name="photo.png", kind="image/png"):
    return {"name": name, "mimeType": kind, "buffer": data}


@contextmanager
def _served(fake, store=None, **settings):
    app = create_app(fake, ServerSettings(port=0, **settings), store or Store(None))
    with running(fake, app, **settings) as server:
        yield server


class Walk:
    """Through all that one window on one server can show."""

    def __init__(self, person, fake, line, folder):
        self.person, self.fake, self.line, self.folder = person, fake, line, folder

    def __iter__(self):
        parts = self.requesting, self.reading, self.going_wrong, self.history, self.table
        for part in (*parts, self.small_and_large, self.diagnostics):
            yield from part()

    def new(self):
        self.person.page.click("#new-chat")
        self.person.page.wait_for_selector("#welcome:visible")

    def requesting(self):
        person, page, fake = self.person, self.person.page, self.fake
        person.until("[...document.querySelectorAll('.sample img')].every((i) => i.naturalWidth)")
        yield "empty-chat"
        page.set_input_files(
            "#files", files=[file(photo(900, 600)), file(photo(300, 900, 2), "tall.png")]
        )
        page.wait_for_selector(".thumb:nth-child(2):not(.loading)")
        page.fill("#prompt", "Which of the two was taken earlier?")
        page.wait_for_selector("#meter-text:has-text('of 2,048')")
        yield "pictures-attached"
        page.evaluate("document.querySelector('#drop').hidden = false")
        yield "dragging"
        page.evaluate("document.querySelector('#drop').hidden = true")
        page.click(".thumb .picture")
        person.until("document.querySelector('#viewer-image').naturalWidth === 900")
        page.click("#viewer-select")
        yield "cutting"
        page.click("#viewer-close")
        fake.stored = threading.Event()
        page.press("#prompt", "Enter")
        page.wait_for_selector(".progress:has-text('Encoding tile 3 of 5')")
        yield "encoding"
        fake.pace_s, fake.words = 0.02, THOUGHT + MARKDOWN * 4
        fake.stored.set()
        fake.stored = None
        page.wait_for_selector(".growing td:has-text('cross')")
        page.wait_for_selector(".rate:has-text('tokens/s')")
        yield "streaming"
        page.click("#stop")
        person.answered()
        yield "stopped"
        fake.pace_s = 0.0

    def reading(self):
        person, page, fake = self.person, self.person.page, self.fake
        self.new()
        fake.words = ANSWER
        person.attach(SHAPES)
        person.say("Describe the image.")
        person.until("document.querySelector('.message.user img').naturalWidth === 256")
        yield "first-answer"
        page.click(".receipt summary")
        page.wait_for_selector(".seen img")
        yield "receipt"
        page.click(".receipt summary")
        fake.words = THOUGHT + MARKDOWN
        person.say("Tell me all about it")
        page.wait_for_selector(".katex")
        page.wait_for_selector(".code [class^=code-]", state="attached")
        page.click(".thought summary")
        yield "markdown"
        page.evaluate("document.querySelector('#scroll').scrollTop -= 420")
        yield "thoughts"
        fake.words = BOXES
        person.say("Where is the cross?")
        page.wait_for_selector(".figure rect")
        yield "boxes"
        page.click(".figure")
        person.until("document.querySelector('#viewer-image').naturalWidth === 256")
        page.click("#viewer-marks rect[data-region]")
        yield "region"
        page.keyboard.press("Escape")
        fake.words = "Four shapes, and a word."
        person.attach(FOUR, WORD, SHAPES)
        person.say("And in these three?")
        yield "several-pictures"
        fake.words = "Four shapes and one word; the third has three shapes."
        page.click(".message.last [aria-label='Answer again']")
        page.wait_for_selector(".branches:has-text('2 / 2')")
        person.answered()
        page.click("[aria-label='Side by side']")
        yield "side-by-side"
        page.click("text=One at a time")
        page.press("#prompt", "ArrowUp")
        page.wait_for_selector("#editing:visible")
        yield "editing"
        page.keyboard.press("Escape")

    def going_wrong(self):
        person, page, fake = self.person, self.person.page, self.fake
        count = fake.count
        self.new()
        fake.refuses = BusyError("64 requests wait already; try again in 3 s")
        person.say("Is anybody there?", wait=False)
        page.wait_for_selector(".problem")
        yield "refused"
        fake.refuses, fake.fails = (
            None,
            PromptError("the device ran out of memory while it decoded"),
        )
        page.click(".problem button")
        page.wait_for_selector(".message.answer .problem")
        yield "failed"
        fake.fails, fake.words = None, "one two three four"
        page.set_input_files("#files", files=[file(photo(50, 50)[:60], "broken.png")])
        page.wait_for_selector(".toast:has-text('broken.png')")
        yield "picture-refused"
        page.click(".toast button")
        fake.pace_s, fake.words = 0.03, ANSWER * 20
        person.say("Go on for long", wait=False)
        page.wait_for_selector(".growing:has-text('diamond')")
        self.line.to, port = None, self.line.to
        self.line.cut()
        page.wait_for_selector(".reconnecting:visible")
        yield "reconnecting"
        page.click("#stop")
        page.wait_for_selector(".aside:has-text('The connection was lost here')")
        yield "connection-lost"
        person.say("Are you still there?", wait=False)
        page.wait_for_selector(".toast:has-text('Not sent')")
        yield "offline"
        self.line.to = port
        page.fill("#prompt", "")
        for ticket in fake.tickets:
            ticket.cancel()
        fake.pace_s, fake.words = 0.0, ANSWER
        page.reload()
        page.wait_for_selector(".message.answer")
        person.answered()
        for number in range(3):
            person.say(f"Question {number} of a long talk")

        def full(messages, *_, **__):
            return SimpleNamespace(
                prompt_tokens=400 * len(messages),
                image_tokens=(),
                video_tokens=(),
                audio_tokens=(),
                context=2048,
            )

        fake.count = full
        page.fill("#prompt", "And one more question, for which there is no room any more")
        page.wait_for_selector("#meter-text:has-text('too long')")
        yield "full-context"
        page.click("#meter >> text=Drop the oldest turns")
        page.wait_for_selector(".dropped")
        page.wait_for_selector("#meter-text:has-text('1,200 of')")
        page.evaluate("document.querySelector('.dropped').scrollIntoView({ block: 'center' })")
        yield "turns-dropped"
        fake.count = count
        page.fill("#prompt", "")

    def history(self):
        person, page = self.person, self.person.page
        for text in (
            "Which birds are these?",
            "Read the receipt of the bakery to me",
            "What is the capital of the country on this map, and why?",
        ):
            self.new()
            person.say(text)
        page.click("#list .item:has-text('birds') .icon-button")
        page.click(".menu >> text=Pin")
        page.wait_for_selector("#list h2:has-text('Pinned')")
        page.click("#list .item .icon-button >> nth=0")
        page.wait_for_selector(".menu:popover-open")
        yield "menu"
        page.click(".menu >> text=Rename")
        yield "renaming"
        page.keyboard.press("Escape")
        page.fill("#search", "cross center")
        page.wait_for_selector("#list .around")
        yield "search"
        page.click("#list .item a >> nth=0")
        page.wait_for_selector(".message.found")
        yield "found"
        page.fill("#search", "a word that is nowhere")
        page.wait_for_selector("#list .empty")
        yield "nothing-found"
        page.fill("#search", "")
        page.wait_for_selector("#list h2")
        page.hover("#list .item >> nth=0")
        page.click("#list .item .icon-button >> nth=0")
        page.click(".menu >> text=Delete")
        page.wait_for_selector(".toast:has-text('Undo')")
        yield "deleted"
        page.click(".toast >> text=Undo")
        page.click("#open-settings")
        page.click("#settings summary")
        yield "settings"
        page.click("#open-keys")
        page.wait_for_selector("#keys[open]")
        yield "shortcuts"
        page.keyboard.press("Escape")

    def table(self):
        page, fake = self.person.page, self.fake
        pictures = self.folder / "pictures"
        pictures.mkdir()
        for number in range(1, 9):
            (pictures / f"IMG_{number:04}.png").write_bytes(photo(120 + 30 * number, 160, number))
        (pictures / "notes.txt").write_text("no picture")
        self.new()
        fake.pace_s, fake.words = (
            0.25,
            "A landscape of two colours, and nothing else that could be named.",
        )
        page.set_input_files("#folder", str(pictures))
        page.wait_for_selector("#over[open]")
        yield "folder"
        page.click("#over button.primary")
        page.wait_for_selector("#table-rows tr:nth-child(8)")
        page.wait_for_selector(".c-answer .growing:has-text('landscape')")
        yield "table-growing"
        fake.pace_s = 0.0
        page.wait_for_selector("#table-state:has-text('8 of 8')")
        yield "table"

    def small_and_large(self):
        person, page, fake = self.person, self.person.page, self.fake
        page.set_viewport_size(PHONE)
        yield "phone-table"
        person.go("/")
        page.wait_for_selector("#welcome:visible")
        yield "phone-empty"
        fake.words = THOUGHT + MARKDOWN
        person.attach(SHAPES)
        person.say("Tell me all about it")
        page.wait_for_selector(".katex")
        page.evaluate("document.querySelector('#scroll').scrollTop = 0")
        yield "phone-answer"
        page.click("#open-side")
        page.wait_for_selector("#app.open")
        yield "phone-history"
        page.click("#close-side")
        page.click("#open-settings")
        yield "phone-settings"
        page.keyboard.press("Escape")
        page.set_viewport_size(WIDE)
        yield "wide-answer"
        person.go("/")
        page.wait_for_selector("#welcome:visible")
        yield "wide-empty"
        page.set_viewport_size(QUEUE)

    def diagnostics(self):
        person, page, fake = self.person, self.person.page, self.fake
        hangs = DeviceError("the device hangs: it has done nothing for 300 s")
        for name, fault in (("fast", None), ("wrong", hangs)):
            fake.fault = fault
            person.go("/diagnostics")
            page.wait_for_selector(f"#verdict.{name} h2")
            page.wait_for_selector("#report section")
            page.wait_for_selector("#now div")
            yield f"diagnostics-{name}"
        page.set_viewport_size(PHONE)
        yield "phone-diagnostics"
        page.set_viewport_size(QUEUE)
        fake.fault = None
        person.go("/nothing/here")
        page.wait_for_selector("h1")
        yield "nothing-here"
        person.go("/docs")
        page.click("summary >> nth=0")
        yield "api"


def states(browser, folder, **context):
    """(name, visitor) of each."""
    fake = Shown()
    with _served(fake) as server, wire(server.port) as line:
        person = Visitor(browser, line.url, **context)
        person.expects = ("ERR_", "400", "404", "429", "503")
        for name in Walk(person, fake, line, folder):
            yield name, person
        for ticket in fake.tickets:
            ticket.cancel()
        person.close()
    yield from _with_a_key(browser, **context)


def _with_a_key(browser, **context):
    fake = Shown()
    fake.name, fake.sees = "org/a-model-of-text", False
    fake.warmup_report = replace(fake.warmup_report, refused=(REFUSED,))
    with _served(fake, api_keys=(KEY,)) as server:
        person = Visitor(browser, server.url, begins="#key-dialog[open]", **context)
        person.expects = ("401",)
        page = person.page
        page.fill("#key-input", "a-wrong-key-to-begin-with")
        page.click("#key-dialog >> text=Continue")
        page.wait_for_selector("#key-wrong:visible")
        yield "wrong-key", person
        page.fill("#key-input", KEY)
        page.click("#key-dialog >> text=Continue")
        page.wait_for_selector("#model:has-text('a-model-of-text')")
        yield "text-only", person
        person.go("/diagnostics")
        page.wait_for_selector("#verdict.slower h2")
        page.wait_for_selector("#report section")
        yield "diagnostics-slower", person
        person.close()
