"""Where gevent has patched the process, what takes long lets other greenlets run meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from mtmd.web.native_threads import in_thread, is_patched, waiting

PATCHED = """
from gevent.monkey import get_original
from mtmd.__main__ import patch
patch()
import threading, time
from contextvars import ContextVar
from mtmd.web.native_threads import in_thread, is_patched, waiting

native = get_original("threading", "get_ident")
lock = get_original("_thread", "allocate_lock")()
owner, seen = ContextVar("owner"), []

def long():
    with lock:  # until the main greenlet lets it go: were this a greenlet, nothing would go on
        return native(), owner.get()

def ask():
    owner.set("anna")
    seen.append(in_thread(long))

lock.acquire()
requesting = threading.Thread(target=ask)
requesting.start()
time.sleep(0.01)
lock.release()
requesting.join()
assert is_patched() and seen[0][0] != native() and seen[0][1] == "anna", seen
assert waiting(native) != native()
try:
    in_thread(lambda: 1 / 0)
except ZeroDivisionError:
    print("done")
"""


def test_nothing_changes_where_threads_are_threads():
    assert not is_patched()
    assert in_thread(threading.get_ident) == waiting(threading.get_ident) == threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        in_thread(lambda: 1 / 0)


def test_greenlets_go_on_beside_native_threads():
    result = subprocess.run([sys.executable, "-c", PATCHED], capture_output=True, text=True)
    assert (result.stdout, result.stderr, result.returncode) == ("done\n", "", 0)


STARTS = """
from mtmd.__main__ import patch
patch()
import os, subprocess, sys, threading, time
parent = os.getpid()
forks = []
os.register_at_fork(after_in_child=lambda: time.sleep(0.1))  # lets other greenlets run
other = threading.Thread(target=lambda: [time.sleep(0.01), forks.append(os.getpid())])
other.start()
process = subprocess.Popen([sys.executable, "-S", "-c", "print('started')"])
other.join()
print(process.wait(60), forks == [parent], flush=True)
"""


def test_no_greenlet_goes_on_in_a_process_that_is_started():
    result = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True)
    assert (sorted(result.stdout.split()), result.stderr) == (["0", "True", "started"], "")
