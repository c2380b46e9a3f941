"""A wire between a browser and a server that can be cut in the midst of anything, as a killed server
or a lost network does.
"""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager, suppress


class Wire:
    """Listens on `port` of this machine and passes everything on to the port `to`, until `cut`."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.to = None
        self._lock, self._ends = threading.Lock(), set()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def cut(self):
        """Everything that is open breaks; who comes is turned away until `to` is set again."""
        with self._lock:
            self.to, ends = None, list(self._ends)
        for end in ends:
            _break(end)

    def close(self):
        _break(self._listener)
        self._listener.close()
        self.cut()
        self._thread.join(10)

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.to)) if self.to else None
            except OSError:
                far = None
            if far is None:
                near.close()
                continue
            with self._lock:
                self._ends |= {near, far}
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one, other):
        with suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        for end in (one, other):
            _break(end)
        with self._lock:
            done = one in self._ends
            self._ends -= {one, other}
        if not done:  # the second of the two
            one.close()
            other.close()


def _break(end):
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@contextmanager
def wire(port):
    made = Wire()
    made.to = port
    try:
        yield made
    finally:
        made.close()
