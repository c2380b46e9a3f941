"""What a ticket holds on to."""

from __future__ import annotations

import gc
import weakref

import pytest

from mtmd.base.errors import MtmdError
from mtmd.events import Finished, Progress
from mtmd.service.ticket import Ticket


class Model:
    def __init__(self):
        self.given_up = []

    def give_up(self, ticket):
        self.given_up.append(ticket)


@pytest.mark.parametrize(
    "end", [Finished(None), MtmdError("it failed")], ids=["answered", "failed"]
)
def test_one_that_is_over_holds_on_to_no_model(end):
    """A page keeps the last answers with their tickets; their model may have been unloaded."""
    model = Model()
    gone = weakref.ref(model)
    ticket = Ticket(model.give_up)
    ticket.cancel()
    assert model.given_up == [ticket]
    model.given_up.clear()
    ticket.put(end)
    del model
    assert gone() is None
    ticket.cancel()


@pytest.mark.parametrize(
    "end", [Finished(None), MtmdError("it failed")], ids=["answered", "failed"]
)
def test_one_that_is_over_holds_on_to_nobody_who_waited_for_it(end):
    """Who holds the ticket: the two would be kept until a garbage collection."""

    class Waiting:
        def __init__(self, ticket):
            self.ticket, self.events = ticket, []
            ticket.redirect(lambda event: self.events.append(event))

    ticket = Ticket(lambda _: None)
    waiting = Waiting(ticket)
    gone = weakref.ref(waiting)
    ticket.put(end)
    assert waiting.events == [end]
    gc.disable()
    try:
        del waiting
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("at", ["a piece", "its end"])
def test_one_whose_events_cannot_be_handed_on_is_given_up_alone(at, caplog):
    model, seen = Model(), []

    def broken(event):
        seen.append(event)
        if not isinstance(event, MtmdError):
            raise ValueError("no writer")

    ticket = Ticket(model.give_up)
    ticket.redirect(broken)
    event = Finished(None) if at == "its end" else Progress("prefill", 1, 2)
    ticket.put(event)  # raises nothing into who answers all
    assert seen[0] is event and "internal error: ValueError" in str(seen[1])
    assert "its events cannot be handed on" in caplog.text and "no writer" in caplog.text
    if at == "a piece":
        assert model.given_up == [ticket]
        ticket.put(Finished(None))
    assert len(seen) == 2


def test_one_that_cannot_even_be_told_of_it_is_given_up(caplog):
    model = Model()
    ticket = Ticket(model.give_up)
    ticket.redirect(lambda _: 1 / 0)
    ticket.put(Progress("prefill", 1, 2))
    assert model.given_up == [ticket] and caplog.text.count("cannot be handed on") == 1
