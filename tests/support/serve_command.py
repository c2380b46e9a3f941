"""`mtmd serve` in a process of its own, on a free port."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import contextmanager


@contextmanager
def serving(*arguments, python=(sys.executable,), program=("-m", "mtmd"), env=None, umask=-1):
    """The running command and the lines it said up to its address."""
    command = [
        *python,
        *program,
        "serve",
        "--port",
        "0",
        "--no-warmup",
        "--threads",
        "1",
        *arguments,
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=None if env is None else os.environ | env,
        umask=umask,
    )
    try:
        lines = []
        while not lines or not lines[-1].startswith("serving at "):
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr.read()
        yield process, "".join(lines)
    finally:
        process.kill()
        process.communicate()


def address(stated):
    return re.search(r"serving at (http://\S+),", stated)[1]
