"""Messages between the server's process and an engine's, over one stream socket: a list of records
as JSON, and behind it the pixels and files that belong to them, as they are.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

from mtmd.engine_process.codec import CodecError, Parts, decode, encode

_COUNT, _SIZE = struct.Struct("<I"), struct.Struct("<Q")
_NOW: int | None = getattr(socket, "MSG_DONTWAIT", None)
CAN_SEND_NOW = _NOW is not None  # else, as on Windows, only a thread that may wait sends
BUFFER_BYTES = 1 << 20  # of the socket: tokens of many steps, for a reader that is late


class LinkClosedError(Exception):
    """The other process has gone, or has written what is no message."""


class Link:
    """One end. Any thread may `send`, one may `receive`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, size, BUFFER_BYTES)
        self._socket, self._sending = sock, Lock()
        self._file = sock.makefile("rb")
        self._rest = memoryview(b"")
        """Of a message that `send_now` has begun."""

    def send(self, records: Sequence[Any]) -> None:
        """Send one message, none for no records. Raises CodecError for a value of a class that is
        not registered, and LinkClosedError.
        """
        pieces = _pieces(records)
        try:
            with self._sending:
                rest, self._rest = self._rest, memoryview(b"")
                for piece in (rest, *pieces):
                    self._socket.sendall(piece)
        except (OSError, ValueError) as error:
            raise LinkClosedError from error

    def send_now(self, records: Sequence[Any]) -> bool:
        """Send a message without waiting. Return whether it is sent whole; the rest goes with the
        next `send`, before which there may be no other `send_now`. Raises as `send`.
        """
        assert _NOW is not None
        data = memoryview(b"".join(_pieces(records)))
        try:
            with self._sending:
                sent = self._socket.send(data, _NOW)
        except BlockingIOError:
            sent = 0
        except (OSError, ValueError) as error:
            raise LinkClosedError from error
        self._rest = data[sent:]
        return sent == len(data)

    def receive(self) -> list[Any]:
        """Return the records of the next message. Raises LinkClosedError."""
        try:
            (count,) = _COUNT.unpack(self._read(_COUNT.size))
            sizes = [_SIZE.unpack(self._read(_SIZE.size))[0] for _ in range(count)]
            text, *parts = (self._read(size) for size in sizes)
            records: list[Any] = decode(json.loads(text), parts)
        except (OSError, ValueError, CodecError) as error:
            raise LinkClosedError from error
        return records

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            count = self._file.readinto(rest)
            if not count:
                raise LinkClosedError
            rest = rest[count:]
        return data

    def end(self) -> None:
        """Close it for both sides, from any thread: whoever receives has a LinkClosedError."""
        with suppress(OSError):  # the other side has gone already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def _pieces(records: Sequence[Any]) -> list[bytes | memoryview]:
    """Return the bytes of a message, none for no records."""
    if not records:
        return []
    parts: Parts = []
    text = json.dumps(encode(list(records), parts), separators=(",", ":")).encode()
    sizes = (len(text), *(part.nbytes for part in parts))
    head = _COUNT.pack(len(sizes)) + b"".join(map(_SIZE.pack, sizes))
    return [head + text, *parts]
