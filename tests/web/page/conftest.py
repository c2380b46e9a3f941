"""A browser, and servers for it: with the demo model, and with a service that does as it is told."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
from browsing import Visitor, chromium
from fake_service import FakeService
from serving import running

from mtmd import load
from mtmd.web.app import create_app
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import Store

_open = ExitStack()
_result = []
DRAW = """async ([text, live]) => {
    const { AnswerText } = await import("./MODULE");
    const view = new AnswerText().draw(text, live);
    document.body.append(view.element);
    const loaded = () => !view.element.querySelector(".math.source:not([title]), code[data-language]");
    for (let n = 0; n < 200 && !live && !loaded(); n += 1) await new Promise((go) => setTimeout(go, 20));
    const html = view.element.outerHTML;
    view.element.remove();
    return html;
}"""
# What is drawn at each length, and the heights there.
GROW = """async ([text, step]) => {
    const { AnswerText } = await import("./MODULE");
    const view = new AnswerText();
    document.querySelector("#thread").hidden = false;
    document.querySelector("#thread").append(view.element);
    const heights = [];
    for (let end = 1; end < text.length; end += step) {
        view.draw(text.slice(0, end), true);
        heights.push(view.element.offsetHeight);
    }
    view.draw(text, false);
    heights.push(view.element.offsetHeight);
    for (const one of view.element.querySelectorAll(".grown")) one.classList.remove("grown"); // that it was written here
    const whole = new AnswerText().draw(text, false).element;
    const [grown, same] = [view.element.innerHTML, view.element.isEqualNode(whole)];
    view.element.remove();
    return [heights, same ? null : [grown, whole.innerHTML]];
}"""


@pytest.fixture(scope="module")
def browser():
    """One for all files of this folder, while tests of no other come between."""
    if not _result:
        _result.append(_open.enter_context(chromium()))
    return _result[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Before the tests of another folder, which may have event loops in this thread: Playwright's
    is there until the browser is closed.
    """
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _result.clear()
        _open.close()


@pytest.fixture(scope="module")
def model():
    made = load(threads=1)
    yield made
    made.close()


@pytest.fixture
def served_demo(model):
    """A server with the demo model, which answers rightly and at once. The model is there for the
    next test too.
    """

    class Saved:
        def __getattr__(self, name):
            return getattr(model.service, name)

        def close(self):
            return None

    service = Saved()
    with running(
        service,
        create_app(service, ServerSettings(port=0), Store(None), warmup=model.warmup_report),
    ) as server:
        yield server.url


class Slow(FakeService):
    """Answers word by word, and knows what every picture looked like."""

    def __init__(self):
        super().__init__(pace_s=0.0)

    def processed(self, _sha256, _tenant):
        return (np.full((8, 8, 3), 127, np.uint8),)


@pytest.fixture
def fake():
    return Slow()


@pytest.fixture
def visit(browser, fake):
    """Opens a window on a server with the fake service; all windows must be without complaint at
    the end.
    """
    visitors = []
    with running(fake, create_app(fake, ServerSettings(port=0), Store(None))) as server:

        def open_(url=server.url, **more):
            visitors.append(Visitor(browser, url, **more))
            return visitors[-1]

        yield open_
        for ticket in fake.tickets:
            ticket.cancel()
        for visitor in visitors:
            visitor.close()


@pytest.fixture
def person(visit):
    return visit()


@pytest.fixture(scope="module")
def drawn(browser):
    """A window with the page's modules; `draw(text, live=False)` gives the HTML."""
    fake = FakeService()
    with running(fake, create_app(fake, ServerSettings(port=0), Store(None))) as server:
        person = Visitor(browser, server.url)
        module = person.page.locator("link[href$='markdown/view.js']").get_attribute("href")
        person.module = module
        person.draw = lambda text, live=False: person.page.evaluate(
            DRAW.replace("MODULE", module), [text, live]
        )
        person.grow = lambda text, step=1: person.page.evaluate(
            GROW.replace("MODULE", module), [text, step]
        )
        person.expects = ("TrustedHTML",)
        yield person

        person.close()
