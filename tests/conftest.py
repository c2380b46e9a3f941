"""Set before anything imports torch or Triton, which read their environment once."""
import os

os.environ["TRITON_INTERPRET"] = "1"  # GPU kernels run in Triton's interpreter
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models here are too small to share between threads
