"""What the workers of tests/kernels/isolation do: end badly, each in a way of its own."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from mtmd.base.isolation.channel import Channel


def prepare(setup: bytes) -> bytes:
    return setup


def serve(channel: Channel, prepared: Any) -> None:
    asked = bytes(channel.receive())
    if asked == b"setup":
        channel.send(prepared)
    elif asked == b"pid":
        channel.send(b"%d %d" % (os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)))
    elif asked == b"burn":
        while True:
            pass
    elif asked == b"sleep":
        time.sleep(60)
    elif asked == b"take":
        channel.send(bytes(len([bytearray(1 << 20) for _ in range(200)])))
    elif asked == b"abort":
        os.abort()
    elif asked == b"fault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif asked == b"panic":
        raise BaseException("no Exception")
    elif asked == b"long":
        channel.send(bytes(1000))
    elif asked == b"burn and tell":
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        channel.send(b"%d" % os.getpriority(os.PRIO_PROCESS, 0))
    else:
        channel.send(asked)
