"""Describes what systemd is told of a server that it has started with `Type=notify`: that it
answers, and that it is ending. Without systemd nobody is told.
"""

from __future__ import annotations

import socket
from contextlib import suppress

from mtmd.environment import notify_socket


def notify_systemd(*lines: str) -> None:
    """Each NAME=VALUE, as sd_notify(3) has them. What cannot be told is of no harm: who started
    the server sees whether it lives.
    """
    address = notify_socket()
    family = getattr(socket, "AF_UNIX", None)
    if address is None or family is None:
        return
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.sendto("\n".join(lines).encode(), address)
