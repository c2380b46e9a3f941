"""Set before anything imports torch or Triton, which read their environment once."""

import os
import signal
import sys

os.environ["TRITON_INTERPRET"] = "1"  # GPU kernels run in Triton's interpreter
# The models here are too small to share between threads, and several workers run side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Workers and the processes that tests start import the same files again: compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Where the tests run in the background, Ctrl-C is ignored, by children too: those that test it need
# it.
signal.signal(signal.SIGINT, signal.default_int_handler)
