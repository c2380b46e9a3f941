"""Answers of the page are written by threads that go first, as those of the API are sent."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

from priorities import behind, on_linux, priority

from mtmd.web.page.answers import Answers


class Ticket:
    """Of an answer without text, which notes who reads it."""

    def __init__(self):
        self.result = []

    def __iter__(self):
        self.result.append(priority())
        return iter(())


@on_linux
def test_who_asks_for_an_answer_does_not_change_the_priority_of_its_writer():
    store = SimpleNamespace(before_close=[], finish=lambda *_: None)
    answers, ticket = Answers(store), Ticket()
    behind(lambda: answers.start("id", "conversation", ticket, ExitStack()))
    answers.end()
    assert ticket.result == [priority()]
