"""The interpreter's settings for a server."""

import subprocess
import sys

PROGRAM = """
import gc, sys
from mtmd.loaded.interpreter import shared_out_promptly

loaded, thresholds = len(gc.get_objects()), gc.get_threshold()
with shared_out_promptly():
    print(sys.getswitchinterval() < 0.001, gc.get_freeze_count() > loaded / 2)
    print(len(gc.get_objects()) < loaded / 10)
    print(gc.get_threshold()[2] > 10 * thresholds[2])
print(gc.get_threshold() == thresholds)
print(sys.getswitchinterval() > 0.001, gc.get_freeze_count() == 0)
"""


def test_threads_give_way_soon_and_nothing_loaded_is_looked_through_again():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["True"] * 7
