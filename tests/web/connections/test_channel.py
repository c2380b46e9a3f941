"""Bodies lie in temporary files where they are long: those are closed whoever leaves, and when."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
from waitress.adjustments import Adjustments

from mtmd.web.bodies.body_budget import BodyBudget
from mtmd.web.connections.channel import Channel
from mtmd.web.connections.clients import Clients

POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20000\r\n\r\n" + b"x" * 20000
LATER = POST[:-1]


class Host(SimpleNamespace):
    """Of one channel. `tasks`: what a thread is to be called for."""

    def __init__(self):
        adj = Adjustments(inbuf_overflow=1000)
        super().__init__(
            adj=adj, clients=Clients(), bodies=BodyBudget(1 << 20),
            draining=False, reading=None, active_channels={}, tasks=[],
        )  # fmt: skip

    def who(self, _):
        return ""

    def route(self, *_):
        return 1 << 20, None

    def make_room(self, _):
        return False

    def look_at(self, _):
        pass

    def pull_trigger(self):
        pass

    def add_task(self, task):
        self.tasks.append(task)


class Answering:
    """A task. `meanwhile` is done while it is at work."""

    close_on_finish = wrote_header = False

    def __init__(self, meanwhile):
        self.meanwhile = meanwhile

    def service(self):
        self.meanwhile()


@pytest.fixture
def channel():
    ours, theirs = socket.socketpair()
    made = Channel(Host(), ours, ("127.0.0.1", 5), Adjustments(inbuf_overflow=1000), map={})
    yield made
    made.handle_close()
    theirs.close()


def files_of(channel):
    every = [*channel.requests, *([channel.request] if channel.request else [])]
    return [request.get_body_stream() for request in every]


def states(files):
    return [file.closed for file in files]


def test_a_client_that_leaves_while_it_is_answered_leaves_no_file_of_its_next_requests(channel):
    channel.received(POST + POST + POST + LATER)
    files = files_of(channel)
    assert len(files) == 4 and not any(states(files))
    channel.task_class = lambda *_: Answering(channel.handle_close)
    channel.service()
    assert all(states(files))
    assert channel.server.bodies.held == 0 and channel.server.tasks == [channel]


def test_the_one_that_waits_for_a_thread_is_closed_by_it(channel):
    channel.received(POST + POST)
    files = files_of(channel)
    channel.handle_close()
    assert states(files) == [False, True]
    channel.service()
    assert all(states(files)) and channel.server.bodies.held == 0


def test_what_no_thread_will_come_for_is_closed(channel):
    channel.received(POST + POST)
    files = files_of(channel)
    channel.cancel()
    assert all(states(files)) and channel.server.bodies.held == 0


def test_what_is_answered_while_its_connection_is_cancelled_ends(channel, caplog):
    channel.received(POST + POST)
    files, met = files_of(channel), []

    def meanwhile():
        channel.cancel()
        met.extend(states(files))

    channel.task_class = lambda *_: Answering(meanwhile)
    channel.service()
    assert met == [False, True] and all(states(files))
    channel.service()  # as by a thread that was on its way
    assert not caplog.records
