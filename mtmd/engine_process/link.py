"""Messages between the server's process and the engine's. A message is a list as JSON; the pixels
and files that belong to it lie in a memory that both see, whose descriptor goes along: they are
written once, and no thread of the other process copies them.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

from mtmd.base.isolation.channel import Channel, ChannelClosed
from mtmd.engine_process.codec import Parts, decode, encode

_NOTHING = memoryview(b"")
_WRITTEN_AT_ONCE = 16 << 20  # bytes


class Link:
    """One end. Any thread may send, one may `receive`."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._sending = channel, Lock()
        self._left = b""
        """Of a message, what the socket has not taken yet."""

    def send(self, items: Sequence[Any]) -> None:
        """One message; none where there is nothing to say. Raises CodecError for a value of an
        unknown class, and ChannelClosed.
        """
        text, parts = _written(items)
        memory = _shared(parts) if parts else None
        try:
            with self._sending:
                left, self._left = self._left, b""
                self._channel.send_rest(left)
                if items:
                    self._channel.send(text, fds=() if memory is None else (memory,))
        finally:
            if memory is not None:
                os.close(memory)

    def send_at_once(self, items: Sequence[Any]) -> tuple[bool, bool]:
        """As `send` for what has neither pixels nor files, without waiting. Whether it is sent, and
        whether all of it has left: what has not goes with the next `send`, also of nothing.
        """
        if not self._sending.acquire(blocking=False):
            return False, True
        try:
            if self._left:
                return False, True
            text, parts = _written(items)
            assert not parts
            self._left = self._channel.send_at_once(text)
            return True, not self._left
        finally:
            self._sending.release()

    def receive(self) -> Any:
        """The next message. Raises ChannelClosed, also where it is none."""
        text, found = self._channel.receive_with(1)
        try:
            memory = _mapped(found[0]) if found else _NOTHING
        finally:
            for one in found:
                os.close(one)
        try:
            return decode(json.loads(text), memory)
        except (TypeError, ValueError) as error:
            raise ChannelClosed from error

    def end(self) -> None:
        """From any thread: who receives, on either side, sees it closed."""
        self._channel.end()

    def close(self) -> None:
        self._channel.close()


def _written(items: Sequence[Any]) -> tuple[bytes, Parts]:
    parts: Parts = []
    return json.dumps(encode(list(items), parts), separators=(",", ":")).encode(), parts


def _shared(parts: Parts) -> int:
    """A descriptor of memory that holds all of them, one after another."""
    memory = _new_memory()
    try:
        for part in parts:
            while part:
                part = part[os.write(memory, part[:_WRITTEN_AT_ONCE]) :]
    except BaseException:
        os.close(memory)
        raise
    return memory


def _new_memory() -> int:
    """A file without a name where the system has no other: macOS, and a Linux whose administrator
    or container allows none (vm.memfd_noexec, seccomp).
    """
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            return os.memfd_create("mtmd", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _mapped(memory: int) -> memoryview:
    """What is written to it changes nothing for the other process."""
    count = os.fstat(memory).st_size
    return memoryview(mmap.mmap(memory, count, access=mmap.ACCESS_COPY)) if count else _NOTHING
