"""An engine that cannot speak any more ends, and so tells it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mtmd.apart.outbox import FAILED

PROGRAM = """
import threading
from mtmd.apart.outbox import Outbox
class Link:
    def send(self, value):
        raise ValueError("not to be sent")
Outbox(Link()).put(("log", 20, ("mtmd", "said")))
threading.Event().wait()
"""


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "not read"])
def test_it_ends_whether_its_stderr_is_read_or_not(is_read: bool) -> None:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            if is_read:
                assert "not to be sent" in process.stderr.read()
            else:
                process.stderr.close()
            assert process.wait(60) == FAILED
        finally:
            process.kill()
