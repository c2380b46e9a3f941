"""Messages between two processes over a stream socket: bytes with their length before them, and
file descriptors beside them. No pickles: what a worker says is trusted as little as what it worked
on, so whoever receives says how much it may be.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

_LENGTH = struct.Struct("<I")
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # macOS has none
LONGEST = (1 << 32) - 1  # bytes of a message


class ChannelClosed(Exception):
    """The other side has gone, or says what it may not."""


class ChannelTimeout(Exception):
    """The other side says nothing."""


class Channel:
    """One end. Not thread-safe. Closed when let go."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(True)
        self._socket = sock

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(
        self, *parts: bytes | memoryview, fds: Sequence[int] = (), limit_s: float | None = None
    ) -> None:
        """One message, the `parts` together; the other side gets copies of `fds`. Raises
        ChannelClosed and, where nobody reads for `limit_s`, ChannelTimeout.
        """
        head = _LENGTH.pack(sum(memoryview(p).nbytes for p in parts))
        self._socket.settimeout(limit_s)
        try:
            if fds:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                self._socket.sendmsg([head], [rights])
            elif len(parts) == 1 and len(parts[0]) < 1 << 16:
                self._socket.sendall(head + parts[0])
                return
            else:
                self._socket.sendall(head)
            for part in parts:
                self._socket.sendall(part)
        except TimeoutError:
            raise ChannelTimeout from None
        except (OSError, ValueError) as error:
            raise ChannelClosed from error

    def receive(self, maximum: int = LONGEST, limit_s: float | None = None) -> bytearray:
        """The next message. Raises ChannelClosed, also for one of more than `maximum` bytes or with
        descriptors, and ChannelTimeout where it has not come in whole after `limit_s`.
        """
        data, fds = self.receive_with(0, maximum, limit_s)
        assert not fds
        return data

    def receive_with(
        self, fds: int, maximum: int = LONGEST, limit_s: float | None = None
    ) -> tuple[bytearray, list[int]]:
        """Do what `receive` does, with the descriptors that came, `fds` at most; they are the
        caller's.
        """
        end = None if limit_s is None else time.monotonic() + limit_s
        head, result = bytearray(), list[int]()
        try:
            while len(head) < _LENGTH.size:
                self._limit(end)
                data, more = self._take(_LENGTH.size - len(head), fds - len(result))
                result += more
                if not data:
                    raise ChannelClosed
                head += data
            (count,) = _LENGTH.unpack(head)
            if count > maximum:
                raise ChannelClosed
            body = bytearray(count)
            self._fill(memoryview(body), end)
            return body, result
        except BaseException as error:
            for fd in result:
                os.close(fd)
            if isinstance(error, TimeoutError):
                raise ChannelTimeout from None
            if isinstance(error, (OSError, ValueError)):
                raise ChannelClosed from error
            raise

    def receive_into(self, room: memoryview, limit_s: float | None = None) -> int:
        """The next message, at the beginning of `room`: its length. Raises as `receive`, also for
        one that has no room.
        """
        end = None if limit_s is None else time.monotonic() + limit_s
        try:
            head = bytearray(_LENGTH.size)
            self._fill(memoryview(head), end)
            (count,) = _LENGTH.unpack(head)
            if count > len(room):
                raise ChannelClosed
            self._fill(room[:count], end)
        except TimeoutError:
            raise ChannelTimeout from None
        except (OSError, ValueError) as error:
            raise ChannelClosed from error
        return int(count)

    def ready(self, wait_s: float = 0) -> bool:
        """Return whether there is something to receive, be it the end, after `wait_s` at the
        latest.
        """
        if self.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return bool(poll.poll(wait_s * 1e3))

    def end(self) -> None:
        """Close it, from any thread: whoever receives, on either side, sees it closed."""
        with suppress(OSError):  # the other side has gone already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def __del__(self) -> None:
        self._socket.close()  # at once, without the warning that a socket left open gives

    def _fill(self, room: memoryview, end: float | None) -> None:
        while room:
            self._limit(end)
            count = self._socket.recv_into(room)
            if not count:
                raise ChannelClosed
            room = room[count:]

    def _limit(self, end: float | None) -> None:
        if end is None:
            self._socket.settimeout(None)
            return
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def _take(self, count: int, fds: int) -> tuple[bytes, list[int]]:
        if fds <= 0:  # descriptors that nobody asked for are closed by the kernel
            return self._socket.recv(count), []
        data, result, _, _ = socket.recv_fds(self._socket, count, fds, _CLOEXEC)
        if not _CLOEXEC:
            for fd in result:
                os.set_inheritable(fd, False)
        return data, result
