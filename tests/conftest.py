"""Set before anything imports torch or Triton, which read their environment once."""

import os
import signal

os.environ["TRITON_INTERPRET"] = "1"  # GPU kernels run in Triton's interpreter
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # the models here are too small to share between threads
# Where the tests run in the background, Ctrl-C is ignored, by children too: those that test it need
# it.
signal.signal(signal.SIGINT, signal.default_int_handler)
