"""What an actor says of a server that ends in the midst of an answer. Without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from mtmd.web.replicas.choice import Route
from mtmd.web.replicas.forwarded import Forwarded, Head, Lost, Taken
from mtmd.web.replicas.replica import AT_ONCE, Replica

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


def describe(stated):
    """The parts of an answer by a server that says so much and closes, and how it ended."""

    async def run():
        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(stated)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        replica = object.__new__(Replica)
        replica.name, replica._service, replica._session = "a", SimpleNamespace(fault=None), None
        replica._server = SimpleNamespace(
            port=server.sockets[0].getsockname()[1], stop=lambda: None
        )
        replica._thread = SimpleNamespace(join=lambda _: None)
        parts, ended = [], None
        try:
            async for part in replica.answer(Forwarded("GET", "/", []), Route()):
                parts.append(part)
        except Exception as error:
            ended = error
        await replica._session.close()
        server.close()
        assert parts.pop(0) == Taken("a")
        return parts, ended

    return asyncio.run(run())


@pytest.mark.parametrize(
    "stated",
    [
        HEAD + b"Content-Length: 10\r\n\r\n",
        HEAD + b"Content-Length: 10\r\n\r\nhello",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
        HEAD + b"Content-Length: %d\r\n\r\n" % (AT_ONCE + 1),
    ],
    ids=["nothing", "half", "nothing of a stream", "nothing of a long one"],
)
def test_an_answer_that_ends_before_its_first_piece_can_be_asked_again(stated):
    (head,), ended = describe(stated)
    assert isinstance(head, Head) and isinstance(ended, Lost) and ended.replica == "a"


def test_a_stream_of_which_something_came_cannot():
    (_, piece), ended = describe(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
    assert piece == b"hello" and isinstance(ended, RuntimeError)


def test_whole_answers_come_whole():
    assert describe(HEAD + b"Content-Length: 5\r\n\r\nhello")[0][1:] == [b"hello"]
    assert describe(HEAD + b"Content-Length: 0\r\n\r\n")[0][1:] == []
