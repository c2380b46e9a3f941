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
_found = []


@pytest.fixture(scope="module")
def browser():
    """One for all files of this folder, while tests of no other come between."""
    if not _found:
        _found.append(_open.enter_context(chromium()))
    return _found[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Before the tests of another folder, which may have event loops in this thread: Playwright's
    is there until the browser is closed.
    """
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _found.clear()
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

    class Kept:
        def __getattr__(self, name):
            return getattr(model.service, name)

        def close(self):
            return None

    service = Kept()
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
