"""An engine that can hear or tell nothing any more ends, and so tells it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mtmd.apart.outbox import FAILED

MUTE = """
import threading
from mtmd.apart.outbox import Outbox
class Link:
    def send(self, value):
        raise ValueError("neither")
Outbox(Link()).put(("log", 20, ("mtmd", "said")))
threading.Event().wait()
"""
DEAF = """
import threading
from mtmd.apart.engine import EngineProcess
class Link:
    calls = [("call", 1, ("load", "", ("", {}, 20, 0), ()))]
    def receive(self):
        if self.calls:
            return self.calls.pop()
        raise OSError("neither")
    def send(self, value):
        pass
EngineProcess(Link(), lambda *_: threading.Event().wait()).run()
"""


@pytest.mark.parametrize("program", [MUTE, DEAF], ids=["mute", "deaf"])
@pytest.mark.parametrize("is_read", [True, False], ids=["read", "not read"])
def test_it_ends_whether_its_stderr_is_read_or_not(program: str, is_read: bool) -> None:
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            if is_read:
                assert "neither" in process.stderr.read()
            else:
                process.stderr.close()
            assert process.wait(60) == FAILED
        finally:
            process.kill()
