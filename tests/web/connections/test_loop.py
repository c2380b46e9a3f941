"""The loop over all connections."""

import socket

from mtmd.web.connections.loop import Sockets


class EndsMeanwhile:
    """A connection whose answer another thread ends while the loop asks what it waits for."""

    accepting = False

    def __init__(self, sock):
        self.sock, self.ended, self.received = sock, False, b""

    @property
    def is_quiet(self):
        return self.ended

    def readable(self):
        before, self.ended = self.ended, True
        return before

    def writable(self):
        return False

    def handle_read_event(self):
        self.received += self.sock.recv(100)

    def handle_error(self):
        raise


def test_a_connection_whose_answer_ends_while_it_is_asked_is_read_again():
    loop = Sockets()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = loop[ours.fileno()] = EndsMeanwhile(ours)
        loop.handle(loop.wait(0))
        theirs.sendall(b"another request")
        for _ in range(3):
            loop.handle(loop.wait(0))
        assert connection.received == b"another request"
        del loop[ours.fileno()]
    loop.close()
