"""What the workers of tests/kernels/isolation do: end badly, each in a way of its own."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

from mtmd.base.isolation.channel import Channel


def prepare(setup: bytes) -> bytes:
    return setup


def serve(channel: Channel, prepared: Any) -> None:
    requested = bytes(channel.receive())
    if requested == b"setup":
        channel.send(prepared)
    elif requested == b"pid":
        channel.send(b"%d %d" % (os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)))
    elif requested == b"environment":
        channel.send(json.dumps(dict(os.environ)).encode())
    elif requested == b"burn":
        while True:
            pass
    elif requested == b"sleep":
        time.sleep(60)
    elif requested == b"take":
        channel.send(bytes(len([bytearray(1 << 20) for _ in range(200)])))
    elif requested == b"abort":
        os.abort()
    elif requested == b"fault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif requested == b"panic":
        raise BaseException("no Exception")
    elif requested == b"long":
        channel.send(bytes(1000))
    elif requested == b"burn and tell":
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        channel.send(b"%d" % os.getpriority(os.PRIO_PROCESS, 0))
    else:
        channel.send(requested)
