"""What a ticket holds on to."""

from __future__ import annotations

import gc
import weakref

import pytest

from mtmd.events import Finished
from mtmd.kernels.errors import MtmdError
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
