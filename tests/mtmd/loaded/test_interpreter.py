"""The interpreter's settings for a server."""

import subprocess
import sys

PROGRAM = """
import gc, sys, weakref
from mtmd.loaded import interpreter
from mtmd.loaded.interpreter import MOST, shared_out_promptly

interpreter.GROWN = 4 * MOST

loaded, thresholds = len(gc.get_objects()), gc.get_threshold()
with shared_out_promptly():
    print(sys.getswitchinterval() < 0.001, gc.get_freeze_count() > loaded / 2)
    print(len(gc.get_objects()) < loaded / 10)
    print(gc.get_threshold()[2] > thresholds[2])
    gc.disable()  # what comes is ours
    frozen = gc.get_freeze_count()
    few = [[] for _ in range(MOST // 2)]
    gc.collect()
    print(gc.get_freeze_count() == frozen)

    class Cycle:
        pass

    cycle = Cycle()
    cycle.itself, gone = cycle, weakref.ref(cycle)
    plan = Cycle()
    plan_gone = weakref.ref(plan)
    many = [[] for _ in range(MOST)]
    gc.collect()
    print(gc.get_freeze_count() > frozen + MOST, len(gc.get_objects()) < loaded / 10)
    del plan
    print(plan_gone() is None)  # left out of collections, and free when nobody holds it
    del cycle
    for turn in range(3):
        many.append([[] for _ in range(MOST + 100)])
        gc.collect()
    print(gone() is not None)
    gc.collect()
    print(gone() is None, len(gc.get_objects()) < loaded / 10)
    gc.enable()
print(gc.get_threshold() == thresholds, not gc.callbacks)
print(sys.getswitchinterval() > 0.001, gc.get_freeze_count() == 0)
"""


def test_threads_give_way_soon_and_collections_look_through_little():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["True"] * 15
