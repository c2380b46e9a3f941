"""The interpreter's settings for a server."""

import subprocess
import sys

import pytest

from mtmd.loaded.interpreter import collects_in_parts

PROGRAM = """
import gc, sys, threading, weakref
from mtmd.loaded import interpreter
from mtmd.loaded.interpreter import COUNT_EVERY, Pauses, shared_out_promptly

MAXIMUM = 1000

interpreter.LOOK_S, interpreter.GROWN = 0.01, COUNT_EVERY * MAXIMUM
loaded, thresholds = len(gc.get_objects()), gc.get_threshold()

class Cycle:
    def __init__(self):
        self.itself = self

with shared_out_promptly():
    print(sys.getswitchinterval() < 0.001, gc.get_freeze_count() > loaded / 2)
    print(len(gc.get_objects()) < loaded / 10)
    cycle, saved, gone = Cycle(), [], threading.Event()
    weakref.finalize(cycle, gone.set)
    del cycle
    while not gone.wait(0.001) and len(saved) < 10_000:
        saved.append([[] for _ in range(1000)])
    print(gone.is_set())  # by the thread: the interpreter would not have

saved, pauses = [], Pauses()
gc.collect()
gc.freeze()
gc.disable()  # what comes is ours
frozen = gc.get_freeze_count()
few = [[] for _ in range(MAXIMUM // 2)]
interpreter.LONG_S = 1e9
pauses.collect()
print(gc.get_freeze_count() == frozen)
cycle, plan = Cycle(), Cycle()
gone, plan_gone, plan.itself = weakref.ref(cycle), weakref.ref(plan), None
saved.append([[] for _ in range(MAXIMUM)])
interpreter.LONG_S = -1
pauses.collect()
print(gc.get_freeze_count() > frozen + MAXIMUM, len(gc.get_objects()) < loaded / 10)
del cycle, plan
print(plan_gone() is None)  # left out, in no cycle, and free when nobody holds it
for turn in range(COUNT_EVERY - 1):
    saved.append([[] for _ in range(MAXIMUM + 100)])
    pauses.collect()
print(gone() is not None)
pauses.collect()
print(gone() is None, len(gc.get_objects()) < loaded / 10)
gc.unfreeze()
print(gc.get_threshold() == thresholds, threading.active_count() == 1)

class Slow(Cycle):
    def __del__(self):
        begun.set()
        go_on.wait(10)

gc.enable()
begun, go_on, cycle = threading.Event(), threading.Event(), Cycle()
gone = weakref.ref(cycle)
gc.freeze()
del cycle
Slow()
thread = threading.Thread(target=gc.collect)
thread.start()
print(begun.wait(10), gc.collect() == 0)  # while another thread is at it, it does nothing
threading.Timer(0.05, go_on.set).start()
interpreter.collect_all()
print(gone() is None)
thread.join()

tries = []
def collect(self):
    tries.append(self)
    if len(tries) == 1:
        raise MemoryError
    over.set()

over, pauses, interpreter.FULL_EVERY = threading.Event(), Pauses(), 0
Pauses.collect = collect
gc.disable()
for _ in range(3):
    gc.collect(1)
interpreter.log.disabled = True
pauses.keep(over)
print(len(tries) == 2)
print(sys.getswitchinterval() > 0.001)
"""


def test_threads_give_way_soon_and_collections_look_through_little():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["True"] * 18


@pytest.mark.parametrize(
    ("version", "in_parts"),
    [
        ((3, 10, 13), False),
        ((3, 13, 9), False),
        ((3, 14, 0), True),
        ((3, 14, 4), True),
        ((3, 14, 5), False),
        ((3, 15, 0), False),
    ],
)
def test_the_collector_that_works_in_parts_is_left_to_itself(version, in_parts):
    assert collects_in_parts(version) is in_parts
