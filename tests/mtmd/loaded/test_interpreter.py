"""The interpreter's settings for a server."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, sys, weakref
from mtmd.loaded.interpreter import shared_promptly

class Cycle:
    def __init__(self):
        self.itself = self

before = sys.getswitchinterval(), gc.get_threshold()
loaded = len(gc.get_objects())
with shared_promptly():
    print(sys.getswitchinterval() < 0.001, gc.get_freeze_count() > loaded / 2)
    print(len(gc.get_objects()) < loaded / 10)
    gone = weakref.ref(Cycle())
    saved = []
    while gone() is not None and len(saved) < 10_000:
        saved.append([[] for _ in range(1000)])
    print(gone() is None)
print((sys.getswitchinterval(), gc.get_threshold()) == before, gc.get_freeze_count() == 0)
"""


def test_threads_take_turns_quickly_and_what_is_loaded_is_not_collected() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == "" and set(done.stdout.split()) == {"True"}
